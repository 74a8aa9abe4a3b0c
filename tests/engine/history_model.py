"""A model whose next token depends on every token before it, read back through the block tables.

Its KV cache holds the tokens and positions themselves, so a wrong block, a stale one or one shared by mistake changes
the output or fails a check here. `expected` is what it generates for a request that runs alone, without any of the
engine's machinery.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from zhilight.config.sampling import SamplingParams
from zhilight.engine.batch import SlotTable
from zhilight.engine.block_pool import BlockPool
from zhilight.engine.core import EngineCore
from zhilight.engine.messages import Abort, Add, StepOutput
from zhilight.engine.runner import Runner
from zhilight.engine.sampler import Sampler
from zhilight.engine.scheduler import Scheduler
from zhilight.ops.base import Fetch, SamplingBatch
from zhilight.ops.cpu import CpuOps

VOCAB = 40
EOS = 3


def logits_after(tokens: np.ndarray) -> np.ndarray:
    """[VOCAB] float32, a function of the whole sequence."""
    digest = hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).normal(0, 2, VOCAB).astype(np.float32)


class HistoryModel:
    """Stands where a Model does. `fail_on`: the step that meets this token raises."""

    def __init__(self, fail_on: int | None = None):
        self.fail_on = fail_on

    def _histories(self, step, kv_cache) -> list[np.ndarray]:
        """For each token of the step: the sequence up to it, out of the cache."""
        cache = kv_cache[0]
        size = cache.shape[3]
        if self.fail_on is not None and (step.token_ids == self.fail_on).any():
            raise RuntimeError(f"token {self.fail_on} is poison")
        written = step.slot_mapping >= 0
        block, offset = np.divmod(step.slot_mapping[written], size)
        cache[block, 0, 0, offset, 0] = step.token_ids[written]
        cache[block, 1, 0, offset, 0] = step.positions[written]
        histories = []
        for s in range(step.num_sequences):
            count = step.context_lens[s]
            blocks = step.block_tables[s, : -(-count // size)]
            tokens = cache[blocks, 0, 0, :, 0].reshape(-1)[:count].astype(np.int32)
            positions = cache[blocks, 1, 0, :, 0].reshape(-1)[:count]
            assert (positions == np.arange(count)).all(), "the block table leads to KV of other positions"
            rows = range(step.query_start[s], step.query_start[s + 1])
            for row in rows:
                assert tokens[step.positions[row]] == step.token_ids[row], "the cache holds another token than the step"
                histories.append(tokens[: step.positions[row] + 1])
        return histories

    def forward(self, step, kv_cache) -> np.ndarray:
        histories = self._histories(step, kv_cache)
        return np.array([logits_after(histories[row]) for row in step.logit_rows])

    def hidden_states(self, step, kv_cache) -> np.ndarray:
        return self.forward(step, kv_cache)


class DelayedOps(CpuOps):
    """A CPU backend that claims its results are not there yet, so that the engine overlaps as with a GPU."""

    def fetch(self, source):
        return _Delayed(source.copy())


class _Delayed(Fetch):
    def __init__(self, array):
        self._array = array

    def wait(self):
        return self._array

    def ready(self):
        return False


def make_core(*, num_blocks=64, block_size=16, max_num_seqs=8, max_model_len=256, budget=64, prefix_caching=True, chunked=True,
              overlap=True, delayed=True, policy="fcfs", model=None, check=True, compile_grammar=None) -> EngineCore:
    ops = DelayedOps() if delayed else CpuOps()
    table = SlotTable(max_num_seqs, max_model_len, block_size)
    pool = BlockPool(num_blocks, block_size, prefix_caching)
    scheduler = Scheduler(pool, table, max_num_batched_tokens=budget, eos_token_ids=(EOS,), enable_chunked_prefill=chunked,
                          policy=policy)
    sampler = Sampler(ops, table, VOCAB, (EOS,))
    runner = Runner(model or HistoryModel(), ops, ops.kv_cache(1, num_blocks, 1, block_size, 1), sampler)
    return EngineCore(runner, scheduler, enable_overlap=overlap, check_invariants=check, compile_grammar=compile_grammar)


@dataclass
class Collected:
    """Everything an engine has said about each handle."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finished: dict[int, object] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)
    prompt_logprobs: dict[int, list] = field(default_factory=dict)
    embeddings: dict[int, np.ndarray] = field(default_factory=dict)

    def take(self, out: StepOutput) -> None:
        for handle, token in zip(np.frombuffer(out.handles, np.int64).tolist(), np.frombuffer(out.tokens, np.int32).tolist(),
                                 strict=True):
            assert handle not in self.finished, "a token came after the end"
            self.tokens.setdefault(handle, []).append(token)
        for started in out.started:
            assert started.handle not in self.cached, "started twice"
            self.cached[started.handle] = started.cached_tokens
        for handle, entry in out.logprobs:
            self.logprobs.setdefault(handle, []).append(entry)
        for handle, entries in out.prompt_logprobs:
            self.prompt_logprobs.setdefault(handle, []).extend(entries)
        for handle, data in out.embeddings:
            self.embeddings[handle] = np.frombuffer(data, np.float32)
        for finished in out.finished:
            assert finished.handle not in self.finished, "finished twice"
            self.finished[finished.handle] = finished


def add(core: EngineCore, handle: int, prompt, params: SamplingParams, **extra) -> None:
    core.add(Add(handle, np.asarray(prompt, np.int32).tobytes(), params, 0.0, **extra))


def abort(core: EngineCore, *handles: int) -> None:
    core.abort(Abort(list(handles)))


def run(core: EngineCore, limit: int = 5000) -> Collected:
    collected = Collected()
    for _ in range(limit):
        if not core.has_work:
            return collected
        collected.take(core.step())
    raise AssertionError(f"not done after {limit} steps")


def expected(prompt, params: SamplingParams, max_model_len: int = 256) -> tuple[list[int], str]:
    """(tokens, reason) of the request alone. Only plain sampling and stop tokens."""
    tokens = list(prompt)
    limit = min(max_model_len, len(prompt) + (params.max_tokens or max_model_len))
    ops = CpuOps()
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while True:
        top_k = params.top_k if params.top_k > 0 else VOCAB
        batch = SamplingBatch(np.array([params.temperature], np.float32), np.array([top_k], np.int32),
                              np.array([params.top_p], np.float32), np.array([params.min_p], np.float32),
                              np.array([(params.seed or 0) & (2**64 - 1)], np.uint64), np.array([len(tokens)], np.int64))
        token = int(ops.sample(logits_after(tokens)[None], batch).token_ids[0])
        tokens.append(token)
        if token in stops:
            return tokens[len(prompt):], "stop"
        if len(tokens) >= limit:
            return tokens[len(prompt):], "length"
