"""From a request to prompt token ids: chat messages through the template, texts through the tokenizer.

Everything here is slow for long prompts and runs in the thread pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from zhilight.errors import ZhiLightError
from zhilight.server.openai.errors import APIError, bad_request
from zhilight.server.openai.protocol import (
    ChatCompletionRequest,
    Message,
    Prompt,
    TokenizeRequest,
    Tool,
)
from zhilight.server.openai.sampling import check_token_ids
from zhilight.server.openai.serving import Serving

MAX_PROMPTS = 2048
_CHARACTERS_A_TOKEN = 8
"""More than ordinary text has."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt's token ids, and its text when it came as text or was rendered."""

    token_ids: list[int]
    text: str | None = None


def chat_prompt(serving: Serving, request: ChatCompletionRequest | TokenizeRequest, *,
                tools: list[Tool] | None) -> PreparedPrompt:
    """Render the chat template and tokenize its result. The template's own failure is a 400."""
    text = render_chat(serving, request, tools=tools)
    return encode_text(serving, text, add_special_tokens=bool(request.add_special_tokens), param="messages")


def render_chat(serving: Serving, request: ChatCompletionRequest | TokenizeRequest, *, tools: list[Tool] | None) -> str:
    if not request.messages:
        raise bad_request("messages is empty; give at least one message.", "messages")
    continue_final = bool(request.continue_final_message)
    add_generation_prompt = request.add_generation_prompt
    if continue_final and add_generation_prompt:
        raise bad_request("continue_final_message and add_generation_prompt exclude each other.", "continue_final_message")
    if add_generation_prompt is None:
        add_generation_prompt = not continue_final
    if request.chat_template is not None and not serving.config.trust_request_chat_template:
        raise bad_request("chat_template is refused: the server was started without --trust-request-chat-template.",
                          "chat_template")
    template_arguments = dict(request.chat_template_kwargs or {})
    for name in _OWN_ARGUMENTS & template_arguments.keys():
        raise bad_request(f"chat_template_kwargs may not hold {name!r}.", "chat_template_kwargs")
    effort = getattr(request, "reasoning_effort", None)
    if effort is not None:
        template_arguments.setdefault("reasoning_effort", effort)
        if effort == "none":
            template_arguments.setdefault("enable_thinking", False)
    messages = [template_message(message, index) for index, message in enumerate(request.messages)]
    try:
        return serving.tokenizer.apply_chat_template(
            messages, tools=msgspec.to_builtins(tools) if tools else None, documents=request.documents,
            chat_template=request.chat_template or serving.chat_template, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final, **template_arguments)
    except (ZhiLightError, APIError):
        raise
    except RecursionError as error:
        raise bad_request("messages are nested too deeply.", "messages") from error
    except Exception as error:  # whatever a template does with messages it does not like is the client's to mend
        raise bad_request(f"The chat template refused these messages: {error or type(error).__name__}.",
                          "messages") from error


_OWN_ARGUMENTS = {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
                  "conversation", "tokenize", "self"}


def template_message(message: Message, index: int) -> dict[str, Any]:
    """A message as chat templates expect it: text content, tool arguments as a dict, roles they know."""
    role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
    content = message_text(message, index)
    if content is None and not message.tool_calls:
        if message.role != "assistant":
            raise bad_request(f"messages[{index}].content is missing.", f"messages[{index}].content")
        content = message.refusal or ""
    result: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if getattr(message, name) is not None:
            result[name] = getattr(message, name)
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        if message.role != "assistant":
            raise bad_request(f"messages[{index}] has tool_calls; only the assistant's can.",
                              f"messages[{index}].tool_calls")
        result["tool_calls"] = [_template_call(call, f"messages[{index}].tool_calls[{i}]")
                                for i, call in enumerate(message.tool_calls)]
    return result


def message_text(message: Message, index: int) -> str | None:
    """The text of a message; parts are joined by line breaks, as templates that take texts expect."""
    if message.content is None or isinstance(message.content, str):
        return message.content
    texts = []
    for part_index, part in enumerate(message.content):
        if isinstance(part, str):
            texts.append(part)
            continue
        text = {"text": part.text, "refusal": part.refusal}.get(part.type)
        if text is None:
            param = f"messages[{index}].content[{part_index}]"
            if part.type in ("text", "refusal"):
                raise bad_request(f"{param}.{part.type} is missing.", f"{param}.{part.type}")
            raise bad_request(f"{param} has the type {part.type!r}; this model takes text only.", f"{param}.type",
                              "unsupported_content")
        texts.append(text)
    return "\n".join(texts)


