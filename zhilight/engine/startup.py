"""Brings an engine up: device, model, KV cache, scheduler. A log line a phase, and a summary at the end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zhilight.config.engine import EngineConfig
from zhilight.config.model import ModelConfig
from zhilight.engine.batch import SlotTable
from zhilight.engine.block_pool import BlockPool
from zhilight.engine.core import EngineCore
from zhilight.engine.runner import Runner
from zhilight.engine.sampler import Sampler
from zhilight.engine.scheduler import Scheduler
from zhilight.errors import ConfigError

if TYPE_CHECKING:
    from zhilight.config.sampling import StructuredOutput
    from zhilight.engine.structured import GrammarState
    from zhilight.models.model import Model
    from zhilight.ops.base import Ops
    from zhilight.tokenization.tokenizer import Tokenizer
    from zhilight.weights.source import ModelSource

logger = logging.getLogger(__name__)

GIB = 1 << 30
STEP_TOKENS, OFFLINE_STEP_TOKENS = 66 * 128, 132 * 128
"""Token budgets of a step where none is given. In row tiles of 128 they make whole waves of the products of models 4096 or 8192
wide on 132 multiprocessors. With the larger there are half as many steps, but running sequences wait twice as long for their
next token, and the workspace is twice as large."""
LARGE_DEVICE = 64 * GIB


@dataclass(frozen=True)
class StartedEngine:
    """A running engine core and what its faces need to know. `config` has what was left open filled in."""

    core: EngineCore
    config: EngineConfig
    model_config: ModelConfig
    max_model_len: int
    num_kv_blocks: int


def start_engine(config: EngineConfig, offline: bool = False) -> StartedEngine:
    """Load the model and build the engine core. Raises ConfigError, CheckpointError, DeviceError or OutOfMemory.

    offline: nobody reads tokens as they come, so throughput decides what is left open.
    """
    begin = time.monotonic()
    if config.swap_space_gb > 0:
        raise ConfigError(f"swap_space_gb is {config.swap_space_gb}: this version has no swap, preempted requests are always "
                          "computed again. Leave it at 0.")
    from zhilight.config.checkpoint import read_model_config
    from zhilight.weights.loader import load_model
    from zhilight.weights.source import resolve_model

    with _phase("model files found"):
        source = resolve_model(config.model, config.revision)
        model_config = read_model_config(source)
    check_model_len(config, model_config)  # what is wrong already is said before a device is taken
    with _phase("device ready"):
        ops = open_device(config, model_config)
    config = replace(config, max_num_batched_tokens=token_budget(config, ops, offline))
    check_model_len(config, model_config)
    with _phase("weights loaded"):
        model = load_model(config, model_config, source, ops, True)
    with _phase("KV cache ready"):
        engine = build_engine(config, model_config, model, ops, tokenizer_loader(config, source))
    _log_summary(engine, model, ops, time.monotonic() - begin)
    return engine


def open_device(config: EngineConfig, model_config: ModelConfig) -> Ops:
    """The backend that `config.device` asks for; auto takes a GPU when there is one."""
    if config.device != "cpu":
        from zhilight.driver.device import device_count, require_device

        if config.device == "cuda" or device_count() > 0:
            require_device(config.device_index)  # before the imports below, which fail in their own words without a driver
            from zhilight.ops.cuda import CudaOps

            dtype = config.dtype if config.dtype != "auto" else model_config.dtype
            if config.dtype == "auto" and dtype == "float32":
                dtype = "bfloat16"
            return CudaOps.open(config.device_index, config.gpu_memory_utilization, dtype, config.max_num_seqs,
                                model_config.vocab_size)
        logger.info("no GPU here: running on the CPU")
    if config.dtype not in ("auto", "float32"):
        logger.info("dtype %s is the GPU's; the CPU computes in float32", config.dtype)
    from zhilight.ops.cpu import CpuOps

    return CpuOps()


def build_engine(config: EngineConfig, model_config: ModelConfig, model: Model, ops: Ops,
                 load_tokenizer: Callable[[], Tokenizer]) -> StartedEngine:
    """KV cache, scheduler and runner around a loaded model."""
    kv_dtype = kv_cache_dtype(config, ops)
    available = int(config.cpu_kv_cache_gb * GIB)
    if ops.name == "cuda":
        from zhilight.engine.warmup import warm_up

        available = warm_up(config, model_config, model, ops)
    num_blocks = config.num_kv_blocks or kv_blocks_that_fit(config, model_config, ops, available)
    capacity = num_blocks * config.block_size
    max_model_len = choose_model_len(config, model_config, capacity)
    config = replace(config, max_model_len=max_model_len, num_kv_blocks=num_blocks,
                     max_num_seqs=min(config.max_num_seqs, num_blocks))
    table = SlotTable(config.max_num_seqs, max_model_len, config.block_size)
    sampler = Sampler(ops, table, model_config.vocab_size, model_config.eos_token_ids, config.seed)
    if ops.name != "cpu":
        sampler.reserve()
    kv_cache = ops.kv_cache(model_config.num_layers, num_blocks, model_config.num_kv_heads, config.block_size,
                            model_config.head_dim, kv_dtype)
    pool = BlockPool(num_blocks, config.block_size, config.enable_prefix_caching)
    scheduler = Scheduler(pool, table, max_num_batched_tokens=config.max_num_batched_tokens,
                          eos_token_ids=model_config.eos_token_ids, enable_chunked_prefill=config.enable_chunked_prefill,
                          policy=config.scheduling_policy)
    runner = Runner(model, ops, kv_cache, sampler)
    if ops.name == "cuda" and not config.enforce_eager:
        from zhilight.engine.graph_runner import GraphRunner

        runner = GraphRunner(model, ops, kv_cache, sampler, min(config.max_graph_batch, config.max_num_seqs))
        if not config.lazy_graphs:
            with _phase("decode graphs captured"):
                runner.capture()
    core = EngineCore(runner, scheduler, enable_overlap=config.enable_overlap, check_invariants=config.check_invariants,
                      compile_grammar=_GrammarCompiler(load_tokenizer, model_config))
    return StartedEngine(core, config, model_config, max_model_len, num_blocks)


def tokenizer_loader(config: EngineConfig, source: ModelSource) -> Callable[[], Tokenizer]:
    """Reads the model's tokenizer, or the one that `config.tokenizer` names."""

    def load() -> Tokenizer:
        from zhilight.tokenization.tokenizer import load_tokenizer
        from zhilight.weights.source import resolve_model

        return load_tokenizer(source.path if config.tokenizer is None else resolve_model(config.tokenizer).path)

    return load


