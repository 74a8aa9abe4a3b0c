"""The two matrix products of attention on mma.sync, each one block of inline assembly over register arrays.

A whole product is one assembly text, unrolled here and not by the compiler: arrays stay in registers whatever the compiler's
unrolling limits are, and the assembler schedules the loads of shared memory among the multiplications as it likes.
Fragment layouts are those of `mma_m16n8k16` in ptx.py; an accumulator array is float32 [row tiles, columns / 8, 4].
"""

import functools

from llvmlite import ir
from numba.cuda.extending import intrinsic

from zhilight.driver.dtype import DType
from zhilight.kernels.ptx import u32, void

_F32, _I32 = ir.FloatType(), ir.IntType(32)
_SHORT = {"bfloat16": "bf16", "float16": "f16"}


def _pointer(context, builder, kind, value):
    return context.make_array(kind)(context, builder, value).data


def _element(builder, data, index):
    return builder.gep(data, [ir.Constant(_I32, index)])


def _mma(short, d, a, b0, b1, c):
    return (f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32 {{{','.join(d)}}}, {{{','.join(a)}}}, "
            f"{{{b0},{b1}}}, {{{','.join(c)}}};")


@functools.cache
def scores_mma(dtype: DType, row_tiles: int, key_tiles: int, steps: int, a_stride: int, b_stride: int):
    """(scores [row_tiles, key_tiles, 4], lane address of A, lane address of B): scores = A B^T, both [rows, 16 * steps].

    Lane l points at row l % 8 + 8 * (l / 8 % 2) of A, half l / 16 of its first 16 columns, and at row l % 8 + 8 * (l / 16)
    of B, half l / 8 % 2. Strides are bytes of a row.
    """
    short = _SHORT[dtype.name]
    count = row_tiles * key_tiles * 4
    lines = ["{ .reg .b32 a<" + str(4 * row_tiles) + ">, b<4>; .reg .f32 z; mov.f32 z, 0f00000000;"]
    for k in range(steps):
        for m in range(row_tiles):
            a = ",".join(f"a{4 * m + i}" for i in range(4))
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{a}}}, [${count} + {m * 16 * a_stride + k * 32}];")
        for n in range(key_tiles // 2):
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{b0,b1,b2,b3}}, [${count + 1} + "
                         f"{n * 16 * b_stride + k * 32}];")
            for half in range(2):
                for m in range(row_tiles):
                    first = (m * key_tiles + 2 * n + half) * 4
                    d = [f"${first + i}" for i in range(4)]
                    lines.append(_mma(short, d, [f"a{4 * m + i}" for i in range(4)], f"b{2 * half}", f"b{2 * half + 1}",
                                      d if k else ["z"] * 4))
    text = "\n".join([*lines, "}"])

    @intrinsic
    def multiply(typingctx, scores, a, b):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            kind = ir.FunctionType(ir.LiteralStructType([_F32] * count), [_I32, _I32])
            constraints = ",".join(["=&f"] * count + ["r", "r", "~{memory}"])
            value = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), arguments[1:])
            for i in range(count):
                builder.store(builder.extract_value(value, i), _element(builder, data, i))
            return context.get_dummy_value()

        return void(scores, u32, u32), generate

    return multiply


@functools.cache
def values_mma(dtype: DType, row_tiles: int, steps: int, column_tiles: int, b_stride: int):
    """(acc [row_tiles, column_tiles, 4], weights [row_tiles, 2 * steps, 4], lane address of V): acc += weights V.

    The weights are rounded to `dtype`, which turns an accumulator of scores into A fragments in place. V is [16 * steps,
    8 * column_tiles]; lane l points at row l % 8 + 8 * (l / 8 % 2), half l / 16 of the first 16 columns.
    """
    short = _SHORT[dtype.name]
    pair = {"bf16": "cvt.rn.bf16x2.f32", "f16": "cvt.rn.f16x2.f32"}[short]
    count, weights_count = row_tiles * column_tiles * 4, row_tiles * 2 * steps * 4
    first_weight = 2 * count
    lane = first_weight + weights_count
    lines = ["{ .reg .b32 a<" + str(4 * row_tiles) + ">, b<4>;"]
    for k in range(steps):
        for m in range(row_tiles):
            for i in range(4):
                w = first_weight + (m * 2 * steps + 2 * k + i // 2) * 4 + i % 2 * 2
                lines.append(f"{pair} a{4 * m + i}, ${w + 1}, ${w};")
        for n in range(column_tiles // 2):
            lines.append(f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{b0,b1,b2,b3}}, [${lane} + "
                         f"{k * 16 * b_stride + n * 32}];")
            for half in range(2):
                for m in range(row_tiles):
                    first = (m * column_tiles + 2 * n + half) * 4
                    d = [f"${first + i}" for i in range(4)]
                    lines.append(_mma(short, d, [f"a{4 * m + i}" for i in range(4)], f"b{2 * half}", f"b{2 * half + 1}", d))
    text = "\n".join([*lines, "}"])

    @intrinsic
    def multiply(typingctx, acc, weights, b):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            source = _pointer(context, builder, signature.args[1], arguments[1])
            inputs = [builder.load(_element(builder, data, i)) for i in range(count)]
            inputs += [builder.load(_element(builder, source, i)) for i in range(weights_count)]
            kind = ir.FunctionType(ir.LiteralStructType([_F32] * count), [_F32] * len(inputs) + [_I32])
            constraints = ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["f"] * weights_count
                                   + ["r", "~{memory}"])
            value = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), [*inputs, arguments[2]])
            for i in range(count):
                builder.store(builder.extract_value(value, i), _element(builder, data, i))
            return context.get_dummy_value()

        return void(acc, weights, u32), generate

    return multiply


