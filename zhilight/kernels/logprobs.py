"""Log-probabilities of chosen tokens, their ranks, and the most probable tokens of each row, in one launch.

    logprob[r] = logits[r, token[r]] - log(sum(exp(logits[r])))        rank[r] = 1 + |{i : logits[r, i] > logits[r, token[r]]}|
    top_ids[r], top_logprobs[r] : the N most probable, most probable first, lower ids first among equals

logits [R, V] float32, rows may be strided; token_ids [R] int32; N <= 32.

Grid     one block of 1024 threads a row
Method   one pass for the maximum and the sum; one for the rank; radix selection (11, 11, 10 bits) for the N-th largest
Traffic  7 passes over a row, of which all but the first are served by L2 for up to about 100 rows
"""

from collections.abc import Iterator
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import float32, int32
from zhilight.errors import ShapeError
from zhilight.kernels.ptx import FULL_WARP, exp2_approx, f32, float_of_bits, i32, i64, log2_approx, u32, u64
from zhilight.kernels.runtime import Runtime
from zhilight.kernels.sampling_survey import LOG2_E, NEGATIVE_INFINITY, ordered_key, value_of_key

THREADS = 1024
MAX_TOP = 32
BINS = 2048
_LN_2 = 0.6931471805599453


@kernel_factory
def logprobs_kernel(vocab_size: int, stride: int, num_top: int) -> Kernel:
    warps = THREADS // 32

    @kernel(threads=THREADS, fastmath=False)
    def logprobs(logits: Pointer(float32), token_ids: Pointer(int32), chosen_logprobs: Pointer(float32), ranks: Pointer(int32),
                 top_ids: Pointer(int32), top_logprobs: Pointer(float32)):
        part_max = cuda.shared.array(warps, types.float32)
        part_sum = cuda.shared.array(warps, types.float32)
        histogram = cuda.shared.array(BINS, types.int32)
        found = cuda.shared.array(MAX_TOP, types.uint64)
        number = cuda.shared.array(4, types.int32)
        row = i64(cuda.blockIdx.x) * i64(stride)
        thread = i32(cuda.threadIdx.x)
        lane = thread % i32(32)
        chosen = logits[row + i64(token_ids[cuda.blockIdx.x])]

        largest = float_of_bits(u32(NEGATIVE_INFINITY))
        total = f32(0)
        greater = i32(0)
        i = thread
        while i < i32(vocab_size):
            value = logits[row + i64(i)]
            if value > largest:
                total = total * exp2_approx((largest - value) * f32(LOG2_E))
                largest = value
            if value > float_of_bits(u32(NEGATIVE_INFINITY)):
                total += exp2_approx((value - largest) * f32(LOG2_E))
            if value > chosen:
                greater += i32(1)
            i += i32(THREADS)
        if thread == i32(0):
            number[0] = i32(0)
        for step in (16, 8, 4, 2, 1):
            other = cuda.shfl_xor_sync(u32(FULL_WARP), largest, step)
            other_total = cuda.shfl_xor_sync(u32(FULL_WARP), total, step)
            high = max(largest, other)
            if high > float_of_bits(u32(NEGATIVE_INFINITY)):
                total = (total * exp2_approx((largest - high) * f32(LOG2_E))
                         + other_total * exp2_approx((other - high) * f32(LOG2_E)))
            largest = high
            greater += cuda.shfl_xor_sync(u32(FULL_WARP), greater, step)
        if lane == i32(0):
            part_max[thread // i32(32)] = largest
            part_sum[thread // i32(32)] = total
        cuda.syncthreads()
        if lane == i32(0):
            cuda.atomic.add(number, 0, greater)
        largest = float_of_bits(u32(NEGATIVE_INFINITY))
        for w in range(warps):
            largest = max(largest, part_max[w])
        total = f32(0)
        for w in range(warps):
            total += part_sum[w] * exp2_approx((part_max[w] - largest) * f32(LOG2_E))
        normaliser = largest + log2_approx(total) * f32(_LN_2)
        cuda.syncthreads()
        if thread == i32(0):
            chosen_logprobs[cuda.blockIdx.x] = chosen - normaliser
            ranks[cuda.blockIdx.x] = number[0] + i32(1)

        if num_top > 0:
            prefix = u64(0)
            above = i32(0)
            for digit in range(3):
                shift = u64(21) if digit == 0 else (u64(10) if digit == 1 else u64(0))
                mask = u64(2047) if digit < 2 else u64(1023)
                known = u64(32) if digit == 0 else (u64(21) if digit == 1 else u64(10))
                i = thread
                while i < i32(BINS):
                    histogram[i] = i32(0)
                    i += i32(THREADS)
                cuda.syncthreads()
                i = thread
                while i < i32(vocab_size):
                    key = u64(ordered_key(logits[row + i64(i)]))
                    if (key >> known) == (prefix >> known):
                        cuda.atomic.add(histogram, i32((key >> shift) & mask), i32(1))
                    i += i32(THREADS)
                cuda.syncthreads()
                if thread < i32(32):
                    group = i32(BINS // 32 - 1)
                    done = i32(0)
                    while done == i32(0) and group >= i32(0):
                        amount = histogram[group * i32(32) + (i32(31) - lane)]
                        running = amount
                        for step in (1, 2, 4, 8, 16):
                            other_count = cuda.shfl_up_sync(u32(FULL_WARP), running, step)
                            if lane >= i32(step):
                                running += other_count
                        reached = cuda.ballot_sync(u32(FULL_WARP), above + running >= i32(num_top))
                        if reached != 0:
                            first = i32(cuda.ffs(reached)) - i32(1)
                            above += cuda.shfl_sync(u32(FULL_WARP), running - amount, first)
                            number[1] = above
                            number[2] = group * i32(32) + (i32(31) - first)
                            done = i32(1)
                        else:
                            above += cuda.shfl_sync(u32(FULL_WARP), running, 31)
                        group -= i32(1)
                cuda.syncthreads()
                above = number[1]
                prefix |= u64(number[2]) << shift
                cuda.syncthreads()
            # what is above the edge in any order, then the lowest ids at the edge
            if thread == i32(0):
                number[0] = i32(0)
            cuda.syncthreads()
            i = thread
            while i < i32(vocab_size):
                key = u64(ordered_key(logits[row + i64(i)]))
                if key > prefix:
                    found[cuda.atomic.add(number, 0, i32(1))] = (key << u64(32)) | u64(u32(0xFFFFFFFF) - u32(i))
                i += i32(THREADS)
            cuda.syncthreads()
            previous = i32(-1)
            for place in range(num_top):
                if i32(place) >= above:
                    if thread == i32(0):
                        number[3] = i32(0x7FFFFFFF)
                    cuda.syncthreads()
                    i = thread
                    while i < i32(vocab_size):
                        if i > previous and u64(ordered_key(logits[row + i64(i)])) == prefix:
                            cuda.atomic.min(number, 3, i)
                            break
                        i += i32(THREADS)
                    cuda.syncthreads()
                    previous = number[3]
                    if thread == i32(0):
                        found[place] = (prefix << u64(32)) | u64(u32(0xFFFFFFFF) - u32(previous))
                    cuda.syncthreads()
            if thread < i32(num_top):
                entry = found[thread]
                rank = i32(0)
                for other_place in range(num_top):
                    if found[other_place] > entry:
                        rank += i32(1)
                at = i64(cuda.blockIdx.x) * i64(num_top) + i64(rank)
                top_ids[at] = i32(u64(0xFFFFFFFF) - (entry & u64(0xFFFFFFFF)))
                top_logprobs[at] = value_of_key(u32(entry >> u64(32))) - normaliser

    return logprobs


def logprobs(runtime: Runtime, logits: Any, token_ids: Any, chosen: Any, ranks: Any, top_ids: Any, top_logprobs: Any) -> None:
    """See the module: chosen [R] float32, ranks [R] int32, top_ids [R, N] int32, top_logprobs [R, N] float32 are written."""
    rows, vocab = logits.shape
    num_top = top_ids.shape[1]
    if logits.strides[1] != 1 or num_top > min(MAX_TOP, vocab):
        raise ShapeError(f"logits are {logits.shape}, strides {logits.strides}, N is {num_top}; a row must be contiguous, "
                         f"and N at most {min(MAX_TOP, vocab)}")
    if rows:
        logprobs_kernel(vocab, logits.strides[0], num_top).launch(rows, logits, token_ids, chosen, ranks, top_ids, top_logprobs,
                                               stream=runtime.stream)


def catalogue() -> Iterator[Kernel]:
    yield logprobs_kernel(128256, 128256, 0)
    yield logprobs_kernel(122753, 122760, 20)
