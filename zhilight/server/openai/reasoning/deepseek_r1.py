"""DeepSeek R1 and its distillations. Newer templates open the thought in the prompt, older ones leave it to the model."""

from __future__ import annotations

from zhilight.server.openai.reasoning.base import ReasoningParser


class DeepSeekR1ReasoningParser(ReasoningParser):
    open_marker = "<think>"
    close_marker = "</think>"
