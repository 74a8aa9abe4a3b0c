"""Tool calls in a model's text: what every format shares.

A parser is a coroutine over the text. It reads straight on, as one would describe the format ("text up to the marker, then
an object"), and waits where the text so far ends; so a stream cut anywhere gives the same result as the whole text, and
`parse` is `feed` of everything.

What cannot be read as a call is content, word for word. That can only be known when a call is whole, and what has been
sent cannot be taken back: so a call is sent when it is whole, unless a grammar guarantees it (`constrained`), in which
case its arguments are sent as they come.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from zhilight.server.openai.markers import SPACE, overlap
from zhilight.server.openai.tools.json_scanner import JSONScanner

ARGUMENTS = ("arguments", "parameters")
"""Keys under which an object holds a call's arguments."""
NAME = re.compile(r"[\w.:/-]{1,256}")
"""What a function may be called."""
Reading = Generator[None, None, Any]
"""A coroutine over the text: it yields where it needs more."""


@dataclass(frozen=True)
class ContentDelta:
    """New text of the message's content."""

    text: str


@dataclass(frozen=True)
class ToolCallDelta:
    """New characters of the arguments of call number `index`. id and name come with a call's first delta only."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is the text of a JSON object, as the model wrote it."""

    name: str
    arguments: str
    id: str


@dataclass(frozen=True)
class ParsedMessage:
    """content is None when there is none."""

    content: str | None
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True)
class CallFormat:
    """How the model writes calls, for a grammar that forces them: begin (call (separator call)*) end.

    A call is before_name + name + before_arguments + arguments + after_arguments. Markers that are special tokens are
    recognised in these texts.
    """

    begin: str
    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str
    end: str
    markers: tuple[str, ...] = ()


