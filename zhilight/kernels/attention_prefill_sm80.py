"""Prefill attention over the paged cache with mma.sync: sm_80 and newer.

    out[t, h] = sum_j softmax_j(scale * q[t, h] . k[j, h // G]) v[j, h // G],  j the visible keys of token t

FlashAttention-2 (Dao 2023): a block owns BM queries of one head and walks the keys in tiles of BN, from the last tile
down, with a running maximum and sum a row in float32 and exp2. A warp owns 16 or 32 query rows: with 32, one ldmatrix of K
or V feeds two mma, and shared memory stays below the tensor cores' time. Masks are applied only on tiles that cross the
diagonal, the window's edge or the end of the context.

K and V come 16 bytes a thread with cp.async through the block table. V(j) is loaded under Q K(j), K(j-1) under P V(j); two
blocks an SM hide the rest. Rows in shared memory are padded by 16 bytes, so that ldmatrix has no bank conflicts at any head
size and every address is a constant offset. Values past the context are filled with zeros (stale NaNs must not reach P V).

Arrays: see attention_prefill.py. Grid: query tiles x heads, heads fastest. Forced on one H200, 2026-12-01, head size 128,
2 x 8192, it reached 331 TFLOP/s where FlashAttention-2 (torch) had 337.
"""

from numba import cuda
from numba.cuda import types as numba_types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import DType, int32
from zhilight.kernels.attention_mma import scores_mma, values_mma
from zhilight.kernels.attention_tiles import HIDDEN, LOWEST, cap_score, find_tile
from zhilight.kernels.ptx import (
    FULL_WARP,
    address,
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    exp2_approx,
    f32,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    i64,
    load_shared_v4,
    pack,
    shared_address,
    store_global_v4,
    store_shared_b32,
    u32,
    u64,
)

TILES = {64: (2, 64, 4), 80: (2, 64, 4), 96: (2, 32, 4), 128: (2, 32, 4), 192: (1, 64, 4), 256: (1, 32, 4)}
"""Head size -> (16-row tiles a warp, keys a tile, warps)."""


