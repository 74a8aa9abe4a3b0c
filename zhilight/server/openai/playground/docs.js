// Draws /openapi.json as a page.

const api = await (await fetch(new URL("openapi.json", document.baseURI))).json();
document.getElementById("version").textContent = api.info.version;
const page = document.getElementById("page");

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = className;
  return made;
}

const nameOf = (schema) => schema?.$ref?.split("/").pop();

function typeOf(schema) {
  if (!schema) return "";
  if (schema.$ref) return nameOf(schema);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" | ");
  if (schema.enum) return schema.enum.map((each) => JSON.stringify(each)).join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items) || "anything"}`;
  return schema.type ?? "anything";
}

page.append(element("h2", "Routes"));
for (const [path, operations] of Object.entries(api.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    const details = element("details");
    const summary = element("summary");
    summary.append(element("span", method.toUpperCase(), "method"), ` ${path} `, element("span", operation.summary, "muted"));
    const request = nameOf(operation.requestBody?.content["application/json"].schema);
    const answer = nameOf(operation.responses["200"].content?.["application/json"]?.schema);
    const lines = [request && `body: ${request}`, answer && `answer: ${answer}`,
      operation.security ? "needs a key when the server has one" : "needs no key"].filter(Boolean);
    details.append(summary, element("pre", lines.join("\n")));
    page.append(details);
  }
}
page.append(element("h2", "Types"));
for (const [name, schema] of Object.entries(api.components.schemas)) {
  const details = element("details");
  details.append(element("summary", name), element("span", schema.description ?? "", "muted"));
  const required = new Set(schema.required ?? []);
  details.append(element("pre", Object.entries(schema.properties ?? {}).map(([field, type]) =>
    `${field}${required.has(field) ? " (required)" : ""}: ${typeOf(type)}`).join("\n")));
  page.append(details);
}
