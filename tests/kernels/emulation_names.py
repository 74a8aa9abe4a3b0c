"""The instructions: what stands in place of the names that kernel modules import from ptx.py and numba.cuda.

They do what the PTX manual says. What cp.async brings arrives only at the wait that covers it. The approximate functions are
exact but for the flush of subnormal numbers: the manual bounds their error at about 2 ulp.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from emulation_ptx import Assembler
from emulation_threads import running
from emulation_values import I32, I64, U16, U32, U64, Array, Local, Memory

from zhilight.driver.dtype import DType

FULL_WARP = 0xFFFFFFFF


def names(memory: Memory) -> dict[str, Any]:
    """What to put in place of a kernel module's imports; `memory` is the device's."""
    def shared() -> Memory:
        return running[0].block.shared

    exp2 = _flushed(np.exp2)
    assembler = Assembler(multiply=_multiply, pack=_pack, collective=_collective, exp2=exp2, cp_async=_cp_async)
    found = {
        "cuda": _cuda(), "i32": I32, "i64": I64, "u16": U16, "u32": U32, "u64": U64, "f32": np.float32,
        "address": lambda pointer: U64(pointer.address), "shared_address": lambda array: U32(array.address),
        "cp_async_16_zfill": _cp_async, "cp_async_commit": _commit,
        "cp_async_wait": lambda pending: lambda: _wait(memory, pending),
        "mma_m16n8k16": lambda dtype: lambda *values: _collective(f"mma {dtype}", values, lambda all_: _multiply(dtype, all_)),
        "pack": _pack, "unpack": lambda dtype: lambda bits: tuple(_floats(dtype, bits)),
        "float_of_bits": lambda bits: np.frombuffer(struct.pack("<I", bits), np.float32)[0],
        "bits_of_float": lambda value: U32(np.float32(value).view(np.uint32)),
        "exp2_approx": exp2, "log2_approx": _flushed(np.log2),
        "rsqrt_approx": _flushed(lambda v: 1 / np.sqrt(v)), "reciprocal_approx": _flushed(lambda v: 1 / v),
        "shuffle_xor_u64": lambda v, bits: _shuffle("xor u64", U64(v), lambda lane: lane ^ bits),
        "shuffle_up_u64": lambda v, delta: _shuffle("up u64", U64(v), lambda lane: lane - delta if lane >= delta else lane),
        "atomic_inc_acq_rel_u32": lambda a, limit: _atomic(memory, a, np.uint32, lambda v: 0 if v >= limit else v + 1),
        "reduce_add_f32": lambda a, value: _atomic(memory, a, np.float32, lambda v: v + np.float32(value)),
        "reduce_add_u32": lambda a, value: _atomic(memory, a, np.uint32, lambda v: U32(int(v) + value)),
        "fence_gpu": lambda: None, "grid_dependency_launch": lambda: None, "grid_dependency_wait": lambda: None,
    }
    found |= {"array_assembly": assembler.array_assembly, "ptx": assembler.ptx,
              "load_element": lambda array, index: found["load_global_b32"](U64(array) + 4 * U64(index))}
    for name, count, dtype in (("b16", 1, np.uint16), ("b32", 1, np.uint32), ("v2", 2, np.uint32), ("v4", 4, np.uint32),
                               ("f32", 1, np.float32), ("f32x2", 2, np.float32), ("f32x4", 4, np.float32)):
        for space, place in (("global", lambda: memory), ("shared", shared)):
            found[f"load_{space}_{name}"] = _load(place, count, dtype)
            found[f"store_{space}_{name}"] = _store(place, count, dtype)
    found["load_stream_v4"] = found["load_once_v4"] = found["load_global_v4"]
    return found


def missing(name: str) -> Callable:
    """In place of an instruction that is not here."""
    def fail(*arguments: Any) -> None:
        raise NotImplementedError(f"emulation_names.py has no {name}")

    return fail


# ---- memory ---------------------------------------------------------------------------------------------------------


def _load(place: Callable[[], Memory], count: int, dtype: Any) -> Callable:
    size, kind = count * np.dtype(dtype).itemsize, np.float32 if dtype is np.float32 else U32

    def load(address: int) -> Any:
        values = [kind(v) for v in np.frombuffer(place().read(address, size), dtype)]
        return tuple(values) if count > 1 else values[0]

    return load


def _store(place: Callable[[], Memory], count: int, dtype: Any) -> Callable:
    kind = {np.float32: np.float32, np.uint32: U32, np.uint16: U16}[dtype]

    def store(address: int, *values: Any) -> None:
        assert len(values) == count
        place().write(address, np.array([kind(v) for v in values], dtype).tobytes())

    return store


def _atomic(memory: Memory, address: int, dtype: Any, change: Callable) -> Any:
    old = np.frombuffer(memory.read(address, 4, noted=False), dtype)[0]
    memory.write(address, dtype(change(old)).tobytes(), noted=False)
    return U32(old) if dtype is np.uint32 else old


def _cp_async(target: int, source: int, size: int) -> None:
    assert size in (0, 16)
    running[0].block.shared.note(target, 16, True)  # the bytes may come from now on
    running[0].copies.append((target, source, size))


def _commit() -> None:
    thread = running[0]
    thread.groups.append(thread.copies)
    thread.copies = []


def _wait(memory: Memory, pending: int) -> None:
    thread = running[0]
    while len(thread.groups) > pending:
        for target, source, size in thread.groups.pop(0):
            thread.block.shared.write(target, memory.read(source, 16) if size else bytes(16))


# ---- numbers --------------------------------------------------------------------------------------------------------


def _flushed(exact: Callable) -> Callable:
    def flush(value: np.float32) -> np.float32:
        return np.float32(np.copysign(0, value)) if abs(value) < np.finfo(np.float32).tiny else value

    return lambda value: flush(np.float32(exact(np.float64(flush(np.float32(value))))))


def _pack(dtype: DType) -> Callable:
    def pack(low: Any, high: Any) -> U32:  # NumPy and ml_dtypes round to nearest even
        return U32(np.array([low, high], np.float32).astype(dtype.numpy).view(np.uint32)[0])

    return pack


def _floats(dtype: DType, bits: int) -> np.ndarray:
    return np.frombuffer(struct.pack("<I", bits), dtype.numpy).astype(np.float32)


def _multiply(dtype: DType, lanes: list) -> list:
    """mma.m16n8k16 with the fragment layouts of the PTX manual."""
    a, b, c = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
    for lane, v in enumerate(lanes):
        row, column = lane // 4, lane % 4 * 2
        a[row, column:column + 2], a[row + 8, column:column + 2] = _floats(dtype, v[0]), _floats(dtype, v[1])
        a[row, column + 8:column + 10], a[row + 8, column + 8:column + 10] = _floats(dtype, v[2]), _floats(dtype, v[3])
        b[column:column + 2, row], b[column + 8:column + 10, row] = _floats(dtype, v[4]), _floats(dtype, v[5])
        c[row, column:column + 2], c[row + 8, column:column + 2] = v[6:8], v[8:10]
    d = a @ b + c
    return [(*d[lane // 4, lane % 4 * 2:][:2], *d[lane // 4 + 8, lane % 4 * 2:][:2]) for lane in range(32)]


# ---- threads --------------------------------------------------------------------------------------------------------


def _collective(instruction: str, value: Any, combine: Callable[[list], list]) -> Any:
    """Every lane's value in, every lane's result out. It does not order accesses to memory as a barrier does."""
    return running[0].meet(running[0].warp, instruction, value, combine)


def _shuffle(instruction: str, value: Any, source: Callable[[int], int]) -> Any:
    return _collective(f"shfl {instruction}", value, lambda values: [values[source(lane)] for lane in range(32)])


def _full(mask: int) -> None:
    assert mask == FULL_WARP, "shuffles of part of a warp are not emulated"


def _cuda() -> Any:
    """numba.cuda as kernels use it."""
    def syncthreads() -> None:
        thread = running[0]
        thread.meet(thread.block.meeting, "bar.sync")
        thread.barriers += 1

    def syncwarp() -> None:
        thread = running[0]
        thread.meet(thread.warp, "bar.warp.sync")
        thread.warp_barriers += 1

    def shared_array(shape: Any, dtype: Any) -> Array:
        """The nth call in a thread gives the block's nth array; shape 0 is the dynamic shared memory."""
        thread, block = running[0], running[0].block
        if thread.shared_arrays == len(block.shared_arrays):
            shape = shape if isinstance(shape, tuple) else (shape,)
            size = np.dtype(str(dtype)).itemsize
            nbytes = block.dynamic_shared if shape == (0,) else math.prod(shape) * size
            place = block.shared.place(b"\xff" * nbytes)
            block.shared_arrays.append(Array(block.shared, place, str(dtype), (nbytes // size,) if shape == (0,) else shape))
        thread.shared_arrays += 1
        return block.shared_arrays[thread.shared_arrays - 1]

    def xor(mask: int, value: Any, bits: int) -> Any:
        _full(mask)
        return _shuffle("xor", value, lambda lane: lane ^ bits)

    def up(mask: int, value: Any, delta: int) -> Any:
        _full(mask)
        return _shuffle("up", value, lambda lane: lane - delta if lane >= delta else lane)

    def lane_of(mask: int, value: Any, source: int) -> Any:
        _full(mask)
        return _shuffle("idx", value, lambda lane: int(source))

    def ballot(mask: int, predicate: Any) -> Any:
        _full(mask)
        return _collective("vote.ballot", bool(predicate), lambda all_: [U32(sum(p << i for i, p in enumerate(all_)))] * 32)

    return SimpleNamespace(
        jit=lambda **options: lambda function: function,
        threadIdx=_Index(lambda: (running[0].number, 0, 0)), blockIdx=_Index(lambda: running[0].block.index),
        shared=SimpleNamespace(array=shared_array), local=SimpleNamespace(array=Local.make),
        ballot_sync=ballot, ffs=lambda value: I32((int(value) & -int(value)).bit_length()), shfl_sync=lane_of,
        syncthreads=syncthreads, syncwarp=syncwarp, threadfence=lambda: None, shfl_xor_sync=xor, shfl_up_sync=up)


class _Index:
    def __init__(self, read: Callable[[], tuple[int, int, int]]):
        self._read = read

    x = property(lambda self: I32(self._read()[0]))
    y = property(lambda self: I32(self._read()[1]))
    z = property(lambda self: I32(self._read()[2]))
