"""The operations of the dense path: shapes, dtypes, layout, and what each does. One list, two implementations.

`cpu.py` computes in float32 with NumPy: a real backend and the oracle of every kernel's test. `cuda.py` launches the
kernels. A model is written against `Ops` alone.

An `Array` is a NumPy array (CPU) or a driver Tensor (GPU): both have `.shape`, basic slicing, and `reshape`.
Floating arrays have the backend's activation dtype (float32 on the CPU; bf16 or fp16 on the GPU) unless stated.
An operation writes into `out` when it is given and otherwise into fresh workspace (`empty`), which is valid until the
enclosing `scope()` ends. All work of a step is queued in order; nothing here waits for the device but `download`.

Letters: T tokens of the step, S sequences, H hidden size, Hq / Hkv query / KV heads, D head size, V vocabulary,
B KV blocks, P tokens of a block, R rows that need logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from zhilight.driver.dtype import DType

Array: TypeAlias = Any
"""numpy.ndarray or zhilight.driver.tensor.Tensor."""


@dataclass(frozen=True)
class Step:
    """What one forward pass works on. Sequences that decode (one token each) come first, then prefill chunks.

    token_ids    : [T] int32
    positions    : [T] int32, position of each token in its sequence
    slot_mapping : [T] int64, block * P + offset where the token's K and V go; -1 writes nothing (graph padding)
    block_tables : [S, W] int32, KV blocks of each sequence, padded with 0
    context_lens : [S] int32, tokens in the cache after this step (this step's own included); 0 pads a graph
    query_start  : [S + 1] int32, first row of each sequence's tokens, and T
    logit_rows   : [R] int32, rows whose logits are wanted
    The plain numbers are on the host: they choose kernels and grids.
    logits_at_ends: whether logit_rows are the last tokens of the first R sequences, so that the last layer needs no others
    """

    token_ids: Array
    positions: Array
    slot_mapping: Array
    block_tables: Array
    context_lens: Array
    query_start: Array
    logit_rows: Array
    num_tokens: int
    num_decodes: int
    num_sequences: int
    max_context_len: int
    logits_at_ends: bool
    host_query_start: np.ndarray
    """[S + 1] int32 on the host."""
    host_context_lens: np.ndarray
    """[S] int32 on the host."""

    @property
    def num_prefills(self) -> int:
        return self.num_sequences - self.num_decodes


@dataclass(frozen=True)
class SamplingBatch:
    """Sampling parameters of R rows, as arrays on the backend's device. None: no row uses that feature.

    temperature      : [R] float32; 0 is greedy
    top_k            : [R] int32; V (or more) keeps all
    top_p, min_p     : [R] float32
    seeds            : [R] uint64 and positions [R] int64: the uniform draw of a row is a counter-based function of
                       (seed, position) alone, so neighbours and batch order cannot change it
    slots            : [R] int32, row of the per-request state below; a request keeps its slot while it runs
    repetition       : [R] float32, presence, frequency : [R] float32
    prompt_mask      : [slots, ceil(V / 32)] uint32 bit set of the tokens seen in the prompt
    output_counts    : [slots, V] int32 occurrences in the output so far
    bias_rows, bias_ids, bias_values : [E] int32, int32, float32: value added to logits[row, id]; -inf forbids
                       (logit_bias, min_tokens, bad_words)
    allowed_mask     : [R, ceil(V / 32)] uint32; a 0 bit forbids the token (structured output, allowed_token_ids)
    num_logprobs     : top log-probabilities wanted beside the sampled token's, for the whole batch; -1 is none at all
    all_greedy       : every row has temperature 0 (known on the host, so that the short path can be launched, which reads none
                       of temperature to positions: on a device they may then hold anything)
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seeds: Array
    positions: Array
    slots: Array | None = None
    repetition: Array | None = None
    presence: Array | None = None
    frequency: Array | None = None
    prompt_mask: Array | None = None
    output_counts: Array | None = None
    bias_rows: Array | None = None
    bias_ids: Array | None = None
    bias_values: Array | None = None
    allowed_mask: Array | None = None
    num_logprobs: int = -1
    all_greedy: bool = False


@dataclass(frozen=True)
class SampleResult:
    """token_ids [R] int32; logprobs [R] float32 of the sampled token, top_ids [R, N] int32 and top_logprobs [R, N] float32,
    most probable first, and ranks [R] int32 of the sampled token (1 is the most probable), or None when not asked.

    Log-probabilities are of the model's own distribution: before temperature, penalties and masks.
    """

    token_ids: Array
    logprobs: Array | None = None
    ranks: Array | None = None
    top_ids: Array | None = None
    top_logprobs: Array | None = None


class Fetch(ABC):
    """A device-to-host copy under way."""

    @abstractmethod
    def wait(self) -> np.ndarray:
        """The host array; blocks until the copy is done. May be called again."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether wait() would return at once."""


class Ops(ABC):
    """One device's operations. Raises ShapeError, naming the argument, when a contract below is broken."""

    name: str
    """"cpu" or "cuda"."""
    dtype: DType
    """Activation dtype."""

    # ---- memory -----------------------------------------------------------------------------------------------

    @abstractmethod
    def parameter(self, shape: tuple[int, ...], dtype: DType | None = None) -> Array:
        """A weight's memory, kept for the life of the engine. `dtype` None is the activation dtype."""

    @abstractmethod
    def upload(self, target: Array, source: np.ndarray) -> None:
        """Copy a host array of the same shape into `target` (or a view of it), converting to its dtype."""

    def fill_random(self, target: Array, scale: float, seed: int, mean: float = 0.0) -> None:
        """Fill a parameter with normal numbers of standard deviation `scale`: one block of at most 2 Mi values, repeated.

        For benchmarks (load_format=dummy): the copy is the cost, not the drawing.
        """
        flat = target.reshape(-1)
        size = flat.shape[0]
        block = np.random.default_rng(seed).standard_normal(min(size, 1 << 21), np.float32)
        block = (block * np.float32(scale) + np.float32(mean)).astype(self.dtype.numpy)
        for start in range(0, size, block.size):
            self.upload(flat[start:start + block.size], block[:size - start])

    @abstractmethod
    def download(self, source: Array) -> np.ndarray:
        """Wait for the queued work and return a host copy (bf16 arrives as ml_dtypes.bfloat16)."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DType | None = None) -> Array:
        """Uninitialised workspace, valid until the enclosing scope ends. Equal step shapes get equal addresses."""

    @abstractmethod
    def scope(self) -> AbstractContextManager[None]:
        """Workspace taken inside is given back at its end. Scopes nest."""

    @abstractmethod
    def kv_cache(self, num_layers: int, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int,
                 dtype: DType | None = None) -> list[Array]:
        """One zeroed array a layer, [B, 2, Hkv, P, D]; index 0 of the second axis is K, 1 is V (docs/kv_layout.md)."""

    # ---- dense path -------------------------------------------------------------------------------------------

    @abstractmethod
    def embedding(self, token_ids: Array, table: Array, scale: float = 1.0, out: Array | None = None) -> Array:
        """out[t] = table[token_ids[t]] * scale.  token_ids [T] int32, table [V, H] -> [T, H]."""

    @abstractmethod
    def linear(self, x: Array, weight: Array, bias: Array | None = None, out: Array | None = None) -> Array:
        """out = x @ weight.T + bias.  x [T, K] (rows may be strided), weight [N, K], bias [N] -> [T, N]."""

    def linear_add(self, x: Array, weight: Array, residual: Array, bias: Array | None = None,
                   out: Array | None = None) -> Array | None:
        """residual += linear(x, weight, bias) and None, where the product's kernel can add as it stores; elsewhere the product,
        which the caller has yet to add.  residual [T, N], contiguous."""
        return self.linear(x, weight, bias, out=out)

    @abstractmethod
    def linear_silu_mul(self, x: Array, weight: Array, bias: Array | None = None, out: Array | None = None) -> Array:
        """out[:, j] = silu(y[:, 2j]) * y[:, 2j + 1] with y = x @ weight.T + bias: gate and up rows interleaved.

        x [T, K], weight [2I, K] (row 2j is gate j, row 2j + 1 is up j), bias [2I] -> [T, I].
        """

    @abstractmethod
    def logits(self, x: Array, weight: Array, scale: float = 1.0) -> Array:
        """x [R, H], weight [V, H] -> [R, V] float32 = (x @ weight.T) * scale."""

    @abstractmethod
    def silu_mul(self, x: Array, out: Array | None = None) -> Array:
        """out = silu(x[:, 0::2]) * x[:, 1::2], interleaved as in linear_silu_mul.  x [T, 2I] -> [T, I]."""

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array | None = None) -> Array:
        """out = x / sqrt(mean(x^2) + eps) * weight, in float32 inside.  x [T, H], weight [H]."""

    @abstractmethod
    def add_rms_norm(self, x: Array, residual: Array, weight: Array, eps: float, scale: float = 1.0,
                     out: Array | None = None) -> Array:
        """residual += x * scale, in place; out = rms_norm(residual).  x, residual [T, H], weight [H]."""

    @abstractmethod
    def gather_rows(self, x: Array, rows: Array, out: Array | None = None) -> Array:
        """out[i] = x[rows[i]].  x [T, H], rows [R] int32 -> [R, H]."""

    # ---- attention --------------------------------------------------------------------------------------------

    @abstractmethod
    def rotary_and_cache(self, qkv: Array, step: Step, cos_sin: Array, kv_cache: Array, num_heads: int,
                         num_kv_heads: int) -> None:
        """Rotate q in place inside `qkv`, and write the rotated k and v of each token to its slot of the cache.

        What the k part of qkv holds afterwards is the backend's; attention reads the cache alone.

        qkv [T, (Hq + 2 Hkv) * D], q heads, then k heads, then v heads. cos_sin [positions, rotary_dim] float32: the
        cosines of the rotary_dim / 2 frequencies, then their sines. Rotation is the half-split one (value i pairs with
        i + rotary_dim / 2); values past rotary_dim are left alone. kv_cache [B, 2, Hkv, P, D].
        """

    def linear_to_heads(self, x: Array, weight: Array, bias: Array | None, step: Step, cos_sin: Array, kv_cache: Array,
                        num_heads: int, num_kv_heads: int) -> Array:
        """qkv = x @ weight.T + bias and then `rotary_and_cache`, in one where the backend can. -> qkv [T, (Hq + 2 Hkv) * D], of
        which q alone is to be read."""
        qkv = self.linear(x, weight, bias)
        self.rotary_and_cache(qkv, step, cos_sin, kv_cache, num_heads, num_kv_heads)
        return qkv

    @abstractmethod
    def attention(self, qkv: Array, step: Step, kv_cache: Array, num_heads: int, num_kv_heads: int, scale: float,
                  window: int | None = None, soft_cap: float | None = None, out: Array | None = None) -> Array:
        """Causal attention of the step's queries over the cache, which already holds this step's K and V.

        qkv [T, (Hq + 2 Hkv) * D] (only q is read), kv_cache [B, 2, Hkv, P, D] -> [T, Hq * D]. Query head h reads KV head
        h // (Hq / Hkv). A token at position p sees keys max(0, p - window + 1) .. p. soft_cap c: s -> c * tanh(s / c),
        after `scale`. Softmax in float32. The first `num_decodes` sequences have one token each.
        """

    @abstractmethod
    def attention_at_ends(self, qkv: Array, step: Step, kv_cache: Array, num_heads: int, num_kv_heads: int, scale: float,
                          window: int | None = None, soft_cap: float | None = None, out: Array | None = None) -> Array:
        """As `attention`, of the last token of each of the first R sequences alone.  qkv [R, (Hq + 2 Hkv) * D] ->
        [R, Hq * D]."""

    # ---- sampling ---------------------------------------------------------------------------------------------

    @abstractmethod
    def sample(self, logits: Array, batch: SamplingBatch) -> SampleResult:
        """Choose a token a row. logits [R, V] float32, which may be overwritten.

        Order: repetition, presence and frequency penalties; bias; allowed_mask; then greedy rows take the argmax (lowest id
        on a tie), others divide by temperature, keep top_k, then the smallest set with probability >= top_p, then min_p,
        and draw from what is left, renormalised.
        """

    @abstractmethod
    def logprobs(self, logits: Array, token_ids: Array, num_top: int) -> SampleResult:
        """Log-probabilities of given tokens (for prompt_logprobs). logits [R, V] float32, token_ids [R] int32."""

    @abstractmethod
    def count_tokens(self, output_counts: Array, slots: Array, token_ids: Array) -> None:
        """output_counts[slots[r], token_ids[r]] += 1 for each row; a slot of -1 counts nothing. slots, token_ids [R] int32."""

    # ---- the step ---------------------------------------------------------------------------------------------

    @abstractmethod
    def prepare_step(self, arrays: StepArrays, sampled: Array | None = None) -> Step:
        """Bring a step's integers to the device with one copy and give the Step over them.

        Where `feed_rows` names rows, their token is not yet known to the host: token_ids[feed_rows[i]] is taken on the
        device from sampled[feed_sources[i]], the last step's SampleResult.token_ids.
        """

    @abstractmethod
    def fetch(self, source: Array) -> Fetch:
        """Queue a copy of `source` to the host and return at once."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all queued work."""

    def close(self) -> None:  # noqa: B027 (a backend without a device has nothing to give back)
        """Wait for all queued work and give the device's memory back. Arrays of this backend are dead from now on."""


@dataclass(frozen=True)
class StepArrays:
    """A step's integers on the host; the fields are those of Step."""

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray
    query_start: np.ndarray
    logit_rows: np.ndarray
    num_decodes: int
    feed_rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """[F] int32 rows of token_ids whose token is still on the device."""
    feed_sources: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """[F] int32 rows of the last step's sampled tokens that they take."""

    @property
    def logits_at_ends(self) -> bool:
        rows = len(self.logit_rows)
        return bool(np.array_equal(self.logit_rows, self.query_start[1 : rows + 1] - 1))
