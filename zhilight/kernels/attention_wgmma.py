"""Register blocks of Hopper attention: the two matrix products by wgmma, and the softmax between them.

Each is one block of inline assembly over register arrays, unrolled here. A warpgroup's m64 x n accumulator is a float32 array
[n / 2]: value 4 j + 2 h + e is row 16 w + g + 8 h, column 8 j + 2 c + e (warp w, lane 4 g + c). wgmma runs on after its
block: until `wait_*`, whose operands carry the dependence, the compiler must see no use of the arrays.
"""

import functools

from llvmlite import ir
from numba.cuda.extending import intrinsic

from zhilight.driver.dtype import DType
from zhilight.kernels.attention_tiles import HIDDEN
from zhilight.kernels.ptx import F2, f32, i32, ptx, u32, u64, void

_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_SHORT = {"bfloat16": "bf16", "float16": "f16"}


def _pointer(context, builder, kind, value):
    return context.make_array(kind)(context, builder, value).data


def _load(builder, data, count):
    return [builder.load(builder.gep(data, [ir.Constant(_I32, i)])) for i in range(count)]


def _store(builder, data, value, count):
    for i in range(count):
        builder.store(builder.extract_value(value, i), builder.gep(data, [ir.Constant(_I32, i)]))


def _assembly(builder, text, outputs, tied, inputs):
    """Call assembly with `outputs` float results; the first `tied` of `inputs` share their registers."""
    letters = {_F32: "f", _I32: "r", _I64: "l"}
    kinds = [value.type for value in inputs]
    constraints = ["=&f"] * outputs + [str(i) for i in range(tied)] + [letters[kind] for kind in kinds[tied:]] + ["~{memory}"]
    result = ir.LiteralStructType([_F32] * outputs) if outputs > 1 else _F32 if outputs else ir.VoidType()
    return builder.call(ir.InlineAsm(ir.FunctionType(result, kinds), text, ",".join(constraints), side_effect=True), inputs)


def tile_descriptor(group_bytes: int, column_bytes: int = 16):
    """u32 shared address -> wgmma descriptor of a tile of 128-byte rows with the 128-byte swizzle.

    group_bytes: from one group of 8 rows to the next. column_bytes: from 64 columns to the next 64, which only a transposed
    operand reads.
    """
    high = ((column_bytes >> 4) << 16) | ((group_bytes >> 4) << 32) | (1 << 62)
    return ptx("{ .reg .u32 t; .reg .u64 w; and.b32 t, $1, 0x3ffff; shr.u32 t, t, 4; cvt.u64.u32 w, t; "
               f"or.b64 $0, w, {high}; }}", u64, u32, memory=False)


@functools.cache
def issue_scores(dtype: DType, keys: int, steps: int, a_half: int, b_half: int):
    """(scores [keys / 2], descriptor of Q, descriptor of K): start scores = Q K^T over 16 * steps columns, one group.

    Both operands are [rows, 64] halves of 128-byte rows; a_half and b_half are the bytes from one half to the next.
    """
    short, count = _SHORT[dtype.name], keys // 2
    registers = ",".join(f"${i}" for i in range(count))
    lines = ["{ .reg .b64 a, b; wgmma.fence.sync.aligned;"]
    for k in range(steps):
        lines.append(f"add.s64 a, ${count}, {(k // 4 * a_half + k % 4 * 32) >> 4}; "
                     f"add.s64 b, ${count + 1}, {(k // 4 * b_half + k % 4 * 32) >> 4};")
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{short}.{short} {{{registers}}}, a, b, "
                     f"{'p' if k == 0 else 't'}, 1, 1, 0, 0;")
    lines[0] += " .reg .pred p, t; setp.ne.b32 p, 0, 0; setp.eq.b32 t, 0, 0;"
    text = "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])

    @intrinsic
    def issue(typingctx, scores, a, b):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            _store(builder, data, _assembly(builder, text, count, 0, list(arguments[1:])), count)
            return context.get_dummy_value()

        return void(scores, u64, u64), generate

    return issue


