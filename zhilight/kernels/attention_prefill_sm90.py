"""Prefill attention over the paged cache with wgmma and the bulk copy engine: Hopper.

The formula and the arrays are those of attention_prefill.py. Method: FlashAttention-3 (Shah et al. 2024). A block is one
producer warp and WARPGROUPS consumer warpgroups of 64 query rows each, one block an SM, and takes (query tile, head) pairs
from a ticket counter, longest first within a sequence, until none is left.

The producer copies pages of K and V straight from the cache into a ring of stages: the layer's cache is a matrix [blocks * 2 *
Hkv * P, D], and each lane copies one page (or the part of it in the tile) of 64 columns, so that a tile of any page size
is one step. It also decodes the next ticket and posts it, two tiles ahead of the consumers.

A consumer keeps scores, weights and accumulator in registers. While the tensor cores multiply the weights of tile j by V, and
Q by K of tile j - 1, it computes the softmax of tile j - 1; and two named barriers let the warpgroups issue in turns, so that
one's softmax runs under the other's products. The next tile's Q is copied (cp.async) as soon as the last product with Q is
done, under the last P V and the stores.

Values of V past the context are overwritten with zeros in shared memory: the cache may hold NaN there.

Reached on one H200, 2026-12-01, 32 heads over 8, head size 128, pages of 64, 16384 tokens a batch, beside cuDNN in the same run
(TFLOP/s, bench/kernels/attention_prefill.py): S = 512 368 (377), 1024 497 (473), 2048 594 (551), 4096 655 (608), 8192 686
(640), 16384 700 (668).
"""

from numba import cuda
from numba.cuda import types as numba_types

from zhilight.driver.compiler import Kernel, Pointer, TensorMap, kernel, kernel_factory
from zhilight.driver.dtype import DType, int32, uint32
from zhilight.kernels import attention_wgmma as wg
from zhilight.kernels.attention_tiles import LOWEST, find_tile
from zhilight.kernels.ptx import (
    FULL_WARP,
    address,
    atomic_inc_acq_rel_u32,
    bulk_load_2d,
    cp_async_16,
    cp_async_commit,
    cp_async_wait,
    f32,
    fence_async_shared,
    fence_mbarrier_init,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    i64,
    load_shared_b32,
    load_shared_v4,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_init,
    mbarrier_wait,
    named_barrier,
    named_barrier_arrive,
    prefetch_tensor_map,
    set_max_registers,
    shared_address,
    store_global_v4,
    store_shared_v4,
    u32,
    u64,
)

TILES = {64: (2, 128, 2), 80: (2, 128, 2), 96: (2, 128, 2), 128: (2, 128, 2), 192: (2, 64, 2), 256: (2, 64, 2)}
"""Head size -> (consumer warpgroups, keys a tile, stages)."""
POSTS = 4
"""Slots of the ring of decoded tickets."""
POST_WORDS = 8
"""A ticket: first row of q and out, valid rows (-1: no more work), position of the first row, context, first and last tile of
keys, head, unused."""


