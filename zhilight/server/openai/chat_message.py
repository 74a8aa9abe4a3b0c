"""How generated text becomes a message: reasoning first, then tool calls, else content."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zhilight.config.sampling import StructuredOutput
from zhilight.server.openai.protocol import ChatCompletionRequest, Tool

if TYPE_CHECKING:
    from zhilight.server.openai.serving import Serving


@dataclass(frozen=True)
class CallPiece:
    """New characters of tool call number `index`; id and name come once, with the first piece."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class MessagePiece:
    """What new text added to the message; one of the three is non-empty."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)


@dataclass(frozen=True)
class MessageStyle:
    """What to look for in one request's output."""

    template_tools: list[Tool] | None = None
    parsed_tools: list[dict[str, Any]] | None = None
    tool_parser: str | None = None
    constraint: StructuredOutput | None = None
    named_tool: bool = False
    single_call: bool = False
    reasoning_parser: str | None = None
    shows_reasoning: bool = False


def message_style(serving: Serving, body: ChatCompletionRequest) -> MessageStyle:
    """Raises APIError for a tool_choice that the request's tools do not allow."""
    return MessageStyle(template_tools=body.tools)


class MessageReader:
    """Reads one choice's text as it comes."""

    def __init__(self, style: MessageStyle, prompt_tail: str):
        self._style = style

    def read(self, text: str, *, last: bool) -> list[MessagePiece]:
        return [MessagePiece(content=text)] if text else []
