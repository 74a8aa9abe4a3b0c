"""From a warpgroup's wgmma accumulator to the output: the epilogue of gemm_sm90, as generated intrinsics.

Each warp works alone on its 16 rows: bias, silu(gate) * up or a scale in registers, conversion, then slabs of 16 rows x 128
bytes through its own piece of shared memory (written with stmatrix, in the swizzled order that the copy engine expects, free
of bank conflicts) and bulk tensor stores, which clip what passes the last row or column and write whole sectors. Two slabs
a warp: one is written while the engine still reads the other. To add to the output (the residual stream) the copy engine
adds in L2 instead of storing; what two tiles or slabs both cover is zero in one of them.

split-K: two blocks of a cluster each send the other its half of the columns (`send_half`), from registers straight into that
block's staging, and add what they receive to their own half (`add_half`).

The accumulator's layout is that of ptx.accumulator: value 4 j + 2 h + e of lane 4 g + c is row g + 8 h, column 8 j + 2 c + e.
"""

import functools

from llvmlite import ir
from numba.cuda.extending import intrinsic

from zhilight.driver.dtype import DType, float32
from zhilight.kernels.ptx import accumulator, assemble, f32, i32, u32, u64, void

ROWS = 16
"""Rows of a warp."""
SLABS = 2
"""Of a warp: one is written while the copy engine reads the other."""
SLAB_BYTES = ROWS * 128
LOG2_E = 1.4426950408889634


def slab_bytes(columns: int, out_dtype: DType) -> int:
    """Bytes of a slab's row for an output tile of `columns`: 128, or 64 or 32 when the tile is narrower than that."""
    return next((pitch for pitch in (128, 64) if columns * out_dtype.itemsize >= pitch), 32)


def slab_starts(columns: int, out_dtype: DType) -> list[int]:
    """First columns of the slabs that cover `columns`; the last one overlaps its neighbour where they do not divide."""
    slab = slab_bytes(columns, out_dtype) // out_dtype.itemsize
    if columns < slab or columns % 8:
        raise ValueError(f"an output tile of {columns} {out_dtype} columns has no slabs; take a multiple of 8 from {slab} on")
    starts = list(range(0, columns - slab + 1, slab))
    return starts if columns % slab == 0 else [*starts, columns - slab]


