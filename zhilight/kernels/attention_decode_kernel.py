"""The kernel of decode attention: split over the keys, merged in the same launch. Arrays and plan: attention_decode.py.

A warp owns 16 keys of each tile: it copies them with cp.async through its own ring of stages, multiplies with mma.sync, and
keeps its own maximum, sum and accumulator. In Q K the group's heads are the 16 rows; in P V they are the columns and the
head's values the rows, which costs a group of up to 8 heads half the instructions and registers, and the packed scores are the
second operand as they stand. Warps meet only at a pair's end. The ring runs on across pairs, so the memory is not idle between.

Rows in shared memory are padded by 16 bytes, so that ldmatrix meets no bank twice. Values past the context are filled with
zeros (stale NaNs must not reach P V). With dependent launch, what was in the cache before this step is read before the kernel
before has ended.
"""

from numba import cuda
from numba.cuda import types as numba_types

from zhilight.driver.compiler import Kernel, Pointer, kernel, kernel_factory
from zhilight.driver.dtype import DType, float32, int32, uint32
from zhilight.kernels.attention_mma import register_scores_product, transposed_values_product
from zhilight.kernels.attention_tiles import HIDDEN, LOWEST, cap_score
from zhilight.kernels.ptx import (
    FULL_WARP,
    address,
    atomic_inc_acq_rel_u32,
    cp_async_16_zfill,
    cp_async_commit,
    cp_async_wait,
    exp2_approx,
    f32,
    grid_dependency_launch,
    grid_dependency_wait,
    i32,
    i64,
    load_global_b32,
    load_global_f32x2,
    load_global_f32x4,
    load_shared_b32,
    load_shared_f32,
    load_shared_f32x4,
    pack,
    ptx,
    shared_address,
    store_global_f32x2,
    store_global_f32x4,
    store_global_v2,
    store_global_v4,
    store_shared_b32,
    store_shared_f32,
    u32,
    u64,
    void,
)

MAX_SEQUENCES = 512
"""Sequences of one launch; more are several launches."""


cp_async_16_ahead = ptx("cp.async.cg.shared.global.L2::128B [$0], [$1], 16;", void, u32, u64)
"""As cp_async_16, and the rest of the 128 bytes come to L2: 2 to 3 % faster here, where all is read once."""