# ---- sizes ----------------------------------------------------------------------------------------------------------


def kv_cache_dtype(config: EngineConfig, ops: Ops) -> Any:
    """The KV cache's DType; None is the backend's own."""
    if config.kv_cache_dtype == "auto":
        return None
    if ops.name == "cpu":
        raise ConfigError(f"kv_cache_dtype is {config.kv_cache_dtype!r}; the CPU keeps its KV cache in float32. "
                          "Leave it at auto.")
    raise ConfigError(f"kv_cache_dtype is {config.kv_cache_dtype!r}; the attention kernels read bfloat16 and float16 in this "
                      "version. Leave it at auto.")


def kv_block_bytes(config: EngineConfig, model_config: ModelConfig, itemsize: int) -> int:
    """Bytes of one KV block over all layers."""
    return model_config.num_layers * 2 * model_config.num_kv_heads * config.block_size * model_config.head_dim * itemsize


def kv_blocks_that_fit(config: EngineConfig, model_config: ModelConfig, ops: Ops, available: int) -> int:
    """KV blocks that `available` bytes hold. Raises ConfigError when that is not even one."""
    dtype = kv_cache_dtype(config, ops) or ops.dtype
    block = kv_block_bytes(config, model_config, dtype.itemsize)
    if available < block:
        setting = "cpu_kv_cache_gb" if ops.name == "cpu" else "gpu_memory_utilization"
        raise ConfigError(f"one KV block takes {block / GIB:.3f} GiB but the KV cache has {max(available, 0) / GIB:.3f} GiB. "
                          f"Raise {setting} ({getattr(config, setting)}) or lower block_size ({config.block_size}).")
    return available // block


