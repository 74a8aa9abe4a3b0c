"""What a caller gets back: token, choice and request outputs, of the offline face and of the async one alike."""

from __future__ import annotations

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token under the model's own distribution, and its rank (1 is the most probable)."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """At one position: the token that stands there, and the most probable ones, most probable first."""

    chosen: TokenLogprob
    top: list[TokenLogprob]


class CompletionOutput(msgspec.Struct):
    """One choice. In a stream, `text`, `token_ids` and `logprobs` are what is new; from `LLM.generate`, all of it.

    finish_reason: None while it runs, then "stop", "length", "abort" or "error".
    stop_reason: the stop string or stop token id that ended it; None for end of sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None


class RequestMetrics(msgspec.Struct):
    """Times of one request, seconds of time.monotonic(); None where it has not come that far."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None


class RequestOutput(msgspec.Struct):
    """A request's state: its prompt, its choices, and whether all of them have ended.

    prompt_logprobs: one entry a prompt token, None for the first; sent once. cached_tokens: prompt tokens whose KV came
    from the prefix cache. error: why the request ended with finish_reason "error"; error_param: the field that caused it,
    None where the fault is the engine's.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt: str | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    cached_tokens: int = 0
    error: str | None = None
    metrics: RequestMetrics | None = None
    error_param: str | None = None
