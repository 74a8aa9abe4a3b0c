"""What the front (API process) and the engine tell each other: msgspec structs, one message a step.

Integers that come in bulk (token ids, handles) travel as the bytes of int32 or int64 arrays.
A *handle* names one sequence for the life of the engine; the front chooses it and never uses it twice.
"""

from __future__ import annotations

import msgspec

from zhilight.config.engine import EngineConfig
from zhilight.config.model import ModelConfig
from zhilight.config.sampling import SamplingParams
from zhilight.engine.outputs import PositionLogprobs

# ---- to the engine --------------------------------------------------------------------------------------------------


class Add(msgspec.Struct, tag=True, array_like=True):
    """Generate one sequence. `params.n` is 1; `bad_words` are the token ids of params.bad_words."""

    handle: int
    prompt: bytes
    params: SamplingParams
    arrival: float
    priority: int = 0
    cache_salt: str | None = None
    bad_words: list[list[int]] = []


class Embed(msgspec.Struct, tag=True, array_like=True):
    """Compute the last hidden state of a prompt's last token."""

    handle: int
    prompt: bytes


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Forget these sequences, whatever state they are in; unknown handles are fine."""

    handles: list[int]


class Start(msgspec.Struct, tag=True, array_like=True):
    """The first message: bring the engine up. `log_level` is that of the logging module."""

    config: EngineConfig
    log_level: int


class Shutdown(msgspec.Struct, tag=True, array_like=True):
    """End the engine process now."""


ToEngine = Start | Add | Embed | Abort | Shutdown

# ---- from the engine ------------------------------------------------------------------------------------------------


class EngineStats(msgspec.Struct):
    """Gauges and counters of one engine. Counters only grow.

    kv_usage is the share of KV blocks in use, 0 to 1. prefix_query_tokens counts prompt tokens looked up in the prefix
    cache, prefix_hit_tokens those found; preempted requests are not counted again. kv_faults counts the times that the
    bookkeeping of the KV blocks was found wrong and rebuilt. The *_seconds counters split the
    engine loop's time: choosing the step and building its arrays, other host work, and the device computing.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_blocks: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    finished: int = 0
    failed: int = 0
    steps: int = 0
    kv_faults: int = 0
    schedule_seconds: float = 0.0
    host_seconds: float = 0.0
    device_seconds: float = 0.0


class Started(msgspec.Struct, array_like=True, frozen=True):
    """A sequence was scheduled for the first time, at `time` (time.monotonic seconds)."""

    handle: int
    time: float
    cached_tokens: int


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """A sequence ended: reason is stop, length, error or refused (it never ran). `param` names the field at fault, if one is.

    stop_token: its last token is an end-of-sequence or stop token; stop_reason names the latter.
    """

    handle: int
    reason: str
    stop_reason: int | None = None
    error: str | None = None
    param: str | None = None
    stop_token: bool = False


class StepOutput(msgspec.Struct, tag=True, array_like=True):
    """What one step gave. handles (int64) and tokens (int32) are parallel: one new token for each of these sequences."""

    handles: bytes = b""
    tokens: bytes = b""
    logprobs: list[tuple[int, PositionLogprobs]] = []
    prompt_logprobs: list[tuple[int, list[PositionLogprobs]]] = []
    started: list[Started] = []
    finished: list[Finished] = []
    embeddings: list[tuple[int, bytes]] = []
    stats: EngineStats | None = None


class Ready(msgspec.Struct, tag=True, array_like=True):
    """The engine is up; `config` is the configuration with what was left open filled in."""

    config: EngineConfig
    model_config: ModelConfig
    max_model_len: int
    num_kv_blocks: int


class Failed(msgspec.Struct, tag=True, array_like=True):
    """The engine cannot start or cannot go on, and ends: the error's class name, of zhilight.errors or another, and message."""

    kind: str
    message: str


FromEngine = StepOutput | Ready | Failed
