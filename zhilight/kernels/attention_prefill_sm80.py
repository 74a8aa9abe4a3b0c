"""Prefill attention over the paged cache with mma.sync: sm_80 and newer.

    out[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, h // G])) v[j, h // G],  j the visible keys of token t

Method: FlashAttention-2 (Dao 2023, arXiv:2307.08691). A block owns BM queries of one head and walks the keys in tiles of BN,
from the last tile down, with a running maximum and sum a row in float32 and exp2. A warp owns 16 or 32 query rows: with 32,
one ldmatrix of K or V feeds two mma, and shared memory stays below the tensor cores' time. Masks are applied only on tiles
that cross the diagonal, the window's edge or the end of the context.

Within a tile it departs from the paper: the exponentials of the next 16 keys are made while the tensor cores multiply the
weights of those before by V (attention_mma.py), and the accumulators are rescaled only when a maximum has grown much
(GROWTH). Few values live in registers over a tile, so that 64 keys fit: addresses are made from 32-bit offsets where they are
used, maxima are kept scaled, and what only the end needs waits in the padding of the queries' rows.

K and V come 16 bytes a thread with cp.async through the block table: K and V of the first tile at once, then V(j) under
Q K(j) and K(j-1) under P V(j), with two barriers a tile; two blocks an SM hide the rest. Rows in shared memory are padded by
16 bytes, so that ldmatrix has no bank conflicts at any head size and every address is a constant offset. Values past the
context are filled with zeros (stale NaNs must not reach P V); only the first tile a block takes can hold any.

Arrays: see attention_prefill.py. Grid: query tiles x heads, heads fastest. Shared memory: BM + 2 BN rows of 2 D + 16 bytes.
Operations: 4 D for each visible (query, key) pair and head; bytes: K and V of the visible keys once a query tile and head,
mostly from L2, far below the tensor cores' time.
Reached, forced on one H200, 2026-12-01, causal, bf16, 32 heads over 8, head size 128, pages of 64: 360 TFLOP/s at 2 x 8192 and
269 at 16 x 1024, where FlashAttention-2 (torch) had 324 and 257 in the same run. Ceiling: 456, the best GEMM with mma.sync on
that card (gemm_sm80.py). What was tried: docs/kernels/attention.md.
"""

import functools

from numba import cuda
from numba.cuda import types as numba_types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import DType, int32
from zhilight.errors import ShapeError
from zhilight.kernels.attention_mma import scores_product, softmax_values_product
from zhilight.kernels.attention_tiles import HIDDEN, LOWEST, cap_score, find_tile
from zhilight.kernels.ptx import (
    FULL_WARP,
    address,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    exp2_approx,
    f32,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    i64,
    load_shared_b32,
    load_shared_v4,
    pack,
    ptx,
    shared_address,
    store_global_v4,
    store_shared_b32,
    u32,
    u64,
    void,
)

TILES = {64: (2, 64, 4), 80: (2, 64, 4), 96: (2, 64, 4), 128: (2, 64, 4), 192: (1, 64, 4), 256: (1, 32, 4)}
"""Head size -> (16-row tiles a warp, keys a tile, warps)."""

GROWTH = 8
"""Accumulators and sums are rescaled only when a maximum has grown by more than 2^GROWTH since they last were: after a row's
first tiles hardly ever. Weights are then up to 2^GROWTH, which costs no accuracy: float32 and both 16-bit types keep their
relative precision (float16 ends at 2^16), and the sums share the factor."""


def tiling(head_dim: int, block_size: int, capped: bool) -> tuple[int, int, int]:
    """The entry of TILES, or one of fewer keys where a cap's temporaries would spill."""
    row_tiles, keys, warps = TILES[head_dim]
    if capped and (head_dim == 96 or (head_dim in (128, 192) and block_size == 128)):
        keys = 32
    return row_tiles, keys, warps


@functools.cache
def copy_rows(count: int, shared_step: int, global_step: int):
    """(shared address, array, block, bytes of a block, offset in it): `count` cp.async of 16 bytes, the steps apart.

    The address of the array is a kernel's parameter; it is added here, where it costs no register outside.
    """
    copies = "".join(f"cp.async.cg.shared.global [$0 + {i * shared_step}], [a + {i * global_step}], 16;" for i in range(count))
    return ptx("{ .reg .u64 a, o; cvt.u64.u32 o, $4; mad.wide.u32 a, $2, $3, o; add.u64 a, a, $1;" + copies + "}", void,
               u32, u64, u32, u32, u32)


load_element = ptx("{ .reg .u64 a; mul.wide.u32 a, $2, 4; add.u64 a, a, $1; ld.global.u32 $0, [a]; }", u32, u64, u32)
"""(array, index): as `copy_rows`, one value of 32 bits."""


