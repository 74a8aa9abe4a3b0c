"""Choosing tokens on the device, without sorting the vocabulary and without a host round trip.

    logits [R, V] float32, rows may be strided. Order: penalties, bias, mask; greedy rows take the argmax, the others
    divide by temperature, keep top_k, then the smallest set of probability >= top_p, then min_p, and draw.

Launches, each only when a row needs it:
    penalise   out[r] = logits[r] with repetition, presence and frequency penalties (or a plain copy)
    add_bias   out[row, id] += value
    argmax     masks forbidden tokens and finds each row's largest logit; the last block of a row writes the greedy token
    compact    keeps, in id order, the candidates whose probability is above 2^-40 of the largest
    draw       one block a row: thresholds by radix selection over the candidates, then an inverse-CDF draw in id order

Probabilities are 64-bit integers (2^40 is the largest), so sums do not depend on the order of the threads and a seeded
row draws the same token whatever else runs. Ties go to the lower id, at the edges of top_k and top_p too. The draw is
Philox4x32-10 of (seed, position), bit for bit that of ops/philox.py. Reference: ops/cpu_sampling.py.

Traffic  greedy 4 R V bytes, sampled twice that; penalties add 8 R V (and 4 R V of counts)
Source   radix selection: Alabi et al. 2012; counter-based draws: Salmon et al. 2011
"""

from collections.abc import Iterator
from typing import Any

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import float32, int32, int64, uint32, uint64
from zhilight.errors import ShapeError
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
    reduce_add_f32,
    shuffle_u64,
    shuffle_up_u64,
    shuffle_xor_u64,
    u32,
    u64,
)
from zhilight.kernels.runtime import Runtime

CHUNK = 4096
"""Vocabulary entries of one block."""
THREADS = 256
DRAW_THREADS = 512
BINS = 2048
LOG2_E = 1.4426950408889634
WEIGHT_BITS = 40
_NEGATIVE_INFINITY = 0xFF800000


@cuda.jit(device=True, forceinline=True)
def ordered_key(value):
    """float32 -> uint32 of the same order (NaN above infinity)."""
    bits = bits_of_float(value)
    return bits ^ (u32(0xFFFFFFFF) if bits >> u32(31) else u32(0x80000000))


@cuda.jit(device=True, forceinline=True)
def value_of_key(key):
    """The float32 of an ordered_key."""
    return float_of_bits(key ^ (u32(0x80000000) if key >> u32(31) else u32(0xFFFFFFFF)))


@cuda.jit(device=True, forceinline=True)
def weight_of(value, maximum, factor):
    """2^40 * exp((value - maximum) / temperature) as an integer; factor is log2(e) / temperature."""
    return u64(exp2_approx((value - maximum) * factor) * f32(1 << WEIGHT_BITS))


