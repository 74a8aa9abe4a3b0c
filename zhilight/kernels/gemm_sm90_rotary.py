"""The epilogue of gemm_sm90 for q, k and v: rotary embedding and the write to the paged cache, while all is in registers.

    q heads  rotated, stored to out as any other product
    k heads  rotated, v heads as they are: to the cache alone (their columns of out are not written)

The arrays and the rotation are those of kernels/rotary.py, for heads that rotate whole. A head's columns c and c + D / 2 are
the same thread's accumulator values, so the rotation costs loads of cosines and sines and nothing else. It is of the float32
sums, where the kernel of its own rotates what was rounded before. Rows of the cache lie anywhere, so k and v leave the
staging slabs by 16-byte stores of ordinary kind, a row of 128 bytes by eight lanes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from llvmlite import ir
from numba.cuda.extending import intrinsic

from zhilight.driver.dtype import DType
from zhilight.kernels.gemm_sm90_epilogue import SLAB_BYTES, SLABS, Emitter
from zhilight.kernels.ptx import accumulator, assemble, f32, i32, u32, u64, void


@dataclass(frozen=True)
class Heads:
    """The columns of a product: num_heads q heads, then num_kv_heads k and as many v heads, each of head_dim values.

    block_size: tokens of a block of the cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int


def rotates(heads: Heads, rotary_dim: int, columns: int) -> bool:
    """Whether tiles of so many columns can rotate these heads: whole heads a tile, whole slabs of 64 columns a head."""
    return rotary_dim == heads.head_dim and heads.head_dim % 64 == 0 and columns % heads.head_dim == 0


