"""How generated text becomes a message: the thought first, then tool calls, the rest is content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from zhilight.config.sampling import StructuredOutput
from zhilight.engine.structured import after_marker, either
from zhilight.server.openai.errors import bad_request
from zhilight.server.openai.protocol import ChatCompletionRequest, NamedToolChoice, Tool
from zhilight.server.openai.reasoning import ReasoningParser, get_reasoning_parser
from zhilight.server.openai.tools import ContentDelta, ToolCallDelta, ToolParser, get_tool_parser
from zhilight.server.openai.tools.constrain import allow_calls, force_calls

if TYPE_CHECKING:
    from zhilight.server.config import ServerConfig
    from zhilight.server.openai.serving import Serving
    from zhilight.tokenization.tokenizer import Tokenizer

_TEMPLATE_MARKERS = (("<tool_call>", "hermes"), ("[TOOL_CALLS]", "mistral"), ("tool▁calls▁begin", "deepseek_v3"),
                     ("<|python_tag|>", "llama3_json"), ('"parameters"', "llama3_json"))
_FORCED_FORMAT = "hermes"
"""The format of forced calls when the model has none of its own: the grammar makes it write this one."""


def choose_tool_parser(config: ServerConfig, template: str | None) -> type[ToolParser] | None:
    """The parser of tool_choice auto: as configured, or told by the markers in the chat template."""
    if config.tool_call_parser in (None, "none"):
        return None
    if config.tool_call_parser != "auto":
        return get_tool_parser(config.tool_call_parser)
    if template is None or "tools" not in template:
        return None
    return next((get_tool_parser(name) for marker, name in _TEMPLATE_MARKERS if marker in template), None)


def choose_reasoning_parser(config: ServerConfig) -> type[ReasoningParser] | None:
    if config.reasoning_parser is not None:
        return get_reasoning_parser(config.reasoning_parser)
    return get_reasoning_parser("deepseek_r1") if config.enable_reasoning else None


@dataclass(frozen=True)
class MessagePiece:
    """What new text added to the message; one of the three is non-empty."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


@dataclass(frozen=True)
class MessageStyle:
    """What one request's output is read for.

    template_tools: the tools that the chat template shows. constraint: the grammar of the answer, calls included.
    """

    template_tools: list[Tool] | None = None
    tool_parser: Callable[[], ToolParser] | None = None
    needs_special_tokens: bool = False
    constraint: StructuredOutput | None = None
    named_tool: bool = False
    reasoning_parser: type[ReasoningParser] | None = None
    shows_reasoning: bool = False

    def after_thought(self, structured: StructuredOutput, prompt_tail: str, tokenizer: Tokenizer) -> StructuredOutput:
        """The constraint, moved behind the thought when the model may think first."""
        parser = self.reasoning_parser
        if parser is None or prompt_tail.rstrip().endswith(parser.close_marker):
            return structured
        opening = None if parser(prompt_tail).starts_open else parser.open_marker
        return after_marker(structured, parser.close_marker, opening, tokenizer)


def message_style(serving: Serving, body: ChatCompletionRequest, structured: StructuredOutput | None) -> MessageStyle:
    """`structured`: the format that the request asks of an answer without calls.

    Raises APIError or RequestError for a tool_choice that the tools or the server do not allow.
    """
    reasoning = {"reasoning_parser": serving.reasoning_parser,
                 "shows_reasoning": serving.reasoning_parser is not None and body.include_reasoning is not False}
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none"):
            raise bad_request("tool_choice needs tools.", "tool_choice")
        return MessageStyle(constraint=structured, **reasoning)
    if choice == "none":
        return MessageStyle(constraint=structured, **reasoning)
    tools: list[dict[str, Any]] = msgspec.to_builtins(body.tools)
    parallel = body.parallel_tool_calls is not False
    if choice in (None, "auto"):
        parser = serving.tool_parser
        if parser is None or not serving.config.enable_auto_tool_choice:
            raise bad_request("tool_choice auto needs a tool parser: start the server with --tool-call-parser NAME "
                              "(and without --no-enable-auto-tool-choice), or set tool_choice.", "tool_choice")
        constraint, constrained = None, False
        if structured is not None:  # not `constrained`: an answer in the format may hold what looks like the start of a call
            constraint = either(force_calls(parser, tools, serving.tokenizer, parallel=parallel), structured)
        elif any(tool.function.strict for tool in body.tools):
            constraint, constrained = allow_calls(parser, tools, serving.tokenizer, parallel=parallel), True
        return MessageStyle(body.tools, lambda: parser(tools, constrained=constrained, parallel=parallel),
                            parser.needs_special_tokens, constraint, **reasoning)
    forced = serving.tool_parser or get_tool_parser(_FORCED_FORMAT)
    name = choice.function.name if isinstance(choice, NamedToolChoice) else None
    constraint = force_calls(forced, tools, serving.tokenizer, name=name, parallel=parallel)
    return MessageStyle(body.tools, lambda: forced(tools, constrained=True, parallel=parallel), forced.needs_special_tokens,
                        constraint, name is not None, **reasoning)


class MessageReader:
    """Reads one choice's text as it comes. `prompt_tail` is the end of the rendered prompt."""

    def __init__(self, style: MessageStyle, prompt_tail: str):
        self._shows_reasoning = style.shows_reasoning
        self._reasoning = style.reasoning_parser(prompt_tail) if style.reasoning_parser is not None else None
        self._tools = style.tool_parser() if style.tool_parser is not None else None

    def read(self, text: str, *, last: bool) -> list[MessagePiece]:
        """What `text` makes certain; with `last`, all that is left."""
        reasoning, content = "", text
        if self._reasoning is not None:
            reasoning, content = self._reasoning.feed(text)
            if last:
                more = self._reasoning.finish()
                reasoning, content = reasoning + more[0], content + more[1]
        pieces = [MessagePiece(reasoning=reasoning)] if reasoning and self._shows_reasoning else []
        if self._tools is None:
            return [*pieces, MessagePiece(content=content)] if content else pieces
        deltas = self._tools.feed(content) if content else []
        if last:
            deltas += self._tools.finish()
        return pieces + [MessagePiece(content=delta.text) if isinstance(delta, ContentDelta) else MessagePiece(calls=[delta])
                         for delta in deltas]
