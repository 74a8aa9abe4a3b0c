"""Before the draw: what a row's probabilities sum to, and the few of its logits that the filters can keep.

`survey` adds up each chunk's probability and finds a bound below which top_k, top_p or min_p keep nothing; `compact` gathers
what lies above it. See sampling.py, which launches them, and sampling_draw.py, which draws from what they leave.

A probability is an integer, 2^31 times its ratio to the largest, so that sums do not depend on the order of the threads.
"""

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import float32, int32, uint32, uint64
from zhilight.kernels.ptx import (
    FULL_WARP,
    address,
    atomic_inc_acq_rel_u32,
    bits_of_float,
    exp2_approx,
    f32,
    float_of_bits,
    i32,
    i64,
    load_global_f32x4,
    log2_approx,
    reduce_add_u32,
    shuffle_xor_u64,
    u32,
    u64,
)
from zhilight.kernels.vector import warp_sum

CHUNK = 4096
"""Vocabulary entries of one block."""
THREADS = 256
TILES = CHUNK // (4 * THREADS)
COARSE = THREADS
"""Bins of the survey's histogram."""
PER_LANE = COARSE // 32
LOG2_E = 1.4426950408889634
WEIGHT_BITS = 31
NEGATIVE_INFINITY = 0xFF800000


@cuda.jit(device=True, forceinline=True)
def ordered_key(value):
    """float32 -> uint32 of the same order (NaN above infinity, -0 is 0)."""
    bits = bits_of_float(value + f32(0))
    return bits ^ (u32(0xFFFFFFFF) if bits >> u32(31) else u32(0x80000000))


@cuda.jit(device=True, forceinline=True)
def value_of_key(key):
    """The float32 of an ordered_key."""
    return float_of_bits(key ^ (u32(0x80000000) if key >> u32(31) else u32(0xFFFFFFFF)))


@cuda.jit(device=True, forceinline=True)
def weight_of(value, maximum, factor):
    """2^31 * exp((value - maximum) / temperature) as an integer; factor is log2(e) / temperature."""
    return u64(u32(exp2_approx((value - maximum) * factor) * f32(1 << WEIGHT_BITS)))


@cuda.jit(device=True, forceinline=True)
def load_four(logits, start, token, vocab_size):
    """Logits token .. token + 3 of the row that begins at `start`; what is past the vocabulary is -inf."""
    low = float_of_bits(u32(NEGATIVE_INFINITY))
    if token + i32(3) < vocab_size:
        return load_global_f32x4(address(logits) + u64(start + i64(token)) * u64(4))
    a, b, c = low, low, low
    if token < vocab_size:
        a = logits[start + i64(token)]
    if token + i32(1) < vocab_size:
        b = logits[start + i64(token + i32(1))]
    if token + i32(2) < vocab_size:
        c = logits[start + i64(token + i32(2))]
    return a, b, c, low


