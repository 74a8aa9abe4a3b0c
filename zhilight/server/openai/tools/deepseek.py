"""DeepSeek V3 and R1, and V3.1, which leaves out the word "function" and the fence around the arguments.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
    ```json
    {...}
    ```<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>
    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>
"""

from __future__ import annotations

from zhilight.server.openai.tools.base import CallFormat, Reading, ToolParser

CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR = (
    f"<\uff5c{words}\uff5c>"
    for words in ("tool▁calls▁begin", "tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep"))


class DeepSeekToolParser(ToolParser):
    format = CallFormat(begin=CALLS_BEGIN, before_name=f"{CALL_BEGIN}function{SEPARATOR}", before_arguments="\n```json\n",
                        after_arguments="\n```" + CALL_END, separator="\n", end=CALLS_END,
                        markers=(CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR))
    needs_special_tokens = True

    def read(self) -> Reading:
        while (marker := (yield from self.content_until(CALLS_BEGIN, CALL_BEGIN))):
            if marker == CALLS_BEGIN:
                yield from self.skip_space()
                if not (yield from self.take_text(CALL_BEGIN)):
                    self.close_block()
                    continue
            while (yield from self._call()):
                yield from self.skip_space()
                if not (yield from self.take_text(CALL_BEGIN)):
                    yield from self.take_text(CALLS_END)
                    break
                self.open_block()

    def _call(self) -> Reading:
        """One call, its begin marker taken; takes its end marker, too."""
        name = (yield from self.take_until("<")).strip()
        if not (yield from self.take_text(SEPARATOR)):
            self.close_block()
            return False
        if name == "function" and (yield from self.skip_space()) != "{":
            name = (yield from self.take_until("\n`{")).strip()
            yield from self.skip_space()
            yield from self.take_text("```json")
        if not (yield from self.call(name)):
            return False
        yield from self.skip_space()
        yield from self.take_text("```")
        yield from self.skip_space()
        yield from self.take_text(CALL_END)
        return True