@functools.cache
def store_tile(columns: int, dtype: DType, out_dtype: DType, bias: bool, silu_mul: bool, add: bool = False):
    """The intrinsic (accumulator(columns), staging, lane, out map, column, row, limit, bias, n, scale) -> nothing.

    staging: shared address of the warp's slabs, a multiple of 1024. column, row: of the warp's first
    output value, not negative. bias: address of bias[0], n its length (both unused without bias).
    scale: multiplies float32 outputs. add: out += in 16 bits, for rows before `limit` (unused without add).
    """
    out_columns = columns // 2 if silu_mul else columns
    pitch = slab_bytes(out_columns, out_dtype)
    starts = slab_starts(out_columns, out_dtype)
    slab = pitch // out_dtype.itemsize
    kind = accumulator(columns)
    if add and (silu_mul or out_dtype == float32):
        raise ValueError("only plain 16-bit outputs are added to")
    copy = "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile" if add else "cp.async.bulk.tensor.2d.global.shared::cta"

    @intrinsic
    def store(typingctx, acc, staging, lane, out, column, row, limit, bias_address, n, scale):
        def generate(context, builder, signature, arguments):
            emit = Emitter(builder, arguments[0], arguments[9], out_dtype)
            _, staging, lane, out, column, row, limit, bias_address, n, _ = arguments
            if add:
                emit.set_row_limit(lane, row, limit)
            if bias:
                emit.set_bias(bias_address, builder.mul(column, emit.word(2)) if silu_mul else column, n, lane, dtype)
            base = emit.lane_address(staging, lane, pitch, silu_mul)
            odd = emit.asm("{ .reg .u32 t; .reg .pred p; and.b32 t, $1, 1; setp.ne.u32 p, t, 0; "
                           "selp.u32 $0, 0x3276, 0x5410, p; }", [u32], [lane], [u32], memory=False)
            for index, start in enumerate(starts):
                pending = 0 if index == 0 and len(starts) % SLABS else SLABS - 1
                emit.asm(f"cp.async.bulk.wait_group.read {pending}; bar.warp.sync 0xffffffff;", [], [], [])
                offset = index % SLABS * SLAB_BYTES
                stored = starts[index - 1] + slab if index else 0
                for group in range(slab // 8):
                    if silu_mul:
                        emit.silu_group(base, offset, pitch, start // 8 + group, group, odd)
                    elif out_dtype == float32:
                        emit.float_group(base, offset, pitch, start // 8 + group, group)
                    elif group % 2 == 0:
                        emit.matrix_pair(base, offset, start // 8 + group, group, stored // 8 if add else 0)
                emit.asm("fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff;", [], [], [])
                emit.asm("{ .reg .pred p; .reg .u32 s; .reg .s32 c; setp.eq.u32 p, $0, 0; add.u32 s, $1, "
                         f"{offset}; add.s32 c, $3, {start}; "
                         f"@p {copy}.bulk_group [$2, {{c, $4}}], [s]; "
                         "@p cp.async.bulk.commit_group; }", [], [lane, staging, out, column, row], [u32, u32, u64, i32, i32])
            return context.get_dummy_value()

        return void(kind, u32, u32, u64, i32, i32, i32, u64, i32, f32), generate

    return store


class Emitter:
    """The instructions of one epilogue."""

    def __init__(self, builder, acc, scale, out_dtype: DType):
        self.builder = builder
        self.acc = acc
        self.scale = scale
        self.pack_name = {"bfloat16": "bf16x2", "float16": "f16x2", "float32": None}[out_dtype.name]
        self.bias: tuple | None = None
        self.loaded: dict[int, list] = {}
        self.masks: list | None = None

    def asm(self, text, results, arguments, kinds, memory=True):
        return assemble(self.builder, text, results, arguments, kinds, 0, memory)

    @staticmethod
    def word(value: int):
        return ir.Constant(ir.IntType(32), value)

    def set_bias(self, address, column, n, lane, dtype: DType) -> None:
        """Where the lane's bias values lie: two of each eight columns."""
        first = self.asm("{ .reg .u32 t; and.b32 t, $1, 3; shl.b32 t, t, 1; add.s32 $0, $2, t; }", [i32], [lane, column],
                         [u32, i32], memory=False)
        pointer = self.asm("{ .reg .s64 t; cvt.s64.s32 t, $2; shl.b64 t, t, 1; add.s64 $0, $1, t; }", [u64], [address, first],
                           [u64, i32], memory=False)
        widen = "shl.b32 $0, t, 16; and.b32 $1, t, 0xffff0000;" if dtype.name == "bfloat16" else (
            "{ .reg .f16 l, h; mov.b32 {l, h}, t; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }")
        self.bias = (first, n, pointer, widen)

    def set_row_limit(self, lane, row, limit) -> None:
        """Packed words of rows from `limit` on become zero."""
        self.masks = [self.asm(f"{{ .reg .u32 t; .reg .s32 r; .reg .pred p; shr.u32 t, $1, 2; add.s32 r, $2, t; "
                               f"add.s32 r, r, {8 * half}; setp.lt.s32 p, r, $3; selp.u32 $0, 0xffffffff, 0, p; }}",
                               [u32], [lane, row, limit], [u32, i32, i32], memory=False) for half in range(2)]

    def bias_pair(self, j: int) -> list:
        """The two values of accumulator group j, zero past the end; loaded where they are first needed, to save registers."""
        if j not in self.loaded:
            *operands, widen = self.bias
            pair = self.asm(f"{{ .reg .pred p; .reg .s32 c; .reg .b32 t; add.s32 c, $2, {8 * j}; setp.lt.s32 p, c, $3; "
                            f"mov.b32 t, 0; @p ld.global.nc.b32 t, [$4+{16 * j}]; {widen} }}", [f32, f32], operands,
                            [i32, i32, u64])
            self.loaded[j] = [self.builder.extract_value(pair, e) for e in range(2)]
        return self.loaded[j]

    def value(self, j: int, half: int, e: int):
        found = self.builder.extract_value(self.acc, 4 * j + 2 * half + e)
        return found if self.bias is None else self.builder.fadd(found, self.bias_pair(j)[e])

    def pack(self, low, high):
        return self.asm(f"cvt.rn.{self.pack_name}.f32 $0, $2, $1;", [u32], [low, high], [f32, f32], memory=False)

    def word_of(self, j: int, half: int):
        packed = self.pack(self.value(j, half, 0), self.value(j, half, 1))
        return packed if self.masks is None else self.builder.and_(packed, self.masks[half])

    def lane_address(self, staging, lane, pitch: int, silu_mul: bool):
        """The lane's shared address in a slab before the chunk number is xored in. See the module for the layout."""
        swizzle = f"shr.u32 w, r, {128 // pitch // 2}; and.b32 w, w, {pitch // 16 - 1};"
        if self.pack_name and not silu_mul:
            # stmatrix: lanes 8 q .. 8 q + 7 give the rows of matrix q: q & 1 is the half of the rows, q >> 1 the column group
            text = (f"and.b32 r, $2, 15; shr.u32 c, $2, 4; {swizzle} xor.b32 w, w, c; shl.b32 w, w, 4;")
        elif silu_mul:
            # after the exchange lane c holds 32-bit word 0, 2, 1, 3 of the eight columns
            text = (f"shr.u32 r, $2, 2; {swizzle} shl.b32 w, w, 4; and.b32 c, $2, 1; shl.b32 c, c, 3; add.u32 w, w, c; "
                    "and.b32 c, $2, 2; shl.b32 c, c, 1; add.u32 w, w, c;")
        else:
            text = (f"shr.u32 r, $2, 2; {swizzle} shr.u32 c, $2, 1; and.b32 c, c, 1; xor.b32 w, w, c; shl.b32 w, w, 4; "
                    "and.b32 c, $2, 1; shl.b32 c, c, 3; add.u32 w, w, c;")
        return self.asm(f"{{ .reg .u32 r, c, w; {text} mad.lo.u32 r, r, {pitch}, $1; add.u32 $0, r, w; }}", [u32],
                        [staging, lane], [u32, u32], memory=False)

    def matrix_pair(self, base, offset: int, j: int, group: int, first: int) -> None:
        """Sixteen columns, from accumulator groups j and j + 1, as one stmatrix; zeros for groups before `first`."""
        words = [self.word_of(j + q // 2, q % 2) if j + q // 2 >= first else self.word(0) for q in range(4)]
        self.asm(f"{{ .reg .u32 a; xor.b32 a, $0, {16 * group}; "
                 f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [a+{offset}], {{$1,$2,$3,$4}}; }}", [], [base, *words], [u32] * 5)

    def float_group(self, base, offset: int, pitch: int, j: int, group: int) -> None:
        """Eight float32 columns: 8 bytes a lane and row half."""
        for half in range(2):
            pair = [self.builder.fmul(self.value(j, half, e), self.scale) for e in range(2)]
            self.asm(f"{{ .reg .u32 a; xor.b32 a, $0, {32 * group}; st.shared.v2.f32 [a+{offset + half * 8 * pitch}], "
                     "{$1,$2}; }", [], [base, *pair], [u32, f32, f32])

    def silu_group(self, base, offset: int, pitch: int, j: int, group: int, selector) -> None:
        """Eight output columns, from the sixteen of accumulator groups 2 j and 2 j + 1: a lane makes columns c and 4 + c, and
        trades with its neighbour for two that lie together."""
        for half in range(2):
            made = [self.asm("{ .reg .f32 t; mul.f32 t, $1, " + _float_literal(-LOG2_E) + "; ex2.approx.ftz.f32 t, t; "
                             "add.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 t, t; mul.f32 t, t, $1; mul.f32 $0, t, $2; }",
                             [f32], [self.value(2 * j + q, half, 0), self.value(2 * j + q, half, 1)], [f32, f32], memory=False)
                    for q in range(2)]
            self.asm(f"{{ .reg .u32 a, t; shfl.sync.bfly.b32 t, $1, 1, 31, 0xffffffff; prmt.b32 t, $1, t, $2; "
                     f"xor.b32 a, $0, {16 * group}; st.shared.u32 [a+{offset + half * 8 * pitch}], t; }}",
                     [], [base, self.pack(*made), selector], [u32, u32, u32])


def _float_literal(value: float) -> str:
    import struct

    return "0f" + struct.pack(">f", value).hex().upper()


# ---- split-K between two blocks --------------------------------------------------------------------------------------


def exchange_bytes(columns: int) -> int:
    """Shared memory of a warp for the sums that it receives: 16 rows x columns / 2 float32."""
    return 2 * ROWS * columns


@functools.cache
def send_half(columns: int):
    """The intrinsic (accumulator(columns), part, to, barrier) -> nothing: the other block's half of the columns, to it.

    part: 0 or 1, the part of K that this block multiplied, and the half of the columns that it keeps. to: cluster address, in
    the other block, of the same warp's exchange_bytes plus 16 * lane; barrier: cluster address of its mbarrier, which counts
    the bytes that arrive.
    """
    groups = columns // 16
    kind = accumulator(columns)

    @intrinsic
    def send(typingctx, acc, part, to, barrier):
        def generate(context, builder, signature, arguments):
            acc, part, to, barrier = arguments
            for group in range(groups):
                values = _half(builder, acc, groups, group, builder.icmp_unsigned("!=", part, ir.Constant(part.type, 0)))
                assemble(builder, "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
                         f"[$0+{group * 512}], {{$1,$2,$3,$4}}, [$5];", [], [to, *values, barrier],
                         [u32, f32, f32, f32, f32, u32])
            return context.get_dummy_value()

        return void(kind, i32, u32, u32), generate

    return send


@functools.cache
def add_half(columns: int):
    """The intrinsic (accumulator(columns), part, received) -> accumulator(columns / 2): the kept half plus what was received.

    received: shared address of the warp's exchange_bytes plus 16 * lane. A sum of two does not depend on their order.
    """
    groups = columns // 16
    kind = accumulator(columns // 2)

    @intrinsic
    def add(typingctx, acc, part, received):
        def generate(context, builder, signature, arguments):
            acc, part, received = arguments
            out = ir.Constant(context.get_value_type(kind), ir.Undefined)
            for group in range(groups):
                other = assemble(builder, f"ld.shared.v4.f32 {{$0,$1,$2,$3}}, [$4+{group * 512}];", [f32] * 4, [received],
                                 [u32])
                kept = _half(builder, acc, groups, group, builder.icmp_unsigned("==", part, ir.Constant(part.type, 0)))
                for i in range(4):
                    total = builder.fadd(kept[i], builder.extract_value(other, i))
                    out = builder.insert_value(out, total, 4 * group + i)
            return out

        return kind(accumulator(columns), i32, u32), generate

    return add


def _half(builder, acc, groups: int, group: int, lower) -> list:
    """The four values of a group of the lower or the upper half of the columns."""
    return [builder.select(lower, builder.extract_value(acc, 4 * group + i),
                           builder.extract_value(acc, 4 * (groups + group) + i)) for i in range(4)]