@cuda.jit(device=True, forceinline=True)
def philox_word(seed, position):
    """First word of Philox4x32-10 with key = seed and counter = position (see ops/philox.py)."""
    k0, k1 = u32(seed & u64(0xFFFFFFFF)), u32(seed >> u64(32))
    c0, c1, c2, c3 = u32(position & u64(0xFFFFFFFF)), u32(position >> u64(32)), u32(0), u32(0)
    for _ in range(10):
        p0 = u64(0xD2511F53) * u64(c0)
        p1 = u64(0xCD9E8D57) * u64(c2)
        c0, c1, c2, c3 = (u32(p1 >> u64(32)) ^ c1 ^ k0, u32(p1 & u64(0xFFFFFFFF)),
                          u32(p0 >> u64(32)) ^ c3 ^ k1, u32(p0 & u64(0xFFFFFFFF)))
        k0 = u32(k0 + u32(0x9E3779B9))
        k1 = u32(k1 + u32(0xBB67AE85))
    return c0


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
def argmax_kernel(vocab_size: int, stride: int, masked: bool) -> Kernel:
    chunks = -(-vocab_size // CHUNK)
    words = -(-vocab_size // 32)
    warps = THREADS // 32

    @kernel(threads=THREADS, fastmath=False)
    def argmax(logits: Pointer(float32), mask: Pointer(uint32), best: Pointer(uint64), token_ids: Pointer(int32),
               counters: Pointer(uint32)):
        # best[row, chunk] = key of the largest logit << 32 | ~id, so that the larger is the better and ties go to the lower id
        shared = cuda.shared.array(warps, types.uint64)
        is_last = cuda.shared.array(1, types.uint32)
        row = i64(cuda.blockIdx.y)
        chunk = i32(cuda.blockIdx.x)
        thread = i32(cuda.threadIdx.x)
        token = chunk * i32(CHUNK) + thread
        last = min(i32(vocab_size), (chunk + i32(1)) * i32(CHUNK))
        found = u64(0)
        while token < last:
            value = logits[row * i64(stride) + i64(token)]
            if masked:
                allowed = (mask[row * i64(words) + i64(token >> i32(5))] >> u32(token & i32(31))) & u32(1)
                if allowed == u32(0):
                    value = float_of_bits(u32(_NEGATIVE_INFINITY))
                    logits[row * i64(stride) + i64(token)] = value
            found = max(found, (u64(ordered_key(value)) << u64(32)) | u64(u32(0xFFFFFFFF) - u32(token)))
            token += i32(THREADS)
        for step in (16, 8, 4, 2, 1):
            found = max(found, shuffle_xor_u64(found, u32(step)))
        if thread % i32(32) == i32(0):
            shared[thread // i32(32)] = found
        cuda.syncthreads()
        if thread == i32(0):
            for w in range(1, warps):
                found = max(found, shared[w])
            best[row * i64(chunks) + i64(chunk)] = found
            cuda.threadfence()
            is_last[0] = atomic_inc_acq_rel_u32(address(counters) + u64(row) * u64(4), u32(chunks - 1))
        cuda.syncthreads()
        if is_last[0] == u32(chunks - 1) and thread < i32(32):
            cuda.threadfence()
            found = u64(0)
            c = thread
            while c < i32(chunks):
                found = max(found, best[row * i64(chunks) + i64(c)])
                c += i32(32)
            for step in (16, 8, 4, 2, 1):
                found = max(found, shuffle_xor_u64(found, u32(step)))
            if thread == i32(0):
                token_ids[row] = i32(u64(0xFFFFFFFF) - (found & u64(0xFFFFFFFF)))
                best[row * i64(chunks)] = found  # the row's own, for the kernels that follow

    return argmax


@kernel_factory
def compact_kernel(vocab_size: int, stride: int) -> Kernel:
    chunks = -(-vocab_size // CHUNK)
    warps = THREADS // 32

    @kernel(threads=THREADS, fastmath=False)
    def compact(logits: Pointer(float32), temperature: Pointer(float32), best: Pointer(uint64), candidates: Pointer(uint64),
                counts: Pointer(int32)):
        # candidates[row, chunk, i] = key << 32 | id, in id order
        warp_counts = cuda.shared.array(warps, types.int32)
        row = i64(cuda.blockIdx.y)
        heat = temperature[row]
        if heat == f32(0):
            return
        chunk = i32(cuda.blockIdx.x)
        thread = i32(cuda.threadIdx.x)
        lane = thread % i32(32)
        warp = thread // i32(32)
        maximum = value_of_key(u32(best[row * i64(chunks)] >> u64(32)))
        cutoff = maximum - heat * f32(WEIGHT_BITS / LOG2_E)
        to = (row * i64(chunks) + i64(chunk)) * i64(CHUNK)
        written = i32(0)
        for tile in range(CHUNK // THREADS):
            token = chunk * i32(CHUNK) + i32(tile * THREADS) + thread
            value = float_of_bits(u32(_NEGATIVE_INFINITY))
            if token < i32(vocab_size):
                value = logits[row * i64(stride) + i64(token)]
            kept = token < i32(vocab_size) and value >= cutoff and value > float_of_bits(u32(_NEGATIVE_INFINITY))
            votes = u32(cuda.ballot_sync(u32(FULL_WARP), kept))
            if lane == i32(0):
                warp_counts[warp] = i32(cuda.popc(votes))
            cuda.syncthreads()
            before = written
            for w in range(warps):
                if i32(w) < warp:
                    before += warp_counts[w]
                written += warp_counts[w]
            if kept:
                place = before + i32(cuda.popc(votes & ((u32(1) << u32(lane)) - u32(1))))
                candidates[to + i64(place)] = (u64(ordered_key(value)) << u64(32)) | u64(token)
            cuda.syncthreads()
        if thread == i32(0):
            counts[row * i64(chunks) + i64(chunk)] = written

    return compact


@kernel_factory
def draw_kernel(vocab_size: int) -> Kernel:
    chunks = -(-vocab_size // CHUNK)
    warps = DRAW_THREADS // 32

    @cuda.jit(device=True)
    def select(candidates, counts, row, want, by_mass, low_key, maximum, factor, histogram, chosen):
        """The key at which the running count (or mass) from the top reaches `want`, among candidates with key >= low_key.

        -> (key, count or mass strictly above it). Three passes of 11, 11 and 10 bits from the top.
        """
        thread = i32(cuda.threadIdx.x)
        lane = thread % i32(32)
        prefix = u32(0)
        above = u64(0)
        for digit in range(3):
            shift = u32(21) if digit == 0 else (u32(10) if digit == 1 else u32(0))
            bins = u32(2047) if digit < 2 else u32(1023)
            known = u32(32) if digit == 0 else (u32(21) if digit == 1 else u32(10))
            i = thread
            while i < i32(BINS):
                histogram[i] = u64(0)
                i += i32(DRAW_THREADS)
            cuda.syncthreads()
            c = thread // i32(32)
            while c < i32(chunks):
                count = counts[row * i64(chunks) + i64(c)]
                j = lane
                while j < count:
                    key = u32(candidates[(row * i64(chunks) + i64(c)) * i64(CHUNK) + i64(j)] >> u64(32))
                    matches = digit == 0 or (u64(key) >> u64(known)) == (u64(prefix) >> u64(known))
                    if matches and key >= low_key:
                        amount = u64(1)
                        if by_mass:
                            amount = weight_of(value_of_key(key), maximum, factor)
                        cuda.atomic.add(histogram, i32((key >> shift) & bins), amount)
                    j += i32(32)
                c += i32(warps)
            cuda.syncthreads()
            if thread < i32(32):
                # one warp walks the bins from the top, 32 at a time
                group = i32(BINS // 32 - 1)
                done = i32(0)
                while done == i32(0) and group >= i32(0):
                    bin_ = group * i32(32) + (i32(31) - lane)
                    amount = histogram[bin_]
                    running = amount
                    for step in (1, 2, 4, 8, 16):
                        other = shuffle_up_u64(running, u32(step))
                        if lane >= i32(step):
                            running += other
                    reached = cuda.ballot_sync(u32(FULL_WARP), above + running >= want)
                    if reached != 0:
                        first = i32(cuda.ffs(reached)) - i32(1)
                        before = shuffle_u64(running - amount, u32(first))
                        above += before
                        prefix |= u32(group * i32(32) + (i32(31) - first)) << shift
                        done = i32(1)
                    else:
                        above += shuffle_u64(running, u32(31))
                    group -= i32(1)
                if lane == i32(0):
                    chosen[0] = above
                    chosen[1] = u64(prefix)
            cuda.syncthreads()
            above = chosen[0]
            prefix = u32(chosen[1])
            cuda.syncthreads()
        return prefix, above

    @kernel(threads=DRAW_THREADS, fastmath=False)
    def draw(temperature: Pointer(float32), top_k: Pointer(int32), top_p: Pointer(float32), min_p: Pointer(float32),
             seeds: Pointer(uint64), positions: Pointer(int64), best: Pointer(uint64), candidates: Pointer(uint64),
             counts: Pointer(int32), token_ids: Pointer(int32)):
        histogram = cuda.shared.array(BINS, types.uint64)
        chosen = cuda.shared.array(2, types.uint64)
        chunk_mass = cuda.shared.array(chunks, types.uint64)
        chunk_ties = cuda.shared.array(chunks, types.int32)
        row = i64(cuda.blockIdx.x)
        heat = temperature[row]
        if heat == f32(0):
            return
        thread = i32(cuda.threadIdx.x)
        lane = thread % i32(32)
        maximum = value_of_key(u32(best[row * i64(chunks)] >> u64(32)))
        if not (maximum > float_of_bits(u32(_NEGATIVE_INFINITY)) and maximum < float_of_bits(u32(0x7F800000))):
            return  # the argmax stands: +inf is certain, all -inf or NaN leaves nothing to weigh
        factor = f32(LOG2_E) / heat
        available = i64(0)
        for c in range(chunks):
            available += i64(counts[row * i64(chunks) + i64(c)])

        edge = u32(0)          # the lowest key that is kept, and how many of its ties
        ties = i64(1) << i64(40)
        k = i64(top_k[row])
        if k > i64(0) and k < available:
            edge, above = select(candidates, counts, row, u64(k), False, u32(0), maximum, factor, histogram, chosen)
            ties = k - i64(above)
        if top_p[row] < f32(1):
            total = u64(0)     # of what top_k kept
            edge_weight = weight_of(value_of_key(edge), maximum, factor)
            c = thread // i32(32)
            while c < i32(chunks):
                count = counts[row * i64(chunks) + i64(c)]
                j = lane
                while j < count:
                    key = u32(candidates[(row * i64(chunks) + i64(c)) * i64(CHUNK) + i64(j)] >> u64(32))
                    if key > edge:
                        total += weight_of(value_of_key(key), maximum, factor)
                    j += i32(32)
                c += i32(warps)
            cuda.syncthreads()
            if thread == i32(0):
                chosen[0] = u64(0)
            cuda.syncthreads()
            cuda.atomic.add(chosen, 0, total)
            cuda.syncthreads()
            total = chosen[0]
            cuda.syncthreads()
            if edge > u32(0):
                total += u64(ties) * edge_weight
            want = max(u64(1), u64(types.float64(total) * types.float64(top_p[row])))
            p_edge, p_above = select(candidates, counts, row, want, True, edge, maximum, factor, histogram, chosen)
            p_weight = max(u64(1), weight_of(value_of_key(p_edge), maximum, factor))
            p_ties = i64((want - p_above + p_weight - u64(1)) // p_weight)
            if p_edge != edge or p_ties < ties:
                ties = p_ties
            edge = p_edge
        least = u64(types.float64(min_p[row]) * types.float64(u64(1) << u64(WEIGHT_BITS)))

        # what each chunk keeps above the edge, and its ties at the edge
        c = thread // i32(32)
        while c < i32(chunks):
            count = counts[row * i64(chunks) + i64(c)]
            mass = u64(0)
            equal = i32(0)
            j = lane
            while j < count:
                key = u32(candidates[(row * i64(chunks) + i64(c)) * i64(CHUNK) + i64(j)] >> u64(32))
                if key > edge:
                    weight = weight_of(value_of_key(key), maximum, factor)
                    if weight >= least:
                        mass += weight
                elif key == edge:
                    equal += i32(1)
                j += i32(32)
            for step in (16, 8, 4, 2, 1):
                mass += shuffle_xor_u64(mass, u32(step))
                equal += cuda.shfl_xor_sync(u32(FULL_WARP), equal, step)
            if lane == i32(0):
                chunk_mass[c] = mass
                chunk_ties[c] = equal
            c += i32(warps)
        cuda.syncthreads()
        if thread >= i32(32):
            return
        tie_weight = weight_of(value_of_key(edge), maximum, factor)
        if tie_weight < least:
            tie_weight = u64(0)
        total = u64(0)
        left = ties
        for c in range(chunks):
            kept = min(left, i64(chunk_ties[c]))
            total += chunk_mass[c] + u64(kept) * tie_weight
            left -= kept
        uniform = (types.float64(philox_word(seeds[row], u64(positions[row]))) + 0.5) * 2.0**-32
        target = min(u64(uniform * types.float64(total)), total - u64(1))
        # the chunk that holds the target, then the candidate, in id order
        left = ties
        before = u64(0)
        at = i32(0)
        for c in range(chunks):
            kept = min(left, i64(chunk_ties[c]))
            mass = chunk_mass[c] + u64(kept) * tie_weight
            if before + mass > target:
                at = i32(c)
                break
            before += mass
            left -= kept
        count = counts[row * i64(chunks) + i64(at)]
        base = i32(0)
        while base < count:
            j = base + lane
            entry = u64(0)
            weight = u64(0)
            is_tie = False
            if j < count:
                entry = candidates[(row * i64(chunks) + i64(at)) * i64(CHUNK) + i64(j)]
                key = u32(entry >> u64(32))
                is_tie = key == edge
                if key > edge:
                    weight = weight_of(value_of_key(key), maximum, factor)
                    if weight < least:
                        weight = u64(0)
            tied = u32(cuda.ballot_sync(u32(FULL_WARP), is_tie))
            if is_tie and i64(cuda.popc(tied & ((u32(1) << u32(lane)) - u32(1)))) < left:
                weight = tie_weight
            left = max(i64(0), left - i64(cuda.popc(tied)))
            running = weight
            for step in (1, 2, 4, 8, 16):
                other = shuffle_up_u64(running, u32(step))
                if lane >= i32(step):
                    running += other
            hit = cuda.ballot_sync(u32(FULL_WARP), before + running > target)
            if hit != 0:
                if lane == i32(cuda.ffs(hit)) - i32(1):
                    token_ids[row] = i32(entry & u64(0xFFFFFFFF))
                return
            before += shuffle_u64(running, u32(31))
            base += i32(32)

    return draw


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
    if logits.strides[1] != 1 or work.strides != logits.strides or token_ids.shape != (rows,):
        raise ShapeError(f"logits are {logits.shape}, strides {logits.strides}, work {work.strides}, token_ids "
                         f"{token_ids.shape}; they must be [R, V] of equal strides and [R]")
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
    candidates_bytes = 0 if batch.all_greedy else rows * chunks * CHUNK * 8
    best = runtime.scratch(rows * chunks * 12 + 256 + candidates_bytes)
    counts = best + rows * chunks * 8
    candidates = (counts + rows * chunks * 4 + 255) // 256 * 256
    masked = batch.allowed_mask is not None
    argmax_kernel(vocab, stride, masked).launch((chunks, rows, 1), work, batch.allowed_mask if masked else 0, best, token_ids,
                                                runtime.counters(rows), stream=stream)
    if not batch.all_greedy:
        compact_kernel(vocab, stride).launch((chunks, rows, 1), work, batch.temperature, best, candidates, counts,
                                             stream=stream)
        draw_kernel(vocab).launch(rows, batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds,
                                  batch.positions, best, candidates, counts, token_ids, stream=stream)


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
    yield argmax_kernel(122753, 122760, True)
    yield compact_kernel(vocab, vocab)
    yield draw_kernel(vocab)
    yield count_tokens_kernel(vocab)
