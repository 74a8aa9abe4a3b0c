"""A thought before the answer: `<think>` ... `</think>`, told apart while it streams.

Whether the text begins inside a thought is decided by the end of the rendered prompt (many templates open the thought
themselves) and, where that does not say, by the first characters of the text. White space around the markers belongs
to neither part.
"""

from __future__ import annotations

from typing import ClassVar

from zhilight.server.openai.markers import SPACE, overlap


class ReasoningParser:
    """Reads one choice's text: `feed` it and `finish`, or `parse` everything at once; both give the same two parts.

    prompt_tail: the last characters of the rendered prompt (a hundred are plenty).
    """

    open_marker: ClassVar[str] = "<think>"
    close_marker: ClassVar[str] = "</think>"

    def __init__(self, prompt_tail: str):
        self._prompt_tail = prompt_tail
        self.starts_open = prompt_tail.rstrip(SPACE).endswith(self.open_marker)
        """The prompt has opened the thought: everything up to the close marker is reasoning."""
        self._phase = "thought" if self.starts_open else "start"
        self._held = ""
        self._trim = True
        """Nothing of the part has been shown: white space at its start is dropped."""

    def parse(self, text: str) -> tuple[str | None, str | None]:
        """(reasoning, content), None for a part that is not there."""
        parser = type(self)(self._prompt_tail)
        first, last = parser.feed(text), parser.finish()
        return first[0] + last[0] or None, first[1] + last[1] or None

    def feed(self, text: str) -> tuple[str, str]:
        """New (reasoning, content); either may be empty."""
        return self._read(text, ended=False)

    def finish(self) -> tuple[str, str]:
        """What is left when no more text comes. Text that ends inside the thought is reasoning."""
        return self._read("", ended=True)

    @property
    def in_thought(self) -> bool:
        """The text so far ends inside the thought."""
        return self._phase == "thought"

    def _read(self, text: str, ended: bool) -> tuple[str, str]:
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._phase == "start":
            start = text.lstrip(SPACE)
            if self.open_marker.startswith(start) and start != self.open_marker and not ended:
                self._held = text
                return "", ""
            if start.startswith(self.open_marker):
                self._phase, text = "thought", start[len(self.open_marker):]
            else:
                self._phase, self._trim = "content", False
        if self._phase == "thought":
            thought, marker, rest = text.partition(self.close_marker)
            if not marker and not ended:
                thought, self._held = self._certain(thought)
            elif marker or ended:
                thought = thought.rstrip(SPACE)
            reasoning = self._trimmed(thought)
            if not marker:
                return reasoning, ""
            self._phase, self._trim, text = "content", True, rest
        return reasoning, self._trimmed(text)

    def _certain(self, thought: str) -> tuple[str, str]:
        """Splits off what may belong to the close marker, or is white space before it."""
        certain = thought[:len(thought) - overlap(thought, self.close_marker)].rstrip(SPACE)
        return certain, thought[len(certain):]

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip(SPACE)
            self._trim = not text
        return text