def token_budget(config: EngineConfig, ops: Ops, offline: bool) -> int:
    """Tokens of a step: as configured, else by use and memory, and never less than a full decode batch."""
    if config.max_num_batched_tokens is not None:
        return config.max_num_batched_tokens
    roomy = ops.name == "cuda" and ops.device.total_bytes >= LARGE_DEVICE
    return max(OFFLINE_STEP_TOKENS if offline and roomy else STEP_TOKENS, config.max_num_seqs)


def check_model_len(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raises ConfigError for a max_model_len that the model or the step's token budget, once it is known, cannot honour."""
    wanted, limit, budget = config.max_model_len, model_config.max_context_len, config.max_num_batched_tokens
    if wanted is not None and wanted > limit:
        raise ConfigError(f"max_model_len is {wanted}; the model was made for {limit} positions. Lower it to {limit} or less.")
    if wanted is not None and budget is not None and not config.enable_chunked_prefill and wanted > budget:
        raise ConfigError(
            f"max_model_len is {wanted} and chunked prefill is off, but a step holds {budget} tokens: "
            "the longest prompt would never run. Raise max_num_batched_tokens, or leave enable_chunked_prefill on.")


def choose_model_len(config: EngineConfig, model_config: ModelConfig, capacity: int) -> int:
    """The longest sequence: what was asked for, else the least of the model's, the KV cache's and the step's limit."""
    if config.max_model_len is not None:
        if config.max_model_len > capacity:
            raise ConfigError(
                f"max_model_len is {config.max_model_len} but the KV cache holds {capacity} tokens. Lower max_model_len, or "
                + ("raise num_kv_blocks." if config.num_kv_blocks else
                   "raise gpu_memory_utilization (on a CPU: cpu_kv_cache_gb)."))
        return config.max_model_len
    limits = {model_config.max_context_len: "the model's own limit", capacity: "what the KV cache holds"}
    if not config.enable_chunked_prefill:
        limits.setdefault(config.max_num_batched_tokens, "max_num_batched_tokens, as chunked prefill is off")
    chosen = min(limits)
    logger.info("max_model_len is %d tokens: %s", chosen, limits[chosen])
    return chosen


# ---- details --------------------------------------------------------------------------------------------------------


class _GrammarCompiler:
    """Compiles grammars with the model's tokenizer, which the engine process reads only when it is needed."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], model_config: ModelConfig):
        self._load = load_tokenizer
        self._model_config = model_config
        self._tokenizer: Tokenizer | None = None

    def __call__(self, structured: StructuredOutput) -> GrammarState:
        from zhilight.engine.structured import GrammarState, compile_grammar

        self._tokenizer = self._tokenizer or self._load()
        return GrammarState(compile_grammar(structured, self._tokenizer, vocab_size=self._model_config.vocab_size,
                                            eos_token_ids=self._model_config.eos_token_ids))


@contextmanager
def _phase(done: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    logger.info("%s in %.2f s", done, time.monotonic() - begin)


def _log_summary(engine: StartedEngine, loaded: Model, ops: Ops, seconds: float) -> None:
    config, model = engine.config, engine.model_config
    weights = sum((weight.dtype or ops.dtype).nbytes(math.prod(weight.shape)) for weight in loaded.parameters())
    kv_dtype = kv_cache_dtype(config, ops) or ops.dtype
    kv_gib = engine.num_kv_blocks * kv_block_bytes(config, model, kv_dtype.itemsize) / GIB
    logger.info(
        "%s ready on %s in %.1f s: %s, %d layers, %s, weights %.2f GiB, KV cache %d tokens (%.2f GiB, %s), contexts up to %d "
        "tokens, %d at that length and at most %d at once", config.model, ops.name, seconds, model.architecture,
        model.num_layers, ops.dtype, weights / GIB, engine.num_kv_blocks * config.block_size, kv_gib, kv_dtype,
        engine.max_model_len, engine.num_kv_blocks // -(-engine.max_model_len // config.block_size), config.max_num_seqs)
