"""Attention's products on mma.sync: each one block of inline assembly over register arrays.

A whole product is one assembly text, unrolled here and not by the compiler: arrays stay in registers whatever the compiler's
unrolling limits are. The order of the text is the order meant for the machine; the assembler keeps to it roughly. Prefill's
second product holds the softmax too: the weights of the next 16 keys are made while the tensor cores multiply those before, so
that a warp alone keeps both units busy, and scores leave their float32 registers as soon as they are weights.
Fragment layouts are those of `mma_m16n8k16` in ptx.py; an accumulator array is float32 [row tiles, columns / 8, 4].

Lane addresses of ldmatrix, in 16 rows of 16 columns: lane l points at row l % 8 + 8 * (l / 8 % 2), half l / 16 of the columns,
for A fragments and, transposed, for B fragments of V; for B fragments of K at row l % 8 + 8 * (l / 16), half l / 8 % 2, the
other way round, as the two registers of a B fragment must be neighbours. Strides are bytes of a row.
"""

import functools
from collections.abc import Iterable, Sequence

from llvmlite import ir
from numba.cuda.extending import intrinsic

from zhilight.driver.dtype import DType
from zhilight.kernels.ptx import f32, u32, void

_KINDS = {"f": ir.FloatType(), "r": ir.IntType(32)}
_SHORT = {"bfloat16": "bf16", "float16": "f16"}

FENCE = "bar.warp.sync 0xffffffff;"
"""Becomes a NOP, but the assembler moves no load of shared memory over it: else it loads so far ahead that registers spill, or
are moved about to make room for aligned groups of four. Not where a warp may have diverged: there it becomes a call."""

Parameter = tuple[str, Sequence[int], str]
"""How an assembly uses an argument: "out", "inout" or "in" for an array, "value" for a number; the elements it uses, counted
through the array; "f" for float32 or "r" for 32 bits."""
NUMBER = ("value", range(1), "f")
LANE = ("value", range(1), "r")
"""A lane address."""


def operands(parameters: Iterable[Parameter]) -> list[list[str]]:
    """The names ($0, $1, ...) of each parameter's elements: what is written comes first, then the rest."""
    parameters = list(parameters)
    written = sum(len(elements) for mode, elements, _ in parameters if mode in ("out", "inout"))
    tied = sum(len(elements) for mode, elements, _ in parameters if mode == "inout")
    first, rest, names = 0, written + tied, []
    for mode, elements, _ in parameters:
        start = first if mode in ("out", "inout") else rest
        if mode in ("out", "inout"):
            first += len(elements)
        else:
            rest += len(elements)
        names.append([f"${start + i}" for i in range(len(elements))])
    return names


def array_assembly(lines: Sequence[str], parameters: Sequence[Parameter]):
    """An intrinsic of as many arguments as `parameters`; arrays are cuda.local.array, which stay in registers."""
    text = "\n".join(["{", *lines, "}"])
    written = [(which, element, kind) for which, (mode, elements, kind) in enumerate(parameters)
               for element in elements if mode in ("out", "inout")]

    def generate(context, builder, signature, arguments):
        def pointer(which, element):
            data = context.make_array(signature.args[which])(context, builder, arguments[which]).data
            return builder.gep(data, [ir.Constant(_KINDS["r"], element)])

        tied = [(place, which, element, kind) for place, (which, element, kind) in enumerate(written)
                if parameters[which][0] == "inout"]
        inputs = [builder.load(pointer(which, element)) for _, which, element, _ in tied]
        kinds = [kind for *_, kind in tied]
        constraints = [f"=&{kind}" for *_, kind in written] + [str(place) for place, *_ in tied]
        for which, (mode, elements, kind) in enumerate(parameters):
            if mode in ("in", "value"):
                inputs += [builder.load(pointer(which, i)) for i in elements] if mode == "in" else [arguments[which]]
                kinds += [kind] * len(elements)
                constraints += [kind] * len(elements)
        function = ir.FunctionType(ir.LiteralStructType([_KINDS[kind] for *_, kind in written]), [_KINDS[k] for k in kinds])
        assembly = ir.InlineAsm(function, text, ",".join([*constraints, "~{memory}"]), side_effect=True)
        value = builder.call(assembly, inputs)
        for place, (which, element, _) in enumerate(written):
            builder.store(builder.extract_value(value, place), pointer(which, element))
        return context.get_dummy_value()

    # numba asks the typing function for its argument names; numbers are cast to the types named here
    names = [f"a{i}" for i in range(len(parameters))]
    types = [{"f": "f32", "r": "u32"}[kind] if mode == "value" else name
             for name, (mode, _, kind) in zip(names, parameters, strict=True)]
    scope = {"void": void, "f32": f32, "u32": u32, "generate": generate}
    exec(f"def typing(context, {', '.join(names)}):\n    return void({', '.join(types)}), generate\n", scope)
    return intrinsic(scope["typing"])


