"""Tool-call parsers by the name that `--tool-call-parser` takes (vLLM's names)."""

from __future__ import annotations

from zhilight.errors import ConfigError
from zhilight.server.openai.tools.base import (
    ContentDelta,
    ParsedMessage,
    ToolCall,
    ToolCallDelta,
    ToolParser,
)
from zhilight.server.openai.tools.deepseek import DeepSeekToolParser
from zhilight.server.openai.tools.hermes import HermesToolParser
from zhilight.server.openai.tools.llama3_json import Llama3JSONToolParser
from zhilight.server.openai.tools.mistral import MistralToolParser

__all__ = ["TOOL_PARSERS", "ContentDelta", "ParsedMessage", "ToolCall", "ToolCallDelta", "ToolParser", "get_tool_parser"]

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "deepseek_r1": DeepSeekToolParser,
    "deepseek_v3": DeepSeekToolParser,
    "hermes": HermesToolParser,
    "llama3_json": Llama3JSONToolParser,
    "mistral": MistralToolParser,
    "qwen2": HermesToolParser,
}


def get_tool_parser(name: str) -> type[ToolParser]:
    """The parser called `name`. Raises ConfigError with the list of names."""
    if name not in TOOL_PARSERS:
        raise ConfigError(f"tool_call_parser is {name!r}; it must be one of {', '.join(TOOL_PARSERS)}.")
    return TOOL_PARSERS[name]
