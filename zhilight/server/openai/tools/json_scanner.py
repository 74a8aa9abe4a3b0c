"""Strict JSON, one character at a time: where an object ends, and which of its own keys is being read.

Grammar: RFC 8259. One leniency: a control character inside a string is let through and reported, because models write
line breaks in strings; the caller then writes the value anew.
"""

from __future__ import annotations

import json
import re

_SPACE = " \t\n\r"
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_HEX = frozenset("0123456789abcdefABCDEF")


class JSONScanner:
    """Feed it characters with `push` until `done`.

    depth: open brackets. key: the object's own key that was read last, whose value follows.
    lenient: a string held a bare control character.
    """

    def __init__(self) -> None:
        self.done = False
        self.depth = 0
        self.key: str | None = None
        self.lenient = False
        self._open: list[str] = []
        self._expect = "object"
        self._text: list[str] = []
        self._escape = 0
        """Inside a string: 0 none, 5 after a backslash, 4 to 1 hexadecimal digits still to come."""

    def push(self, char: str) -> None:
        """Takes one character. Raises ValueError when it cannot stand here; the scanner is of no use afterwards."""
        if self._expect in ("key text", "string"):
            self._in_string(char)
        elif self._expect == "scalar" and char in _SCALAR_CHARS:
            self._text.append(char)
        else:
            if self._expect == "scalar":
                if not _SCALAR.fullmatch("".join(self._text)):
                    raise ValueError(f"{''.join(self._text)!r} is no JSON value")
                self._after_value()
            if char not in _SPACE:
                self._between(char)

    def _in_string(self, char: str) -> None:
        if self._escape == 5:
            if char not in '"\\/bfnrtu':
                raise ValueError(f"\\{char} is no JSON escape")
            self._escape = 4 if char == "u" else 0
        elif self._escape:
            if char not in _HEX:
                raise ValueError(f"{char!r} is no hexadecimal digit")
            self._escape -= 1
        elif char == "\\":
            self._escape = 5
        elif char == '"':
            if self._expect == "key text":
                if self.depth == 1:
                    self.key = json.loads('"' + "".join(self._text) + '"', strict=False)
                self._expect = "colon"
            else:
                self._after_value()
            return
        elif char < " ":
            self.lenient = True
        if self._expect == "key text" and self.depth == 1:
            self._text.append(char)

    def _between(self, char: str) -> None:
        expect = self._expect
        if expect == "colon" and char == ":":
            self._expect = "value"
        elif expect in ("key", "key or end") and char == '"':
            self._expect, self._text = "key text", []
        elif expect == "comma or end" and char == ",":
            self._expect = "key" if self._open[-1] == "}" else "value"
        elif expect in ("comma or end", "key or end", "value or end") and char == self._open[-1]:
            self._open.pop()
            self.depth -= 1
            self._after_value()
        elif char == "{" and expect in ("object", "value", "value or end"):
            self._start("}", "key or end")
        elif char == "[" and expect in ("value", "value or end"):
            self._start("]", "value or end")
        elif char == '"' and expect in ("value", "value or end"):
            self._expect = "string"
        elif char in _SCALAR_CHARS and expect in ("value", "value or end"):
            self._expect, self._text = "scalar", [char]
        else:
            raise ValueError(f"{char!r} cannot stand where {expect} is expected")

    def _start(self, closing: str, expect: str) -> None:
        if self.depth == 200:
            raise ValueError("more than 200 open brackets")
        self._open.append(closing)
        self.depth += 1
        self._expect = expect

    def _after_value(self) -> None:
        self.done = self.depth == 0
        self._expect = "comma or end"
