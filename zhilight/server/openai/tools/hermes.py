"""Hermes and Qwen2/2.5/3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, repeated."""

from __future__ import annotations

from zhilight.server.openai.tools.base import CallFormat, Reading, ToolParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser(ToolParser):
    format = CallFormat(begin="", before_name=OPEN + '\n{"name": "', before_arguments='", "arguments": ',
                        after_arguments="}\n" + CLOSE, separator="\n", end="", markers=(OPEN, CLOSE))

    def read(self) -> Reading:
        while (yield from self.content_until(OPEN)):
            while (yield from self.call()):
                if (yield from self.skip_space()) != "{":
                    yield from self.take_text(CLOSE)
                    break