def _template_call(call: Any, param: str) -> dict[str, Any]:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
        except (msgspec.DecodeError, RecursionError) as error:
            raise bad_request(f"{param}.function.arguments is not JSON: {error}.", f"{param}.function.arguments") from error
        if not isinstance(arguments, dict):
            raise bad_request(f"{param}.function.arguments must be a JSON object.", f"{param}.function.arguments")
    result: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        result["id"] = call.id
    return result


def text_prompts(serving: Serving, prompt: Prompt | None, *, add_special_tokens: bool, param: str) -> list[PreparedPrompt]:
    """The prompts of a completion or embedding request, in order."""
    if prompt is None or (isinstance(prompt, list) and not prompt):
        raise bad_request(f"{param} is missing or empty.", param)
    if isinstance(prompt, str):
        return [encode_text(serving, prompt, add_special_tokens=add_special_tokens, param=param)]
    if all(isinstance(item, int) for item in prompt):
        return [_checked_ids(serving, prompt, param)]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"{param} holds {len(prompt)} prompts; the limit is {MAX_PROMPTS}.", param)
    if all(isinstance(item, str) for item in prompt):
        return [encode_text(serving, item, add_special_tokens=add_special_tokens, param=f"{param}[{index}]")
                for index, item in enumerate(prompt)]
    if all(isinstance(item, list) for item in prompt):
        return [_checked_ids(serving, item, f"{param}[{index}]") for index, item in enumerate(prompt)]
    raise bad_request(f"{param} must be a text, texts, token ids or lists of token ids, not a mixture.", param)


def check_length(serving: Serving, text: str, param: str) -> None:
    """Refuse a text that cannot fit before the tokenizer spends seconds on it.

    Either no tokens are long enough for it, or its beginning alone has more tokens than the context. (A cut changes the
    tokens beside it, not those far away: the margin of 64 is wide.)
    """
    limit = serving.max_model_len
    fits = len(text) <= serving.longest_token * limit
    if fits and len(text) > 2 * _CHARACTERS_A_TOKEN * limit:
        beginning = serving.tokenizer.encode(text[:_CHARACTERS_A_TOKEN * limit], add_special_tokens=False)
        fits = len(beginning) <= limit + 64
    if not fits:
        raise bad_request(f"This model's maximum context length is {limit} tokens; {param} has {len(text)} characters, "
                          "which are more tokens than that.", param, "context_length_exceeded")


def encode_text(serving: Serving, text: str, *, add_special_tokens: bool, param: str) -> PreparedPrompt:
    check_length(serving, text, param)
    token_ids = serving.tokenizer.encode(text, add_special_tokens=add_special_tokens)
    if not token_ids:
        raise bad_request(f"{param} is empty: it has no tokens.", param)
    return PreparedPrompt(token_ids, text)


def _checked_ids(serving: Serving, token_ids: list[int], param: str) -> PreparedPrompt:
    if not token_ids:
        raise bad_request(f"{param} is empty: it has no tokens.", param)
    check_token_ids(param, token_ids, serving.model_config.vocab_size)
    return PreparedPrompt(token_ids)


def truncate(serving: Serving, prompt: PreparedPrompt, keep: int | None, *, reserve: int = 0) -> PreparedPrompt:
    """Keep the last `keep` tokens; -1 keeps what the context holds beside `reserve` tokens of output."""
    if keep is None:
        return prompt
    if keep == -1:
        keep = serving.max_model_len - reserve
    if not 1 <= keep <= serving.max_model_len:
        raise bad_request(f"truncate_prompt_tokens is {keep}; it must be -1 or from 1 to {serving.max_model_len}.",
                          "truncate_prompt_tokens")
    if len(prompt.token_ids) <= keep:
        return prompt
    token_ids = prompt.token_ids[-keep:]
    return PreparedPrompt(token_ids, None)
