"""The dense path on the CPU: NumPy, float32, all cores (see `cpu_threads.py`). A real backend, and the oracle of every kernel's
test.

Weights are float32 in memory, row-major [N, K], so that `x @ weight.T` is one BLAS call without a copy. Workspace
comes from one arena that only grows, so a step of the same shape meets the same pages again. See `base.py` for the
contract of each operation; sampling is in `cpu_sampling.py`, attention in `cpu_attention.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np

from zhilight.driver.dtype import DType, float32
from zhilight.driver.host import host_memory
from zhilight.driver.memory import human
from zhilight.errors import OutOfMemory, ShapeError
from zhilight.ops.base import Fetch, Ops, SampleResult, SamplingBatch, Step, StepArrays
from zhilight.ops.cpu_attention import decode_attention, prefill_attention
from zhilight.ops.cpu_sampling import log_probabilities, sample_tokens
from zhilight.ops.cpu_threads import shared_threads

_CHUNK = 16 << 20
_ALIGNMENT = 64


class CpuOps(Ops):
    """Operations on NumPy arrays.

    poison: fill workspace with NaN when its scope ends, so that a read after the end cannot go unseen (for tests).
    """

    name = "cpu"
    dtype = float32

    def __init__(self, poison: bool = False):
        self._workspace = Workspace(poison)
        self._taken = 0
        self._threads = shared_threads()

    # ---- memory -----------------------------------------------------------------------------------------------

    def parameter(self, shape: tuple[int, ...], dtype: DType | None = None) -> np.ndarray:
        dtype = dtype or self.dtype
        self._take("the weights", dtype.nbytes(math.prod(shape)), "Take a smaller model, or a GPU")
        return np.empty(shape, dtype.numpy)

    def upload(self, target: np.ndarray, source: np.ndarray) -> None:
        if target.shape != source.shape:
            raise ShapeError(f"upload: source is {source.shape} but target is {target.shape}.")
        np.copyto(target, source, casting="unsafe")

    def download(self, source: np.ndarray) -> np.ndarray:
        return source.copy()

    def empty(self, shape: tuple[int, ...], dtype: DType | None = None) -> np.ndarray:
        return self._workspace.take(shape, (dtype or self.dtype).numpy)

    def scope(self) -> AbstractContextManager[None]:
        return self._workspace.scope()

    def kv_cache(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int,
                 dtype: DType | None = None) -> list[np.ndarray]:
        shape, dtype = (num_blocks, 2, num_kv_heads, block_size, head_dim), dtype or self.dtype
        self._take("the KV cache", num_layers * dtype.nbytes(math.prod(shape)), "Lower cpu_kv_cache_gb or num_kv_blocks")
        return [np.zeros(shape, dtype.numpy) for _ in range(num_layers)]

    def _take(self, what: str, nbytes: int, way_out: str) -> None:
        """Count memory that is kept for good: the system grants any size and kills the process when pages are written."""
        limit = host_memory()
        if self._taken + nbytes > limit:
            raise OutOfMemory(f"{what} would bring the CPU backend to {human(self._taken + nbytes)}, but this machine (or "
                              f"container) has {human(limit)} of memory. {way_out}.")
        self._taken += nbytes

    # ---- dense path -------------------------------------------------------------------------------------------

    def embedding(self, token_ids: np.ndarray, table: np.ndarray, scale: float = 1.0,
                  out: np.ndarray | None = None) -> np.ndarray:
        _check_range("token_ids", token_ids, table.shape[0])
        out = self._out(out, (token_ids.shape[0], table.shape[1]))
        np.take(table, token_ids, axis=0, out=out, mode="clip")  # any other mode makes NumPy buffer the output
        if scale != 1.0:
            out *= np.float32(scale)
        return out

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None,
               out: np.ndarray | None = None) -> np.ndarray:
        _check_columns("x", x, "weight", weight)
        out = self._out(out, (x.shape[0], weight.shape[0]))
        self._threads.matmul(x, weight, out)
        if bias is not None:
            _check_shape("bias", bias, (weight.shape[0],))
            out += bias
        return out

    def linear_silu_mul(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None,
                        out: np.ndarray | None = None) -> np.ndarray:
        out = self._out(out, (x.shape[0], weight.shape[0] // 2))
        with self.scope():
            return self.silu_mul(self.linear(x, weight, bias), out=out)

    def logits(self, x: np.ndarray, weight: np.ndarray, scale: float = 1.0) -> np.ndarray:
        out = self.linear(x, weight)
        if scale != 1.0:
            out *= np.float32(scale)
        return out

    def silu_mul(self, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if x.shape[1] % 2:
            raise ShapeError(f"silu_mul: x is {x.shape}; its last axis holds gate and up in turn, so it must be even.")
        out = self._out(out, (x.shape[0], x.shape[1] // 2))
        gate, up = x[:, 0::2], x[:, 1::2]
        np.negative(gate, out=out)
        with np.errstate(over="ignore"):  # exp overflows to inf for a gate below -88, and gate / inf is 0, as it should be
            np.exp(out, out=out)
        out += 1
        np.divide(gate, out, out=out)
        out *= up
        return out

    def rms_norm(self, x: np.ndarray, weight: np.ndarray, eps: float, out: np.ndarray | None = None) -> np.ndarray:
        _check_shape("weight", weight, (x.shape[1],))
        out = self._out(out, x.shape)
        mean_square = np.einsum("th,th->t", x, x) / np.float32(x.shape[1])
        np.multiply(x, (1 / np.sqrt(mean_square + np.float32(eps)))[:, None], out=out)
        out *= weight
        return out

    def add_rms_norm(self, x: np.ndarray, residual: np.ndarray, weight: np.ndarray, eps: float, scale: float = 1.0,
                     out: np.ndarray | None = None) -> np.ndarray:
        _check_shape("residual", residual, x.shape)
        if scale == 1.0:
            residual += x
        else:
            residual += x * np.float32(scale)
        return self.rms_norm(residual, weight, eps, out)

    def gather_rows(self, x: np.ndarray, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        _check_range("rows", rows, x.shape[0])
        return np.take(x, rows, axis=0, out=self._out(out, (rows.shape[0], x.shape[1])), mode="clip")

    # ---- attention --------------------------------------------------------------------------------------------

    def rotary_and_cache(self, qkv: np.ndarray, step: Step, cos_sin: np.ndarray, kv_cache: np.ndarray, num_heads: int,
                         num_kv_heads: int) -> None:
        heads = _heads(qkv, num_heads, num_kv_heads, kv_cache)
        half = cos_sin.shape[1] // 2
        if 2 * half > kv_cache.shape[4]:
            raise ShapeError(f"rotary_and_cache: cos_sin rotates {2 * half} values but a head has {kv_cache.shape[4]}.")
        _check_range("positions", step.positions, cos_sin.shape[0])
        table = cos_sin[step.positions][:, None, :]
        cos, sin = table[..., :half], table[..., half:]
        rotated = heads[:, :num_heads + num_kv_heads]
        first, second = rotated[..., :half], rotated[..., half:2 * half]
        turned = first * cos - second * sin
        second *= cos
        second += first * sin
        first[...] = turned

        keys, values = heads[:, num_heads:num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads:]
        slots = step.slot_mapping
        if slots.size and slots.min() < 0:
            written = slots >= 0
            slots, keys, values = slots[written], keys[written], values[written]
        block, offset = np.divmod(slots, kv_cache.shape[3])
        kv_cache[block, 0, :, offset] = keys
        kv_cache[block, 1, :, offset] = values

    def attention(self, qkv: np.ndarray, step: Step, kv_cache: np.ndarray, num_heads: int, num_kv_heads: int,
                  scale: float, window: int | None = None, soft_cap: float | None = None,
                  out: np.ndarray | None = None) -> np.ndarray:
        queries = _heads(qkv, num_heads, num_kv_heads, kv_cache)[:, :num_heads]
        out = self._out(out, (step.num_tokens, num_heads * kv_cache.shape[4]))
        result = out.reshape(queries.shape)
        decodes = step.num_decodes
        if decodes:
            decode_attention(queries[:decodes], step, kv_cache, scale, window, soft_cap, result[:decodes])
        for sequence in range(decodes, step.num_sequences):
            prefill_attention(queries, step, sequence, kv_cache, scale, window, soft_cap, result, self._threads)
        return out

    def attention_at_ends(self, qkv: np.ndarray, step: Step, kv_cache: np.ndarray, num_heads: int, num_kv_heads: int,
                          scale: float, window: int | None = None, soft_cap: float | None = None,
                          out: np.ndarray | None = None) -> np.ndarray:
        queries = _heads(qkv, num_heads, num_kv_heads, kv_cache)[:, :num_heads]
        out = self._out(out, (len(qkv), num_heads * kv_cache.shape[4]))
        decode_attention(queries, step, kv_cache, scale, window, soft_cap, out.reshape(queries.shape))
        return out

    # ---- sampling ---------------------------------------------------------------------------------------------

    def sample(self, logits: np.ndarray, batch: SamplingBatch) -> SampleResult:
        return sample_tokens(logits, batch)

    def logprobs(self, logits: np.ndarray, token_ids: np.ndarray, num_top: int) -> SampleResult:
        return log_probabilities(logits, np.asarray(token_ids, np.int32), num_top)

    def count_tokens(self, output_counts: np.ndarray, slots: np.ndarray, token_ids: np.ndarray) -> None:
        counted = slots >= 0
        np.add.at(output_counts, (slots[counted], token_ids[counted]), 1)

    # ---- the step ---------------------------------------------------------------------------------------------

    def prepare_step(self, arrays: StepArrays, sampled: np.ndarray | None = None) -> Step:
        token_ids = np.array(arrays.token_ids, np.int32)
        if arrays.feed_rows.size:
            if sampled is None:
                raise ShapeError("prepare_step: feed_rows names rows but no sampled tokens are given.")
            token_ids[arrays.feed_rows] = sampled[arrays.feed_sources]
        query_start = np.array(arrays.query_start, np.int32)
        context_lens = np.array(arrays.context_lens, np.int32)
        return Step(
            token_ids=token_ids,
            positions=np.array(arrays.positions, np.int32),
            slot_mapping=np.array(arrays.slot_mapping, np.int64),
            block_tables=np.array(arrays.block_tables, np.int32),
            context_lens=context_lens,
            query_start=query_start,
            logit_rows=np.array(arrays.logit_rows, np.int32),
            num_tokens=token_ids.shape[0],
            num_decodes=arrays.num_decodes,
            num_sequences=context_lens.shape[0],
            max_context_len=int(context_lens.max(initial=0)),
            logits_at_ends=arrays.logits_at_ends,
            host_query_start=query_start,
            host_context_lens=context_lens,
        )

    def fetch(self, source: np.ndarray) -> Fetch:
        return _Fetched(source.copy())

    def synchronize(self) -> None:
        """Nothing is queued: every operation has ended when it returns."""

    def _out(self, out: np.ndarray | None, shape: tuple[int, ...]) -> np.ndarray:
        if out is None:
            return self.empty(shape)
        _check_shape("out", out, shape)
        return out


class Workspace:
    """A stack of short-lived arrays in chunks of memory that are kept from step to step.

    Outside any scope an array is an ordinary one, freed by its last reference.
    """

    def __init__(self, poison: bool = False):
        self._poison = poison
        self._chunks: list[np.ndarray] = []
        self._chunk = self._used = self._depth = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if not self._depth:
            return np.empty(shape, dtype)
        count = int(np.prod(shape, dtype=np.int64))
        nbytes = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        while self._chunk < len(self._chunks) and self._used + nbytes > self._chunks[self._chunk].nbytes:
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(self._chunks):
            self._chunks.append(np.empty(max(nbytes, _CHUNK), np.uint8))
            self._used = 0
        start, self._used = self._used, self._used + nbytes
        return self._chunks[self._chunk][start:start + count * dtype.itemsize].view(dtype).reshape(shape)

    @contextmanager
    def scope(self) -> Iterator[None]:
        mark = self._chunk, self._used
        self._depth += 1
        try:
            yield
        finally:
            if self._poison:
                self._fill_with_nan(mark)
            self._depth -= 1
            self._chunk, self._used = mark
            if not self._depth and len(self._chunks) > 1:  # one chunk of what was needed in all: growth is geometric
                self._chunks = [np.empty(sum(chunk.nbytes for chunk in self._chunks), np.uint8)]

    def _fill_with_nan(self, mark: tuple[int, int]) -> None:
        for chunk in range(mark[0], min(self._chunk + 1, len(self._chunks))):
            start = mark[1] if chunk == mark[0] else 0
            end = self._used if chunk == self._chunk else self._chunks[chunk].nbytes
            self._chunks[chunk][start:end] = 0xFF  # all ones is a NaN in every floating type


class _Fetched(Fetch):
    def __init__(self, array: np.ndarray):
        self._array = array

    def wait(self) -> np.ndarray:
        return self._array

    def ready(self) -> bool:
        return True


def _heads(qkv: np.ndarray, num_heads: int, num_kv_heads: int, kv_cache: np.ndarray) -> np.ndarray:
    """qkv as [T, Hq + 2 Hkv, D], a view."""
    head_dim = kv_cache.shape[4]
    if kv_cache.shape[2] != num_kv_heads:
        raise ShapeError(f"kv_cache has {kv_cache.shape[2]} KV heads but num_kv_heads is {num_kv_heads}.")
    _check_shape("qkv", qkv, (qkv.shape[0], (num_heads + 2 * num_kv_heads) * head_dim))
    return qkv.reshape(qkv.shape[0], -1, head_dim)


def _check_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ShapeError(f"{name} is {array.shape}; it must be {shape}.")


def _check_range(name: str, ids: np.ndarray, limit: int) -> None:
    if ids.size and not (ids.min() >= 0 and ids.max() < limit):
        raise ShapeError(f"{name} holds {ids.min()} to {ids.max()}; they must be from 0 to {limit - 1}.")


def _check_columns(name: str, array: np.ndarray, other_name: str, other: np.ndarray) -> None:
    if array.shape[1] != other.shape[1]:
        raise ShapeError(f"{name} is {array.shape} but {other_name} is {other.shape}: their last axes must be equal.")