@functools.cache
def register_scores_mma(dtype: DType, wide: bool, steps: int, b_stride: int):
    """(scores [2, 4], queries [steps, 4] u32, lane address of K): scores = Q K^T of 16 keys, with Q held in registers.

    wide: the upper eight rows hold queries too; else they are taken as zeros and scores[:, 2:] is not written. Two chains of
    accumulators halve the latency. Lane addresses as for B of `scores_mma`.
    """
    short = _SHORT[dtype.name]
    per_step, kept = (4, 4) if wide else (2, 2)
    outputs = 2 * kept
    lane = outputs + per_step * steps
    chains = 2 if steps > 1 else 1
    lines = ["{ .reg .b32 b<4>, zero; .reg .f32 z, c<16>; mov.f32 z, 0f00000000; mov.b32 zero, 0;"]
    for k in range(steps):
        first = outputs + per_step * k
        a = [f"${first + i}" for i in range(4)] if wide else [f"${first}", "zero", f"${first + 1}", "zero"]
        lines.append(f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{b0,b1,b2,b3}}, [${lane} + {k * 32}];")
        for n in range(2):
            d = [f"c{8 * (k % chains) + 4 * n + i}" for i in range(4)]
            lines.append(_mma(short, d, a, f"b{2 * n}", f"b{2 * n + 1}", d if k >= chains else ["z"] * 4))
    for n in range(2):
        for i in range(kept):
            lines.append(f"add.f32 ${n * kept + i}, c{4 * n + i}, c{8 + 4 * n + i};" if chains == 2
                         else f"mov.f32 ${n * kept + i}, c{4 * n + i};")
    text = "\n".join([*lines, "}"])

    @intrinsic
    def multiply(typingctx, scores, queries, b):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            source = _pointer(context, builder, signature.args[1], arguments[1])
            used = range(4) if wide else (0, 2)
            inputs = [builder.load(_element(builder, source, 4 * k + i)) for k in range(steps) for i in used]
            kind = ir.FunctionType(ir.LiteralStructType([_F32] * outputs), [_I32] * (len(inputs) + 1))
            constraints = ",".join(["=&f"] * outputs + ["r"] * (len(inputs) + 1) + ["~{memory}"])
            value = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), [*inputs, arguments[2]])
            for n in range(2):
                for i in range(kept):
                    builder.store(builder.extract_value(value, n * kept + i), _element(builder, data, 4 * n + i))
            return context.get_dummy_value()

        return void(scores, queries, u32), generate

    return multiply


@functools.cache
def transposed_values_mma(dtype: DType, head_tiles: int, column_tiles: int, stride: int):
    """(acc [column_tiles, head_tiles, 4], weights [2 * head_tiles] u32, lane address of V): acc += V^T weights^T, 16 keys.

    The columns of V are the 16 rows of the multiplication and the heads its 8 columns, so that a group of up to 8 heads
    costs half the instructions and registers of the other way round. The scores' C fragments, packed, are its B fragments.
    acc: value e of tile d is column 16 d + g + 8 (e / 2), head 2 c + e % 2. Lane addresses as for B of `scores_mma`.
    """
    short = _SHORT[dtype.name]
    count = column_tiles * head_tiles * 4
    lane = 2 * count + 2 * head_tiles
    lines = ["{ .reg .b32 a<4>;"]
    for d in range(column_tiles):
        lines.append(f"ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{a0,a1,a2,a3}}, [${lane} + {d * 32}];")
        for t in range(head_tiles):
            c = [f"${(d * head_tiles + t) * 4 + i}" for i in range(4)]
            lines.append(_mma(short, c, ["a0", "a1", "a2", "a3"], f"${2 * count + 2 * t}", f"${2 * count + 2 * t + 1}", c))
    text = "\n".join([*lines, "}"])

    @intrinsic
    def multiply(typingctx, acc, weights, v):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            source = _pointer(context, builder, signature.args[1], arguments[1])
            inputs = [builder.load(_element(builder, data, i)) for i in range(count)]
            inputs += [builder.load(_element(builder, source, i)) for i in range(2 * head_tiles)]
            kind = ir.FunctionType(ir.LiteralStructType([_F32] * count), [_F32] * count + [_I32] * (2 * head_tiles + 1))
            constraints = ",".join(["=&f"] * count + [str(i) for i in range(count)] + ["r"] * (2 * head_tiles + 1)
                                   + ["~{memory}"])
            value = builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), [*inputs, arguments[2]])
            for i in range(count):
                builder.store(builder.extract_value(value, i), _element(builder, data, i))
            return context.get_dummy_value()

        return void(acc, weights, u32), generate

    return multiply
