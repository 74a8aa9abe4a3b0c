"""What clients send: one msgspec struct a route, with strict types.

A field that is not listed is accepted and ignored. A field that is listed in `_REFUSED` is known and cannot be honoured: any
value but the neutral ones is a 400. None always means "left out".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from zhilight.server.openai.errors import bad_request

JSONObject = dict[str, Any]
Prompt = str | list[str | int | list[int]]
"""A text, several texts, one list of token ids, or several lists of token ids."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JSONSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: JSONObject | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`: exactly one of the constraints."""

    json: str | JSONObject | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ContentPart(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | JSONObject = ""


class ToolCall(msgspec.Struct, kw_only=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart | str] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: JSONObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    function: NamedFunction
    type: Literal["function"] = "function"


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields that the chat and the completion route share."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JSONObject | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    priority: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    echo: bool | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    # Known and refused unless neutral:
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    logits_processors: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    prompt_embeds: Any = None
    suffix: Any = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: JSONObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[JSONObject] | None = None
    # Known and refused unless neutral:
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    verbosity: Any = None
    mm_processor_kwargs: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt | None = None
    logprobs: int | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings."""

    input: Prompt
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    user: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: `prompt`, or `messages` as of the chat route."""

    prompt: str | None = None
    messages: list[Message] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    chat_template: str | None = None
    chat_template_kwargs: JSONObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[JSONObject] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_beam_search": ((False,), "beam search is not built; use n or best_of"),
    "length_penalty": ((0, 1), "it belongs to beam search, which is not built"),
    "early_stopping": ((False,), "it belongs to beam search, which is not built"),
    "logits_processors": (([],), "code from clients is not run; use logit_bias, bad_words or allowed_token_ids"),
    "guided_whitespace_pattern": ((), "whitespace is the grammar's matter"),
    "guided_decoding_backend": (("auto", "guidance", "llguidance"), "the only backend is llguidance"),
    "kv_transfer_params": ((), "there is no KV transfer between servers"),
    "prompt_embeds": ((), "prompts are texts or token ids"),
    "suffix": (("",), "no served model fills in the middle; send one prompt"),
    "store": ((False,), "completions are not stored"),
    "functions": (([],), "it was replaced by tools"),
    "function_call": (("none",), "it was replaced by tool_choice"),
    "modalities": ((["text"], []), "the output is text"),
    "audio": ((), "the output is text"),
    "prediction": ((), "predicted outputs are not built"),
    "web_search_options": ((), "the server does not search the web"),
    "verbosity": (("medium",), "no served model knows it; say it in the prompt"),
    "mm_processor_kwargs": (({},), "there is no multimodal input"),
}


def refuse_unsupported(request: SamplingFields) -> None:
    """Raise a 400 for a known field that cannot be honoured."""
    for name, (neutral, reason) in _REFUSED.items():
        value = getattr(request, name, None)
        if value is not None and not any(value == item and isinstance(value, bool) == isinstance(item, bool)
                                         for item in neutral):
            raise bad_request(f"{name} is not supported: {reason}.", name, "unsupported_parameter")
