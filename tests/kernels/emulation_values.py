"""What emulated kernels compute with: integers of numba's widths, and memory that refuses bad accesses and races.

Floats are np.float32, so each operation is rounded as on the device, but: the device may fuse a multiply and an add, and numba
makes float64 of a float32 and a plain integer, which stays float32 here. NaN keeps its bits, where an addition on the device
makes it 0x7fffffff.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np


class Integer(int):
    """An integer of a C type. Casts wrap. As numba types it: arithmetic is of 64 bits whatever the operands, signed if either
    is (a plain Python integer is int64); a shift is signed as its left operand is."""

    __slots__ = ()
    bits: ClassVar[int]
    signed: ClassVar[bool]
    low: ClassVar[int]
    high: ClassVar[int]

    def __new__(cls, value: Any = 0):
        value = int(value)
        if not cls.low <= value <= cls.high:
            value &= (1 << cls.bits) - 1
            value -= (1 << cls.bits) if value > cls.high else 0
        return int.__new__(cls, value)


def _integer(bits: int, signed: bool) -> type[Integer]:
    low, high = (-1 << bits - 1, (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return type(f"{'I' if signed else 'U'}{bits}", (Integer,),
                {"__slots__": (), "bits": bits, "signed": signed, "low": low, "high": high})


U8, U16, U32, U64, I32, I64 = (_integer(bits, signed) for bits, signed in (
    (8, False), (16, False), (32, False), (64, False), (32, True), (64, True)))


def _arithmetic(name: str) -> Callable:
    exact = getattr(int, name)

    def operate(self: Integer, other: Any) -> Any:
        value = exact(self, other)
        if value is NotImplemented:
            return value
        return (I64 if self.signed or getattr(other, "signed", True) else U64)(value)

    return operate


def _shift(name: str, reflected: bool) -> Callable:
    exact = getattr(int, name)

    def operate(self: Integer, other: int) -> Integer:
        left, by = (other, self) if reflected else (self, other)
        assert 0 <= by < 64, f"shift by {int(by)}"
        return (I64 if getattr(left, "signed", True) else U64)(exact(self, other))

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    setattr(Integer, f"__{_name}__", _arithmetic(f"__{_name}__"))
    setattr(Integer, f"__r{_name}__", _arithmetic(f"__r{_name}__"))
for _name in ("lshift", "rshift"):
    setattr(Integer, f"__{_name}__", _shift(f"__{_name}__", False))
    setattr(Integer, f"__r{_name}__", _shift(f"__r{_name}__", True))
Integer.__neg__ = lambda self: (I64 if self.signed else U64)(-int(self))
Integer.__invert__ = lambda self: (I64 if self.signed else U64)(~int(self))

KINDS = {"uint8": U8, "uint16": U16, "uint32": U32, "uint64": U64, "int32": I32, "int64": I64, "float32": np.float32}
"""By the name of the element type."""


class Memory:
    """Arrays at addresses of `1 << shift` bytes each. An access outside an array or not aligned to its size is an error, and so
    is one that races: another thread of the block touched the bytes, one of the two accesses writes, and no barrier of the
    block, or of the warp if they share it, stands between them. Atomic operations are not noted.
    """

    def __init__(self, shift: int, current: Callable[[], Any]):
        """current: the thread that runs, or None outside of a kernel."""
        self._shift, self._current = shift, current
        self._arrays: dict[int, bytearray] = {}
        self._writes: dict[int, tuple] = {}
        self._reads: dict[int, dict[int, tuple]] = {}

    def place(self, content: bytes) -> int:
        """The address of a copy of the bytes."""
        assert len(content) < 1 << self._shift
        self._arrays[len(self._arrays) + 1] = bytearray(content)
        return len(self._arrays) << self._shift

    def begin_block(self) -> None:
        """Forget who touched what: between blocks no order is checked."""
        self._writes.clear()
        self._reads.clear()

    def content(self, address: int, nbytes: int) -> bytes:
        array, offset = self._find(address, nbytes, 1)
        return bytes(array[offset:offset + nbytes])

    def read(self, address: int, nbytes: int, noted: bool = True) -> bytes:
        array, offset = self._find(address, nbytes, nbytes)
        if noted:
            self.note(address, nbytes, False)
        return bytes(array[offset:offset + nbytes])

    def write(self, address: int, value: bytes, noted: bool = True) -> None:
        array, offset = self._find(address, len(value), len(value))
        if noted:
            self.note(address, len(value), True)
        array[offset:offset + len(value)] = value

    def _find(self, address: int, nbytes: int, alignment: int) -> tuple[bytearray, int]:
        array, offset = self._arrays.get(address >> self._shift), address & (1 << self._shift) - 1
        assert array is not None and offset + nbytes <= len(array), f"{nbytes} bytes at {int(address):#x} are in no array"
        assert offset % alignment == 0, f"{nbytes} bytes at {int(address):#x} are not aligned"
        return array, offset

    def note(self, address: int, nbytes: int, writes: bool) -> None:
        """Hold an access of the running thread against those before it, two bytes at a time."""
        thread = self._current()
        mine = thread.number, thread.warp.number, thread.barriers, thread.warp_barriers
        for place in range(int(address) // 2, (int(address) + nbytes + 1) // 2):
            before = self._writes.get(place)
            if before is not None:
                _check_order(before, mine, place)
            readers = self._reads.get(place)
            if writes:
                for before in (readers or {}).values():
                    _check_order(before, mine, place)
                self._writes[place] = mine
                if readers:
                    readers.clear()
            elif readers is None:
                self._reads[place] = {mine[0]: mine}
            else:
                readers[mine[0]] = mine


def _check_order(before: tuple, now: tuple, place: int) -> None:
    ordered = before[0] == now[0] or before[2] != now[2] or (before[1] == now[1] and before[3] != now[3])
    assert ordered, f"threads {before[0]} and {now[0]} race at {2 * place:#x}"


class Array:
    """A typed array in a Memory: a kernel's pointer (shape None) or shared array."""

    def __init__(self, memory: Memory, address: int, element: str, shape: tuple[int, ...] | None = None):
        self.address, self.shape = address, shape
        self._memory, self._kind, self._dtype = memory, KINDS[element], np.dtype(element)

    def __getitem__(self, index: Any) -> Any:
        return self._kind(np.frombuffer(self._memory.read(self._at(index), self._dtype.itemsize), self._dtype)[0])

    def __setitem__(self, index: Any, value: Any) -> None:
        self._memory.write(self._at(index), self._dtype.type(self._kind(value)).tobytes())

    def _at(self, index: Any) -> int:
        if self.shape is not None:
            index = index if isinstance(index, tuple) else (index,)
            assert len(index) == len(self.shape)
            assert all(0 <= i < n for i, n in zip(index, self.shape, strict=True)), f"index {index} of shape {self.shape}"
            index = sum(int(i) * math.prod(self.shape[axis + 1:]) for axis, i in enumerate(index))
        return int(self.address) + int(index) * self._dtype.itemsize


class Local:
    """A thread's own array, all ones before it is written."""

    def __init__(self, values: np.ndarray):
        self._values, self._kind = values, KINDS[values.dtype.name]

    @classmethod
    def make(cls, shape: Any, element: Any) -> Local:
        dtype = np.dtype(str(element))
        return cls(np.full(np.prod(shape) * dtype.itemsize, 255, np.uint8).view(dtype).reshape(shape))

    def __getitem__(self, index: Any) -> Any:
        found = self._values[index]
        return Local(found) if isinstance(found, np.ndarray) else self._kind(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._values[index] = self._kind(value)