@functools.cache
def add_bias(columns: int, dtype: DType, out_dtype: DType):
    """The intrinsic (accumulator(columns), column, lane, bias, n) -> the same with the bias added."""
    kind = accumulator(columns)

    @intrinsic
    def add(typingctx, acc, column, lane, bias_address, n):
        def generate(context, builder, signature, arguments):
            acc, column, lane, bias_address, n = arguments
            emit = Emitter(builder, acc, None, out_dtype)
            emit.set_bias(bias_address, column, n, lane, dtype)
            for i in range(kind.count):
                acc = builder.insert_value(acc, emit.value(i // 4, i // 2 % 2, i % 2), i)
            return acc

        return kind(kind, i32, u32, u64, i32), generate

    return add


@functools.cache
def rotate(columns: int, head_dim: int):
    """The intrinsic (accumulator(columns), rotated, first row's cosines, second row's) -> accumulator(columns), rotated.

    rotated: how many of the tile's heads, from the first on. The rows are lane / 4 and that plus 8 of the warp's sixteen; their
    addresses include the lane's 8 * (lane % 4) bytes.
    """
    groups = head_dim // 16  # of eight columns in half a head
    kind = accumulator(columns)

    @intrinsic
    def turn(typingctx, acc, rotated, first, second):
        def generate(context, builder, signature, arguments):
            acc, rotated, *rows = arguments
            out, one, none = acc, ir.Constant(ir.FloatType(), 1.0), ir.Constant(ir.FloatType(), 0.0)
            turns = [builder.icmp_signed("<", ir.Constant(rotated.type, head), rotated) for head in range(columns // head_dim)]
            for j in range(groups):
                for half, row in enumerate(rows):
                    table = assemble(builder, f"ld.global.nc.v2.f32 {{$0,$1}}, [$4+{32 * j}]; "
                                     f"ld.global.nc.v2.f32 {{$2,$3}}, [$4+{32 * j + 2 * head_dim}];", [f32] * 4, [row], [u64],
                                     memory=False)
                    values = [builder.extract_value(table, i) for i in range(4)]
                    for head, turned in enumerate(turns):
                        for e in range(2):
                            cos, sin = builder.select(turned, values[e], one), builder.select(turned, values[2 + e], none)
                            at = 4 * (head * 2 * groups + j) + 2 * half + e
                            low, high = builder.extract_value(acc, at), builder.extract_value(acc, at + 4 * groups)
                            out = builder.insert_value(out, builder.fsub(builder.fmul(low, cos), builder.fmul(high, sin)), at)
                            out = builder.insert_value(out, builder.fadd(builder.fmul(high, cos), builder.fmul(low, sin)),
                                                       at + 4 * groups)
            return out

        return kind(kind, i32, u64, u64), generate

    return turn


@functools.cache
def store_heads(columns: int, head_dim: int, head_bytes: int, dtype: DType):
    """The intrinsic (accumulator(columns), staging, lane, out map, column, row, stored, place, four row addresses) -> nothing.

    As gemm_sm90_epilogue.store_tile for the first `stored` heads of the tile; those behind go to the cache. place: byte offset
    in its block of the first of those, head_bytes from one to the next. Row address i is that of row 4 i + lane / 8
    of the warp in the cache, with the lane's 16 * (lane % 8) bytes, or 0 for a row that is not kept.
    """
    kind = accumulator(columns)

    @intrinsic
    def store(typingctx, acc, staging, lane, out, column, row, stored, place, row0, row1, row2, row3):
        def generate(context, builder, signature, arguments):
            acc, staging, lane, out, column, row, stored, place, *rows = arguments
            emit = Emitter(builder, acc, None, dtype)
            base = emit.lane_address(staging, lane, 128, False)
            # chunk lane % 8 of row 4 i + lane / 8, for even and odd i
            chunks = [assemble(builder, "{ .reg .u32 r, c; shr.u32 r, $2, 3; " + f"add.u32 r, r, {4 * odd}; "
                               "and.b32 c, $2, 7; xor.b32 c, c, r; shl.b32 c, c, 4; mad.lo.u32 $0, r, 128, c; "
                               "add.u32 $0, $0, $1; }", [u32], [staging, lane], [u32, u32], memory=False) for odd in range(2)]
            for index in range(columns // 64):
                head, inside = divmod(64 * index, head_dim)
                pending = 0 if index == 0 and columns // 64 % SLABS else SLABS - 1
                emit.asm(f"cp.async.bulk.wait_group.read {pending}; bar.warp.sync 0xffffffff;", [], [], [])
                offset = index % SLABS * SLAB_BYTES
                for group in range(0, 8, 2):
                    emit.matrix_pair(base, offset, 8 * index + group, group, 0)
                emit.asm("fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;", [], [], [])
                copies = "".join(
                    f"setp.ne.u64 p, ${9 + i}, 0; ld.shared.v4.b32 {{a, b, c, d}}, [${7 + i % 2}+{offset + i // 2 * 1024}]; "
                    f"add.u64 t, ${9 + i}, o; @p st.global.v4.b32 [t], {{a, b, c, d}}; " for i in range(4))
                emit.asm("{ .reg .pred q, p; .reg .b32 a, b, c, d; .reg .u32 s; .reg .s32 x, h; .reg .u64 o, t; "
                         f"setp.lt.s32 q, {head}, $5; @!q bra CACHE_${{:uid}}; "
                         f"setp.eq.u32 p, $0, 0; add.u32 s, $1, {offset}; add.s32 x, $3, {64 * index}; "
                         "@p cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [$2, {x, $4}], [s]; "
                         "bra DONE_${:uid}; CACHE_${:uid}: "
                         f"sub.s32 h, {head}, $5; mul.wide.s32 o, h, {head_bytes}; cvt.s64.s32 t, $6; add.u64 o, o, t; "
                         f"add.u64 o, o, {2 * inside}; {copies}"
                         "DONE_${:uid}: setp.eq.u32 p, $0, 0; @p cp.async.bulk.commit_group; }", [],
                         [lane, staging, out, column, row, stored, place, *chunks, *rows],
                         [u32, u32, u64, i32, i32, i32, i32, u32, u32, u64, u64, u64, u64])
            return context.get_dummy_value()

        return void(kind, u32, u32, u64, i32, i32, i32, i32, u64, u64, u64, u64), generate

    return store
