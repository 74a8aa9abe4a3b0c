"""Mistral: `[TOOL_CALLS]` and then a list of objects, or (since 2025) `name[ARGS]{...}`, the marker repeated for each."""

from __future__ import annotations

from zhilight.server.openai.tools.base import CallFormat, Reading, ToolParser, random_name

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralToolParser(ToolParser):
    format = CallFormat(begin=MARKER + "[", before_name='{"name": "', before_arguments='", "arguments": ',
                        after_arguments="}", separator=", ", end="]", markers=(MARKER,))
    needs_special_tokens = True

    def read(self) -> Reading:
        while (yield from self.content_until(MARKER)):
            char = yield from self.skip_space()
            if char == "[":
                yield from self._list()
            elif char == "{":
                yield from self.call()
            else:
                yield from self._named()

    def _list(self) -> Reading:
        yield from self.take_text("[")
        while (yield from self.call()):
            if (yield from self.skip_space()) != ",":
                yield from self.take_text("]")
                return
            yield from self.take_text(",")

    def _named(self) -> Reading:
        name = yield from self.take_until("[{")
        if (yield from self.take_text(CALL_ID)):
            yield from self.take_until("[{")
        yield from self.take_text(ARGS)
        yield from self.call(name.strip())

    def new_id(self) -> str:
        """Mistral's chat template wants exactly nine letters and digits."""
        return random_name(9)
