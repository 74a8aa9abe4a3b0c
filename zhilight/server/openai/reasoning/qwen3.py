"""Qwen3. The model opens the thought itself; with enable_thinking=false the template puts an empty, closed one before."""

from __future__ import annotations

from zhilight.server.openai.reasoning.base import ReasoningParser


class Qwen3ReasoningParser(ReasoningParser):
    open_marker = "<think>"
    close_marker = "</think>"