@functools.cache
def issue_values(dtype: DType, columns: int, steps: int):
    """(acc [columns / 2], weights [4 * steps] u32, descriptor of V): start acc += weights V, one group.

    V [16 * steps, columns]: its rows are keys of 128 bytes in halves of 64 columns; its descriptor says where the next half is.
    """
    short, count = _SHORT[dtype.name], columns // 2
    registers = ",".join(f"${i}" for i in range(count))
    descriptor = 2 * count + 4 * steps
    lines = ["{ .reg .b64 b; .reg .pred t; setp.eq.b32 t, 0, 0; wgmma.fence.sync.aligned;"]
    for k in range(steps):
        a = ",".join(f"${2 * count + 4 * k + i}" for i in range(4))
        lines.append(f"add.s64 b, ${descriptor}, {k * 2048 >> 4};")
        lines.append(f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{short}.{short} {{{registers}}}, {{{a}}}, b, t, "
                     "1, 1, 1;")
    text = "\n".join([*lines, "wgmma.commit_group.sync.aligned; }"])

    @intrinsic
    def issue(typingctx, acc, weights, b):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            source = _pointer(context, builder, signature.args[1], arguments[1])
            inputs = [*_load(builder, data, count), *_load(builder, source, 4 * steps), arguments[2]]
            _store(builder, data, _assembly(builder, text, count, count, inputs), count)
            return context.get_dummy_value()

        return void(acc, weights, u64), generate

    return issue


