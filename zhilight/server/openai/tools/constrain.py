"""Grammars of tool calls, in the format that the request's parser reads.

`force_calls` serves tool_choice "required" and a named function: the answer consists of calls. `allow_calls` serves
"auto" where a tool is strict: the answer is free, but what begins as a call goes on as one.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from zhilight.config.sampling import StructuredOutput
from zhilight.engine.structured import check_grammar
from zhilight.errors import RequestError
from zhilight.server.openai.tools.base import NAME, CallFormat, ToolParser

if TYPE_CHECKING:
    from zhilight.tokenization.tokenizer import Tokenizer


def force_calls(parser: type[ToolParser], tools: list[dict[str, Any]], tokenizer: Tokenizer, *, name: str | None = None,
                parallel: bool = True) -> StructuredOutput:
    """A grammar for one or more calls of `tools`, with arguments that fit the tools' parameters.

    name: call this tool, once (a named tool_choice). parallel: whether several calls may follow each other.
    Raises RequestError naming the tool whose name or schema cannot be honoured, or the tool_choice.
    """
    if not tools:
        raise RequestError("tool_choice asks for a call but there are no tools. Give tools, or leave tool_choice out.",
                           param="tool_choice")
    names = [tool["function"]["name"] for tool in tools]
    if name is not None and name not in names:
        raise RequestError(f"tool_choice names {name!r}, which is not among the tools ({', '.join(names)}).",
                           param="tool_choice")
    chosen = [i for i in range(len(tools)) if name in (None, names[i])]
    grammar = _CallGrammar(parser.format, tools, tokenizer)
    more = grammar.more() if parallel and name is None else ""
    rules = [f"start: {grammar.literal(parser.format.begin)} call {more} {grammar.literal(parser.format.end)}",
             *grammar.calls("call", chosen, strict_only=False)]
    return StructuredOutput("grammar", "\n".join(rules) + "\n")


def allow_calls(parser: type[ToolParser], tools: list[dict[str, Any]], tokenizer: Tokenizer, *,
                parallel: bool = True) -> StructuredOutput:
    """A grammar for free text in which every call is well formed, and fits its tool's parameters where the tool is strict.

    Raises RequestError naming the tool whose name or schema cannot be honoured.
    """
    style, everyone = parser.format, list(range(len(tools)))
    grammar = _CallGrammar(style, tools, tokenizer)
    more = grammar.more() if parallel else ""
    tail = f"{more} {grammar.literal(style.end)}"
    if not style.markers:  # nothing but the whole header tells a call from other text, and it stands at the start
        rules = [f"start: text | first {tail}", *grammar.calls("first", everyone, strict_only=True, lazy=True)]
    else:
        marker = style.markers[0]
        rest = (style.begin + style.before_name).removeprefix(marker)
        begun = f"text {grammar.literal(marker)}" if grammar.special_id(marker) is not None else "begun"
        rules = [f"start: ({begun} first {tail})* text", f"begun[lazy]: TEXT {json.dumps(marker, ensure_ascii=False)}",
                 *grammar.calls("first", everyone, strict_only=True, before_name=rest)]
    if more:
        rules += grammar.calls("call", everyone, strict_only=True)
    return StructuredOutput("grammar", "\n".join([*rules, "text: TEXT", r"TEXT: /(.|\n)*/"]) + "\n")


class _CallGrammar:
    """Lark rules for calls in one format."""

    def __init__(self, style: CallFormat, tools: list[dict[str, Any]], tokenizer: Tokenizer):
        self._style, self._tools, self._tokenizer = style, tools, tokenizer

    def more(self) -> str:
        return f"({self.literal(self._style.separator)} call)*"

    def calls(self, rule: str, chosen: list[int], *, strict_only: bool, before_name: str | None = None,
              lazy: bool = False) -> list[str]:
        """Rules `rule`, and one for each chosen tool.

        strict_only: tools that are not strict take any object. before_name: in place of the format's own.
        lazy: the header is recognised in free text as soon as it is whole.
        """
        style = self._style
        before_name = style.before_name if before_name is None else before_name
        rules = [f"{rule}: " + " | ".join(f"{rule}_{i}" for i in chosen)]
        for i in chosen:
            function = self._tools[i]["function"]
            if not NAME.fullmatch(function["name"]):
                raise RequestError(f"tools[{i}].function.name is {function['name']!r}; letters, digits and _ - . : / make a "
                                   "name.", param=f"tools[{i}].function.name")
            header = self.literal(before_name + function["name"] + style.before_arguments)
            if lazy:
                rules.append(f"{rule}_{i}_header[lazy]: {header}")
                header = f"{rule}_{i}_header"
            schema = '{"type": "object"}' if strict_only and not function.get("strict") else _schema(i, function)
            rules.append(f"{rule}_{i}: {header} %json {schema} {self.literal(style.after_arguments)}")
        return rules

    def special_id(self, marker: str) -> int | None:
        """The id of a marker that is a special token of the vocabulary."""
        token_id = self._tokenizer.token_id(marker)
        return token_id if token_id in self._tokenizer.all_special_ids else None

    def literal(self, text: str) -> str:
        """`text` as Lark: strings, and special tokens by id (their text alone would never be sampled as that token)."""
        markers = self._style.markers
        pieces = re.split("(" + "|".join(map(re.escape, markers)) + ")", text) if markers else [text]
        terms = []
        for piece in filter(None, pieces):
            token_id = self.special_id(piece) if piece in markers else None
            terms.append(json.dumps(piece, ensure_ascii=False) if token_id is None else f"<[{token_id}]>")
        return " ".join(terms)


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
