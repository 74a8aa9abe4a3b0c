"""The dense path on an NVIDIA GPU: every operation launches kernels of zhilight/kernels on one stream.

All memory comes from the device's MemoryPool; workspace is a stack, so that equal steps meet equal addresses and can be
captured as graphs. Nothing here waits for the device but `download`, `synchronize` and a fetch's `wait`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import numpy as np

from zhilight.driver import dtype as dtypes
from zhilight.driver.compiler import target_of
from zhilight.driver.device import MINIMUM_CAPABILITY, Device, dotted
from zhilight.driver.dtype import DType
from zhilight.driver.memory import MemoryPool, PinnedPool
from zhilight.driver.stream import Stream
from zhilight.driver.tensor import Tensor
from zhilight.errors import ConfigError, DeviceError, ShapeError
from zhilight.kernels import activation, embedding, logprobs, norm, rotary, sampling
from zhilight.kernels.attention_decode import attention_decode
from zhilight.kernels.attention_prefill import Chunks, attention_prefill
from zhilight.kernels.gemm import adds_as_it_stores, gemm, heads_plan
from zhilight.kernels.runtime import Runtime
from zhilight.ops.base import Fetch, Ops, SampleResult, SamplingBatch, Step, StepArrays
from zhilight.ops.staging import Fetcher, Staging

MIB = 1 << 20
STAGED_BYTES = 32 * MIB
"""Uploads up to this go through page-locked memory and are not waited for."""
ROW_MULTIPLE = 8
"""Rows of a weight are padded to this with zeros: the GEMMs want N in whole vectors (MiniCPM's vocabulary is odd)."""
DEVICE_DTYPES = {"bfloat16": dtypes.bfloat16, "float16": dtypes.float16}


class CudaOps(Ops):
    """Operations on Tensors of one GPU.

    max_rows: most logit rows sampled in one step; vocab_size: with it, sizes the sampling scratch memory.
    overlap: launch the kernels of a step with programmatic dependent launch (Hopper and newer).
    """

    name = "cuda"

    def __init__(self, device: Device, pool: MemoryPool, dtype: DType, max_rows: int, vocab_size: int,
                 overlap: bool | None = None):
        self.device = device
        self.pool = pool
        self.dtype = dtype
        self.stream = Stream()
        self.overlap = device.capability >= (9, 0) if overlap is None else overlap
        self.pinned = PinnedPool(device, 4 << 30)
        scratch = max(128 * MIB, sampling.scratch_bytes(max_rows, vocab_size))
        self.runtime = Runtime(self.stream, target_of(*device.capability), device.multiprocessors, self._permanent, scratch)
        self.sampled = pool.allocate("weights", (max_rows,), dtypes.int32)
        self._step_memory = pool.allocate("weights", (1 << 20,), dtypes.uint8)
        self.staging = Staging(self.pinned, self.stream)
        self._fetcher = Fetcher(self.pinned, self.stream)

    @classmethod
    def open(cls, device_index: int, utilization: float, dtype: str, max_rows: int, vocab_size: int) -> CudaOps:
        """Open a GPU and take its pool. Raises DeviceError without a usable GPU, ConfigError for a dtype that is not built."""
        if dtype not in DEVICE_DTYPES:
            raise ConfigError(f"dtype is {dtype!r}; on a GPU it must be {' or '.join(DEVICE_DTYPES)} (float32 runs with "
                              "device='cpu').")
        device = Device.open(device_index)
        if device.capability < MINIMUM_CAPABILITY:
            device.close()
            raise DeviceError(f"GPU {device.index} ({device.name}) has compute capability {dotted(device.capability)}; "
                              f"ZhiLight's kernels need {dotted(MINIMUM_CAPABILITY)} or later. Choose another GPU with "
                              "device_index or CUDA_VISIBLE_DEVICES, or run on the CPU with device=cpu.")
        pool = MemoryPool(device, MemoryPool.budget_for(device, utilization))
        return cls(device, pool, DEVICE_DTYPES[dtype], max_rows, vocab_size)

    def close(self) -> None:
        """Wait for the device and free all memory."""
        self.stream.synchronize()
        self.pinned.close()
        self.pool.close()

    # ---- memory -----------------------------------------------------------------------------------------------

    def _permanent(self, nbytes: int) -> int:
        return self.pool.allocate("weights", (nbytes,), dtypes.uint8, alignment=1024).address

    def parameter(self, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        rows = -(-shape[0] // ROW_MULTIPLE) * ROW_MULTIPLE if len(shape) == 2 else shape[0]
        whole = self.pool.allocate("weights", (rows, *shape[1:]), dtype or self.dtype)
        if rows == shape[0]:
            return whole
        whole[shape[0]:].fill_zero(self.stream)
        return whole[: shape[0]]

    def upload(self, target: Tensor, source: np.ndarray) -> None:
        if target.shape != source.shape:
            raise ShapeError(f"upload: source is {source.shape} but target is {target.shape}.")
        if source.dtype != target.dtype.numpy:
            source = source.astype(target.dtype.numpy)
        if target.contiguous and source.nbytes <= STAGED_BYTES:
            self.staging.copy(target.address, np.ascontiguousarray(source))
        else:
            target.copy_from_host(source, self.stream)

    def fill_random(self, target: Tensor, scale: float, seed: int, mean: float = 0.0) -> None:
        """As in the base class, but drawn once for all parameters (each begins elsewhere) and repeated by the device."""
        flat = target.reshape(-1)
        count = min(flat.shape[0], 1 << 21)
        start = seed * 7919 % (1 << 16)
        block = _normals()[start : start + count] * np.float32(scale) + np.float32(mean)
        flat[:count].copy_from_host(block.astype(target.dtype.numpy), self.stream)
        while count < flat.shape[0]:
            more = min(count, flat.shape[0] - count)
            flat[count : count + more].copy_(flat[:more], self.stream)
            count += more

    def download(self, source: Tensor) -> np.ndarray:
        return source.to_host(self.stream)

    def fetch(self, source: Tensor) -> Fetch:
        return self._fetcher.fetch(source)

    def empty(self, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        """Takes more rows than asked for, up to an eighth or 63: similar steps then meet the same addresses, so that there
        are few tensor maps however many different steps a server runs."""
        return self.pool.workspace(shape, dtype or self.dtype, 1024, _workspace_bytes)

    def scope(self) -> AbstractContextManager[None]:
        return self.pool.scope()

    def kv_cache(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int,
                 dtype: DType | None = None) -> list[Tensor]:
        caches = []
        for _ in range(num_layers):
            cache = self.pool.allocate("kv", (num_blocks, 2, num_kv_heads, block_size, head_dim), dtype or self.dtype, 1024)
            cache.fill_zero(self.stream)
            caches.append(cache)
        return caches

    def synchronize(self) -> None:
        self.stream.synchronize()

    # ---- dense path -------------------------------------------------------------------------------------------

    def embedding(self, token_ids: Tensor, table: Tensor, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
        out = self.empty((token_ids.shape[0], table.shape[1])) if out is None else out
        embedding.embedding(self.runtime, table, token_ids, out, scale, self.overlap)
        return out

    def gather_rows(self, x: Tensor, rows: Tensor, out: Tensor | None = None) -> Tensor:
        return self.embedding(rows, x, out=out)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        out = self.empty((x.shape[0], weight.shape[0])) if out is None else out
        gemm(self.runtime, x, weight, out, bias, overlap=self.overlap)
        return out

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None,
                   out: Tensor | None = None) -> Tensor | None:
        if adds_as_it_stores(x.shape[0], self.runtime.capability):
            gemm(self.runtime, x, weight, residual, bias, add=True, overlap=self.overlap)
            return None
        return self.linear(x, weight, bias, out)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        out = self.empty((x.shape[0], weight.shape[0] // 2)) if out is None else out
        gemm(self.runtime, x, weight, out, bias, silu_mul=True, overlap=self.overlap)
        return out

    def logits(self, x: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
        vocab = weight.shape[0]
        padded = -(-vocab // ROW_MULTIPLE) * ROW_MULTIPLE
        if padded != vocab:  # `parameter` has padded the rows with zeros
            weight = Tensor(weight.address, (padded, weight.shape[1]), weight.dtype, weight.device, weight.owner)
        out = self.empty((x.shape[0], padded), dtypes.float32)
        gemm(self.runtime, x, weight, out, scale=scale, overlap=self.overlap)
        return out[:, :vocab] if padded != vocab else out

    def silu_mul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        out = self.empty((x.shape[0], x.shape[1] // 2)) if out is None else out
        activation.silu_mul(self.runtime, x, out, self.overlap)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        out = self.empty(x.shape) if out is None else out
        norm.rms_norm(self.runtime, x, weight, eps, out, self.overlap)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float = 1.0,
                     out: Tensor | None = None) -> Tensor:
        out = self.empty(x.shape) if out is None else out
        norm.add_rms_norm(self.runtime, x, residual, weight, eps, scale, out, self.overlap)
        return out

    # ---- attention --------------------------------------------------------------------------------------------

    def rotary_and_cache(self, qkv: Tensor, step: CudaStep, cos_sin: Tensor, kv_cache: Tensor, num_heads: int,
                         num_kv_heads: int) -> None:
        rotary.rotary_and_cache(self.runtime, qkv, step.positions, step.slot_mapping, cos_sin, kv_cache, num_heads,
                                num_kv_heads, self.overlap)

    def linear_to_heads(self, x: Tensor, weight: Tensor, bias: Tensor | None, step: CudaStep, cos_sin: Tensor, kv_cache: Tensor,
                        num_heads: int, num_kv_heads: int) -> Tensor:
        qkv, runtime = self.empty((x.shape[0], weight.shape[0])), self.runtime
        queue = heads_plan(x.layout, weight.layout, qkv.layout, None if bias is None else bias.layout,
                           (step.positions.dtype, step.slot_mapping.dtype), cos_sin.layout, kv_cache.layout, num_heads,
                           num_kv_heads, self.overlap, runtime.capability, runtime.multiprocessors)
        if queue is None:
            self.linear(x, weight, bias, qkv)
            self.rotary_and_cache(qkv, step, cos_sin, kv_cache, num_heads, num_kv_heads)
        else:
            queue(runtime, x, weight, qkv, bias, step.positions.address, step.slot_mapping.address, cos_sin.address,
                  kv_cache.address)
        return qkv

    def attention(self, qkv: Tensor, step: CudaStep, kv_cache: Tensor, num_heads: int, num_kv_heads: int, scale: float,
                  window: int | None = None, soft_cap: float | None = None, out: Tensor | None = None) -> Tensor:
        head_dim = kv_cache.shape[4]
        out = self.empty((qkv.shape[0], num_heads * head_dim)) if out is None else out
        if step.num_decodes:
            attention_decode(self.runtime, qkv, kv_cache, step.block_tables, step.context_lens, out, step.num_decodes,
                             num_heads, num_kv_heads, scale, step.max_context_len, window, soft_cap, self.overlap)
        if step.num_prefills:
            attention_prefill(self.runtime, qkv, kv_cache, step.block_tables, step.context_lens, step.query_start, out,
                              step.chunks, num_heads, num_kv_heads, scale, window, soft_cap, self.overlap)
        return out

    def attention_at_ends(self, qkv: Tensor, step: CudaStep, kv_cache: Tensor, num_heads: int, num_kv_heads: int, scale: float,
                          window: int | None = None, soft_cap: float | None = None, out: Tensor | None = None) -> Tensor:
        rows = qkv.shape[0]
        out = self.empty((rows, num_heads * kv_cache.shape[4])) if out is None else out
        attention_decode(self.runtime, qkv, kv_cache, step.block_tables, step.context_lens, out, rows, num_heads, num_kv_heads,
                         scale, step.max_context_len, window, soft_cap, self.overlap)
        return out

    # ---- sampling ---------------------------------------------------------------------------------------------

    def sample(self, logits: Tensor, batch: SamplingBatch) -> SampleResult:
        rows = logits.shape[0]
        if rows > self.sampled.shape[0]:
            raise ShapeError(f"logits have {rows} rows; this backend was made for {self.sampled.shape[0]} (max_num_seqs).")
        token_ids = self.sampled[:rows]
        changed = batch.slots is not None or batch.bias_rows is not None or batch.allowed_mask is not None
        work = logits
        if batch.num_logprobs >= 0 and changed:  # log-probabilities are of the logits as the model gave them
            work = self.empty((rows, logits.strides[0]), dtypes.float32)[:, : logits.shape[1]]
        sampling.sample(self.runtime, logits, batch, token_ids, work)
        if batch.num_logprobs < 0:
            return SampleResult(token_ids)
        return self.logprobs(logits, token_ids, batch.num_logprobs)

    def logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> SampleResult:
        rows = logits.shape[0]
        chosen = self.empty((rows,), dtypes.float32)
        ranks = self.empty((rows,), dtypes.int32)
        top_ids = self.empty((rows, num_top), dtypes.int32)
        top_logprobs = self.empty((rows, num_top), dtypes.float32)
        logprobs.logprobs(self.runtime, logits, token_ids, chosen, ranks, top_ids, top_logprobs)
        return SampleResult(token_ids, chosen, ranks, top_ids, top_logprobs)

    def count_tokens(self, output_counts: Tensor, slots: Tensor, token_ids: Tensor) -> None:
        sampling.count_tokens(self.runtime, output_counts, slots, token_ids)

    # ---- the step ---------------------------------------------------------------------------------------------

    def prepare_step(self, arrays: StepArrays, sampled: Tensor | None = None) -> CudaStep:
        packed = PackedStep(arrays)
        if packed.nbytes > self._step_memory.nbytes:
            self._step_memory = self.pool.allocate("weights", (2 * packed.nbytes,), dtypes.uint8)
        memory = self._step_memory  # its copy is queued behind the step before, so one buffer does
        self.staging.copy_parts(memory.address, packed.parts, packed.nbytes)
        step = packed.step(memory)
        if arrays.feed_rows.size:
            if sampled is None:
                raise ShapeError("feed_rows names rows, but no sampled tokens are given.")
            embedding.feed_tokens(self.runtime, step.token_ids, packed.view(memory, "feed_rows"), sampled,
                                  packed.view(memory, "feed_sources"), self.overlap)
        return step


@dataclass(frozen=True)
class CudaStep(Step):
    """A Step, and what the layers' launches want of its integers."""

    @cached_property
    def chunks(self) -> Chunks:
        """The sequences after the decodes; worked out by the first layer for all."""
        return Chunks(self.host_query_start, self.host_context_lens, self.num_decodes)


class PackedStep:
    """Where each of a step's arrays lies in one buffer, so that one copy takes all of them to the device.

    max_context_len: for a captured graph, the largest context that its grid must serve; None takes the step's own.
    """

    ORDER = ("slot_mapping", "token_ids", "positions", "context_lens", "query_start", "logit_rows", "feed_rows", "feed_sources",
             "block_tables")

    def __init__(self, arrays: StepArrays, max_context_len: int | None = None):
        self.arrays = arrays
        self.max_context_len = max_context_len
        self.parts: list[tuple[int, np.ndarray]] = []
        self._offsets: dict[str, tuple[int, tuple[int, ...]]] = {}
        offset = 0
        for name in self.ORDER:
            array = np.ascontiguousarray(getattr(arrays, name), np.int64 if name == "slot_mapping" else np.int32)
            self.parts.append((offset, array))
            self._offsets[name] = offset, array.shape
            offset += (array.nbytes + 15) // 16 * 16
        self.nbytes = max(16, offset)

    def view(self, memory: Tensor, name: str) -> Tensor:
        offset, shape = self._offsets[name]
        dtype = dtypes.int64 if name == "slot_mapping" else dtypes.int32
        return Tensor(memory.address + offset, shape, dtype, memory.device, memory.owner)

    def step(self, memory: Tensor) -> CudaStep:
        """The Step whose arrays lie in `memory`."""
        arrays = self.arrays
        return CudaStep(
            **{name: self.view(memory, name) for name in self.ORDER if not name.startswith("feed")},
            num_tokens=len(arrays.token_ids),
            num_decodes=arrays.num_decodes,
            num_sequences=len(arrays.context_lens),
            max_context_len=self.max_context_len or int(arrays.context_lens.max(initial=0)),
            logits_at_ends=arrays.logits_at_ends,
            host_query_start=arrays.query_start,
            host_context_lens=arrays.context_lens,
        )


def _workspace_bytes(shape: tuple[int, ...], dtype: DType) -> int:
    """What `empty` takes for a tensor: its rows are rounded up by an eighth, or 63, at most."""
    rows = shape[0]
    step = 1 << max(6, rows.bit_length() - 4)
    return dtype.nbytes(-(-rows // step) * step * prod(shape[1:]))


@cache
def _normals() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1 << 21) + (1 << 16), np.float32)
