"""One sequence as the engine sees it, its states, and what is checked before it gets there."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zhilight.config.engine import EngineConfig
from zhilight.config.model import ModelConfig
from zhilight.config.sampling import SamplingParams
from zhilight.errors import RequestError


class RequestState(enum.Enum):
    """WAITING -> RUNNING -> FINISHED, with PREEMPTED (waiting again, its tokens kept) in between when KV runs out."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Request:
    """One sequence. `tokens` [n] int32 holds its prompt and, while it waits after a preemption, what it had generated;
    while it runs, the slot table has the tokens."""

    handle: int
    tokens: np.ndarray
    params: SamplingParams
    arrival: float = 0.0
    priority: int = 0
    cache_salt: str | None = None
    bad_words: list[list[int]] = field(default_factory=list)
    grammar: Any = None
    """State of the structured output's grammar, or None."""

    state: RequestState = RequestState.WAITING
    key: tuple[int, int] = (0, 0)
    """Order of service: (priority, number of arrival). Set by the scheduler."""
    slot: int = -1
    prompt_len: int = 0
    limit: int = 0
    """Total length, prompt included, at which it ends for reason "length"."""
    root: bytes = b""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of its full blocks, as far as they have been needed."""
    prefill_end: int = 0
    """Tokens to compute before it samples again: the prompt, or after a preemption all it had."""
    cached_tokens: int = 0
    prompt_logprobs_sent: int = 0
    overtaken: int = 0
    """Requests that came later and were admitted first."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)


def validate_prompt(prompt_token_ids: Sequence[int], params: SamplingParams, config: EngineConfig,
                    model_config: ModelConfig) -> np.ndarray:
    """The prompt as [n] int32. Raises RequestError, with the numbers, for a request that can never be served.

    config: a started engine's, where max_model_len and num_kv_blocks are filled in.
    """
    vocab_size, max_model_len = model_config.vocab_size, config.max_model_len
    prompt = _token_array(prompt_token_ids, vocab_size)
    if len(prompt) >= max_model_len:
        raise RequestError(
            f"The prompt has {len(prompt)} tokens; the longest context is {max_model_len} and leaves no room for an output "
            f"token. Shorten the prompt{_way_to_longer_contexts(config, model_config)}.", param="prompt")
    if params.max_tokens is not None and len(prompt) + params.max_tokens > max_model_len:
        raise RequestError(
            f"The prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}, together "
            f"{len(prompt) + params.max_tokens}; the longest context is {max_model_len}. Shorten the prompt or lower "
            f"max_tokens{_way_to_longer_contexts(config, model_config)}.", param="max_tokens")
    room = max_model_len - len(prompt)
    if params.min_tokens > room:
        raise RequestError(f"min_tokens is {params.min_tokens}; after the prompt of {len(prompt)} tokens the context of "
                           f"{max_model_len} has room for {room}.", param="min_tokens")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        ids = getattr(params, name)
        if ids:
            _check_ids(np.asarray(list(ids), np.int64), vocab_size, name)
    return prompt


def validate_embedding(prompt_token_ids: Sequence[int], config: EngineConfig, model_config: ModelConfig) -> np.ndarray:
    """The input of an embedding as [n] int32; it may fill the whole context. Raises RequestError, with the numbers."""
    prompt = _token_array(prompt_token_ids, model_config.vocab_size)
    if len(prompt) > config.max_model_len:
        raise RequestError(f"The input has {len(prompt)} tokens; the longest context is {config.max_model_len}. Shorten it"
                           f"{_way_to_longer_contexts(config, model_config)}.", param="input")
    return prompt


def _token_array(prompt_token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
    try:
        prompt = np.asarray(prompt_token_ids)
    except (OverflowError, ValueError, TypeError) as error:
        raise RequestError(f"The prompt is not a list of token ids: {error}.", param="prompt") from None
    if not prompt.size:
        raise RequestError("The prompt is empty; it must have at least one token.", param="prompt")
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise RequestError("The prompt is not a flat list of token ids, which are integers.", param="prompt")
    _check_ids(prompt, vocab_size, "prompt")
    return prompt.astype(np.int32)


def _way_to_longer_contexts(config: EngineConfig, model_config: ModelConfig) -> str:
    """What may be done about a max_model_len that is too short; it depends on what has limited it."""
    if config.max_model_len >= model_config.max_context_len:
        return " (the model was made for no more)"
    capacity = config.num_kv_blocks * config.block_size
    if config.max_model_len > capacity - config.block_size:
        return (f", or enlarge the KV cache, which holds {capacity} tokens: raise num_kv_blocks, or gpu_memory_utilization (on "
                "a CPU: cpu_kv_cache_gb)")
    return ", or raise max_model_len"


def _check_ids(ids: np.ndarray, vocab_size: int, param: str) -> None:
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        raise RequestError(f"{param} has token id {int(ids[outside.argmax()])}; the vocabulary is 0 to {vocab_size - 1}.",
                           param=param)