@kernel_factory
def attention_decode_kernel(dtype: DType, head_dim: int, block_size: int, group: int, windowed: bool, capped: bool,
                            overlap: bool, warps: int, stages: int, passes: int, min_blocks: int) -> Kernel:
    """passes: column parts in which warps add up, to bound shared memory. min_blocks: blocks an SM to leave registers for."""
    D, P, G, W, STAGES, PASSES = head_dim, block_size, group, warps, stages, passes
    THREADS, TILE = 32 * W, 16 * W
    STRIDE = 2 * D + 16                    # bytes of a row in shared memory: ldmatrix meets no bank twice
    PIECES = D // 8                        # 16-byte pieces of a row
    KT, DT = D // 16, D // 16
    LOG_TILE, LOG_PAGE = TILE.bit_length() - 1, P.bit_length() - 1
    WIDE = G > 8
    ROW_HALVES = 2 if WIDE else 1           # tiles of 8 heads
    HALF_TILE = 16 * STRIDE                # a warp's K, then its V
    WARP_STAGE = 2 * HALF_TILE
    MERGE_OFFSET = STAGES * W * WARP_STAGE
    MERGE_COLUMNS = D // PASSES
    MERGE_ROW = 4 * MERGE_COLUMNS + 32
    SUMS_OFFSET = MERGE_OFFSET + W * G * MERGE_ROW      # maximum and sum of each warp's rows
    LENS_OFFSET = SUMS_OFFSET + W * 16 * 8
    SHARED = LENS_OFFSET + 4 * MAX_SEQUENCES
    FLAG_OFFSET = MERGE_OFFSET + 4 * MERGE_COLUMNS      # in the padding of the first row
    SLOT = G * D + 2 * G                   # floats of one part: rows, then maxima and sums
    QUADS = G * MERGE_COLUMNS // 4
    MAIN = 1 << (PIECES.bit_length() - 1)
    MERGED_PARTS = 20 if W <= 8 and D <= 128 else 8     # loads in flight when a pair is added up
    multiply_scores = register_scores_product(dtype, WIDE, KT)
    multiply_values = transposed_values_product(dtype, ROW_HALVES, DT)
    pack_pair = pack(dtype)
    wait_stage = cp_async_wait(STAGES - 1)

    def row_loader(start, width):
        """Copies pieces start .. start + width of 16 rows with one warp."""
        STEP = 32 // width

        @cuda.jit(device=True)
        def load(target, source, rows, lane):
            row = lane // i32(width)
            piece = (i32(start) + lane % i32(width)) * i32(16)
            into = target + u32(row * i32(STRIDE) + piece)
            source += u64(row * i32(2 * D) + piece)
            if rows >= i32(16):
                for i in range(16 // STEP):
                    cp_async_16_ahead(into + u32(i * STEP * STRIDE), source + u64(i * STEP * 2 * D))
            else:
                for i in range(16 // STEP):
                    size = u32(16) if row + i32(i * STEP) < rows else u32(0)
                    cp_async_16_zfill(into + u32(i * STEP * STRIDE), source + u64(i * STEP * 2 * D), size)

        return load

    load_main = row_loader(0, MAIN)
    load_rest = row_loader(MAIN, PIECES - MAIN) if PIECES > MAIN else load_main

    @cuda.jit(device=True)
    def first_tile(length, window):
        if windowed:
            return i32(max(i32(0), i32(length - window)) >> i32(LOG_TILE))
        return i32(0)

    @cuda.jit(device=True)
    def count_tiles(length, window):
        return i32(i32((length + i32(TILE - 1)) >> i32(LOG_TILE)) - first_tile(length, window))

    @cuda.jit(device=True)
    def find_pair(number, mine, upto, run, lens, num_kv_heads, window):
        """(sequence, head, tile of the pair, its tiles, context) of tile `number` of the launch.

        Lane l knows the tiles of sequences l * run .. (l + 1) * run (mine) and of all before (l + 1) * run (upto).
        """
        source = i32(i32(cuda.ffs(cuda.ballot_sync(FULL_WARP, number < upto * num_kv_heads))) - i32(1))
        sequence = i32(source * run)
        before = i32(cuda.shfl_sync(FULL_WARP, i32(upto - mine), source))
        length = i32(load_shared_b32(lens + u32(sequence * i32(4))))
        tiles = count_tiles(length, window)
        while number >= (before + tiles) * num_kv_heads:
            before = i32(before + tiles)
            sequence = i32(sequence + i32(1))
            length = i32(load_shared_b32(lens + u32(sequence * i32(4))))
            tiles = count_tiles(length, window)
        tile = i32(number - before * num_kv_heads)
        head = i32(u32(tile) // u32(tiles))
        return sequence, head, i32(tile - head * tiles), tiles, length

    @cuda.jit(device=True)
    def merge_parts(memory, o_to, first_block, parts, opens, tid):
        index = tid
        while index < i32(G * D // 4):
            row = index // i32(D // 4)
            column = index % i32(D // 4) * i32(4)
            best = f32(HIDDEN)
            sum_ = f32(0)
            o0 = f32(0)
            o1 = f32(0)
            o2 = f32(0)
            o3 = f32(0)
            values = cuda.local.array((MERGED_PARTS, 6), numba_types.float32)
            part = i32(0)
            while part < parts:
                for i in range(MERGED_PARTS):
                    values[i, 0] = f32(HIDDEN)
                    for e in range(1, 6):
                        values[i, e] = f32(0)
                    if part + i32(i) < parts:
                        slot = i32((first_block + part + i32(i)) * i32(2))
                        if part + i32(i) == i32(0) and not opens:
                            slot = i32(slot + i32(1))
                        at = memory + u64(slot * i32(SLOT)) * u64(4)
                        pair = load_global_f32x2(at + u64((i32(G * D) + row * i32(2)) * i32(4)))
                        quad = load_global_f32x4(at + u64((row * i32(D) + column) * i32(4)))
                        values[i, 0] = pair[0]
                        values[i, 1] = pair[1]
                        for e in range(4):
                            values[i, 2 + e] = quad[e]
                new = best
                for i in range(MERGED_PARTS):
                    new = max(new, values[i, 0])
                shrink = exp2_approx(best - new)
                best = new
                sum_ *= shrink
                o0 *= shrink
                o1 *= shrink
                o2 *= shrink
                o3 *= shrink
                for i in range(MERGED_PARTS):
                    weight = exp2_approx(values[i, 0] - best)
                    sum_ += weight * values[i, 1]
                    o0 += weight * values[i, 2]
                    o1 += weight * values[i, 3]
                    o2 += weight * values[i, 4]
                    o3 += weight * values[i, 5]
                part += i32(MERGED_PARTS)
            factor = f32(1) / sum_
            store_global_v2(o_to + u64(row * i32(2 * D) + column * i32(2)), pack_pair(o0 * factor, o1 * factor),
                            pack_pair(o2 * factor, o3 * factor))
            index += i32(THREADS)

    @cuda.jit(device=True)
    def clear_padding(lens, out, out_stride, num_sequences, num_kv_heads, tid):
        """Zeros for the rows without a context, shared out among the blocks."""
        sequence = i32(cuda.blockIdx.x)
        while sequence < num_sequences:
            if i32(load_shared_b32(lens + u32(sequence * i32(4)))) <= i32(0):
                index = tid
                while index < num_kv_heads * i32(G * PIECES):
                    store_global_v4(address(out) + u64(sequence) * u64(out_stride) * u64(2) + u64(index * i32(16)),
                                    u32(0), u32(0), u32(0), u32(0))
                    index += i32(THREADS)
            sequence += i32(cuda.gridDim.x)

    @kernel(threads=THREADS, min_blocks=min_blocks, shared=SHARED, max_registers=255)
    def attention_decode(queries: Pointer(dtype), kv_cache: Pointer(dtype), tables: Pointer(int32),
                         context_lens: Pointer(int32), out: Pointer(dtype), parts_memory: Pointer(float32),
                         counters: Pointer(uint32), query_stride: i64, out_stride: i64, table_stride: i32,
                         num_sequences: i32, num_kv_heads: i32, scale_log2: f32, cap_inner: f32, window: i32):
        memory = shared_address(cuda.shared.array(0, numba_types.uint8))
        tid = i32(cuda.threadIdx.x)
        lane = i32(tid & i32(31))
        warp = i32(tid >> i32(5))
        quad_row = i32(lane >> i32(2))
        quad_col = i32((lane & i32(3)) * i32(2))
        block_index = i32(cuda.blockIdx.x)
        lens = memory + u32(LENS_OFFSET)
        if overlap:
            grid_dependency_launch()
        index = tid
        while index < num_sequences:
            store_shared_b32(lens + u32(index * i32(4)), u32(context_lens[index]))
            index += i32(THREADS)
        cuda.syncthreads()

        # the plan: tiles before each lane's run of sequences, and this block's share of all tiles
        run = i32((num_sequences + i32(31)) >> i32(5))
        mine = i32(0)
        for i in range(run):
            index = i32(lane * run + i32(i))
            if index < num_sequences:
                mine = i32(mine + count_tiles(i32(load_shared_b32(lens + u32(index * i32(4)))), window))
        upto = mine
        for step in (1, 2, 4, 8, 16):
            below = cuda.shfl_up_sync(FULL_WARP, upto, step)
            if lane >= i32(step):
                upto = i32(upto + below)
        total_tiles = u32(cuda.shfl_sync(FULL_WARP, upto, 31) * num_kv_heads)
        blocks = min(i32(cuda.gridDim.x), i32(total_tiles))
        if block_index >= blocks:
            if overlap:
                grid_dependency_wait()
            clear_padding(lens, out, out_stride, num_sequences, num_kv_heads, tid)
            return
        begin = i32(u32(u32(block_index) * total_tiles) // u32(blocks))
        remaining = i32(i32(u32(u32(block_index + i32(1)) * total_tiles) // u32(blocks)) - begin)
        sequence, head, tile, tiles, length = find_pair(begin, mine, upto, run, lens, num_kv_heads, window)
        pair_begin = i32(begin - tile)                      # number of the pair's first tile

        # a last pair that goes on in the next block comes first: its part is there when that block asks for it, and the
        # launch does not end with a merge
        second = i32(0)                                     # tiles from `begin` on, after the last pair's
        end = i32(begin + remaining)
        last_sequence, last_head, last_tile, last_tiles, last_length = find_pair(
            i32(end - i32(1)), mine, upto, run, lens, num_kv_heads, window)
        begin_sequence, begin_head, begin_tile, begin_tiles, begin_length = sequence, head, tile, tiles, length
        last_begin = i32(end - i32(1) - last_tile)
        if last_begin > begin and last_tile < last_tiles - i32(1):
            second = i32(last_begin - begin)
            remaining = i32(end - last_begin)
            sequence, head, tile, tiles, length = last_sequence, last_head, i32(0), last_tiles, last_length
            pair_begin = last_begin

        # where the copies are: STAGES tiles from the one that is next to be read
        to_load = remaining
        load_second = second
        load_sequence, load_head, load_tile, load_tiles, load_length = sequence, head, tile, tiles, length
        table_base = i32(-64)                               # the tile whose block id lane 0 holds
        block_ids = i32(0)
        head_bytes = u64(P * D * 2)
        value_bytes = u64(num_kv_heads) * head_bytes
        ring = memory + u32(warp * i32(WARP_STAGE))
        load_stage = i32(0)
        ahead = i32(0)

        k_lane = ring + u32((lane // i32(16) * i32(8) + lane % i32(8)) * i32(STRIDE) + (lane // i32(8)) % i32(2) * i32(16))
        v_lane = k_lane + u32(HALF_TILE)
        q = cuda.local.array((KT, 4), numba_types.uint32)
        s = cuda.local.array((1, 2, 4), numba_types.float32)
        weights = cuda.local.array((ROW_HALVES, 2), numba_types.uint32)
        acc = cuda.local.array((DT, ROW_HALVES, 4), numba_types.float32)
        top = cuda.local.array(2, numba_types.float32)
        sums = cuda.local.array(2, numba_types.float32)
        for k in range(KT):
            for e in range(4):
                q[k, e] = u32(0)
        for n in range(2):
            for e in range(4):
                s[0, n, e] = f32(0)
        fresh = True
        waited = not overlap
        stage = i32(0)

        while remaining > i32(0):
            # fill the ring; from the second turn on, the stage that was read in the turn before
            while ahead < i32(STAGES):
                if to_load > i32(0):
                    if overlap:
                        if not waited and load_tile == load_tiles - i32(1):
                            grid_dependency_wait()          # only a context's last key is of this step
                            waited = True
                    key = i32((first_tile(load_length, window) + load_tile) * i32(TILE) + warp * i32(16))
                    if load_tile < table_base or load_tile >= table_base + i32(32):
                        table_base = load_tile
                        lane_key = i32(key + lane * i32(TILE))
                        block_ids = i32(0)
                        if lane_key < load_length:
                            block_ids = tables[i64(load_sequence) * i64(table_stride) + i64(lane_key >> i32(LOG_PAGE))]
                    if key < load_length:
                        block = cuda.shfl_sync(FULL_WARP, block_ids, i32(load_tile - table_base))
                        source = (address(kv_cache) + u64(block) * u64(2) * value_bytes + u64(load_head) * head_bytes
                                  + u64((key & i32(P - 1)) * i32(2 * D)))
                        target = ring + u32(load_stage * i32(W * WARP_STAGE))
                        rows = i32(load_length - key)
                        load_main(target, source, rows, lane)
                        load_main(target + u32(HALF_TILE), source + value_bytes, rows, lane)
                        if PIECES > MAIN:
                            load_rest(target, source, rows, lane)
                            load_rest(target + u32(HALF_TILE), source + value_bytes, rows, lane)
                    to_load = i32(to_load - i32(1))
                    load_tile = i32(load_tile + i32(1))
                    if to_load == i32(0):
                        to_load = load_second
                        load_second = i32(0)
                        load_sequence, load_head, load_tile = begin_sequence, begin_head, begin_tile
                        load_tiles, load_length = begin_tiles, begin_length
                        table_base = i32(-64)
                    elif load_tile == load_tiles:
                        load_tile = i32(0)
                        load_head = i32(load_head + i32(1))
                        if load_head == num_kv_heads:
                            load_head = i32(0)
                            load_tiles = i32(0)
                            while load_tiles == i32(0):
                                load_sequence = i32(load_sequence + i32(1))
                                load_length = i32(load_shared_b32(lens + u32(load_sequence * i32(4))))
                                load_tiles = count_tiles(load_length, window)
                            table_base = i32(-64)
                load_stage = i32(load_stage + i32(1)) if load_stage < i32(STAGES - 1) else i32(0)
                cp_async_commit()
                ahead = i32(ahead + i32(1))
            ahead = i32(ahead - i32(1))

            if fresh:
                fresh = False
                if overlap:
                    if not waited:
                        grid_dependency_wait()
                        waited = True
                q_from = address(queries) + (u64(sequence) * u64(query_stride) + u64(head * i32(G * D) + quad_col)) * u64(2)
                for h in range(ROW_HALVES):
                    row = quad_row + i32(8 * h)
                    if row < i32(G):
                        for k in range(KT):
                            q[k, h] = load_global_b32(q_from + u64(row * i32(2 * D)) + u64(32 * k))
                            q[k, 2 + h] = load_global_b32(q_from + u64(row * i32(2 * D)) + u64(32 * k + 16))
                for h in range(2):
                    top[h] = f32(LOWEST)
                    sums[h] = f32(0)
                for d in range(DT):
                    for h in range(ROW_HALVES):
                        for e in range(4):
                            acc[d, h, e] = f32(0)

            wait_stage()
            cuda.syncwarp()
            key = i32((first_tile(length, window) + tile) * i32(TILE) + warp * i32(16))
            if key < length:
                multiply_scores(s, q, k_lane + u32(stage * i32(W * WARP_STAGE)))
                if capped:
                    for n in range(2):
                        for e in range(2 * ROW_HALVES):
                            s[0, n, e] = cap_score(s[0, n, e], cap_inner, f32(1))
                masked = key + i32(16) > length
                if windowed:
                    masked = masked or key < length - window
                if masked:
                    for n in range(2):
                        for e in range(2 * ROW_HALVES):
                            position = i32(key + i32(8 * n + e % 2) + quad_col)
                            hidden = position >= length
                            if windowed:
                                hidden = hidden or position < length - window
                            if hidden:
                                s[0, n, e] = f32(HIDDEN)
                for h in range(ROW_HALVES):
                    best = max(max(s[0, 0, 2 * h], s[0, 0, 2 * h + 1]), max(s[0, 1, 2 * h], s[0, 1, 2 * h + 1]))
                    best = max(best, cuda.shfl_xor_sync(FULL_WARP, best, 1))
                    best = max(best, cuda.shfl_xor_sync(FULL_WARP, best, 2))
                    best = max(best, top[h])
                    shrink = exp2_approx((top[h] - best) * scale_log2)
                    top[h] = best
                    offset = best * scale_log2
                    sum_ = f32(0)
                    for n in range(2):
                        for e in range(2):
                            p = exp2_approx(s[0, n, 2 * h + e] * scale_log2 - offset)
                            s[0, n, 2 * h + e] = p
                            sum_ += p
                    sums[h] = sums[h] * shrink + sum_
                    for n in range(2):
                        weights[h, n] = pack_pair(s[0, n, 2 * h], s[0, n, 2 * h + 1])
                    # the accumulator's columns are heads: their factors are in other lanes
                    factor0 = cuda.shfl_sync(FULL_WARP, shrink, quad_col * i32(4))
                    factor1 = cuda.shfl_sync(FULL_WARP, shrink, quad_col * i32(4) + i32(4))
                    for d in range(DT):
                        acc[d, h, 0] *= factor0
                        acc[d, h, 1] *= factor1
                        acc[d, h, 2] *= factor0
                        acc[d, h, 3] *= factor1
                multiply_values(acc, weights, v_lane + u32(stage * i32(W * WARP_STAGE)))
            cuda.syncwarp()
            stage = i32(stage + i32(1)) if stage < i32(STAGES - 1) else i32(0)
            remaining = i32(remaining - i32(1))
            tile = i32(tile + i32(1))
            if tile < tiles and remaining > i32(0):
                continue

            # end of a pair, or of this block's part of it: the warps add up
            for h in range(ROW_HALVES):
                sum_ = sums[h]
                sum_ += cuda.shfl_xor_sync(FULL_WARP, sum_, 1)
                sum_ += cuda.shfl_xor_sync(FULL_WARP, sum_, 2)
                if quad_col == i32(0):
                    at = memory + u32(SUMS_OFFSET) + u32((warp * i32(16) + quad_row + i32(8 * h)) * i32(8))
                    store_shared_f32(at, top[h] * scale_log2)
                    store_shared_f32(at + u32(4), sum_)
            first_block = i32(u32(u32(pair_begin + i32(1)) * u32(blocks) - u32(1)) // total_tiles)
            last_block = i32(u32(u32(pair_begin + tiles) * u32(blocks) - u32(1)) // total_tiles)
            parts = i32(last_block - first_block + i32(1))
            # a block has at most two parts: slot 0 is its first pair's, slot 1 its last's
            slot = i32(0) if pair_begin <= begin else i32(1)
            part_to = address(parts_memory) + u64((block_index * i32(2) + slot) * i32(SLOT)) * u64(4)
            o_to = address(out) + (u64(sequence) * u64(out_stride) + u64(head * i32(G * D))) * u64(2)
            for column_pass in range(PASSES):
                for h in range(ROW_HALVES):
                    for e in range(2):
                        row = quad_col + i32(8 * h + e)
                        if row < i32(G):
                            at = memory + u32(MERGE_OFFSET) + u32((warp * i32(G) + row) * i32(MERGE_ROW) + quad_row * i32(4))
                            for d in range(DT):
                                for half in range(2):
                                    if column_pass == (16 * d + 8 * half) // MERGE_COLUMNS:
                                        store_shared_f32(at + u32((16 * d + 8 * half) % MERGE_COLUMNS * 4),
                                                         acc[d, h, 2 * half + e])
                cuda.syncthreads()
                index = tid
                while index < i32(QUADS):
                    row = index // i32(MERGE_COLUMNS // 4)
                    column = index % i32(MERGE_COLUMNS // 4) * i32(4)
                    best = f32(LOWEST) * scale_log2
                    for w in range(W):
                        best = max(best, load_shared_f32(memory + u32(SUMS_OFFSET + w * 128) + u32(row * i32(8))))
                    sum_ = f32(0)
                    o0 = f32(0)
                    o1 = f32(0)
                    o2 = f32(0)
                    o3 = f32(0)
                    for w in range(W):
                        at = memory + u32(SUMS_OFFSET + w * 128) + u32(row * i32(8))
                        weight = exp2_approx(load_shared_f32(at) - best)
                        sum_ += weight * load_shared_f32(at + u32(4))
                        v = load_shared_f32x4(memory + u32(MERGE_OFFSET + w * G * MERGE_ROW)
                                              + u32(row * i32(MERGE_ROW) + column * i32(4)))
                        o0 += weight * v[0]
                        o1 += weight * v[1]
                        o2 += weight * v[2]
                        o3 += weight * v[3]
                    column += i32(column_pass * MERGE_COLUMNS)
                    if parts == i32(1):
                        factor = f32(1) / sum_
                        store_global_v2(o_to + u64(row * i32(2 * D) + column * i32(2)), pack_pair(o0 * factor, o1 * factor),
                                        pack_pair(o2 * factor, o3 * factor))
                    else:
                        at_part = part_to + u64((row * i32(D) + column) * i32(4))
                        store_global_f32x4(at_part, o0, o1, o2, o3)
                        if column == i32(0):
                            store_global_f32x2(part_to + u64((i32(G * D) + row * i32(2)) * i32(4)), best, sum_)
                    index += i32(THREADS)
                cuda.syncthreads()

            if parts > i32(1):
                # the barrier and one thread's release make the whole block's part visible, and its acquire the others'
                if tid == i32(0):
                    arrived = atomic_inc_acq_rel_u32(address(counters) + u64((sequence * num_kv_heads + head) * i32(4)),
                                                     u32(parts - i32(1)))
                    store_shared_b32(memory + u32(FLAG_OFFSET), arrived)
                cuda.syncthreads()
                if i32(load_shared_b32(memory + u32(FLAG_OFFSET))) == parts - i32(1):
                    # the pair is its first block's last part, unless it began there; it is the first part of the others
                    opens = i32(u32(u32(first_block) * total_tiles) // u32(blocks)) >= pair_begin
                    merge_parts(address(parts_memory), o_to, first_block, parts, opens, tid)
            fresh = True
            if remaining == i32(0):
                remaining = second
                second = i32(0)
                sequence, head, tile, tiles, length = begin_sequence, begin_head, begin_tile, begin_tiles, begin_length
                pair_begin = i32(begin - begin_tile)
                continue
            tile = i32(0)
            pair_begin = i32(pair_begin + tiles)
            head = i32(head + i32(1))
            if head == num_kv_heads:
                head = i32(0)
                tiles = i32(0)
                while tiles == i32(0):
                    sequence = i32(sequence + i32(1))
                    length = i32(load_shared_b32(lens + u32(sequence * i32(4))))
                    tiles = count_tiles(length, window)
        clear_padding(lens, out, out_stride, num_sequences, num_kv_heads, tid)

    return attention_decode
