"""A kernel's Python function run as plain Python, a thread for each CUDA thread, with its instructions replaced by what the PTX
manual says: for index arithmetic, fragment layouts and the order of copies, barriers and reads, without a GPU.

Shared memory starts as NaN bytes; what cp.async brings arrives only at the wait that covers it; a global access outside an
array is an error.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

_state = threading.local()
BF16 = ml_dtypes.bfloat16


class Emulator:
    """Global memory and the replacements for one kernel module's names."""

    def __init__(self):
        self.arrays: dict[int, np.ndarray] = {}

    def put(self, array: np.ndarray) -> int:
        """The address of a copy of the array."""
        base = (len(self.arrays) + 1) << 32
        self.arrays[base] = np.frombuffer(bytearray(array.tobytes()), np.uint8)
        return base

    def get(self, base: int, like: np.ndarray) -> np.ndarray:
        return np.frombuffer(self.arrays[base].tobytes(), like.dtype).reshape(like.shape)

    def read(self, address: int, nbytes: int) -> bytes:
        array, offset = self.arrays[address >> 32 << 32], address & 0xFFFFFFFF
        assert address % nbytes == 0 and offset + nbytes <= len(array), f"read of {nbytes} bytes at {address:#x}"
        return array[offset:offset + nbytes].tobytes()

    def write(self, address: int, value: bytes) -> None:
        array, offset = self.arrays[address >> 32 << 32], address & 0xFFFFFFFF
        assert address % len(value) == 0 and offset + len(value) <= len(array), f"write of {len(value)} bytes at {address:#x}"
        array[offset:offset + len(value)] = np.frombuffer(value, np.uint8)

    def names(self) -> dict[str, Any]:
        """What to put in place of a kernel module's imports."""
        return {
            "cuda": _cuda(), "i32": int, "u32": int, "u64": int, "f32": float,
            "address": lambda pointer: pointer, "shared_address": lambda array: 0,
            "cp_async_16_zfill": lambda target, source, size: _state.copies.append((target, source, size)),
            "cp_async_commit": _commit, "cp_async_wait": lambda pending: lambda: self._wait(pending),
            "load_global_v4": lambda a: struct.unpack("<4I", self.read(a, 16)),
            "load_global_b16": lambda a: struct.unpack("<H", self.read(a, 2))[0],
            "store_global_b16": lambda a, v: self.write(a, struct.pack("<H", v & 0xFFFF)),
            "store_global_f32": lambda a, v: self.write(a, np.float32(v).tobytes()),
            "load_shared_v4": lambda a: struct.unpack("<4I", _shared(a, 16).tobytes()),
            "load_shared_f32": lambda a: float(_shared(a, 4).view(np.float32)[0]),
            "store_shared_f32": _store_shared_f32,
            "mma_m16n8k16": lambda dtype: lambda *values: _together(values, _multiply),
            "pack": lambda dtype: _pack,
            "unpack": lambda dtype: lambda bits: tuple(map(float, _floats(bits))),
            "exp2_approx": lambda v: 2.0 ** v, "reciprocal_approx": lambda v: 1.0 / v,
            "grid_dependency_launch": lambda: None, "grid_dependency_wait": lambda: None,
        }

    def _wait(self, pending: int) -> None:
        while len(_state.groups) > pending:
            for target, source, size in _state.groups.pop(0):
                _shared(target, 16)[:] = np.frombuffer(self.read(source, 16) if size else bytes(16), np.uint8)

    def launch(self, kernel: Any, grid: int, *arguments: Any) -> None:
        """One block after the other. Raises the first error of a thread."""
        for index in range(grid):
            warps = [SimpleNamespace(values=[None] * 32, results=None, barrier=threading.Barrier(32))
                     for _ in range(kernel.threads // 32)]
            block = SimpleNamespace(index=index, shared=np.full(kernel.shared, 255, np.uint8), warps=warps, errors=[],
                                    barrier=threading.Barrier(kernel.threads))
            threads = [threading.Thread(target=_run, args=(kernel.function, block, t, arguments))
                       for t in range(kernel.threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if block.errors:
                raise block.errors[0]


def _run(function: Callable, block: Any, thread: int, arguments: tuple) -> None:
    _state.block, _state.thread, _state.warp, _state.lane = block, thread, block.warps[thread // 32], thread % 32
    _state.copies, _state.groups = [], []
    try:
        function(*arguments)
    except threading.BrokenBarrierError:
        pass  # another thread's error is in the list
    except Exception as error:
        block.errors.append(error)
        block.barrier.abort()
        for warp in block.warps:
            warp.barrier.abort()


def _commit() -> None:
    _state.groups.append(_state.copies)
    _state.copies = []


def _shared(address: int, nbytes: int) -> np.ndarray:
    memory = _state.block.shared
    assert address % nbytes == 0 and 0 <= address <= len(memory) - nbytes, f"shared access of {nbytes} bytes at {address}"
    return memory[address:address + nbytes]


def _together(value: Any, operation: Callable[[list], list]) -> Any:
    """A warp's collective: every lane's value in, every lane's result out."""
    warp = _state.warp
    warp.values[_state.lane] = value
    warp.barrier.wait()
    if _state.lane == 0:
        warp.results = operation(warp.values)
    warp.barrier.wait()
    result = warp.results[_state.lane]
    warp.barrier.wait()
    return result


def _store_shared_f32(address: int, value: float) -> None:
    _shared(address, 4)[:] = np.frombuffer(np.float32(value).tobytes(), np.uint8)


def _pack(low: float, high: float) -> int:
    return struct.unpack("<I", np.array([low, high], np.float32).astype(BF16).tobytes())[0]


def _floats(bits: int) -> np.ndarray:
    return np.frombuffer(struct.pack("<I", bits), BF16).astype(np.float32)


def _multiply(lanes: list) -> list:
    """mma.m16n8k16 with the fragment layouts of the PTX manual."""
    a, b, c = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
    for lane, v in enumerate(lanes):
        row, column = lane // 4, lane % 4 * 2
        a[row, column:column + 2], a[row + 8, column:column + 2] = _floats(v[0]), _floats(v[1])
        a[row, column + 8:column + 10], a[row + 8, column + 8:column + 10] = _floats(v[2]), _floats(v[3])
        b[column:column + 2, row], b[column + 8:column + 10, row] = _floats(v[4]), _floats(v[5])
        c[row, column:column + 2], c[row + 8, column:column + 2] = v[6:8], v[8:10]
    d = a @ b + c
    return [(*d[lane // 4, lane % 4 * 2:][:2], *d[lane // 4 + 8, lane % 4 * 2:][:2]) for lane in range(32)]


def _cuda() -> Any:
    class Index:
        def __init__(self, read: Callable[[], int]):
            self._read = read

        x = property(lambda self: self._read())

    return SimpleNamespace(
        jit=lambda **options: lambda function: function,
        threadIdx=Index(lambda: _state.thread), blockIdx=Index(lambda: _state.block.index),
        shared=SimpleNamespace(array=lambda *arguments: None),
        local=SimpleNamespace(array=lambda shape, dtype: np.empty(shape, object)),
        syncthreads=lambda: _state.block.barrier.wait(), syncwarp=lambda: _state.warp.barrier.wait(),
        shfl_xor_sync=lambda mask, value, bits: _together(value, lambda values: [values[i ^ bits] for i in range(32)]))
