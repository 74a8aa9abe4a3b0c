"""Finding markers in text that arrives in pieces; the parsers of tool calls and of reasoning share it."""

from __future__ import annotations

SPACE = " \t\n\r"


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` begin `marker`, without being all of it: they must be held back."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
