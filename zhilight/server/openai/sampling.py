"""From a request's fields to SamplingParams: defaults of the model, limits of the server, ids inside the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zhilight.config.sampling import SamplingParams, StructuredOutput
from zhilight.server.openai.errors import bad_request
from zhilight.server.openai.protocol import SamplingFields
from zhilight.server.openai.serving import Serving

MAX_STOP_STRINGS = 128
MAX_STOP_LENGTH = 4096
MAX_BAD_WORDS = 1024
MAX_LOGIT_BIAS = 4096
"""Every step of the whole batch carries them along."""
MAX_PRIORITY = 2**31 - 1


def make_sampling_params(serving: Serving, request: SamplingFields, *, max_tokens: int, logprobs: int | None,
                         structured: StructuredOutput | None) -> SamplingParams:
    """Raises RequestError or APIError (both are a 400) naming the field."""
    vocab_size = serving.model_config.vocab_size
    top_k = _value(request.top_k, int(serving.default("top_k", 0)))
    stop = check_stop(request.stop)
    check_token_ids("stop_token_ids", request.stop_token_ids, vocab_size)
    check_token_ids("allowed_token_ids", request.allowed_token_ids, vocab_size)
    if request.bad_words and len(request.bad_words) > MAX_BAD_WORDS:
        raise bad_request(f"bad_words has {len(request.bad_words)} entries; the limit is {MAX_BAD_WORDS}.", "bad_words")
    if request.priority and serving.engine.config.scheduling_policy != "priority":
        raise bad_request("priority needs a server started with --scheduling-policy priority.", "priority")
    if request.priority and abs(request.priority) > MAX_PRIORITY:
        raise bad_request(f"priority is {request.priority}; it must be from {-MAX_PRIORITY} to {MAX_PRIORITY}.", "priority")
    return SamplingParams(
        n=_value(request.n, 1),
        best_of=request.best_of,
        temperature=_value(request.temperature, serving.default("temperature", 1.0)),
        top_k=0 if top_k >= vocab_size else top_k,
        top_p=_value(request.top_p, serving.default("top_p", 1.0)),
        min_p=_value(request.min_p, serving.default("min_p", 0.0)),
        repetition_penalty=_value(request.repetition_penalty, serving.default("repetition_penalty", 1.0)),
        presence_penalty=_value(request.presence_penalty, 0.0),
        frequency_penalty=_value(request.frequency_penalty, 0.0),
        logit_bias=make_logit_bias(request.logit_bias, vocab_size),
        seed=request.seed,
        max_tokens=max_tokens,
        min_tokens=_value(request.min_tokens, 0),
        stop=stop,
        include_stop_str_in_output=bool(request.include_stop_str_in_output),
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=request.prompt_logprobs,
        bad_words=tuple(request.bad_words or ()),
        allowed_token_ids=None if request.allowed_token_ids is None else tuple(dict.fromkeys(request.allowed_token_ids)),
        skip_special_tokens=_value(request.skip_special_tokens, True),
        spaces_between_special_tokens=_value(request.spaces_between_special_tokens, True),
        structured=structured,
    )


def check_common(request: SamplingFields) -> None:
    """Combinations of fields that make no sense on either route."""
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options needs stream to be true.", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs cannot be streamed: set stream to false.", "prompt_logprobs")
    if request.stream and request.best_of is not None and request.best_of > (request.n or 1):
        raise bad_request("best_of larger than n cannot be streamed: the best choices are known only at the end.",
                          "best_of")
    if request.cache_salt is not None and not 0 < len(request.cache_salt) <= 1024:
        raise bad_request("cache_salt must have 1 to 1024 characters.", "cache_salt")
    if request.request_id is not None and not _is_header_safe(request.request_id):
        raise bad_request("request_id must have 1 to 128 printable ASCII characters.", "request_id")


def check_count(serving: Serving, request: SamplingFields, prompts: int) -> None:
    """Refuse more sequences than could ever wait in the engine: it would be busy for ever."""
    sequences = prompts * max(request.n or 1, request.best_of or 1)
    limit = serving.engine.config.max_waiting
    if sequences > limit:
        raise bad_request(f"{prompts} prompts with n {request.n or 1} make {sequences} sequences; the limit is {limit} "
                          "(--max-waiting).", "n")


def output_budget(serving: Serving, *, prompt_tokens: int, asked: int | None, default: int | None, param: str) -> int:
    """Tokens the request may generate. `default` None means what is left of the context."""
    limit = serving.max_model_len
    left = limit - prompt_tokens
    if left < 1:
        raise bad_request(f"This model's maximum context length is {limit} tokens, and the prompt has {prompt_tokens}: "
                          "nothing is left for the answer. Shorten the prompt.", "prompt", "context_length_exceeded")
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise bad_request(f"This model's maximum context length is {limit} tokens. However, you requested "
                          f"{prompt_tokens + asked} tokens ({prompt_tokens} in the prompt, {asked} in {param}).",
                          param, "context_length_exceeded")
    return asked


def check_token_ids(name: str, token_ids: Iterable[int] | None, vocab_size: int) -> None:
    for token in token_ids or ():
        if not 0 <= token < vocab_size:
            raise bad_request(f"{name} holds {token}; token ids are from 0 to {vocab_size - 1}.", name)


def check_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(dict.fromkeys(stop or ()))
    if len(strings) > MAX_STOP_STRINGS:
        raise bad_request(f"stop has {len(strings)} strings; the limit is {MAX_STOP_STRINGS}.", "stop")
    if any(len(text) > MAX_STOP_LENGTH for text in strings):
        raise bad_request(f"a stop string is longer than {MAX_STOP_LENGTH} characters.", "stop")
    return strings


def make_logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    if not bias:
        return None
    if len(bias) > MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias has {len(bias)} entries; the limit is {MAX_LOGIT_BIAS}. To allow only some tokens, use "
                          "allowed_token_ids.", "logit_bias")
    result = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise bad_request(f"logit_bias has the key {key[:40]!r}; keys are token ids.", "logit_bias")
        result[int(key)] = value
    check_token_ids("logit_bias", result, vocab_size)
    return result


def _value(given: Any, default: Any) -> Any:
    return default if given is None else given


def _is_header_safe(text: str) -> bool:
    return 0 < len(text) <= 128 and text.isascii() and text.isprintable()
