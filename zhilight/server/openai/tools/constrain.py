"""tool_choice "required" or a named function: the grammar of an answer that consists of calls, as the parser reads them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from zhilight.config.sampling import StructuredOutput
from zhilight.engine.structured import check_grammar
from zhilight.errors import RequestError
from zhilight.server.openai.tools.base import NAME, ToolParser

if TYPE_CHECKING:
    from zhilight.tokenization.tokenizer import Tokenizer


def force_calls(parser: type[ToolParser], tools: list[dict[str, Any]], tokenizer: Tokenizer, *, name: str | None = None,
                parallel: bool = True) -> StructuredOutput:
    """A grammar for one or more calls of `tools` in `parser`'s format, with arguments that fit the tools' parameters.

    name: call this tool, once (a named tool_choice). parallel: whether several calls may follow each other.
    Raises RequestError naming the tool whose name or schema cannot be honoured, or the tool_choice.
    """
    if not tools:
        raise RequestError("tool_choice asks for a call but there are no tools. Give tools, or leave tool_choice out.",
                           param="tool_choice")
    chosen = [(i, tool["function"]) for i, tool in enumerate(tools) if name in (None, tool["function"]["name"])]
    if not chosen:
        names = ", ".join(tool["function"]["name"] for tool in tools)
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools ({names}).", param="tool_choice")
    style = parser.format

    def literal(text: str) -> str:
        return _literal(text, style.markers, tokenizer)

    more = f"({literal(style.separator)} call)*" if parallel and name is None else ""
    lines = [f"start: {literal(style.begin)} call {more} {literal(style.end)}",
             "call: " + " | ".join(f"call_{i}" for i, _ in chosen)]
    for i, function in chosen:
        if not NAME.fullmatch(function["name"]):
            raise RequestError(f"tools[{i}].function.name is {function['name']!r}; letters, digits and _ - . : / make a name.",
                               param=f"tools[{i}].function.name")
        header = literal(style.before_name + function["name"] + style.before_arguments)
        lines.append(f"call_{i}: {header} %json {_schema(i, function)} {literal(style.after_arguments)}")
    return StructuredOutput("grammar", "\n".join(lines) + "\n")


def _schema(i: int, function: dict[str, Any]) -> str:
    """The arguments' schema: an object always; without parameters an empty one."""
    parameters = function.get("parameters") or {"type": "object", "properties": {}, "additionalProperties": False}
    param = f"tools[{i}].function.parameters"
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise RequestError(f"{param} must be the schema of an object.", param=param)
    schema = json.dumps({"type": "object", **parameters})
    try:
        check_grammar(StructuredOutput("json_schema", schema))
    except RequestError as error:
        raise RequestError(f"{param}: {error}", param=param) from error
    return schema


def _literal(text: str, markers: tuple[str, ...], tokenizer: Tokenizer) -> str:
    """`text` as Lark: strings, and special tokens by id (their text alone would never be sampled as that token)."""
    if not text:
        return ""
    pieces = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
    terms = []
    for piece in filter(None, pieces):
        token_id = tokenizer.token_id(piece) if piece in markers else None
        terms.append(f"<[{token_id}]>" if token_id in tokenizer.all_special_ids else json.dumps(piece, ensure_ascii=False))
    return " ".join(terms)
