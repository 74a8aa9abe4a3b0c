// The chat page: streams an answer from /v1/chat/completions and draws the live figures.

import { Charts } from "./charts.js";

const $ = (id) => document.getElementById(id);
const url = (path) => new URL(path, document.baseURI);
const conversation = [];
let running = null; // AbortController of the answer that is being written

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function addMessage(role, text = "") {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  const label = document.createElement("div");
  label.className = "role";
  label.textContent = role;
  const thought = document.createElement("div");
  thought.className = "thought";
  thought.hidden = true;
  const body = document.createElement("div");
  body.className = "body";
  body.textContent = text;
  const note = document.createElement("div");
  note.className = "note";
  box.append(label, thought, body, note);
  $("messages").append(box);
  scroll();
  return { box, thought, body, note };
}

function scroll() {
  $("messages").scrollTop = $("messages").scrollHeight;
}

function request() {
  const number = (id) => $(id).value === "" ? undefined : Number($(id).value);
  const system = $("system").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"),
    max_tokens: number("max_tokens"), seed: number("seed"), stop: $("stop_string").value || undefined,
  };
}

async function* events(response) {
  // The `data:` lines of a server-sent event stream.
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function answer() {
  const view = addMessage("assistant");
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  const started = performance.now();
  let text = "", thought = "", first = 0, usage = null, reason = "";
  try {
    const response = await fetch(url("v1/chat/completions"), {
      method: "POST", headers: headers(), body: JSON.stringify(request()), signal: running.signal });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      if (!first && (choice.delta.content || choice.delta.reasoning_content)) first = performance.now();
      thought += choice.delta.reasoning_content ?? "";
      text += choice.delta.content ?? "";
      reason = choice.finish_reason ?? reason;
      view.thought.hidden = !thought;
      view.thought.textContent = thought;
      view.body.textContent = text;
      scroll();
    }
  } catch (error) {
    if (error.name === "AbortError") {
      reason = "stopped";
    } else {
      view.box.classList.add("error");
      text ||= "";
      view.body.textContent = text + (text ? "\n" : "") + error.message;
    }
  }
  const seconds = (performance.now() - (first || started)) / 1000;
  const tokens = usage?.completion_tokens;
  view.note.textContent = [reason, tokens !== undefined && `${tokens} tokens`,
    first && `first after ${Math.round(first - started)} ms`,
    tokens > 1 && first && `${((tokens - 1) / seconds).toFixed(1)} tokens/s`].filter(Boolean).join(", ");
  if (text) conversation.push({ role: "assistant", content: text });
  running = null;
  $("send").disabled = false;
  $("stop").disabled = true;
  $("input").focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("input").value.trim();
  if (!text || running) return;
  $("input").value = "";
  conversation.push({ role: "user", content: text });
  addMessage("user", text);
  answer();
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  $("messages").replaceChildren();
});

async function showModel() {
  const response = await fetch(url("v1/models"), { headers: headers() });
  if (response.ok) {
    const [model] = (await response.json()).data;
    $("model").textContent = `${model.id}, context ${model.max_model_len}`;
  } else {
    $("model").textContent = response.status === 401 ? "give the API key" : `error ${response.status}`;
  }
}
$("key").addEventListener("change", showModel);
showModel();

const charts = new Charts($("charts"));
async function tick() {
  try {
    await charts.update(url("metrics"));
  } catch {
    $("model").textContent = "the server does not answer";
  }
  setTimeout(tick, 1000);
}
tick();
