"""Reasoning parsers by the name that `--reasoning-parser` takes."""

from __future__ import annotations

from zhilight.errors import ConfigError
from zhilight.server.openai.reasoning.base import ReasoningParser
from zhilight.server.openai.reasoning.deepseek_r1 import DeepSeekR1ReasoningParser
from zhilight.server.openai.reasoning.qwen3 import Qwen3ReasoningParser

__all__ = ["REASONING_PARSERS", "ReasoningParser", "get_reasoning_parser"]

REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1ReasoningParser,
    "qwen3": Qwen3ReasoningParser,
}


def get_reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser called `name`. Raises ConfigError with the list of names."""
    if name not in REASONING_PARSERS:
        raise ConfigError(f"reasoning_parser is {name!r}; it must be one of {', '.join(REASONING_PARSERS)}.")
    return REASONING_PARSERS[name]
