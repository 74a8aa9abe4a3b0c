"""Llama 3.1 and 3.2: the answer is one object `{"name": ..., "parameters": {...}}`, or several with ";" between them.

`<|python_tag|>` may stand before it; after that tag a built-in tool is called in Python's manner: `search.call(query="x")`.
"""

from __future__ import annotations

import ast
import json

from zhilight.server.openai.tools.base import CallFormat, Reading, ToolParser

TAG = "<|python_tag|>"
_LONGEST_PYTHON = 20_000
"""Characters; Python's parser is not let loose on more."""


class Llama3JSONToolParser(ToolParser):
    format = CallFormat(begin="", before_name='{"name": "', before_arguments='", "parameters": ', after_arguments="}",
                        separator="; ", end="")
    needs_special_tokens = True

    def read(self) -> Reading:
        self.open_block()
        if (yield from self.skip_space()) == "{":
            yield from self._objects()
        else:
            self.close_block()
        while (yield from self.content_until(TAG)):
            if (yield from self.skip_space()) == "{":
                yield from self._objects()
            else:
                yield from self._python()

    def _objects(self) -> Reading:
        # Nothing marks the object as a call, so that an answer in JSON is told apart by the tool it names.
        while (yield from self.call(known_only=True)):
            if (yield from self.skip_space()) != ";":
                return
            yield from self.take_text(";")
            if (yield from self.skip_space()) != "{":
                return

    def _python(self) -> Reading:
        code = yield from self.take_until("")
        call = _python_call(code.strip())
        if call is not None and call[0] in self.tool_names:
            self.report(*call)
        else:
            self.close_block()


def _python_call(code: str) -> tuple[str, str] | None:
    """Name and JSON arguments of `name(key=literal, ...)` or `name.call(key=literal, ...)`; None for any other code."""
    if len(code) > _LONGEST_PYTHON:
        return None
    try:
        match ast.parse(code, mode="eval").body:
            case ast.Call(ast.Attribute(ast.Name(name), "call") | ast.Name(name), [], keywords):
                arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in keywords}
                if None not in arguments:
                    return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return None
