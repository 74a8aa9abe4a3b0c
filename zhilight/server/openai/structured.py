"""Which grammar a request asks for: response_format, structured_outputs, or the older guided_* fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from zhilight.config.sampling import StructuredOutput
from zhilight.server.openai.errors import bad_request
from zhilight.server.openai.protocol import ResponseFormat, SamplingFields, StructuredOutputs

MAX_GRAMMAR_LENGTH = 1 << 18
"""Characters of a grammar: compiling a longer one would keep a thread busy for seconds."""


@dataclass(frozen=True)
class Constraint:
    """The grammar, and the request's field that asked for it."""

    param: str
    constraint: StructuredOutput


def structured_output_of(request: SamplingFields) -> Constraint | None:
    """The one constraint of the request, or None. Two of them, or an empty or huge one, are a 400."""
    found: list[tuple[str, StructuredOutput]] = []
    if request.response_format is not None:
        found += _from_response_format(request.response_format)
    if request.structured_outputs is not None:
        found += _from_structured_outputs(request.structured_outputs)
    found += _constraints("guided_", json=request.guided_json, regex=request.guided_regex,
                          choice=request.guided_choice, grammar=request.guided_grammar)
    if len(found) > 1:
        names = ", ".join(name for name, _ in found)
        raise bad_request(f"the output can follow one constraint only, and the request has several: {names}.", found[1][0])
    if not found:
        return None
    if len(found[0][1].value) > MAX_GRAMMAR_LENGTH:
        raise bad_request(f"{found[0][0]} has {len(found[0][1].value)} characters; the limit is {MAX_GRAMMAR_LENGTH}.",
                          found[0][0])
    return Constraint(*found[0])


def _from_response_format(response_format: ResponseFormat) -> list[tuple[str, StructuredOutput]]:
    if response_format.type == "text":
        return []
    if response_format.type == "json_object":
        return [("response_format", StructuredOutput("json_object", ""))]
    if response_format.json_schema is None or response_format.json_schema.schema is None:
        raise bad_request("response_format of type json_schema needs json_schema.schema.",
                          "response_format.json_schema.schema")
    return [("response_format", StructuredOutput("json_schema", _schema_text(response_format.json_schema.schema)))]


def _from_structured_outputs(outputs: StructuredOutputs) -> list[tuple[str, StructuredOutput]]:
    found = _constraints("structured_outputs.", json=outputs.json, regex=outputs.regex, choice=outputs.choice,
                         grammar=outputs.grammar)
    if outputs.json_object:
        found.append(("structured_outputs.json_object", StructuredOutput("json_object", "")))
    if not found:
        raise bad_request("structured_outputs needs one of json, json_object, regex, choice, grammar.",
                          "structured_outputs")
    return found


def _constraints(prefix: str, *, json: Any, regex: str | None, choice: list[str] | None,
                 grammar: str | None) -> list[tuple[str, StructuredOutput]]:
    found = []
    if json is not None:
        found.append((prefix + "json", StructuredOutput("json_schema", _schema_text(json))))
    if regex is not None:
        found.append((prefix + "regex", StructuredOutput("regex", regex)))
    if choice is not None:
        if not choice or not all(choice):
            raise bad_request(f"{prefix}choice must hold at least one non-empty text.", prefix + "choice")
        found.append((prefix + "choice", StructuredOutput("choice", msgspec.json.encode(choice).decode())))
    if grammar is not None:
        if not grammar.strip():
            raise bad_request(f"{prefix}grammar is empty.", prefix + "grammar")
        found.append((prefix + "grammar", StructuredOutput("grammar", grammar)))
    return found


def _schema_text(schema: Any) -> str:
    """The schema as JSON text; a text is taken as it is (the compiler says what is wrong with it)."""
    return schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