@kernel_factory
def prefill_sm80_kernel(dtype: DType, head_dim: int, block_size: int, windowed: bool, capped: bool, overlap: bool,
                        row_tiles: int, keys: int, warps: int) -> Kernel:
    """head_dim, block_size, and whether there is a window and a cap, are constants. overlap: dependent launch (sm_90).

    Raises ShapeError when the rows of a tile of keys are no multiple of those that all threads copy at once.
    """
    D, P, BN, MT = head_dim, block_size, keys, row_tiles
    THREADS = 32 * warps
    ROWS = 16 * MT                      # a warp's queries
    BM = ROWS * warps
    STRIDE = 2 * D + 16                 # bytes of a row in shared memory
    CHUNKS = D // 8                     # 16-byte pieces of a row
    K_OFFSET = BM * STRIDE
    V_OFFSET = K_OFFSET + BN * STRIDE
    SHARED = V_OFFSET + BN * STRIDE
    Q_COPIES = BM * CHUNKS // THREADS
    NT, KT, DT, PT = BN // 8, D // 16, D // 8, BN // 16
    multiply_scores = scores_product(dtype, MT, NT, KT, STRIDE, K_OFFSET)
    multiply_values = softmax_values_product(dtype, MT, PT, DT, STRIDE, V_OFFSET)
    READS_AHEAD = P >= BN and not windowed      # a window's registers leave none for the block ids of tiles to come
    pack_pair = pack(dtype)
    wait_copies = cp_async_wait(0)

    def loader(start, width):
        """Copies 16-byte pieces start .. start + width of each row of a tile; two functions: any tile, and whole tiles."""
        STEP = THREADS // width         # rows that all threads copy at once
        if BN % STEP:
            raise ShapeError(f"{THREADS} threads copy {STEP} rows of {width} pieces at once: {BN} keys are no multiple of it.")
        PAGE = min(P, BN)               # rows of a tile in one page
        SIMPLE = STEP <= PAGE           # then a thread's n-th row is in the same page as every thread's n-th
        COPIES = PAGE // STEP if SIMPLE else 1
        copy_page = copy_rows(COPIES, STEP * STRIDE, STEP * 2 * D)

        @cuda.jit(device=True)
        def load_any(target, cache, offset, block_bytes, tables, table_row, first_key, context, tid):
            row = i32(tid // i32(width))
            piece = i32((i32(start) + tid % i32(width)) * i32(16))
            into = target + u32(row * i32(STRIDE) + piece)
            for i in range(BN // STEP):
                key = first_key + row + i32(i * STEP)
                size = u32(16) if key < context else u32(0)
                key = min(key, context - i32(1))
                block = u64(load_element(tables, table_row + u32(key // i32(P))))
                source = cache + block * u64(block_bytes) + u64(offset + u32(key % i32(P) * i32(2 * D) + piece))
                cp_async_16_zfill(into + u32(i * STEP * STRIDE), source, size)

        @cuda.jit(device=True)
        def load_whole(target, cache, offset, block_bytes, tables, table_row, page, first_key, tid):
            row = i32(tid // i32(width))
            piece = i32((i32(start) + tid % i32(width)) * i32(16))
            if SIMPLE:
                offset = u32(offset + (row + first_key % i32(P)) * i32(2 * D) + piece)
                into = u32(target + row * i32(STRIDE) + piece)
                for i in range(BN // PAGE):
                    block = page if READS_AHEAD else load_element(tables, table_row + u32(first_key // i32(P) + i32(i)))
                    copy_page(into + u32(i * PAGE * STRIDE), cache, block, block_bytes, offset)
            else:
                load_any(target, cache, offset, block_bytes, tables, table_row, first_key, i32(first_key + i32(BN)), tid)

        return load_any, load_whole

    MAIN = 1 << (CHUNKS.bit_length() - 1)
    any_main, whole_main = loader(0, MAIN)
    any_rest, whole_rest = loader(MAIN, CHUNKS - MAIN) if CHUNKS > MAIN else (any_main, whole_main)

    @cuda.jit(device=True)
    def load_any(target, cache, offset, block_bytes, tables, table_row, first_key, context, tid):
        any_main(target, cache, offset, block_bytes, tables, table_row, first_key, context, tid)
        if CHUNKS > MAIN:
            any_rest(target, cache, offset, block_bytes, tables, table_row, first_key, context, tid)

    @cuda.jit(device=True)
    def load_whole(target, cache, offset, block_bytes, tables, table_row, page, first_key, tid):
        whole_main(target, cache, offset, block_bytes, tables, table_row, page, first_key, tid)
        if CHUNKS > MAIN:
            whole_rest(target, cache, offset, block_bytes, tables, table_row, page, first_key, tid)

    @cuda.jit(device=True)
    def page_of(tables, table_row, first_key):
        """The block of a whole tile, read long before it is used; without READS_AHEAD it is read when the tile is loaded."""
        return load_element(tables, table_row + u32(max(first_key, i32(0)) // i32(P))) if READS_AHEAD else u32(0)

    @cuda.jit(device=True)
    def cap_and_mask(s, first_key, warp_row, lane, cap_inner, window):
        if capped:
            for m in range(MT):
                for n in range(NT):
                    for e in range(4):
                        s[m, n, e] = cap_score(s[m, n, e], cap_inner, f32(1))
        ahead = i32(warp_row - first_key)       # of the warp's first row, from the tile's first key
        masked = ahead < i32(BN - 1)
        if windowed:
            masked = masked or ahead > i32(window - i32(ROWS))
        if masked:
            row0 = i32(ahead + (lane >> i32(2)) - (lane & i32(3)) * i32(2))
            for m in range(MT):
                for h in range(2):
                    row = i32(row0 + i32(16 * m + 8 * h))
                    low = i32(row - window)
                    for n in range(NT):
                        for e in range(2):
                            hidden = i32(8 * n + e) > row
                            if windowed:
                                hidden = hidden or i32(8 * n + e) <= low
                            if hidden:
                                s[m, n, 2 * h + e] = f32(HIDDEN)

    @kernel(threads=THREADS, min_blocks=2 if SHARED <= 113 * 1024 and THREADS <= 128 else 1, shared=SHARED,
            max_registers=255)
    def prefill_sm80(queries: Pointer(dtype), kv_cache: Pointer(dtype), tables: Pointer(int32), context_lens: Pointer(int32),
                     query_start: Pointer(int32), out: Pointer(dtype), query_stride: i64, out_stride: i64,
                     table_stride: i32, first_sequence: i32, num_sequences: i32, num_heads: i32, num_kv_heads: i32,
                     scale_log2: f32, cap_inner: f32, window: i32):
        memory = shared_address(cuda.shared.array(0, numba_types.uint8))
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & i32(31))
        warp = i32(tid >> i32(5))
        if overlap:
            grid_dependency_launch()
            grid_dependency_wait()

        block_index = i32(cuda.blockIdx.x)
        head = i32(block_index % num_heads)
        sequence, from_end, tiles = find_tile(query_start, first_sequence, num_sequences, block_index // num_heads, i32(BM),
                                              lane)
        if sequence < i32(0):
            return
        row0 = query_start[sequence]
        length = i32(query_start[sequence + i32(1)] - row0)
        context = context_lens[sequence]
        q0 = i32((tiles - i32(1) - from_end) * i32(BM))     # first query of the tile, in the sequence
        position0 = i32(context - length + q0)              # and its position in the context
        valid = i32(min(length - q0, i32(BM)))
        kv_head = i32(head // (num_heads // num_kv_heads))

        # queries, 16 bytes a thread; rows past the end are zeros
        q_from = address(queries) + (u64(row0 + q0) * u64(query_stride) + u64(head) * u64(D)) * u64(2)
        for i in range(Q_COPIES):
            index = tid + i32(i * THREADS)
            row = index // i32(CHUNKS)
            chunk = index - row * i32(CHUNKS)
            size = u32(16)
            if row >= valid:
                size = u32(0)
            source = q_from + u64(min(row, valid - i32(1))) * u64(query_stride) * u64(2) + u64(chunk * i32(16))
            cp_async_16_zfill(memory + u32(row * i32(STRIDE) + chunk * i32(16)), source, size)
        if tid == i32(0):  # in the padding of row 0, for the end
            store_shared_b32(memory + u32(2 * D), u32(row0 + q0))
            store_shared_b32(memory + u32(2 * D + 4), u32(valid))

        end_key = min(context, position0 + valid)
        tile = i32((end_key + i32(BN - 1)) // i32(BN) - i32(1))
        first_tile = i32(0)
        if windowed:
            first_tile = i32(max(i32(0), position0 - window + i32(1)) // i32(BN))
        block_bytes = u32(num_kv_heads) * u32(4 * P * D)
        cache, table = address(kv_cache), address(tables)
        k_from = u32(kv_head) * u32(2 * P * D)           # of this head, in a block of the cache
        v_from = u32(k_from + u32(num_kv_heads) * u32(2 * P * D))
        table_row = u32(sequence * table_stride)
        k_memory, v_memory = memory + u32(K_OFFSET), memory + u32(V_OFFSET)

        page = u32(0)                   # block of the tile to load next
        if context > i32(0):
            last = i32(tile * i32(BN))
            load_any(k_memory, cache, k_from, block_bytes, table, table_row, last, context, tid)
            load_any(v_memory, cache, v_from, block_bytes, table, table_row, last, context, tid)
        cp_async_commit()

        # lane addresses of ldmatrix: A fragments of Q; K rows (not transposed) and V rows (transposed)
        k_lane = u32(memory + u32((lane // i32(16) * i32(8) + lane % i32(8)) * i32(STRIDE) + lane // i32(8) % i32(2) * i32(16)))
        v_lane = u32(memory + u32((lane // i32(8) % i32(2) * i32(8) + lane % i32(8)) * i32(STRIDE) + lane // i32(16) * i32(16)))
        q_lane = u32(v_lane + u32(warp * i32(ROWS * STRIDE)))

        acc = cuda.local.array((MT, DT, 4), numba_types.float32)
        s = cuda.local.array((MT, NT, 4), numba_types.float32)
        top = cuda.local.array((MT, 2), numba_types.float32)
        total = cuda.local.array((MT, 2), numba_types.float32)
        best = cuda.local.array((MT, 2), numba_types.float32)
        for m in range(MT):
            for h in range(2):
                top[m, h] = f32(LOWEST) * scale_log2
                total[m, h] = f32(0)
            for d in range(DT):
                for e in range(4):
                    acc[m, d, e] = f32(0)
        warp_row = i32(position0 + warp * i32(ROWS))
        fresh = True                    # V of the first tile has come with K
        wait_copies()
        cuda.syncthreads()
        if context <= i32(0):
            tile = i32(first_tile - i32(1))

        while tile >= first_tile:
            first_key = i32(tile * i32(BN))
            before = i32(first_key - i32(BN))
            if not fresh:
                wait_copies()
                cuda.syncthreads()
                load_whole(v_memory, cache, v_from, block_bytes, table, table_row, page, first_key, tid)
            fresh = False
            page = page_of(table, table_row, before)
            cp_async_commit()

            multiply_scores(s, q_lane, k_lane)

            wait_copies()
            cuda.syncthreads()
            if tile > first_tile:
                load_whole(k_memory, cache, k_from, block_bytes, table, table_row, page, before, tid)
            cp_async_commit()

            cap_and_mask(s, first_key, warp_row, lane, cap_inner, window)
            for m in range(MT):
                for h in range(2):
                    most = f32(HIDDEN)
                    for n in range(NT):
                        most = max(most, max(s[m, n, 2 * h], s[m, n, 2 * h + 1]))
                    most = max(most, cuda.shfl_xor_sync(FULL_WARP, most, 1))
                    best[m, h] = max(most, cuda.shfl_xor_sync(FULL_WARP, most, 2))
            grown = False
            for m in range(MT):
                for h in range(2):
                    grown = grown or best[m, h] * scale_log2 - top[m, h] > f32(GROWTH)
            if cuda.ballot_sync(FULL_WARP, grown) != 0:
                for m in range(MT):
                    for h in range(2):
                        most = max(top[m, h], best[m, h] * scale_log2)
                        shrink = exp2_approx(top[m, h] - most)
                        top[m, h] = most
                        total[m, h] *= shrink
                        for d in range(DT):
                            acc[m, d, 2 * h] *= shrink
                            acc[m, d, 2 * h + 1] *= shrink
            multiply_values(acc, total, s, top, scale_log2, v_lane)
            tile = i32(tile - i32(1))

        # a warp stages its own rows in its part of the Q tile, so that rows leave as 16-byte stores
        cuda.syncthreads()
        first_row = load_shared_b32(memory + u32(2 * D))
        valid_rows = i32(load_shared_b32(memory + u32(2 * D + 4)))
        for m in range(MT):
            for h in range(2):
                sum_ = total[m, h]
                sum_ += cuda.shfl_xor_sync(FULL_WARP, sum_, 1)
                sum_ += cuda.shfl_xor_sync(FULL_WARP, sum_, 2)
                factor = f32(0)
                if sum_ > f32(0):
                    factor = f32(1) / sum_
                row = warp * i32(ROWS) + i32(16 * m + 8 * h) + (lane >> i32(2))
                target = memory + u32(row * i32(STRIDE) + (lane & i32(3)) * i32(4))
                for d in range(DT):
                    store_shared_b32(target + u32(16 * d), pack_pair(acc[m, d, 2 * h] * factor, acc[m, d, 2 * h + 1] * factor))
        cuda.syncwarp()
        last_head = u64(i32(cuda.blockIdx.x) % num_heads)
        o_to = address(out) + (u64(first_row) * u64(out_stride) + last_head * u64(D)) * u64(2)
        for i in range(ROWS * CHUNKS // 32):
            index = lane + i32(32 * i)
            row = warp * i32(ROWS) + index // i32(CHUNKS)
            chunk = index % i32(CHUNKS)
            if row < valid_rows:
                v = load_shared_v4(memory + u32(row * i32(STRIDE) + chunk * i32(16)))
                store_global_v4(o_to + u64(row) * u64(out_stride) * u64(2) + u64(chunk * i32(16)), v[0], v[1], v[2], v[3])

    return prefill_sm80
