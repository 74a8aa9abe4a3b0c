"""Chat templates: Jinja in a sandbox, with the extensions, filters and globals that model cards count on.

The environment gives templates what Hugging Face's does: `raise_exception`, `strftime_now`, a `tojson` that neither
escapes HTML nor turns text into \\u sequences, loop controls and `{% generation %}` blocks.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from zhilight.errors import RequestError

if TYPE_CHECKING:
    import jinja2

_CONTINUE = "\ue000zhilight-continues-here\ue001"
"""Marks the end of the final message while it is rendered; private-use characters, so no message holds it."""


def choose_template(templates: dict[str, str], chosen: str | None, has_tools: bool) -> str:
    """The template text: `chosen` by name or as text itself; else "tool_use" when there are tools, else "default".

    Raises RequestError when there is nothing to choose from.
    """
    if chosen is not None:
        return templates.get(chosen, chosen)
    if has_tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    if templates:
        raise RequestError(f"the model has no default chat template; name one of {', '.join(sorted(templates))} "
                           "in chat_template.", param="chat_template")
    raise RequestError("the model has no chat template: its tokenizer carries none. Use completions with a plain prompt, "
                       "or give a template (chat_template in the request, --chat-template FILE at start).",
                       param="messages")


def render(template: str, messages: list[dict[str, Any]], *, continue_final_message: bool, variables: dict[str, Any]) -> str:
    """Renders `template` over `messages`; the other variables it may read are in `variables`.

    With `continue_final_message` the text ends where the last message's content ends, for the model to go on.
    Raises RequestError: param "chat_template" for a syntax error, "messages" for what the template raises itself.
    """
    compiled = _compile(template)
    if continue_final_message:
        messages = [*messages[:-1], _mark_end(messages)]
    messages = [_with_arguments(message) for message in messages]
    try:
        text = compiled.render(messages=messages, **variables)
    except Exception as error:  # whatever a template does wrong, it did it to these messages: the sandbox is the border
        raise RequestError(f"the chat template refused the messages: {error or type(error).__name__}",
                           param="messages") from error
    return _cut_at_mark(text) if continue_final_message else text


class CallArguments(dict):
    """A tool call's arguments for templates of both persuasions.

    Some read a mapping (`| tojson`, `.items()`), some take OpenAI's string as it is: added to text or printed, this is JSON.
    """

    def __str__(self) -> str:
        return _to_json(self)

    def __radd__(self, text: str) -> str:
        return text + str(self)

    def __add__(self, text: str) -> str:
        return str(self) + text


def _with_arguments(message: Any) -> Any:
    if not (isinstance(message, dict) and isinstance(message.get("tool_calls"), list)):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            call = {**call, "function": {**function, "arguments": CallArguments(function["arguments"])}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _mark_end(messages: list[dict[str, Any]]) -> dict[str, Any]:
    final = messages[-1] if messages else {}
    content = final.get("content")
    if isinstance(content, str):
        return {**final, "content": content + _CONTINUE + " "}
    if isinstance(content, list):
        for i in reversed(range(len(content))):
            if isinstance(content[i], dict) and isinstance(content[i].get("text"), str):
                part = {**content[i], "text": content[i]["text"] + _CONTINUE + " "}
                return {**final, "content": [*content[:i], part, *content[i + 1:]]}
    raise RequestError("continue_final_message is set but the last message has no text to continue. Give it a content, "
                       "or leave continue_final_message out.", param="continue_final_message")


def _cut_at_mark(text: str) -> str:
    at = text.rfind(_CONTINUE)
    if at < 0:
        raise RequestError("continue_final_message is set but the chat template does not render the last message's text.",
                           param="continue_final_message")
    if text.startswith(" ", at + len(_CONTINUE)):
        return text[:at]
    return text[:at].rstrip()  # the template trims what it renders: so would it have trimmed the text without the mark


@lru_cache(maxsize=64)
def _compile(template: str) -> jinja2.Template:
    import jinja2

    try:
        return _environment().from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise RequestError(f"the chat template has a syntax error in line {error.lineno}: {error.message}",
                           param="chat_template") from error
    except RecursionError as error:
        raise RequestError("the chat template is nested too deeply.", param="chat_template") from error


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is rendered as it is."""

        tags = frozenset({"generation"})

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