@kernel_factory
def survey_kernel(vocab_size: int, stride: int) -> Kernel:
    chunks = -(-vocab_size // CHUNK)
    warps = THREADS // 32
    range_ = WEIGHT_BITS / LOG2_E     # of (maximum - logit) / temperature: beyond it the weight is 0
    bin_width, bins_a_unit = range_ / COARSE, COARSE / range_
    bin_log2 = -range_ / COARSE * LOG2_E
    more_than_one = 1.00001 / (1 << WEIGHT_BITS)

    @kernel(threads=THREADS, fastmath=False)
    def survey(logits: Pointer(float32), temperature: Pointer(float32), top_k: Pointer(int32), top_p: Pointer(float32),
               min_p: Pointer(float32), best: Pointer(uint64), masses: Pointer(uint64), row_counts: Pointer(uint32),
               cutoffs: Pointer(float32), counters: Pointer(uint32)):
        # masses[row, chunk]; row_counts[row, COARSE] is zero before and after; cutoffs[row]: -inf is no filter
        part = cuda.shared.array(warps, types.uint64)
        bin_counts = cuda.shared.array(COARSE, types.uint32)
        is_last = cuda.shared.array(1, types.uint32)
        row = i64(cuda.blockIdx.y)
        heat = temperature[row]
        if heat == f32(0):
            return
        chunk = i32(cuda.blockIdx.x)
        thread = i32(cuda.threadIdx.x)
        k = top_k[row]
        filters = (k > i32(0) and k < i32(vocab_size)) or top_p[row] < f32(1)
        maximum = value_of_key(u32(best[row * i64(chunks)] >> u64(32)))
        factor = f32(LOG2_E) / heat
        bin_counts[thread] = u32(0)
        values = cuda.local.array((TILES, 4), types.float32)
        for tile in range(TILES):
            token = chunk * i32(CHUNK) + i32(tile * 4 * THREADS) + thread * i32(4)
            four = load_four(logits, row * i64(stride), token, i32(vocab_size))
            for j in range(4):
                values[tile, j] = four[j]
        cuda.syncthreads()
        mass = u64(0)
        for tile in range(TILES):
            for j in range(4):
                weight = weight_of(values[tile, j], maximum, factor)
                if weight > u64(0):
                    mass += weight
                    if filters:
                        place = min(i32(COARSE - 1), i32((maximum - values[tile, j]) / heat * f32(bins_a_unit)))
                        cuda.atomic.add(bin_counts, place, u32(1))
        for step in (16, 8, 4, 2, 1):
            mass += shuffle_xor_u64(mass, u32(step))
        if thread % i32(32) == i32(0):
            part[thread // i32(32)] = mass
        cuda.syncthreads()
        if filters and bin_counts[thread] > u32(0):
            reduce_add_u32(address(row_counts) + u64(row * i64(COARSE) + i64(thread)) * u64(4), bin_counts[thread])
        cuda.threadfence()
        cuda.syncthreads()
        if thread == i32(0):
            for w in range(1, warps):
                mass += part[w]
            masses[row * i64(chunks) + i64(chunk)] = mass
            cuda.threadfence()
            is_last[0] = atomic_inc_acq_rel_u32(address(counters) + u64(row) * u64(4), u32(chunks - 1))
        cuda.syncthreads()
        if is_last[0] == u32(chunks - 1):
            cuda.threadfence()
            bin_counts[thread] = row_counts[row * i64(COARSE) + i64(thread)]
            row_counts[row * i64(COARSE) + i64(thread)] = u32(0)
            cuda.syncthreads()
            if thread < i32(32):
                low = f32(0)           # the logit's distance from the largest, over temperature, below which nothing is kept
                if filters:
                    # one warp, PER_LANE bins a lane: where the count reaches k, or a lower bound of the mass top_p of it.
                    # (After top_k, top_p is of what top_k keeps, all of which the draw must see.)
                    width = f32(bin_log2)
                    by_count = k > i32(0) and k < i32(vocab_size)
                    want = f32(k)
                    if not by_count:
                        total = f32(0)
                        c = thread
                        while c < i32(chunks):
                            total += f32(masses[row * i64(chunks) + i64(c)])
                            c += i32(32)
                        total = warp_sum(total)
                        want = total * f32(more_than_one) * top_p[row]
                    amounts = cuda.local.array(PER_LANE, types.float32)
                    own = f32(0)
                    for i in range(PER_LANE):
                        place = thread * i32(PER_LANE) + i32(i)
                        amounts[i] = f32(bin_counts[place])
                        if not by_count:
                            amounts[i] = amounts[i] * exp2_approx(f32(place + i32(1)) * width)
                        own += amounts[i]
                    running = own
                    for step in (1, 2, 4, 8, 16):
                        other = cuda.shfl_up_sync(u32(FULL_WARP), running, step)
                        if thread >= i32(step):
                            running += other
                    running -= own
                    last = i32(COARSE - 1)
                    for i in range(PER_LANE):
                        running += amounts[i]
                        if running >= want:
                            last = min(last, thread * i32(PER_LANE) + i32(i))
                    for step in (16, 8, 4, 2, 1):
                        last = min(last, cuda.shfl_xor_sync(u32(FULL_WARP), last, step))
                    # a bin further, for the rounding of the division that found the bins
                    low = f32(last + i32(2)) * f32(bin_width)
                elif min_p[row] > f32(0):  # a little below, for the approximate logarithm
                    low = min(f32(range_), f32(0.01) - log2_approx(min_p[row]) / f32(LOG2_E))
                if thread == i32(0):
                    cutoffs[row] = maximum - heat * low if low > f32(0) else float_of_bits(u32(NEGATIVE_INFINITY))

    return survey


@kernel_factory
def compact_kernel(vocab_size: int, stride: int) -> Kernel:
    chunks = -(-vocab_size // CHUNK)
    warps = THREADS // 32

    @kernel(threads=THREADS, fastmath=False)
    def compact(logits: Pointer(float32), temperature: Pointer(float32), cutoffs: Pointer(float32), candidates: Pointer(uint64),
                counts: Pointer(int32)):
        # candidates[row, chunk, i] = key << 32 | id, in id order
        warp_counts = cuda.shared.array((TILES, warps), types.int32)
        row = i64(cuda.blockIdx.y)
        if temperature[row] == f32(0):
            return
        cutoff = cutoffs[row]
        if not (cutoff > float_of_bits(u32(NEGATIVE_INFINITY))):
            return
        chunk = i32(cuda.blockIdx.x)
        thread = i32(cuda.threadIdx.x)
        lane = thread % i32(32)
        warp = thread // i32(32)
        to = (row * i64(chunks) + i64(chunk)) * i64(CHUNK)
        values = cuda.local.array((TILES, 4), types.float32)
        places = cuda.local.array(TILES, types.int32)
        for tile in range(TILES):
            token = chunk * i32(CHUNK) + i32(tile * 4 * THREADS) + thread * i32(4)
            four = load_four(logits, row * i64(stride), token, i32(vocab_size))
            for j in range(4):
                values[tile, j] = four[j]
        for tile in range(TILES):
            mine = i32(0)
            for j in range(4):
                if values[tile, j] >= cutoff:
                    mine += i32(1)
            running = mine
            for step in (1, 2, 4, 8, 16):
                other = cuda.shfl_up_sync(u32(FULL_WARP), running, step)
                if lane >= i32(step):
                    running += other
            places[tile] = running - mine
            if lane == i32(31):
                warp_counts[tile, warp] = running
        cuda.syncthreads()
        before = i32(0)
        for tile in range(TILES):
            token = chunk * i32(CHUNK) + i32(tile * 4 * THREADS) + thread * i32(4)
            place = before + places[tile]
            for w in range(warps):
                if i32(w) < warp:
                    place += warp_counts[tile, w]
                before += warp_counts[tile, w]
            for j in range(4):
                if values[tile, j] >= cutoff:
                    candidates[to + i64(place)] = (u64(ordered_key(values[tile, j])) << u64(32)) | u64(token + i32(j))
                    place += i32(1)
        if thread == i32(0):
            counts[row * i64(chunks) + i64(chunk)] = before

    return compact
