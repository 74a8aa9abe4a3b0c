"""Choosing tokens on the device, without sorting the vocabulary and without a host round trip.

    logits [R, V] float32, rows may be strided. Order: penalties, bias, mask; greedy rows take the argmax, the others
    divide by temperature, keep top_k, then the smallest set of probability >= top_p, then min_p, and draw.

Launches, each only when a row needs it:
    penalise   out[r] = logits[r] with repetition, presence and frequency penalties (or a plain copy)
    add_bias   out[row, id] += value
    argmax     masks forbidden tokens and finds each row's largest logit; the last block of a row writes the greedy token
    survey     sums the probabilities of each chunk of the vocabulary and, where a row filters, makes a coarse histogram of
               them; the last block of a row finds a logit below which nothing can be kept
    compact    copies what is above that, in id order: a few hundred candidates for the usual settings
    draw       one block a row: exact thresholds by radix selection among the candidates, then an inverse-CDF draw in id order

Probabilities are integers (2^31 is the largest), so sums do not depend on the order of the threads and a seeded
row draws the same token whatever else runs. Ties go to the lower id, at the edges of top_k and top_p too. The draw is
Philox4x32-10 of (seed, position), bit for bit that of ops/philox.py. Reference: ops/cpu_sampling.py.

Traffic  greedy 4 R V bytes, sampled two to three times that, from L2 for up to about 100 rows; penalties add 8 R V
Source   radix selection: Alabi et al. 2012; counter-based draws: Salmon et al. 2011
"""

from collections.abc import Iterator
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import float32, int32, uint32, uint64
from zhilight.errors import ShapeError
from zhilight.kernels.ptx import (
    address,
    atomic_inc_acq_rel_u32,
    f32,
    float_of_bits,
    i32,
    i64,
    reduce_add_f32,
    shuffle_xor_u64,
    u32,
    u64,
)
from zhilight.kernels.runtime import Runtime
from zhilight.kernels.sampling_draw import draw_kernel
from zhilight.kernels.sampling_survey import (
    CHUNK,
    COARSE,
    NEGATIVE_INFINITY,
    THREADS,
    TILES,
    compact_kernel,
    load_four,
    ordered_key,
    survey_kernel,
)