class ToolParser:
    """Base of the formats. One instance reads one choice's text: `feed` it and `finish`, or `parse` everything at once.

    tools: the request's tools, in OpenAI's form. constrained: a grammar made the text (see constrain.py).
    parallel: whether calls after the first are reported, too.
    """

    format: ClassVar[CallFormat]
    needs_special_tokens: ClassVar[bool] = False
    """The markers are special tokens in the family's vocabularies: the request must not skip them."""

    def __init__(self, tools: list[dict[str, Any]], *, constrained: bool = False, parallel: bool = True):
        self.tools, self.constrained, self.parallel = tools, constrained, parallel
        self._text, self._at, self._ended = "", 0, False
        self._raw: list[str] | None = None
        """What has been read of a block that may yet turn out to be content."""
        self._space: list[str] = []
        """White space whose fate is open: it is dropped around calls."""
        self._said = False
        self._calls = 0
        self._arguments: list[str] = []
        self._deltas: list[ContentDelta | ToolCallDelta] = []
        self._reading: Reading | None = self.read()
        self._advance()

    def read(self) -> Reading:
        """The format, as a coroutine over the primitives below. Text that it leaves unread is content."""
        raise TypeError(f"{type(self).__name__} does not say how its format is read")

    # ---- the two faces

    def feed(self, text: str) -> list[ContentDelta | ToolCallDelta]:
        """What `text` makes certain."""
        self._text, self._at = self._text[self._at:] + text, 0
        return self._advance()

    def finish(self) -> list[ContentDelta | ToolCallDelta]:
        """What is left when no more text comes."""
        self._ended = True
        return self._advance()

    def parse(self, text: str) -> ParsedMessage:
        """The whole message at once."""
        parser = type(self)(self.tools, constrained=self.constrained, parallel=self.parallel)
        content, calls = [], []
        for delta in parser.feed(text) + parser.finish():
            if isinstance(delta, ContentDelta):
                content.append(delta.text)
            elif delta.name is not None:
                calls.append(ToolCall(delta.name, delta.arguments, delta.id or ""))
            else:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + delta.arguments)
        return ParsedMessage("".join(content) or None, calls)

    def _advance(self) -> list[ContentDelta | ToolCallDelta]:
        if self._reading is not None and next(self._reading, StopIteration) is StopIteration:
            self._reading = None
        if self._reading is None:
            self.say(self._text[self._at:])
            self._at = len(self._text)
        self._send_arguments()
        if self._ended:
            self._end_space()
        deltas, self._deltas = self._deltas, []
        return deltas

    # ---- primitives of the formats, each used with `yield from`

    def peek(self) -> Reading:
        """The next character, left where it is; "" at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def skip_space(self) -> Reading:
        """Takes white space; returns the character after it, left where it is."""
        while (char := (yield from self.peek())) and char in SPACE:
            self._take(1)
        return char

    def take_text(self, expected: str) -> Reading:
        """Takes `expected` if exactly that comes next; otherwise takes nothing and returns False."""
        while not self._text.startswith(expected, self._at):
            if self._ended or not expected.startswith(self._text[self._at:]):
                return False
            yield
        self._take(len(expected))
        return True

    def take_until(self, stops: str) -> Reading:
        """Takes and returns the text up to one of the characters `stops`, which is left, or up to the end."""
        taken = []
        while (char := (yield from self.peek())) and char not in stops:
            taken.append(char)
            self._take(1)
        return "".join(taken)

    def content_until(self, *markers: str) -> Reading:
        """Passes text on as content up to the first of `markers`, which is taken and returned; "" at the end."""
        while True:
            text = self._text[self._at:]
            at, marker = min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=(-1, ""))
            if marker:
                self.say(text[:at])
                self._at += at
                self.open_block()
                self._take(len(marker))
                return marker
            open_end = 0 if self._ended else max(overlap(text, marker) for marker in markers)
            self.say(text[:len(text) - open_end])
            self._at = len(self._text) - open_end
            if self._ended:
                return ""
            yield

    def open_block(self) -> None:
        """From here on, what is read is either a call or, word for word, content."""
        self._raw = []

    def close_block(self) -> None:
        """What was read since `open_block` is content after all."""
        raw, self._raw = self._raw, None
        self.say("".join(raw or ()))

    def call(self, name: str | None = None, known_only: bool = False) -> Reading:
        """Reads a JSON object as a call and reports it; returns whether it was one. What was none becomes content.

        Without `name` the object holds "name" and "arguments" (or "parameters"); with it, it is the arguments.
        known_only: an object is a call only if it names one of the request's tools and has arguments.
        """
        if self._raw is None:
            self.open_block()
        if name is not None and not NAME.fullmatch(name):
            self.close_block()
            return False
        yield from self.skip_space()
        scanner, text, first, last, streamed = JSONScanner(), [], None, None, False
        around = 1 if name is None else 0  # brackets around the arguments
        while not scanner.done:
            if self._at == len(self._text):
                if self._ended:
                    break
                yield
                continue
            char, depth = self._text[self._at], scanner.depth
            try:
                scanner.push(char)
            except ValueError:
                break
            self._take(1)
            text.append(char)
            if char == "{" and depth == around < scanner.depth and (name is not None or scanner.key in ARGUMENTS):
                first, last = len(text) - 1, None
                streamed = streamed or (self.constrained and self._announce(name, text, known_only))
            if first is not None and last is None:
                if streamed:
                    self._arguments.append(char)
                if scanner.depth == around:
                    last = len(text)
        if streamed:  # what is sent is sent, whole or cut off
            self._raw = None
            return scanner.done
        found = _read_call("".join(text), name, slice(first, last), scanner.lenient) if scanner.done else None
        if found is None or (known_only and not (first is not None and found.name in self.tool_names)):
            self.close_block()
            return False
        self._raw = None
        self.report(found.name, found.arguments, found.id)
        return True

    # ---- reporting

    @property
    def tool_names(self) -> list[str]:
        return [tool["function"]["name"] for tool in self.tools]

    def report(self, name: str, arguments: str, call_id: str = "") -> None:
        """A whole call, or one whose arguments follow."""
        self._send_arguments()
        self._space.clear()
        self._raw = None
        self._calls += 1
        if self.parallel or self._calls == 1:
            self._deltas.append(ToolCallDelta(self._calls - 1, arguments, call_id or self.new_id(), name))

    def say(self, text: str) -> None:
        """Content. White space waits until something else follows it."""
        body = text.rstrip(SPACE)
        if body:
            words = "".join(self._space) + body
            self._deltas.append(ContentDelta(words.lstrip(SPACE) if self._calls and not self._said else words))
            self._said = True
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body):])

    def new_id(self) -> str:
        """An id for a call that brings none."""
        return "call_" + random_name(24)

    def _announce(self, name: str | None, text: list[str], known_only: bool) -> bool:
        """Sends a call's header as its arguments begin; False when its name has not come by then, or does not count."""
        if name is None:
            call = _read_call("".join(text[:-1]) + "{}}", None, slice(len(text) - 1, len(text) + 1), lenient=False)
            if call is None or (known_only and call.name not in self.tool_names):
                return False
            self.report(call.name, "", call.id)
        else:
            self.report(name, "")
        return True

    def _send_arguments(self) -> None:
        arguments, self._arguments = "".join(self._arguments), []
        if arguments and (self.parallel or self._calls == 1):
            self._deltas.append(ToolCallDelta(self._calls - 1, arguments))

    def _end_space(self) -> None:
        if not self._calls and (space := "".join(self._space)):
            self._deltas.append(ContentDelta(space))
        self._space.clear()

    def _take(self, count: int) -> None:
        if self._raw is not None:
            self._raw.append(self._text[self._at:self._at + count])
        self._at += count


def random_name(length: int) -> str:
    """Random letters and digits."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def _read_call(text: str, name: str | None, arguments: slice, lenient: bool) -> ToolCall | None:
    """The call in the whole object `text`, of which `arguments` is the part that holds them; None if it is none."""
    try:
        value = json.loads(text, strict=not lenient)
    except (ValueError, RecursionError):
        return None
    call_id = ""
    if name is not None:
        held = value
    else:
        name, call_id = value.get("name"), value.get("id")
        held = next((value[key] for key in reversed(value) if key in ARGUMENTS), None)
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None
    written = json.dumps(held, ensure_ascii=False) if lenient else text[arguments]
    if isinstance(held, str):  # JSON within JSON, as OpenAI's API itself writes arguments
        written = held
        try:
            held = json.loads(held)
        except (ValueError, RecursionError):
            return None
    elif held is None:
        written, held = "{}", {}
    return ToolCall(name, written, call_id if isinstance(call_id, str) else "") if isinstance(held, dict) else None
