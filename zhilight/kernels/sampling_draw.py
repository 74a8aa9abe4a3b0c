"""Drawing a token from one row of filtered logits, which sampling_survey.py has prepared. See sampling.py."""

from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import float32, int32, int64, uint64
from zhilight.kernels.ptx import (
    FULL_WARP,
    f32,
    float_of_bits,
    i32,
    i64,
    shuffle_u64,
    shuffle_up_u64,
    shuffle_xor_u64,
    u32,
    u64,
)
from zhilight.kernels.sampling_survey import (
    CHUNK,
    LOG2_E,
    NEGATIVE_INFINITY,
    WEIGHT_BITS,
    ordered_key,
    value_of_key,
    weight_of,
)

DRAW_THREADS = 512
PART = CHUNK // DRAW_THREADS
"""Entries of a chunk that one thread of the draw looks at."""
BINS = 256
"""Of one digit of a radix selection."""


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
def draw_kernel(vocab_size: int, stride: int) -> Kernel:
    chunks = -(-vocab_size // CHUNK)
    warps = DRAW_THREADS // 32

    @cuda.jit(device=True)
    def select(candidates, counts, row, want, by_mass, low_key, base, span, maximum, factor, histogram, chosen):
        """The key at which the running count (or mass) from the top reaches `want`, among candidates with key >= low_key.

        -> (key, count or mass strictly above it). Keys lie in base .. base + span: passes of 8 bits from the span's top, so
        that the first one already spreads the candidates.
        """
        thread = i32(cuda.threadIdx.x)
        lane = thread % i32(32)
        remaining = i32(32) - i32(cuda.clz(span))
        prefix = u32(0)
        above = u64(0)
        while remaining > i32(0):
            shift = max(remaining - i32(8), i32(0))
            mask = (u32(1) << u32(remaining - shift)) - u32(1)
            if thread < i32(BINS):
                histogram[thread] = u64(0)
            cuda.syncthreads()
            c = thread // i32(32)
            while c < i32(chunks):
                count = counts[row * i64(chunks) + i64(c)]
                j = lane
                while j < count:
                    key = u32(candidates[(row * i64(chunks) + i64(c)) * i64(CHUNK) + i64(j)] >> u64(32))
                    distance = u64(key - base)
                    if key >= low_key and (distance >> u64(remaining)) == (u64(prefix) >> u64(remaining)):
                        amount = u64(1)
                        if by_mass:
                            amount = weight_of(value_of_key(key), maximum, factor)
                        cuda.atomic.add(histogram, i32(u32(distance >> u64(shift)) & mask), amount)
                    j += i32(32)
                c += i32(warps)
            cuda.syncthreads()
            if thread < i32(32):
                # one warp walks the bins from the top, 32 at a time
                group = i32(BINS // 32 - 1)
                done = i32(0)
                while done == i32(0) and group >= i32(0):
                    amount = histogram[group * i32(32) + (i32(31) - lane)]
                    running = amount
                    for step in (1, 2, 4, 8, 16):
                        other = shuffle_up_u64(running, u32(step))
                        if lane >= i32(step):
                            running += other
                    reached = cuda.ballot_sync(u32(FULL_WARP), above + running >= want)
                    if reached != 0:
                        first = i32(cuda.ffs(reached)) - i32(1)
                        above += shuffle_u64(running - amount, u32(first))
                        prefix |= u32(group * i32(32) + (i32(31) - first)) << u32(shift)
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
            remaining = shift
        cuda.syncthreads()
        return u32(base + prefix), above

    @kernel(threads=DRAW_THREADS, fastmath=False, float64=True)
    def draw(logits: Pointer(float32), temperature: Pointer(float32), top_k: Pointer(int32), top_p: Pointer(float32),
             min_p: Pointer(float32), seeds: Pointer(uint64), positions: Pointer(int64), best: Pointer(uint64),
             masses: Pointer(uint64), cutoffs: Pointer(float32), candidates: Pointer(uint64), counts: Pointer(int32),
             token_ids: Pointer(int32)):
        histogram = cuda.shared.array(BINS, types.uint64)
        chosen = cuda.shared.array(2, types.uint64)
        chunk_mass = cuda.shared.array(chunks, types.uint64)
        chunk_ties = cuda.shared.array(chunks, types.int32)
        warp_mass = cuda.shared.array(warps, types.uint64)
        warp_ties = cuda.shared.array(warps, types.int32)
        row = i64(cuda.blockIdx.x)
        heat = temperature[row]
        if heat == f32(0):
            return
        thread = i32(cuda.threadIdx.x)
        lane = thread % i32(32)
        maximum = value_of_key(u32(best[row * i64(chunks)] >> u64(32)))
        if not (maximum > float_of_bits(u32(NEGATIVE_INFINITY)) and maximum < float_of_bits(u32(0x7F800000))):
            return  # the argmax stands: +inf is certain, all -inf or NaN leaves nothing to weigh
        factor = f32(LOG2_E) / heat
        word = philox_word(seeds[row], u64(positions[row]))
        uniform = (types.float64(word) + 0.5) * 2.0**-32
        filtered = cutoffs[row] > float_of_bits(u32(NEGATIVE_INFINITY))

        edge = u32(0)          # the lowest key that is kept, and how many of its ties
        ties = i64(1) << i64(40)
        least = u64(0)
        if filtered:
            base = ordered_key(cutoffs[row])
            span = u32(ordered_key(maximum) - base)
            available = i64(0)
            total = u64(0)
            for c in range(chunks):
                available += i64(counts[row * i64(chunks) + i64(c)])
                total += masses[row * i64(chunks) + i64(c)]
            k = i64(top_k[row])
            if k > i64(0) and k < available:
                edge, above = select(candidates, counts, row, u64(k), False, u32(0), base, span, maximum, factor, histogram,
                                     chosen)
                ties = k - i64(above)
            if top_p[row] < f32(1):
                if k > i64(0) and k < i64(vocab_size):  # of what top_k kept, not of all
                    kept_mass = u64(0)
                    c = thread // i32(32)
                    while c < i32(chunks):
                        count = counts[row * i64(chunks) + i64(c)]
                        j = lane
                        while j < count:
                            key = u32(candidates[(row * i64(chunks) + i64(c)) * i64(CHUNK) + i64(j)] >> u64(32))
                            if key > edge:
                                kept_mass += weight_of(value_of_key(key), maximum, factor)
                            j += i32(32)
                        c += i32(warps)
                    if thread == i32(0):
                        chosen[0] = u64(0)
                    cuda.syncthreads()
                    cuda.atomic.add(chosen, 0, kept_mass)
                    cuda.syncthreads()
                    total = chosen[0]
                    cuda.syncthreads()
                    if edge > u32(0):
                        total += u64(ties) * weight_of(value_of_key(edge), maximum, factor)
                want = max(u64(1), u64(types.float64(total) * types.float64(top_p[row])))
                p_edge, p_above = select(candidates, counts, row, want, True, edge, base, span, maximum, factor, histogram,
                                         chosen)
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
        else:
            c = thread
            while c < i32(chunks):
                chunk_mass[c] = masses[row * i64(chunks) + i64(c)]
                chunk_ties[c] = i32(0)
                c += i32(DRAW_THREADS)
        cuda.syncthreads()
        tie_weight = weight_of(value_of_key(edge), maximum, factor)
        if tie_weight < least:
            tie_weight = u64(0)
        total = u64(0)
        left = ties
        for c in range(chunks):
            kept = min(left, i64(chunk_ties[c]))
            total += chunk_mass[c] + u64(kept) * tie_weight
            left -= kept
        target = min(u64(uniform * types.float64(total)), total - u64(1))
        # the chunk that holds the target ...
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
        count = min(i32(CHUNK), i32(vocab_size) - at * i32(CHUNK))
        if filtered:
            count = counts[row * i64(chunks) + i64(at)]
        # ... then the thread that does, in id order, and the candidate among its few
        first = thread * i32(PART)
        own = u64(0)
        own_ties = i32(0)
        weights = cuda.local.array(PART, types.uint64)
        marks = cuda.local.array(PART, types.int32)
        for i in range(PART):
            j = first + i32(i)
            weights[i] = u64(0)
            marks[i] = i32(0)
            if j < count:
                if filtered:
                    key = u32(candidates[(row * i64(chunks) + i64(at)) * i64(CHUNK) + i64(j)] >> u64(32))
                    if key > edge:
                        weight = weight_of(value_of_key(key), maximum, factor)
                        if weight >= least:
                            weights[i] = weight
                    elif key == edge:
                        marks[i] = i32(1)
                else:
                    token = at * i32(CHUNK) + j
                    weights[i] = weight_of(logits[row * i64(stride) + i64(token)], maximum, factor)
            own += weights[i]
            own_ties += marks[i]
        running = own
        running_ties = own_ties
        for step in (1, 2, 4, 8, 16):
            other = shuffle_up_u64(running, u32(step))
            other_ties = cuda.shfl_up_sync(u32(FULL_WARP), running_ties, step)
            if lane >= i32(step):
                running += other
                running_ties += other_ties
        if lane == i32(31):
            warp_mass[thread // i32(32)] = running
            warp_ties[thread // i32(32)] = running_ties
        cuda.syncthreads()
        running -= own
        running_ties -= own_ties
        for w in range(warps):
            if i32(w) < thread // i32(32):
                running += warp_mass[w]
                running_ties += warp_ties[w]
        before += running + u64(min(left, i64(running_ties))) * tie_weight
        left -= i64(running_ties)
        for i in range(PART):
            weight = weights[i]
            if marks[i] == i32(1):
                if left > i64(0):
                    weight = tie_weight
                left -= i64(1)
            if before <= target and target < before + weight:
                token = at * i32(CHUNK) + first + i32(i)
                if filtered:
                    place = (row * i64(chunks) + i64(at)) * i64(CHUNK) + i64(first + i32(i))
                    token = i32(candidates[place] & u64(0xFFFFFFFF))
                token_ids[row] = token
            before += weight

    return draw
