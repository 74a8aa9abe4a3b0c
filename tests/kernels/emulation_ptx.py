"""Blocks of inline assembly for emulated kernels: their own text is run, an instruction at a time, as the PTX manual says.

Registers are a dict by name; one that is read before it is written is an error. Only what the attention kernels use is here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from emulation_threads import running
from emulation_values import U32, U64, Local

from zhilight.driver.dtype import bfloat16, float16

DTYPES = {"bf16": bfloat16, "f16": float16}
Instruction = Callable[[dict[str, Any]], None]


class Assembler:
    """`instructions` are the emulator's own: multiply, pack, collective, exp2 and cp_async of emulation_names.py."""

    def __init__(self, **instructions: Callable):
        self._use = instructions
        self._assembled: dict[str, list[Instruction]] = {}

    def array_assembly(self, lines: Sequence[str], parameters: Sequence[tuple[str, Sequence[int], str]]) -> Callable:
        """`array_assembly` of attention_mma.py: operands are numbered as it says there."""
        from zhilight.kernels.attention_mma import operands

        code, places = self._assemble("\n".join(lines)), operands(parameters)

        def run(*arguments: Any) -> None:
            registers: dict[str, Any] = {}
            flat = [a._values.reshape(-1) if isinstance(a, Local) else [{"r": U32, "f": np.float32}[kind](a)]
                    for a, (_, _, kind) in zip(arguments, parameters, strict=True)]
            for names, values, (mode, elements, _) in zip(places, flat, parameters, strict=True):
                if mode != "out":
                    registers |= {name: values[i] for name, i in zip(names, elements, strict=True)}
            for instruction in code:
                instruction(registers)
            for names, values, (mode, elements, _) in zip(places, flat, parameters, strict=True):
                if mode in ("out", "inout"):
                    values[list(elements)] = [registers[name] for name in names]

        return run

    def ptx(self, text: str, result: Any, *parameters: Any, memory: bool = True, tied: int = 0) -> Callable:
        """`ptx` of ptx.py, without a result; the types of the parameters are the emulator's already."""
        code = self._assemble(text)
        assert str(result) == "none"

        def run(*arguments: Any) -> None:
            registers = {f"${i}": kind(value) for i, (kind, value) in enumerate(zip(parameters, arguments, strict=True))}
            for instruction in code:
                instruction(registers)

        return run

    def _assemble(self, text: str) -> list[Instruction]:
        found = self._assembled.get(text)
        if found is None:
            lines = re.sub(r"^\s*{|}\s*$", "", text).split(";")
            found = self._assembled[text] = [self._instruction(*line.split(maxsplit=1)) for line in map(str.strip, lines)
                                             if line and not line.startswith(".reg")]
        return found

    def _instruction(self, name: str, rest: str) -> Instruction:
        parts = [part.strip() for part in re.split(r",(?![^{]*})", rest)]
        lists = [part.strip("{}").split(",") for part in parts]
        base, kind = name.split(".")[0], name.split(".")[-1]
        if base == "mma":
            return self._mma(DTYPES[name.split(".")[-2]], *lists)
        if base == "ldmatrix":
            return self._ldmatrix(lists[0], *_address(parts[1]), ".trans." in name)
        if base == "bar":
            assert name == "bar.warp.sync"
            return lambda registers: None  # this orders accesses too, but no kernel may rely on its fences for that
        if base == "cp":
            (target, at), (source, of) = map(_address, parts[:2])
            return lambda r: self._use["cp_async"](U32(r[target] + at), U64(r[source] + of), int(parts[2]))
        if base == "mov":
            assert parts[1] == "0f00000000"
            return self._store(parts[0], lambda: np.float32(0), [])
        if base == "cvt" and "x2" in name:
            pack = self._use["pack"](DTYPES[name.split(".")[2][:-2]])
            return self._store(parts[0], lambda high, low: pack(low, high), parts[1:])
        compute = {
            "fma.f32": lambda a, b, c: np.float32(np.float64(a) * np.float64(b) + np.float64(c)),
            "add.f32": lambda a, b: np.float32(a + b), "neg.f32": lambda a: np.float32(-a),
            "ex2.f32": self._use["exp2"], "cvt.u32": U64, "add.u64": lambda a, b: U64(int(a) + int(b)),
            "mad.u32": lambda a, b, c: U64(int(a) * int(b) + int(c)),
        }[f"{base}.{kind}"]
        return self._store(parts[0], compute, parts[1:])

    def _store(self, target: str, compute: Callable, sources: list[str]) -> Instruction:
        def run(registers: dict[str, Any]) -> None:
            registers[target] = compute(*[registers[source] for source in sources])

        return run

    def _mma(self, dtype: Any, d: list[str], a: list[str], b: list[str], c: list[str]) -> Instruction:
        def run(registers: dict[str, Any]) -> None:
            values = [registers[name] for name in (*a, *b, *c)]
            found = self._use["collective"](f"mma {dtype}", values, lambda lanes: self._use["multiply"](dtype, lanes))
            registers |= dict(zip(d, found, strict=True))  # `registers` is the caller's dict: |= changes it in place

        return run

    def _ldmatrix(self, targets: list[str], lane: str, offset: int, transposed: bool) -> Instruction:
        """Lane l gives the address of row l % 8 of matrix l / 8; it gets pair l % 4 of row (column) l / 4 of each."""
        def combine(rows: list[bytes]) -> list[list[U32]]:
            matrices = np.frombuffer(b"".join(rows), np.uint16).reshape(4, 8, 8)
            if transposed:
                matrices = matrices.transpose(0, 2, 1)
            pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(4, 32)
            return [[U32(v) for v in pairs[:, lane]] for lane in range(32)]

        def run(registers: dict[str, Any]) -> None:
            row = running[0].block.shared.read(U32(registers[lane] + offset), 16)
            found = self._use["collective"]("ldmatrix", row, combine)
            registers |= dict(zip(targets, found, strict=True))

        return run


def _address(text: str) -> tuple[str, int]:
    register, offset = re.fullmatch(r"\[(\S+)(?: \+ (\d+))?\]", text).groups()
    return register, int(offset or 0)