@kernel_factory
def prefill_sm90_kernel(dtype: DType, head_dim: int, block_size: int, windowed: bool, capped: bool, overlap: bool,
                        warpgroups: int, keys: int, stages: int) -> Kernel:
    """head_dim, block_size, and whether there is a window and a cap, are constants. overlap: dependent launch."""
    D, P, BN, GROUPS, STAGES = head_dim, block_size, keys, warpgroups, stages
    THREADS = 128 * (GROUPS + 1)
    BM = 64 * GROUPS
    HALVES = -(-D // 64)                                    # of 64 columns; the last one's rest is zeros
    STEPS, PIECES = D // 16, D // 8
    SCORES, VALUES, WEIGHTS = BN // 2, D // 2, BN // 4      # registers of a thread
    LOG_STAGES, LOG_POSTS = STAGES.bit_length() - 1, POSTS.bit_length() - 1
    PAGE_ROWS = min(P, BN)                                  # rows of a page in one tile
    PAGES = BN // PAGE_ROWS
    COPIES = PAGES * HALVES                                 # lanes that copy
    Q_HALF, KV_HALF = BM * 128, BN * 128
    Q_BYTES, TILE_BYTES = HALVES * Q_HALF, HALVES * KV_HALF
    SEPARATE = D <= 128                                     # room to stage the output beside the next Q
    K_OFFSET = Q_BYTES * (2 if SEPARATE else 1)
    V_OFFSET = K_OFFSET + STAGES * TILE_BYTES
    BARRIERS = V_OFFSET + STAGES * TILE_BYTES
    K_FULL, K_EMPTY, V_FULL, V_EMPTY = (BARRIERS + 8 * STAGES * i for i in range(4))
    POST_FULL = BARRIERS + 32 * STAGES
    POST_EMPTY = POST_FULL + 8 * POSTS
    POST = POST_EMPTY + 8 * POSTS
    SHARED = POST + 4 * POSTS * POST_WORDS + 1024           # and the base rounded up to 1024
    more_registers = set_max_registers(224 if GROUPS == 2 else 160, True)
    fewer_registers = set_max_registers(56 if GROUPS == 2 else 32, False)
    issue_scores = wg.issue_scores(dtype, BN, STEPS, Q_HALF, KV_HALF)
    issue_values = wg.issue_values(dtype, D, BN // 16)
    scores_done = wg.wait_scores(BN, 0)
    scores_ready = wg.wait_scores(BN, 1)
    values_ready = wg.wait_values(D, BN // 16)
    softmax_step, mask_scores, cap_scores = wg.softmax_step(BN), wg.mask_scores(BN, windowed), wg.cap_scores(BN)
    pack_weights, scale_values, clear_values = wg.pack_weights(dtype, BN), wg.scale_values(D), wg.clear_values(D)
    stage_values = wg.stage_values(dtype, D, Q_HALF)
    key_descriptor, value_descriptor = wg.tile_descriptor(1024), wg.tile_descriptor(1024, KV_HALF)
    wait_copies = cp_async_wait(0)

    @cuda.jit(device=True)
    def post_ticket(memory, ticket, number, tickets, query_start, context_lens, first_sequence, num_sequences, num_heads,
                    window, lane):
        """Decode a ticket and post it as entry `number`; (sequence, head, context, first tile, last tile)."""
        slot = u32(number & i32(POSTS - 1))
        mbarrier_wait(memory + u32(POST_EMPTY) + slot * u32(8), (u32(number >> i32(LOG_POSTS)) & u32(1)) ^ u32(1))
        at = memory + u32(POST) + slot * u32(4 * POST_WORDS)
        head = i32(ticket % num_heads)
        sequence = i32(-1)
        from_end = i32(0)
        tiles = i32(0)
        if ticket < tickets:
            sequence, from_end, tiles = find_tile(query_start, first_sequence, num_sequences, ticket // num_heads, i32(BM),
                                                  lane)
        context = i32(0)
        first = i32(0)
        last = i32(-1)
        if sequence >= i32(0):
            start = query_start[sequence]
            length = i32(query_start[sequence + i32(1)] - start)
            context = context_lens[sequence]
            row = i32((tiles - i32(1) - from_end) * i32(BM))
            position = i32(context - length + row)
            valid = i32(min(length - row, i32(BM)))
            if context > i32(0):
                last = i32((min(context, position + valid) + i32(BN - 1)) // i32(BN) - i32(1))
                if windowed:
                    first = i32(max(i32(0), position - window + i32(1)) // i32(BN))
            if lane == i32(0):
                store_shared_v4(at, u32(start + row), u32(valid), u32(position), u32(context))
                store_shared_v4(at + u32(16), u32(first), u32(last), u32(head), u32(0))
        elif lane == i32(0):
            store_shared_v4(at, u32(0), u32(i32(-1)), u32(0), u32(0))
        if lane == i32(0):
            mbarrier_arrive(memory + u32(POST_FULL) + slot * u32(8))
        return sequence, head, context, first, last

    @cuda.jit(device=True)
    def load_queries(target, source, stride_bytes, valid, thread):
        """A warpgroup's 64 rows of Q, each warp its own 16, 16 bytes a lane; rows past the end repeat the last one."""
        for i in range(16 * PIECES // 32):
            index = (thread & i32(31)) + i32(32 * i)
            row = index // i32(PIECES)
            piece = index - row * i32(PIECES)
            row += (thread >> i32(5)) * i32(16)
            into = target + u32(piece // i32(8) * i32(Q_HALF) + row * i32(128) + ((piece ^ row) & i32(7)) * i32(16))
            cp_async_16(into, source + u64(min(row, valid - i32(1))) * stride_bytes + u64(piece * i32(16)))
        cp_async_commit()

    @kernel(threads=THREADS, min_blocks=1, shared=SHARED, min_capability=(9, 0, "a"), max_registers=168 if GROUPS == 2 else 128)
    def prefill_sm90(kv_map: TensorMap, queries: Pointer(dtype), tables: Pointer(int32), context_lens: Pointer(int32),
                     query_start: Pointer(int32), out: Pointer(dtype), counter: Pointer(uint32), query_stride: i64,
                     out_stride: i64, table_stride: i32, first_sequence: i32, num_sequences: i32, num_heads: i32,
                     num_kv_heads: i32, tickets: i32, scale_log2: f32, cap_inner: f32, window: i32):
        memory = (shared_address(cuda.shared.array(0, numba_types.uint8)) + u32(1023)) & u32(0xFFFFFC00)
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & i32(31))
        group = i32(tid >> i32(7))
        if tid == i32(0):
            for s in range(STAGES):
                mbarrier_init(memory + u32(K_FULL + 8 * s), u32(1))
                mbarrier_init(memory + u32(V_FULL + 8 * s), u32(1))
                mbarrier_init(memory + u32(K_EMPTY + 8 * s), u32(GROUPS))
                mbarrier_init(memory + u32(V_EMPTY + 8 * s), u32(GROUPS))
            for s in range(POSTS):
                mbarrier_init(memory + u32(POST_FULL + 8 * s), u32(1))
                mbarrier_init(memory + u32(POST_EMPTY + 8 * s), u32(GROUPS))
            fence_mbarrier_init()
            prefetch_tensor_map(kv_map)
        cuda.syncthreads()
        if overlap:
            grid_dependency_launch()
            grid_dependency_wait()

        if group == i32(GROUPS):
            fewer_registers()
            if tid < i32(128 * GROUPS + 32):
                ticket = i32(cuda.blockIdx.x)
                number = i32(0)
                loaded = i32(0)                             # tiles of K so far
                sequence, head, context, first, last = post_ticket(
                    memory, ticket, number, tickets, query_start, context_lens, first_sequence, num_sequences, num_heads,
                    window, lane)
                page_lane = i32(lane // i32(HALVES))
                column = i32((lane % i32(HALVES)) * i32(64))
                into = u32(lane % i32(HALVES) * i32(KV_HALF) + page_lane * i32(PAGE_ROWS * 128))
                while sequence >= i32(0):
                    next_sequence = i32(-1)
                    next_head = i32(0)
                    next_context = i32(0)
                    next_first = i32(0)
                    next_last = i32(-1)
                    kv_head = i32(head // (num_heads // num_kv_heads))
                    table_row = i64(sequence) * i64(table_stride)
                    steps = i32(last - first + i32(1))
                    row = i32(0)
                    value_row = i32(0)
                    step = i32(0)
                    while step <= steps:
                        # V of the tile before last, then K of this one
                        if step < steps:
                            value_row_next = row
                            key = i32((last - step) * i32(BN) + page_lane * i32(PAGE_ROWS))
                            key = i32(min(key, context - i32(1)))
                            block = tables[table_row + i64(key // i32(P))]
                            offset = i32(0)
                            if P > BN:
                                offset = i32((last - step) * i32(BN) % i32(P))
                            row = i32((block * i32(2) * num_kv_heads + kv_head) * i32(P) + offset)
                            stage = u32(loaded + step) & u32(STAGES - 1)
                            turn = u32((loaded + step) >> i32(LOG_STAGES)) & u32(1)
                            mbarrier_wait(memory + u32(K_EMPTY) + stage * u32(8), turn ^ u32(1))
                            bar = memory + u32(K_FULL) + stage * u32(8)
                            if lane == i32(0):
                                mbarrier_expect(bar, u32(TILE_BYTES))
                            cuda.syncwarp()
                            if lane < i32(COPIES):
                                bulk_load_2d(memory + u32(K_OFFSET) + stage * u32(TILE_BYTES) + into, kv_map, bar, column, row)
                            value_row = value_row_next
                        else:
                            value_row = row
                        if step > i32(0):
                            stage = u32(loaded + step - i32(1)) & u32(STAGES - 1)
                            turn = u32((loaded + step - i32(1)) >> i32(LOG_STAGES)) & u32(1)
                            mbarrier_wait(memory + u32(V_EMPTY) + stage * u32(8), turn ^ u32(1))
                            bar = memory + u32(V_FULL) + stage * u32(8)
                            if lane == i32(0):
                                mbarrier_expect(bar, u32(TILE_BYTES))
                            cuda.syncwarp()
                            if lane < i32(COPIES):
                                bulk_load_2d(memory + u32(V_OFFSET) + stage * u32(TILE_BYTES) + into, kv_map, bar, column,
                                             value_row + num_kv_heads * i32(P))
                        if step == min(i32(1), steps):
                            # the next ticket, while the ring is full
                            drawn = i32(0)
                            if lane == i32(0):
                                drawn = i32(atomic_inc_acq_rel_u32(address(counter), u32(tickets - i32(1))))
                            ticket = i32(cuda.shfl_sync(FULL_WARP, drawn, 0) + i32(cuda.gridDim.x))
                            number = i32(number + i32(1))
                            next_sequence, next_head, next_context, next_first, next_last = post_ticket(
                                memory, ticket, number, tickets, query_start, context_lens, first_sequence, num_sequences,
                                num_heads, window, lane)
                        step = i32(step + i32(1))
                    loaded = i32(loaded + steps)
                    sequence = next_sequence
                    head = next_head
                    context = next_context
                    first = next_first
                    last = next_last
        else:
            more_registers()
            thread = i32(tid & i32(127))
            warp = i32(thread >> i32(5))
            quad_row = i32(lane >> i32(2))
            quad_col = i32((lane & i32(3)) * i32(2))
            s = cuda.local.array(SCORES, numba_types.float32)
            acc = cuda.local.array(VALUES, numba_types.float32)
            weights = cuda.local.array(WEIGHTS, numba_types.uint32)
            top = cuda.local.array(2, numba_types.float32)
            total = cuda.local.array(2, numba_types.float32)
            q_memory = memory + u32(group * i32(64 * 128))
            o_memory = q_memory + u32(Q_BYTES if SEPARATE else 0)
            q_desc = key_descriptor(q_memory)
            k_desc = key_descriptor(memory + u32(K_OFFSET))
            v_desc = value_descriptor(memory + u32(V_OFFSET))
            query_bytes = u64(query_stride) * u64(2)
            if GROUPS == 2 and group == i32(1):
                named_barrier_arrive(u32(1), u32(256))      # the first turn is warpgroup 0's
            number = i32(0)
            used = i32(0)                                   # tiles of K and V so far
            mbarrier_wait(memory + u32(POST_FULL), u32(0))
            at = memory + u32(POST)
            row0 = i32(i32(load_shared_b32(at)) + group * i32(64))
            valid = i32(i32(load_shared_b32(at + u32(4))) - group * i32(64))
            position = i32(i32(load_shared_b32(at + u32(8))) + group * i32(64))
            context = i32(load_shared_b32(at + u32(12)))
            first = i32(load_shared_b32(at + u32(16)))
            last = i32(load_shared_b32(at + u32(20)))
            head = i32(load_shared_b32(at + u32(24)))
            more = i32(load_shared_b32(at + u32(4))) >= i32(0)
            if more and valid > i32(0):
                load_queries(q_memory, address(queries) + u64(row0) * query_bytes + u64(head * i32(2 * D)), query_bytes,
                             valid, thread)
            while more:
                wait_copies()
                fence_async_shared()
                named_barrier(u32(4) + u32(group), u32(128))
                if thread == i32(0):
                    mbarrier_arrive(memory + u32(POST_EMPTY) + u32(number & i32(POSTS - 1)) * u32(8))
                number = i32(number + i32(1))
                clear_values(acc)
                for h in range(2):
                    top[h] = f32(LOWEST)
                    total[h] = f32(0)
                row = i32(position + warp * i32(16) + quad_row)          # position of row g; row g + 8 follows
                tile = last
                if tile >= first:
                    stage = i32(used & i32(STAGES - 1))
                    mbarrier_wait(memory + u32(K_FULL) + u32(stage * i32(8)), u32(used >> i32(LOG_STAGES)) & u32(1))
                    issue_scores(s, q_desc, k_desc + u64(stage * i32(TILE_BYTES >> 4)))
                    scores_done(s)
                    if thread == i32(0):
                        mbarrier_arrive(memory + u32(K_EMPTY) + u32(stage * i32(8)))
                    if capped:
                        cap_scores(s, cap_inner)
                    last_column = i32(row - tile * i32(BN) - quad_col)
                    mask_scores(s, last_column, i32(last_column + i32(8)), window)
                    softmax_step(s, top, total, scale_log2)
                    pack_weights(weights, s)
                    if (tile + i32(1)) * i32(BN) > context:
                        # rows of V past the context may hold anything: zeros instead
                        mbarrier_wait(memory + u32(V_FULL) + u32(stage * i32(8)), u32(used >> i32(LOG_STAGES)) & u32(1))
                        fill = i32(context - tile * i32(BN) + (thread >> i32(3)))
                        while fill < i32(BN):
                            for half in range(HALVES):
                                store_shared_v4(memory + u32(V_OFFSET + half * KV_HALF) + u32(stage * i32(TILE_BYTES))
                                                + u32(fill * i32(128) + (thread & i32(7)) * i32(16)),
                                                u32(0), u32(0), u32(0), u32(0))
                            fill = i32(fill + i32(16))
                        fence_async_shared()
                        named_barrier(u32(4) + u32(group), u32(128))
                    tile = i32(tile - i32(1))
                    while tile >= first:
                        old = stage
                        old_turn = u32(used >> i32(LOG_STAGES)) & u32(1)
                        used = i32(used + i32(1))
                        stage = i32(used & i32(STAGES - 1))
                        mbarrier_wait(memory + u32(K_FULL) + u32(stage * i32(8)), u32(used >> i32(LOG_STAGES)) & u32(1))
                        if GROUPS == 2:
                            named_barrier(u32(1) + u32(group), u32(256))
                        issue_scores(s, q_desc, k_desc + u64(stage * i32(TILE_BYTES >> 4)))
                        mbarrier_wait(memory + u32(V_FULL) + u32(old * i32(8)), old_turn)
                        issue_values(acc, weights, v_desc + u64(old * i32(TILE_BYTES >> 4)))
                        if GROUPS == 2:
                            named_barrier_arrive(u32(2) - u32(group), u32(256))
                        scores_ready(s)
                        if thread == i32(0):
                            mbarrier_arrive(memory + u32(K_EMPTY) + u32(stage * i32(8)))
                        if capped:
                            cap_scores(s, cap_inner)
                        masked = tile * i32(BN) + i32(BN - 1) > position
                        if windowed:
                            masked = masked or tile * i32(BN) <= position + i32(63) - window
                        if masked:
                            last_column = i32(row - tile * i32(BN) - quad_col)
                            mask_scores(s, last_column, i32(last_column + i32(8)), window)
                        shrink = softmax_step(s, top, total, scale_log2)
                        values_ready(acc, weights)
                        if thread == i32(0):
                            mbarrier_arrive(memory + u32(V_EMPTY) + u32(old * i32(8)))
                        scale_values(acc, shrink[0], shrink[1])
                        pack_weights(weights, s)
                        tile = i32(tile - i32(1))
                    mbarrier_wait(memory + u32(V_FULL) + u32(stage * i32(8)), u32(used >> i32(LOG_STAGES)) & u32(1))
                    issue_values(acc, weights, v_desc + u64(stage * i32(TILE_BYTES >> 4)))

                # Q is free: the next one comes while the last product runs and the output leaves
                out_row = row0
                out_valid = valid
                out_head = head
                has_keys = last >= first
                slot = u32(number & i32(POSTS - 1))
                mbarrier_wait(memory + u32(POST_FULL) + slot * u32(8), u32(number >> i32(LOG_POSTS)) & u32(1))
                at = memory + u32(POST) + slot * u32(4 * POST_WORDS)
                row0 = i32(i32(load_shared_b32(at)) + group * i32(64))
                valid = i32(i32(load_shared_b32(at + u32(4))) - group * i32(64))
                position = i32(i32(load_shared_b32(at + u32(8))) + group * i32(64))
                context = i32(load_shared_b32(at + u32(12)))
                first = i32(load_shared_b32(at + u32(16)))
                last = i32(load_shared_b32(at + u32(20)))
                head = i32(load_shared_b32(at + u32(24)))
                more = i32(load_shared_b32(at + u32(4))) >= i32(0)
                if SEPARATE and more and valid > i32(0):
                    load_queries(q_memory, address(queries) + u64(row0) * query_bytes + u64(head * i32(2 * D)), query_bytes,
                                 valid, thread)
                values_ready(acc, weights)                          # on every path: the assembler must see it
                if has_keys:
                    if thread == i32(0):
                        mbarrier_arrive(memory + u32(V_EMPTY) + u32(used & i32(STAGES - 1)) * u32(8))
                    used = i32(used + i32(1))
                for h in range(2):
                    sum_ = total[h]
                    sum_ += cuda.shfl_xor_sync(FULL_WARP, sum_, 1)
                    sum_ += cuda.shfl_xor_sync(FULL_WARP, sum_, 2)
                    total[h] = f32(0)
                    if sum_ > f32(0):
                        total[h] = f32(1) / sum_
                scale_values(acc, total[0], total[1])
                if not SEPARATE:
                    named_barrier(u32(4) + u32(group), u32(128))
                stage_values(acc, o_memory + u32((warp * i32(16) + quad_row) * i32(128) + quad_col * i32(2)),
                             u32(quad_row * i32(16)))
                cuda.syncwarp()
                o_to = address(out) + (u64(out_row) * u64(out_stride) + u64(out_head * i32(D))) * u64(2)
                for i in range(16 * PIECES // 32):
                    index = lane + i32(32 * i)
                    line = index // i32(PIECES)
                    piece = index - line * i32(PIECES)
                    line += warp * i32(16)
                    if line < out_valid:
                        v = load_shared_v4(o_memory + u32(piece // i32(8) * i32(Q_HALF) + line * i32(128)
                                                          + ((piece ^ line) & i32(7)) * i32(16)))
                        store_global_v4(o_to + u64(line) * u64(out_stride) * u64(2) + u64(piece * i32(16)),
                                        v[0], v[1], v[2], v[3])
                if not SEPARATE:
                    named_barrier(u32(4) + u32(group), u32(128))
                    if more and valid > i32(0):
                        load_queries(q_memory, address(queries) + u64(row0) * query_bytes + u64(head * i32(2 * D)), query_bytes,
                                     valid, thread)

    return prefill_sm90

