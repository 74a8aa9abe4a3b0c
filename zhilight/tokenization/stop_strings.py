"""Stop strings in a stream of text: the Aho-Corasick automaton (Aho and Corasick 1975), one step a character.

Its state is the longest end of the text that begins a stop string, which is exactly what must be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Cuts a stream at the first completed stop string. Where several end at one character, the longest counts.

    The result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool):
        self._include = include
        self.found: str | None = None
        """The stop string that ended the text."""
        self._held = ""
        self._state = 0
        self._build(stops)

    def feed(self, text: str, may_match: bool = True) -> str:
        """The text that is now certain. Stop strings completed within `text` are passed over unless `may_match`."""
        if not self._children[0] or self.found is not None:
            return "" if self.found is not None else text
        text = self._held + text
        position = len(self._held)
        while position < len(text):
            position += 1
            self._state = self._step(self._state, text[position - 1])
            match = self._match[self._state]
            if match is not None and may_match:
                self.found, self._held = match, ""
                return text[:position] if self._include else text[:position - len(match)]
        certain = len(text) - self._open[self._state]
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The text held back, when nothing more comes."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, char: str) -> int:
        while char not in self._children[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._children[state][char]

    def _build(self, stops: Sequence[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._children[state]:
                    self._children[state][char] = len(self._children)
                    self._children.append({})
                    self._match.append(None)
                    depth.append(depth[state] + 1)
                state = self._children[state][char]
            self._match[state] = stop
        self._fallback = [0] * len(self._children)
        # How many characters at the end of the text could still become a stop string, in each state.
        self._open = [0] * len(self._children)
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            self._match[state] = self._match[state] or self._match[fallback]
            self._open[state] = depth[state] if self._children[state] else self._open[fallback]
            for char, child in self._children[state].items():
                self._fallback[child] = self._step(fallback, char)
                queue.append(child)