@kernel_factory
def penalise_kernel(vocab_size: int, stride: int, penalties: bool) -> Kernel:
    words = -(-vocab_size // 32)

    @kernel(threads=THREADS, fastmath=False)
    def penalise(logits: Pointer(float32), out: Pointer(float32), slots: Pointer(int32), repetition: Pointer(float32),
                 presence: Pointer(float32), frequency: Pointer(float32), prompt_mask: Pointer(uint32),
                 output_counts: Pointer(int32)):
        row = i64(cuda.blockIdx.y)
        token = i32(cuda.blockIdx.x) * i32(CHUNK) + i32(cuda.threadIdx.x)
        last = min(i32(vocab_size), (i32(cuda.blockIdx.x) + i32(1)) * i32(CHUNK))
        while token < last:
            value = logits[row * i64(stride) + i64(token)]
            if penalties:
                slot = i64(slots[row])
                if slot >= i64(0):
                    count = output_counts[slot * i64(vocab_size) + i64(token)]
                    seen = (prompt_mask[slot * i64(words) + i64(token >> i32(5))] >> u32(token & i32(31))) & u32(1)
                    if count > i32(0) or seen == u32(1):
                        if value > f32(0):
                            value = value / repetition[row]
                        else:
                            value = value * repetition[row]
                    if count > i32(0):
                        value = value - presence[row] - frequency[row] * f32(count)
            out[row * i64(stride) + i64(token)] = value
            token += i32(THREADS)

    return penalise


@kernel_factory
def add_bias_kernel(stride: int) -> Kernel:
    @kernel(threads=THREADS, fastmath=False)
    def add_bias(logits: Pointer(float32), rows: Pointer(int32), ids: Pointer(int32), values: Pointer(float32), count: i32):
        i = i32(cuda.blockIdx.x) * i32(THREADS) + i32(cuda.threadIdx.x)
        if i < count:
            reduce_add_f32(address(logits) + u64(i64(rows[i]) * i64(stride) + i64(ids[i])) * u64(4), values[i])

    return add_bias


@kernel_factory
def argmax_kernel(vocab_size: int, stride: int, masked: bool, chunks_a_block: int = 1) -> Kernel:
    chunks = -(-vocab_size // CHUNK)
    blocks = -(-chunks // chunks_a_block)
    words = -(-vocab_size // 32)
    warps = THREADS // 32

    @kernel(threads=THREADS, fastmath=False)
    def argmax(logits: Pointer(float32), mask: Pointer(uint32), best: Pointer(uint64), token_ids: Pointer(int32),
               counters: Pointer(uint32)):
        # best[row, block] = key of the largest logit << 32 | ~id, so that the larger is the better and ties go to the lower id
        shared = cuda.shared.array(warps, types.uint64)
        is_last = cuda.shared.array(1, types.uint32)
        row = i64(cuda.blockIdx.y)
        block = i32(cuda.blockIdx.x)
        thread = i32(cuda.threadIdx.x)
        values = cuda.local.array((2, TILES, 4), types.float32)
        top = u32(0)        # below the key of any number; then the first of the thread's largest, as its tokens ascend
        top_token = i32(0)
        for part in range(chunks_a_block + 1):
            first = (block * i32(chunks_a_block) + i32(part)) * i32(CHUNK) + thread * i32(4)
            if part < chunks_a_block:  # the next chunk is under way while this one is compared
                for tile in range(TILES):
                    four = load_four(logits, row * i64(stride), first + i32(tile * 4 * THREADS), i32(vocab_size))
                    for j in range(4):
                        values[part % 2, tile, j] = four[j]
            if part == 0:
                continue
            first -= i32(CHUNK)
            for tile in range(TILES):
                token = first + i32(tile * 4 * THREADS)
                if masked:
                    if token < i32(vocab_size):
                        allowed = mask[row * i64(words) + i64(token >> i32(5))] >> u32(token & i32(31))
                        for j in range(4):
                            if (allowed >> u32(j)) & u32(1) == u32(0) and token + i32(j) < i32(vocab_size):
                                values[(part + 1) % 2, tile, j] = float_of_bits(u32(NEGATIVE_INFINITY))
                                logits[row * i64(stride) + i64(token + i32(j))] = float_of_bits(u32(NEGATIVE_INFINITY))
                for j in range(4):
                    key = ordered_key(values[(part + 1) % 2, tile, j])  # past the vocabulary -inf: a real one has a lower id
                    if key > top:
                        top = key
                        top_token = token + i32(j)
        found = u64(top) << u64(32) | u64(u32(0xFFFFFFFF) - u32(top_token))
        for step in (16, 8, 4, 2, 1):
            found = max(found, shuffle_xor_u64(found, u32(step)))
        if thread % i32(32) == i32(0):
            shared[thread // i32(32)] = found
        cuda.syncthreads()
        if thread == i32(0):
            for w in range(1, warps):
                found = max(found, shared[w])
            best[row * i64(chunks) + i64(block)] = found
            cuda.threadfence()
            is_last[0] = atomic_inc_acq_rel_u32(address(counters) + u64(row) * u64(4), u32(blocks - 1))
        cuda.syncthreads()
        if is_last[0] == u32(blocks - 1) and thread < i32(32):
            cuda.threadfence()
            found = u64(0)
            c = thread
            while c < i32(blocks):
                found = max(found, best[row * i64(chunks) + i64(c)])
                c += i32(32)
            for step in (16, 8, 4, 2, 1):
                found = max(found, shuffle_xor_u64(found, u32(step)))
            if thread == i32(0):
                token_ids[row] = i32(u64(0xFFFFFFFF) - (found & u64(0xFFFFFFFF)))
                best[row * i64(chunks)] = found  # the row's own, for the kernels that follow

    return argmax


@kernel_factory
def count_tokens_kernel(vocab_size: int) -> Kernel:
    @kernel(threads=THREADS, fastmath=False)
    def count_tokens(output_counts: Pointer(int32), slots: Pointer(int32), token_ids: Pointer(int32), count: i32):
        i = i32(cuda.blockIdx.x) * i32(THREADS) + i32(cuda.threadIdx.x)
        if i < count and slots[i] >= i32(0):
            place = i64(slots[i]) * i64(vocab_size) + i64(token_ids[i])
            output_counts[place] = output_counts[place] + i32(1)  # a slot stands in one row at most

    return count_tokens


def sample(runtime: Runtime, logits: Any, batch: Any, token_ids: Any, work: Any) -> None:
    """Choose a token a row into token_ids [R] int32. `batch` is an ops.base.SamplingBatch of device arrays.

    work: [R, V] float32 where the filtered logits go when `logits` must be kept, or `logits` itself.
    Raises ShapeError when shapes disagree.
    """
    rows, vocab = logits.shape
    stride = logits.strides[0]
    if logits.strides[1] != 1 or stride % 4 or work.strides != logits.strides or token_ids.shape != (rows,):
        raise ShapeError(f"logits are {logits.shape}, strides {logits.strides}, work {work.strides}, token_ids "
                         f"{token_ids.shape}; they must be [R, V] of equal strides, rows a multiple of 4 apart, and [R]")
    if not rows:
        return
    stream, chunks = runtime.stream, -(-vocab // CHUNK)
    penalties = batch.slots is not None and (batch.output_counts is not None)
    if penalties or work.address != logits.address:
        arguments = ((batch.slots, batch.repetition, batch.presence, batch.frequency, batch.prompt_mask, batch.output_counts)
                     if penalties else (0,) * 6)
        penalise_kernel(vocab, stride, penalties).launch((chunks, rows, 1), logits, work, *arguments, stream=stream)
    if batch.bias_rows is not None and batch.bias_rows.shape[0]:
        count = batch.bias_rows.shape[0]
        add_bias_kernel(stride).launch(-(-count // THREADS), work, batch.bias_rows, batch.bias_ids, batch.bias_values, count,
                                      stream=stream)
    best = runtime.scratch(scratch_bytes(rows, vocab, batch.all_greedy))
    masked = batch.allowed_mask is not None
    # one chunk a block fills the GPU for few rows; for many, longer blocks pay for their reduction
    a_block = 4 if rows * chunks >= 15 * runtime.multiprocessors else 1
    argmax_kernel(vocab, stride, masked, a_block).launch(
        (-(-chunks // a_block), rows, 1), work, batch.allowed_mask if masked else 0, best, token_ids, runtime.counters(rows),
        stream=stream)
    if not batch.all_greedy:
        masses = best + rows * chunks * 8
        counts = masses + rows * chunks * 8
        cutoffs = counts + rows * chunks * 4
        candidates = (cutoffs + rows * 4 + 255) // 256 * 256
        row_counts = runtime.zeros(rows * COARSE * 4)
        survey_kernel(vocab, stride).launch((chunks, rows, 1), work, batch.temperature, batch.top_k, batch.top_p, batch.min_p,
                                            best, masses, row_counts, cutoffs, runtime.counters(rows),
                                            stream=stream)
        compact_kernel(vocab, stride).launch((chunks, rows, 1), work, batch.temperature, cutoffs, candidates, counts,
                                             stream=stream)
        draw_kernel(vocab, stride).launch(rows, work, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds,
                                          batch.positions, best, masses, cutoffs, candidates, counts, token_ids, stream=stream)


def scratch_bytes(rows: int, vocab: int, all_greedy: bool = False) -> int:
    """Scratch memory that `sample` takes for `rows` rows."""
    chunks = -(-vocab // CHUNK)
    return rows * chunks * 8 if all_greedy else rows * (chunks * 20 + 4) + 256 + rows * chunks * CHUNK * 8


def count_tokens(runtime: Runtime, output_counts: Any, slots: Any, token_ids: Any) -> None:
    """output_counts[slots[r], token_ids[r]] += 1; a slot of -1 counts nothing."""
    rows = slots.shape[0]
    if rows:
        count_tokens_kernel(output_counts.shape[1]).launch(-(-rows // THREADS), output_counts, slots, token_ids, rows,
                                                           stream=runtime.stream)


def catalogue() -> Iterator[Kernel]:
    vocab = 128256
    yield penalise_kernel(vocab, vocab, True)
    yield penalise_kernel(vocab, vocab, False)
    yield add_bias_kernel(vocab)
    yield argmax_kernel(vocab, vocab, False)
    yield argmax_kernel(vocab, vocab, False, 4)
    yield argmax_kernel(122753, 122760, True)
    yield compact_kernel(vocab, vocab)
    yield survey_kernel(vocab, vocab)
    yield draw_kernel(vocab, vocab)
    yield count_tokens_kernel(vocab)
