"""Counts tokens for the `usage` object."""

from __future__ import annotations

from zhilight.engine.outputs import RequestOutput
from zhilight.server.openai.responses import PromptTokensDetails, Usage


class UsageCount:
    """Tokens of one HTTP request: its prompts, what of them came from the prefix cache, and what was generated."""

    def __init__(self, prompt_tokens: int):
        self._prompt_tokens = prompt_tokens
        self._cached: dict[int, int] = {}
        self._generated = 0

    def add_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        if output.cached_tokens:
            self._cached[prompt_index] = output.cached_tokens

    def add_generated(self, tokens: int) -> None:
        self._generated += tokens

    def usage(self) -> Usage:
        return Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._generated,
                     total_tokens=self._prompt_tokens + self._generated,
                     prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached.values())))