@kernel_factory
def prefill_sm80_kernel(dtype: DType, head_dim: int, block_size: int, windowed: bool, capped: bool, overlap: bool,
                        row_tiles: int, keys: int, warps: int) -> Kernel:
    """head_dim, block_size, and whether there is a window and a cap, are constants. overlap: dependent launch (sm_90)."""
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
    multiply_scores = scores_mma(dtype, MT, NT, KT, STRIDE, STRIDE)
    multiply_values = values_mma(dtype, MT, PT, DT, STRIDE)
    pack_pair = pack(dtype)
    wait_copies = cp_async_wait(0)

    def key_loader(start, width):
        """Copies 16-byte pieces start .. start + width of each row of a tile: offsets but the first are constants."""
        STEP = THREADS // width

        @cuda.jit(device=True)
        def load(target, source, block_bytes, tables, table_row, first_key, context, tid):
            row = tid // i32(width)
            piece = (i32(start) + tid % i32(width)) * i32(16)
            into = target + u32(row * i32(STRIDE) + piece)
            if P >= BN:
                block = u64(tables[table_row + i64(first_key // i32(P))])
                source += block * block_bytes + u64((first_key % i32(P) + row) * i32(2 * D) + piece)
                if first_key + i32(BN) <= context:
                    for i in range(BN // STEP):
                        cp_async_16(into + u32(i * STEP * STRIDE), source + u64(i * STEP * 2 * D))
                else:
                    for i in range(BN // STEP):
                        size = u32(16) if first_key + row + i32(i * STEP) < context else u32(0)
                        cp_async_16_zfill(into + u32(i * STEP * STRIDE), source + u64(i * STEP * 2 * D), size)
            else:
                for i in range(BN // STEP):
                    key = first_key + row + i32(i * STEP)
                    size = u32(16) if key < context else u32(0)
                    key = min(key, context - i32(1))
                    block = u64(tables[table_row + i64(key // i32(P))])
                    cp_async_16_zfill(into + u32(i * STEP * STRIDE),
                                      source + block * block_bytes + u64(key % i32(P) * i32(2 * D) + piece), size)

        return load

    MAIN = 1 << (CHUNKS.bit_length() - 1)
    load_main = key_loader(0, MAIN)
    load_rest = key_loader(MAIN, CHUNKS - MAIN) if CHUNKS > MAIN else load_main

    @cuda.jit(device=True)
    def load_keys(target, source, block_bytes, tables, table_row, first_key, context, tid):
        load_main(target, source, block_bytes, tables, table_row, first_key, context, tid)
        if CHUNKS > MAIN:
            load_rest(target, source, block_bytes, tables, table_row, first_key, context, tid)

    @kernel(threads=THREADS, min_blocks=2 if SHARED <= 113 * 1024 else 1, shared=SHARED, max_registers=255)
    def prefill_sm80(queries: Pointer(dtype), kv_cache: Pointer(dtype), tables: Pointer(int32), context_lens: Pointer(int32),
                     query_start: Pointer(int32), out: Pointer(dtype), query_stride: i64, out_stride: i64,
                     table_stride: i32, first_sequence: i32, num_sequences: i32, num_heads: i32, num_kv_heads: i32,
                     scale_log2: f32, cap_inner: f32, window: i32):
        memory = shared_address(cuda.shared.array(0, numba_types.uint8))
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & i32(31))
        warp = i32(tid >> i32(5))
        quad_row = i32(lane >> i32(2))
        quad_col = i32((lane & i32(3)) * i32(2))
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

        end_key = min(context, position0 + valid)
        tile = i32((end_key + i32(BN - 1)) // i32(BN) - i32(1))
        first_tile = i32(0)
        if windowed:
            first_tile = i32(max(i32(0), position0 - window + i32(1)) // i32(BN))
        head_bytes = u64(P * D * 2)
        value_bytes = u64(num_kv_heads) * head_bytes
        block_bytes = u64(2) * value_bytes
        k_from = address(kv_cache) + u64(kv_head) * head_bytes
        v_from = k_from + value_bytes
        table_row = i64(sequence) * i64(table_stride)
        k_memory, v_memory = memory + u32(K_OFFSET), memory + u32(V_OFFSET)

        if context > i32(0):
            load_keys(k_memory, k_from, block_bytes, tables, table_row, tile * i32(BN), context, tid)
        cp_async_commit()

        # lane addresses of ldmatrix: A fragments of Q; K rows as B (non-transposed); V rows as B (transposed)
        q_lane = memory + u32((warp * i32(ROWS) + (lane // i32(8)) % i32(2) * i32(8) + lane % i32(8)) * i32(STRIDE)
                              + lane // i32(16) * i32(16))
        k_lane = k_memory + u32((lane // i32(16) * i32(8) + lane % i32(8)) * i32(STRIDE) + (lane // i32(8)) % i32(2) * i32(16))
        v_lane = v_memory + u32(((lane // i32(8)) % i32(2) * i32(8) + lane % i32(8)) * i32(STRIDE) + lane // i32(16) * i32(16))

        acc = cuda.local.array((MT, DT, 4), numba_types.float32)
        s = cuda.local.array((MT, NT, 4), numba_types.float32)
        top = cuda.local.array((MT, 2), numba_types.float32)
        total = cuda.local.array((MT, 2), numba_types.float32)
        for m in range(MT):
            for h in range(2):
                top[m, h] = f32(LOWEST)
                total[m, h] = f32(0)
            for d in range(DT):
                for e in range(4):
                    acc[m, d, e] = f32(0)
        warp_row = i32(position0 + warp * i32(ROWS))
        if context <= i32(0):
            tile = i32(first_tile - i32(1))
            wait_copies()

        while tile >= first_tile:
            first_key = i32(tile * i32(BN))
            wait_copies()
            cuda.syncthreads()
            load_keys(v_memory, v_from, block_bytes, tables, table_row, first_key, context, tid)
            cp_async_commit()

            multiply_scores(s, q_lane, k_lane)

            wait_copies()
            cuda.syncthreads()
            if tile > first_tile:
                load_keys(k_memory, k_from, block_bytes, tables, table_row, first_key - i32(BN), context, tid)
            cp_async_commit()

            if capped:
                for m in range(MT):
                    for n in range(NT):
                        for e in range(4):
                            s[m, n, e] = cap_score(s[m, n, e], cap_inner, f32(1))
            masked = first_key + i32(BN) > warp_row + i32(1)
            if windowed:
                masked = masked or first_key <= warp_row + i32(ROWS - 1) - window
            if masked:
                for m in range(MT):
                    for h in range(2):
                        row = i32(warp_row + i32(16 * m + 8 * h) + quad_row - first_key - quad_col)
                        low = i32(row - window)
                        for n in range(NT):
                            for e in range(2):
                                hidden = i32(8 * n + e) > row
                                if windowed:
                                    hidden = hidden or i32(8 * n + e) <= low
                                if hidden:
                                    s[m, n, 2 * h + e] = f32(HIDDEN)

            for m in range(MT):
                for h in range(2):
                    best = top[m, h]
                    for n in range(NT):
                        best = max(best, max(s[m, n, 2 * h], s[m, n, 2 * h + 1]))
                    best = max(best, cuda.shfl_xor_sync(FULL_WARP, best, 1))
                    best = max(best, cuda.shfl_xor_sync(FULL_WARP, best, 2))
                    shrink = exp2_approx((top[m, h] - best) * scale_log2)
                    top[m, h] = best
                    offset = best * scale_log2
                    sum_ = f32(0)
                    for n in range(NT):
                        for e in range(2):
                            p = exp2_approx(s[m, n, 2 * h + e] * scale_log2 - offset)
                            s[m, n, 2 * h + e] = p
                            sum_ += p
                    total[m, h] = total[m, h] * shrink + sum_
                    for d in range(DT):
                        acc[m, d, 2 * h] *= shrink
                        acc[m, d, 2 * h + 1] *= shrink

            multiply_values(acc, s, v_lane)
            tile = i32(tile - i32(1))

        # a warp stages its own rows in its part of the Q tile, so that rows leave as 16-byte stores
        cuda.syncthreads()
        for m in range(MT):
            for h in range(2):
                sum_ = total[m, h]
                sum_ += cuda.shfl_xor_sync(FULL_WARP, sum_, 1)
                sum_ += cuda.shfl_xor_sync(FULL_WARP, sum_, 2)
                factor = f32(0)
                if sum_ > f32(0):
                    factor = f32(1) / sum_
                row = warp * i32(ROWS) + i32(16 * m + 8 * h) + quad_row
                target = memory + u32(row * i32(STRIDE) + quad_col * i32(2))
                for d in range(DT):
                    store_shared_b32(target + u32(16 * d), pack_pair(acc[m, d, 2 * h] * factor, acc[m, d, 2 * h + 1] * factor))
        cuda.syncwarp()
        o_to = address(out) + (u64(row0 + q0) * u64(out_stride) + u64(head) * u64(D)) * u64(2)
        for i in range(ROWS * CHUNKS // 32):
            index = lane + i32(32 * i)
            row = warp * i32(ROWS) + index // i32(CHUNKS)
            chunk = index % i32(CHUNKS)
            if row < valid:
                v = load_shared_v4(memory + u32(row * i32(STRIDE) + chunk * i32(16)))
                store_global_v4(o_to + u64(row) * u64(out_stride) * u64(2) + u64(chunk * i32(16)), v[0], v[1], v[2], v[3])

    return prefill_sm80