@functools.cache
def wait_scores(keys: int, pending: int):
    """(scores): wait until at most `pending` groups are under way; the scores are then valid."""
    return _wait(keys // 2, 0, pending)


@functools.cache
def wait_values(columns: int, steps: int):
    """(acc, weights): wait for all groups; acc is then valid and the weights' registers are free."""
    return _wait(columns // 2, 4 * steps, 0)


def _wait(count, held, pending):
    text = f"wgmma.wait_group.sync.aligned {pending};"

    if held:
        @intrinsic
        def wait(typingctx, acc, weights):
            def generate(context, builder, signature, arguments):
                data = _pointer(context, builder, signature.args[0], arguments[0])
                source = _pointer(context, builder, signature.args[1], arguments[1])
                inputs = [*_load(builder, data, count), *_load(builder, source, held)]
                _store(builder, data, _assembly(builder, text, count, count, inputs), count)
                return context.get_dummy_value()

            return void(acc, weights), generate
    else:
        @intrinsic
        def wait(typingctx, acc):
            def generate(context, builder, signature, arguments):
                data = _pointer(context, builder, signature.args[0], arguments[0])
                _store(builder, data, _assembly(builder, text, count, count, _load(builder, data, count)), count)
                return context.get_dummy_value()

            return void(acc), generate
    return wait


@functools.cache
def softmax_step(keys: int):
    """(scores [keys / 2], top [2], total [2], scale) -> (shrink of row g, of row g + 8).

    scores become exp2((scores - top) * scale) with top the running maximum, which it updates; total becomes total * shrink
    plus this thread's part of the row's sum; the sums of a row's four lanes are added up once, at the end.
    """
    count = keys // 2
    # results: scores, top 2, total 2, shrink 2; inputs: scores, top 2, total 2 (tied), scale
    new_top, new_total, shrink = count, count + 2, count + 4
    outputs = count + 6
    scale = outputs + count + 4
    lines = ["{ .reg .f32 m<4>, s<4>, t, o, l<2>;"]
    for h in range(2):
        row = [4 * j + 2 * h + e for j in range(keys // 8) for e in range(2)]
        for i in range(4):
            lines.append(f"max.f32 m{i}, ${row[i]}, ${row[i + 4]};")
        for i, x in enumerate(row[8:]):
            lines.append(f"max.f32 m{i % 4}, m{i % 4}, ${x};")
        lines.append("max.f32 m0, m0, m1; max.f32 m2, m2, m3; max.f32 m0, m0, m2;")
        for lanes in (1, 2):
            lines.append(f"shfl.sync.bfly.b32 t, m0, {lanes}, 31, 0xffffffff; max.f32 m0, m0, t;")
        lines.append(f"max.f32 m0, m0, ${new_top + h}; sub.f32 t, ${new_top + h}, m0; mul.f32 t, t, ${scale}; "
                     f"ex2.approx.ftz.f32 ${shrink + h}, t; mov.f32 ${new_top + h}, m0; mul.f32 o, m0, ${scale}; neg.f32 o, o;")
        for x in row:
            lines.append(f"fma.rn.f32 ${x}, ${x}, ${scale}, o; ex2.approx.ftz.f32 ${x}, ${x};")
        for i in range(4):
            lines.append(f"add.f32 s{i}, ${row[i]}, ${row[i + 4]};")
        for i, x in enumerate(row[8:]):
            lines.append(f"add.f32 s{i % 4}, s{i % 4}, ${x};")
        lines.append("add.f32 s0, s0, s1; add.f32 s2, s2, s3; add.f32 s0, s0, s2;")
        lines.append(f"fma.rn.f32 ${new_total + h}, ${new_total + h}, ${shrink + h}, s0;")
    text = "\n".join([*lines, "}"])

    @intrinsic
    def step(typingctx, scores, top, total, scale):
        def generate(context, builder, signature, arguments):
            arrays = [_pointer(context, builder, kind, value) for kind, value in zip(signature.args[:3], arguments[:3])]
            sizes = (count, 2, 2)
            inputs = [value for data, size in zip(arrays, sizes) for value in _load(builder, data, size)]
            value = _assembly(builder, text, outputs, count + 4, [*inputs, arguments[3]])
            first = 0
            for data, size in zip(arrays, sizes):
                for i in range(size):
                    builder.store(builder.extract_value(value, first + i), builder.gep(data, [ir.Constant(_I32, i)]))
                first += size
            pair = ir.Constant(context.get_value_type(F2), ir.Undefined)
            for h in range(2):
                pair = builder.insert_value(pair, builder.extract_value(value, shrink + h), h)
            return pair

        return F2(scores, top, total, f32), generate

    return step


@functools.cache
def mask_scores(keys: int, windowed: bool):
    """(scores, last 0, last 1, window): hide scores of row g at columns beyond `last 0`, of row g + 8 beyond `last 1`.

    Columns are counted from this thread's first (2 c). With a window, columns at or below last - window are hidden too.
    """
    count = keys // 2
    first = 2 * count
    lines = ["{ .reg .pred p; .reg .s32 low<2>;"]
    bits = _float_bits(HIDDEN)
    if windowed:
        for h in range(2):
            lines.append(f"sub.s32 low{h}, ${first + h}, ${first + 2};")
    for j in range(keys // 8):
        for h in range(2):
            for e in range(2):
                x, column = 4 * j + 2 * h + e, 8 * j + e
                lines.append(f"setp.lt.s32 p, ${first + h}, {column}; selp.f32 ${x}, {bits}, ${x}, p;")
                if windowed:
                    lines.append(f"setp.ge.s32 p, low{h}, {column}; selp.f32 ${x}, {bits}, ${x}, p;")
    text = "\n".join([*lines, "}"])

    @intrinsic
    def mask(typingctx, scores, last0, last1, window):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            inputs = [*_load(builder, data, count), *arguments[1:]]
            _store(builder, data, _assembly(builder, text, count, count, inputs), count)
            return context.get_dummy_value()

        return void(scores, i32, i32, i32), generate

    return mask


@functools.cache
def cap_scores(keys: int):
    """(scores, inner): scores = tanh(scores * inner), by exp2 and a reciprocal."""
    count = keys // 2
    lines = ["{ .reg .f32 t, k;", f"mul.f32 k, ${2 * count}, {_float_bits(2 * 1.4426950408889634)};"]
    for x in range(count):
        lines.append(f"mul.f32 t, ${x}, k; ex2.approx.ftz.f32 t, t; add.f32 t, t, {_float_bits(1.0)}; rcp.approx.ftz.f32 t, t; "
                     f"fma.rn.f32 ${x}, t, {_float_bits(-2.0)}, {_float_bits(1.0)};")
    text = "\n".join([*lines, "}"])

    @intrinsic
    def cap(typingctx, scores, inner):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            _store(builder, data, _assembly(builder, text, count, count, [*_load(builder, data, count), arguments[1]]), count)
            return context.get_dummy_value()

        return void(scores, f32), generate

    return cap


@functools.cache
def pack_weights(dtype: DType, keys: int):
    """(weights [keys / 4] u32, scores): the scores as the A fragments of the second product."""
    pair = {"bf16": "cvt.rn.bf16x2.f32", "f16": "cvt.rn.f16x2.f32"}[_SHORT[dtype.name]]

    @intrinsic
    def convert(typingctx, weights, scores):
        def generate(context, builder, signature, arguments):
            target = _pointer(context, builder, signature.args[0], arguments[0])
            values = _load(builder, _pointer(context, builder, signature.args[1], arguments[1]), keys // 2)
            kind = ir.FunctionType(_I32, [_F32, _F32])
            for i in range(keys // 4):
                word = builder.call(ir.InlineAsm(kind, f"{pair} $0, $2, $1;", "=r,f,f"), [values[2 * i], values[2 * i + 1]])
                builder.store(word, builder.gep(target, [ir.Constant(_I32, i)]))
            return context.get_dummy_value()

        return void(weights, scores), generate

    return convert


@functools.cache
def scale_values(columns: int):
    """(acc, factor of row g, factor of row g + 8): multiply in place."""
    @intrinsic
    def scale(typingctx, acc, first, second):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            for i, value in enumerate(_load(builder, data, columns // 2)):
                builder.store(builder.fmul(value, arguments[1 + i // 2 % 2]), builder.gep(data, [ir.Constant(_I32, i)]))
            return context.get_dummy_value()

        return void(acc, f32, f32), generate

    return scale


@functools.cache
def clear_values(columns: int):
    """(acc): zeros."""
    @intrinsic
    def clear(typingctx, acc):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            for i in range(columns // 2):
                builder.store(ir.Constant(_F32, 0.0), builder.gep(data, [ir.Constant(_I32, i)]))
            return context.get_dummy_value()

        return void(acc), generate

    return clear


@functools.cache
def stage_values(dtype: DType, columns: int, half_bytes: int):
    """(acc, shared address of the lane's row g and column 2 c, g * 16): write acc as 16-bit rows with the 128-byte swizzle."""
    pair = {"bf16": "cvt.rn.bf16x2.f32", "f16": "cvt.rn.f16x2.f32"}[_SHORT[dtype.name]]
    count = columns // 2
    lines = ["{ .reg .b32 a, v;"]
    for j in range(columns // 8):
        lines.append(f"xor.b32 a, ${count + 1}, {j % 8 * 16}; add.u32 a, a, ${count};")
        for h in range(2):
            x = 4 * j + 2 * h
            lines.append(f"{pair} v, ${x + 1}, ${x}; st.shared.b32 [a + {j // 8 * half_bytes + h * 1024}], v;")
    text = "\n".join([*lines, "}"])

    @intrinsic
    def stage(typingctx, acc, address, swizzle):
        def generate(context, builder, signature, arguments):
            data = _pointer(context, builder, signature.args[0], arguments[0])
            _assembly(builder, text, 0, 0, [*_load(builder, data, count), *arguments[1:]])
            return context.get_dummy_value()

        return void(acc, u32, u32), generate

    return stage


def _float_bits(value: float) -> str:
    import struct

    return f"0f{struct.unpack('>I', struct.pack('>f', value))[0]:08X}"