def _mma(short: str, d: list[str], a: list[str], b0: str, b1: str, c: list[str]) -> str:
    return (f"mma.sync.aligned.m16n8k16.row.col.f32.{short}.{short}.f32 {{{','.join(d)}}}, {{{','.join(a)}}}, "
            f"{{{b0},{b1}}}, {{{','.join(c)}}};")


def _ldmatrix(registers: list[str], lane: str, offset: int, transposed: bool = False) -> str:
    return (f"ldmatrix.sync.aligned.m8n8.x4.{'trans.' if transposed else ''}shared.b16 {{{','.join(registers)}}}, "
            f"[{lane} + {offset}];")


# ---- prefill --------------------------------------------------------------------------------------------------------


@functools.cache
def scores_product(dtype: DType, row_tiles: int, key_tiles: int, steps: int, stride: int, k_offset: int):
    """(scores [row_tiles, key_tiles, 4], lane address of Q, lane address of K): scores = Q K^T of 16 * steps columns.

    K stands k_offset behind its lane address. Loads of K stand two groups of 16 keys before their use, those of Q one step.
    """
    parameters = (("out", range(row_tiles * key_tiles * 4), "f"), LANE, LANE)
    scores, (q,), (k,) = operands(parameters)
    groups = [(step, n) for step in range(steps) for n in range(key_tiles // 2)]

    def load_queries(step: int) -> list[str]:
        if step >= steps:
            return []
        return [_ldmatrix([f"q{step % 2}{m}{i}" for i in range(4)], q, m * 16 * stride + step * 32) for m in range(row_tiles)]

    def load_keys(index: int) -> list[str]:
        if index >= len(groups):
            return []
        step, n = groups[index]
        return [_ldmatrix([f"k{index % 3}{i}" for i in range(4)], k, k_offset + n * 16 * stride + step * 32)]

    lines = [f".reg .b32 {','.join(f'q{p}{m}{i}' for p in range(2) for m in range(row_tiles) for i in range(4))};",
             f".reg .b32 {','.join(f'k{p}{i}' for p in range(3) for i in range(4))};",
             ".reg .f32 z; mov.f32 z, 0f00000000;", *load_queries(0), *load_keys(0), *load_keys(1)]
    for index, (step, n) in enumerate(groups):
        if n == 0 and step:
            lines.append(FENCE)
        lines += load_keys(index + 2)
        if n == key_tiles // 2 - 1:
            lines += load_queries(step + 1)
        for half in range(2):
            for m in range(row_tiles):
                first = (m * key_tiles + 2 * n + half) * 4
                d = scores[first:first + 4]
                lines.append(_mma(_SHORT[dtype.name], d, [f"q{step % 2}{m}{i}" for i in range(4)], f"k{index % 3}{2 * half}",
                                  f"k{index % 3}{2 * half + 1}", d if step else ["z"] * 4))
    return array_assembly(lines, parameters)


@functools.cache
def softmax_values_product(dtype: DType, row_tiles: int, steps: int, column_tiles: int, stride: int, v_offset: int):
    """(acc, totals, scores, tops, scale, lane address of V): acc += weights V of 16 * steps keys.

    weights = exp2(scores * scale - tops), rounded to `dtype`; totals += a lane's sum of them before rounding.
    acc [row_tiles, column_tiles, 4], scores [row_tiles, 2 * steps, 4], totals and tops [row_tiles, 2]. V stands v_offset behind
    its lane address.
    """
    parameters = (("inout", range(row_tiles * column_tiles * 4), "f"), ("inout", range(2 * row_tiles), "f"),
                  ("in", range(row_tiles * 2 * steps * 4), "f"), ("in", range(2 * row_tiles), "f"), NUMBER, LANE)
    acc, totals, scores, tops, (scale,), (v,) = operands(parameters)
    places = [f"{m}{i}" for m in range(row_tiles) for i in range(4)]
    lines = [f".reg .f32 {','.join(f'p{s}{place}{e}' for s in range(2) for place in places for e in range(2))};",
             f".reg .b32 {','.join(f'w{s}{place}' for s in range(steps) for place in places)};",
             f".reg .b32 {','.join(f'v{group}{i}' for group in range(3) for i in range(4))};",
             *(f".reg .f32 below{row}; neg.ftz.f32 below{row}, {top};" for row, top in enumerate(tops))]
    weights = [_weights_lines(_SHORT[dtype.name], row_tiles, 2 * steps, step, scores, totals, scale) for step in range(steps)]
    lines += weights[0]
    for step in range(steps):
        product = _values_lines(_SHORT[dtype.name], row_tiles, column_tiles, step, acc, v, v_offset + step * 16 * stride)
        lines += _interleave(product, weights[step + 1] if step + 1 < steps else [])
    return array_assembly(lines, parameters)


def _weights_lines(short: str, row_tiles: int, key_tiles: int, step: int, scores: list[str], totals: list[str],
                   scale: str) -> list[str]:
    """Weights of 16 keys into w{step}.. as A fragments, and their sums into totals; `below` is minus the rows' tops.

    Sums and roundings stand one pair after their exponentials, which take a while.
    """
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


def _values_lines(short: str, row_tiles: int, column_tiles: int, step: int, acc: list[str], v: str, offset: int) -> list[str]:
    """acc += weights V of 16 keys. Loads of V stand two groups of 16 columns before their use."""
    groups = column_tiles // 2

    def load(n: int) -> list[str]:
        return [_ldmatrix([f"v{n % 3}{i}" for i in range(4)], v, offset + n * 32, True)] if n < groups else []

    lines = load(0) + load(1)
    for n in range(groups):
        if n or step:
            lines.append(FENCE)
        lines += load(n + 2)
        for half in range(2):
            for m in range(row_tiles):
                first = (m * column_tiles + 2 * n + half) * 4
                d = acc[first:first + 4]
                lines.append(_mma(short, d, [f"w{step}{m}{i}" for i in range(4)], f"v{n % 3}{2 * half}",
                                  f"v{n % 3}{2 * half + 1}", d))
    return lines


def _interleave(main: list[str], side: list[str]) -> list[str]:
    """`side` spread evenly over `main`; both keep their order."""
    lines = []
    for i, line in enumerate(main):
        lines += [*side[i * len(side) // len(main):(i + 1) * len(side) // len(main)], line]
    return lines


# ---- decode ---------------------------------------------------------------------------------------------------------


@functools.cache
def register_scores_product(dtype: DType, wide: bool, steps: int):
    """(scores [2, 4], queries [steps, 4] u32, lane address of K): scores = Q K^T of 16 keys, with Q held in registers.

    wide: the upper eight rows hold queries too; else they are taken as zeros, queries[:, 1::2] is not read and scores[:, 2:]
    not written. Two chains of accumulators halve the latency.
    """
    kept, used = (4, (0, 1, 2, 3)) if wide else (2, (0, 2))
    parameters = (("out", [4 * n + i for n in range(2) for i in range(kept)], "f"),
                  ("in", [4 * step + i for step in range(steps) for i in used], "r"), LANE)
    scores, queries, (k,) = operands(parameters)
    chains = 2 if steps > 1 else 1
    lines = [".reg .b32 b<4>, zero; .reg .f32 z, c<16>; mov.f32 z, 0f00000000; mov.b32 zero, 0;"]
    for step in range(steps):
        mine = queries[len(used) * step:len(used) * (step + 1)]
        a = mine if wide else [mine[0], "zero", mine[1], "zero"]
        lines.append(_ldmatrix(["b0", "b1", "b2", "b3"], k, step * 32))
        for n in range(2):
            d = [f"c{8 * (step % chains) + 4 * n + i}" for i in range(4)]
            lines.append(_mma(_SHORT[dtype.name], d, a, f"b{2 * n}", f"b{2 * n + 1}", d if step >= chains else ["z"] * 4))
    for n in range(2):
        for i in range(kept):
            lines.append(f"add.f32 {scores[n * kept + i]}, c{4 * n + i}, c{8 + 4 * n + i};" if chains == 2
                         else f"mov.f32 {scores[n * kept + i]}, c{4 * n + i};")
    return array_assembly(lines, parameters)


@functools.cache
def transposed_values_product(dtype: DType, head_tiles: int, column_tiles: int):
    """(acc [column_tiles, head_tiles, 4], weights [2 * head_tiles] u32, lane address of V): acc += V^T weights^T, 16 keys.

    The columns of V are the 16 rows of the multiplication and the heads its 8 columns, so that a group of up to 8 heads
    costs half the instructions and registers of the other way round. The scores' C fragments, packed, are its B fragments.
    acc: value e of tile d is column 16 d + g + 8 (e / 2), head 2 c + e % 2. The lane address is as for B fragments of K.
    """
    parameters = (("inout", range(column_tiles * head_tiles * 4), "f"), ("in", range(2 * head_tiles), "r"), LANE)
    acc, weights, (v,) = operands(parameters)
    lines = [".reg .b32 a<4>;"]
    for d in range(column_tiles):
        lines.append(_ldmatrix(["a0", "a1", "a2", "a3"], v, d * 32, True))
        for t in range(head_tiles):
            first = (d * head_tiles + t) * 4
            c = acc[first:first + 4]
            lines.append(_mma(_SHORT[dtype.name], c, ["a0", "a1", "a2", "a3"], weights[2 * t], weights[2 * t + 1], c))
    return array_assembly(lines, parameters)
