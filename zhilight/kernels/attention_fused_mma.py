"""Attention's products on mma.sync with the softmax among them: each one block of inline assembly over register arrays.

The weights of the next 16 keys are made while the tensor cores multiply those before: a warp alone keeps both units busy, and
scores leave their float32 registers as soon as they are weights. The order of the text is the order meant for the machine; the
assembler keeps to it roughly.
Fragment layouts are those of `mma_m16n8k16` in ptx.py; an accumulator array is float32 [row tiles, columns / 8, 4].
"""

import functools
from collections.abc import Iterable

from llvmlite import ir
from numba.cuda.extending import intrinsic

from zhilight.driver.dtype import DType
from zhilight.kernels.ptx import f32, ptx, u32, u64, void

_KINDS = {"f": ir.FloatType(), "r": ir.IntType(32)}
_SHORT = {"bfloat16": "bf16", "float16": "f16"}

FENCE = "bar.warp.sync 0xffffffff;"
"""Becomes a NOP, but the assembler moves no load of shared memory over it: else it loads so far ahead that registers spill, or
are moved about to make room for aligned groups of four. Not where a warp may have diverged: there it becomes a call."""

Parameter = tuple[str, int, str]
"""How an assembly uses an argument: "out", "inout" or "in" for an array, "value" for a number; its elements; "f" or "r"."""


def operands(parameters: Iterable[Parameter]) -> list[list[str]]:
    """The names ($0, $1, ...) of each parameter's elements: what is written comes first, then the rest."""
    parameters = list(parameters)
    written = sum(count for mode, count, _ in parameters if mode in ("out", "inout"))
    tied = sum(count for mode, count, _ in parameters if mode == "inout")
    first, rest, names = 0, written + tied, []
    for mode, count, _ in parameters:
        start = first if mode in ("out", "inout") else rest
        if mode in ("out", "inout"):
            first += count
        else:
            rest += count
        names.append([f"${start + i}" for i in range(count)])
    return names


def array_assembly(text: str, parameters: tuple[Parameter, ...]):
    """An intrinsic of as many arguments as `parameters`; arrays are cuda.local.array, which stay in registers."""
    written = [(i, kind) for i, (mode, count, kind) in enumerate(parameters) if mode in ("out", "inout") for _ in range(count)]

    def generate(context, builder, signature, arguments):
        def element(which, index):
            data = context.make_array(signature.args[which])(context, builder, arguments[which]).data
            return builder.gep(data, [ir.Constant(_KINDS["r"], index)])

        inputs, constraints = [], [f"=&{kind}" for _, kind in written]
        place = 0
        for which, (mode, count, kind) in enumerate(parameters):
            if mode == "inout":
                inputs += [builder.load(element(which, i)) for i in range(count)]
                constraints += [str(place + i) for i in range(count)]
            place += count if mode in ("out", "inout") else 0
        kinds = [kind for which, kind in written if parameters[which][0] == "inout"]
        for which, (mode, count, kind) in enumerate(parameters):
            if mode in ("in", "value"):
                inputs += [builder.load(element(which, i)) for i in range(count)] if mode == "in" else [arguments[which]]
                constraints += [kind] * count
                kinds += [kind] * count
        function = ir.FunctionType(ir.LiteralStructType([_KINDS[kind] for _, kind in written]), [_KINDS[k] for k in kinds])
        constraints = ",".join([*constraints, "~{memory}"])
        value = builder.call(ir.InlineAsm(function, text, constraints, side_effect=True), inputs)
        counts: dict[int, int] = {}
        for i, (which, _) in enumerate(written):
            builder.store(builder.extract_value(value, i), element(which, counts.get(which, 0)))
            counts[which] = counts.get(which, 0) + 1
        return context.get_dummy_value()

    # numba asks the typing function for its argument names; numbers are cast to the types named here
    names = [f"a{i}" for i in range(len(parameters))]
    types = [{"f": "f32", "r": "u32"}[kind] if mode == "value" else name
             for name, (mode, _, kind) in zip(names, parameters, strict=True)]
    scope = {"void": void, "f32": f32, "u32": u32, "generate": generate}
    exec(f"def typing(context, {', '.join(names)}):\n    return void({', '.join(types)}), generate\n", scope)
    return intrinsic(scope["typing"])


def mma(short: str, d: list[str], a: list[str], b0: str, b1: str, c: list[str]) -> str:
    return (f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32 {{{','.join(d)}}}, {{{','.join(a)}}}, "
            f"{{{b0},{b1}}}, {{{','.join(c)}}};")


def ldmatrix(registers: list[str], lane: str, offset: int, transposed: bool = False) -> str:
    return (f"ldmatrix.sync.aligned.m8n8.x4.{'trans.' if transposed else ''}shared.b16 {{{','.join(registers)}}}, "
            f"[{lane} + {offset}];")


def interleave(main: list[str], side: list[str], first: int = 0) -> list[str]:
    """`side` spread evenly over `main` from its line `first` on; both keep their order."""
    lines, room = main[:first], len(main) - first
    for i in range(room):
        lines += [*side[i * len(side) // room:(i + 1) * len(side) // room], main[first + i]]
    return lines


def scores_lines(short: str, row_tiles: int, key_tiles: int, steps: range, stride: int, scores: list[str], q: str, k: str,
                 k_offset: int, start: list[str] | None = None, final: list[str] | None = None,
                 fenced: bool = False) -> list[str]:
    """scores = start (or zeros) + Q K^T over `steps` of 16 columns; the last writes `final`, which may be in use till then.

    Loads of K stand two groups of 16 keys before their use, those of Q one step.
    """
    groups = [(step, n) for step in steps for n in range(key_tiles // 2)]

    def load_queries(step: int) -> list[str]:
        return [ldmatrix([f"q{step % 2}{m}{i}" for i in range(4)], q, m * 16 * stride + step * 32) for m in range(row_tiles)]

    def load_keys(index: int) -> list[str]:
        if index >= len(groups):
            return []
        step, n = groups[index]
        return [ldmatrix([f"k{index % 3}{i}" for i in range(4)], k, k_offset + n * 16 * stride + step * 32)]

    lines = [f".reg .b32 {','.join(f'q{p}{m}{i}' for p in range(2) for m in range(row_tiles) for i in range(4))};",
             f".reg .b32 {','.join(f'k{p}{i}' for p in range(3) for i in range(4))};",
             ".reg .f32 z; mov.f32 z, 0f00000000;"]
    lines += load_queries(steps[0]) + load_keys(0) + load_keys(1)
    for index, (step, n) in enumerate(groups):
        if fenced and n == 0 and index:
            lines.append(FENCE)
        lines += load_keys(index + 2)
        if n == key_tiles // 2 - 1 and step + 1 < steps.stop:
            lines += load_queries(step + 1)
        for half in range(2):
            for m in range(row_tiles):
                place = slice((m * key_tiles + 2 * n + half) * 4, (m * key_tiles + 2 * n + half) * 4 + 4)
                c = scores[place] if step > steps[0] else start[place] if start else ["z"] * 4
                d = final[place] if final and step + 1 == steps.stop else scores[place]
                lines.append(mma(short, d, [f"q{step % 2}{m}{i}" for i in range(4)], f"k{index % 3}{2 * half}",
                                 f"k{index % 3}{2 * half + 1}", c))
    return lines


def weights_lines(short: str, row_tiles: int, key_tiles: int, step: int, scores: list[str], totals: list[str],
                  scale: str) -> list[str]:
    """Weights exp2(score * scale - top) of 16 keys into w{step}.. as A fragments, and their sums into totals."""
    pair = {"bf16": "cvt.rn.bf16x2.f32", "f16": "cvt.rn.f16x2.f32"}[short]
    lines, late = [], []
    for m in range(row_tiles):
        for i in range(4):
            row, first = 2 * m + i % 2, (m * key_tiles + 2 * step + i // 2) * 4 + i % 2 * 2
            p = [f"p{step % 2}{m}{i}{e}" for e in range(2)]
            lines += [f"fma.rn.ftz.f32 {p[e]}, {scores[first + e]}, {scale}, below{row};" for e in range(2)]
            lines += [f"ex2.approx.ftz.f32 {p[e]}, {p[e]};" for e in range(2)]
            lines += late
            late = [f"add.ftz.f32 {totals[row]}, {totals[row]}, {p[e]};" for e in range(2)]
            late.append(f"{pair} w{step}{m}{i}, {p[1]}, {p[0]};")
    return lines + late


def weights_registers(row_tiles: int, steps: int, tops: list[str]) -> list[str]:
    """What the lines of `weights_lines` and `values_lines` use besides their arguments."""
    places = [f"{m}{i}" for m in range(row_tiles) for i in range(4)]
    return [f".reg .f32 {','.join(f'p{s}{place}{e}' for s in range(2) for place in places for e in range(2))};",
            f".reg .b32 {','.join(f'w{s}{place}' for s in range(steps) for place in places)};",
            f".reg .b32 {','.join(f'v{group}{i}' for group in range(3) for i in range(4))};",
            *(f".reg .f32 below{row}; neg.ftz.f32 below{row}, {top};" for row, top in enumerate(tops))]


def values_lines(short: str, row_tiles: int, column_tiles: int, step: int, stride: int, acc: list[str], v: str,
                 v_offset: int) -> list[str]:
    """acc += weights V of 16 keys. Loads of V stand two groups of 16 columns before their use."""
    groups = column_tiles // 2

    def load(n: int) -> list[str]:
        if n >= groups:
            return []
        return [ldmatrix([f"v{n % 3}{i}" for i in range(4)], v, v_offset + step * 16 * stride + n * 32, True)]

    lines = load(0) + load(1)
    for n in range(groups):
        if n or step:
            lines.append(FENCE)
        lines += load(n + 2)
        for half in range(2):
            for m in range(row_tiles):
                first = (m * column_tiles + 2 * n + half) * 4
                d = acc[first:first + 4]
                lines.append(mma(short, d, [f"w{step}{m}{i}" for i in range(4)], f"v{n % 3}{2 * half}",
                                 f"v{n % 3}{2 * half + 1}", d))
    return lines


@functools.cache
def scores_product(dtype: DType, row_tiles: int, key_tiles: int, steps: int, stride: int, k_offset: int):
    """(scores [row_tiles, key_tiles, 4], lane address of Q, lane address of K): scores = Q K^T of 16 * steps columns.

    Lane l points at row l % 8 + 8 * (l / 8 % 2) of Q, half l / 16 of the first 16 columns, and, k_offset further on, at row
    l % 8 + 8 * (l / 16) of K, half l / 8 % 2: the other way round, as the two registers of a B fragment must be neighbours.
    """
    parameters = (("out", row_tiles * key_tiles * 4, "f"), ("value", 1, "r"), ("value", 1, "r"))
    scores, (q,), (k,) = operands(parameters)
    lines = scores_lines(_SHORT[dtype.name], row_tiles, key_tiles, range(steps), stride, scores, q, k, k_offset, fenced=True)
    return array_assembly("\n".join(["{", *lines, "}"]), parameters)


@functools.cache
def softmax_values_product(dtype: DType, row_tiles: int, steps: int, column_tiles: int, stride: int, v_offset: int):
    """(acc, totals, scores, tops, scale, lane address): acc += weights V of 16 * steps keys.

    weights = exp2(scores * scale - tops); totals += a lane's sum of them. acc [row_tiles, column_tiles, 4], scores
    [row_tiles, 2 * steps, 4], totals and tops [row_tiles, 2]. The lane address is as that of Q, v_offset before V.
    """
    short, rows = _SHORT[dtype.name], 2 * row_tiles
    parameters = (("inout", row_tiles * column_tiles * 4, "f"), ("inout", rows, "f"), ("in", row_tiles * 2 * steps * 4, "f"),
                  ("in", rows, "f"), ("value", 1, "f"), ("value", 1, "r"))
    acc, totals, scores, tops, (scale,), (v,) = operands(parameters)
    lines = ["{", *weights_registers(row_tiles, steps, tops),
             *weights_lines(short, row_tiles, 2 * steps, 0, scores, totals, scale)]
    for step in range(steps):
        product = values_lines(short, row_tiles, column_tiles, step, stride, acc, v, v_offset)
        following = []
        if step + 1 < steps:
            following = weights_lines(short, row_tiles, 2 * steps, step + 1, scores, totals, scale)
        lines += interleave(product, following)
    return array_assembly("\n".join([*lines, "}"]), parameters)


@functools.cache
def maxima_product(dtype: DType, row_tiles: int, key_tiles: int, steps: range, stride: int, k_offset: int):
    """(next, best, scores, lane addresses of Q and K): next = Q K^T of another tile over `steps`, and maxima of `scores`.

    best [row_tiles, 2]: of the scores of the row, in all four lanes. Otherwise as `scores_product`.
    """
    rows, count = 2 * row_tiles, row_tiles * key_tiles * 4
    parameters = (("out", count, "f"), ("out", rows, "f"), ("in", count, "f"), ("value", 1, "r"), ("value", 1, "r"))
    inner, best, scores, (q,), (k,) = operands(parameters)
    other = [f"other{row}" for row in range(rows)]
    maxima = []
    for n in range(key_tiles):
        for row in range(rows):
            first = (row // 2 * key_tiles + n) * 4 + row % 2 * 2
            maxima.append(f"max.ftz.f32 {other[row] if n else best[row]}, {scores[first]}, {scores[first + 1]};")
            maxima += [f"max.ftz.f32 {best[row]}, {best[row]}, {other[row]};"] if n else []
    for lanes in (1, 2):
        maxima += [f"shfl.sync.bfly.b32 {o}, {b}, {lanes}, 31, 0xffffffff;" for o, b in zip(other, best, strict=True)]
        maxima += [f"max.ftz.f32 {b}, {b}, {o};" for o, b in zip(other, best, strict=True)]
    product = scores_lines(_SHORT[dtype.name], row_tiles, key_tiles, steps, stride, inner, q, k, k_offset, fenced=True)
    lines = ["{", f".reg .f32 {','.join(other)};", *interleave(product, maxima, 3), "}"]
    return array_assembly("\n".join(lines), parameters)


@functools.cache
def pipelined_product(dtype: DType, row_tiles: int, key_tiles: int, steps: range, column_tiles: int, stride: int,
                      k_offset: int, v_offset: int):
    """(acc, totals, scores, next, tops, scale, lane addresses of Q, K and V): acc += weights V, and scores = the next tile's.

    The weights of the scores are made among the multiplications that add Q K^T over `steps` to `next`; the sum is then put
    where the scores were. Otherwise as `scores_product` and `softmax_values_product`.
    """
    short, rows, v_steps, count = _SHORT[dtype.name], 2 * row_tiles, key_tiles // 2, row_tiles * key_tiles * 4
    parameters = (("inout", row_tiles * column_tiles * 4, "f"), ("inout", rows, "f"), ("inout", count, "f"), ("in", count, "f"),
                  ("in", rows, "f"), ("value", 1, "f"), *((("value", 1, "r"),) * 3))
    acc, totals, scores, start, tops, (scale,), (q,), (k,), (v,) = operands(parameters)
    inner = [f"c{i}" for i in range(count)]
    product = scores_lines(short, row_tiles, key_tiles, steps, stride, inner, q, k, k_offset, start, scores, True)
    last = len(product) - row_tiles * key_tiles - 2
    softmax = [line for step in range(v_steps)
               for line in weights_lines(short, row_tiles, key_tiles, step, scores, totals, scale)]
    lines = ["{", *weights_registers(row_tiles, v_steps, tops), f".reg .f32 {','.join(inner)};",
             *interleave(product[:last], softmax, 3), *product[last:]]
    for step in range(v_steps):
        lines += [FENCE] if not step else []
        lines += values_lines(short, row_tiles, column_tiles, step, stride, acc, v, v_offset)
    return array_assembly("\n".join([*lines, "}"]), parameters)


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
