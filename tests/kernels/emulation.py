"""A kernel's Python function run as plain Python, a thread for each CUDA thread, with its instructions replaced by what the PTX
manual says: for index arithmetic, layouts and the order of copies, barriers and accesses, without a GPU.

    emulator = Emulator()
    emulator.install(monkeypatch, module)          # from here on the module's kernels are plain Python
    module.rms_norm(emulator.runtime, emulator.tensor(x), ...)
    emulator.array(out)

The values and the memory are in emulation_values.py, the threads in emulation_threads.py, the instructions in
emulation_names.py.
"""

from __future__ import annotations

import itertools
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulation_names import missing, names
from emulation_threads import Block, running
from emulation_values import Array, Memory
from numba.cuda.extending import intrinsic

from zhilight.driver.compiler import Kernel, Pointer
from zhilight.driver.dtype import from_numpy
from zhilight.driver.launcher import BoundLaunch
from zhilight.driver.tensor import Tensor

COUNTERS = 64


class Emulator:
    """A device: its memory, and `runtime` for the host functions of kernels (kernels/runtime.py)."""

    def __init__(self, multiprocessors: int = 132):
        self.memory = Memory(32, lambda: running[0])
        self.counters = self.tensor(np.zeros(COUNTERS, np.uint32))
        self.runtime = SimpleNamespace(
            stream=self, capability=(9, 0, "a"), multiprocessors=multiprocessors, counters=lambda count: self.counters.address,
            scratch=lambda nbytes: self.memory.place(b"\xff" * nbytes))

    def tensor(self, array: np.ndarray) -> Tensor:
        """A copy of the array in the device's memory."""
        return Tensor(self.memory.place(array.tobytes()), array.shape, from_numpy(array.dtype))

    def array(self, tensor: Tensor) -> np.ndarray:
        """A copy of the (contiguous) tensor."""
        assert tensor.contiguous
        return np.frombuffer(self.memory.content(tensor.address, tensor.nbytes), tensor.dtype.numpy).reshape(tensor.shape)

    def install(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Replace the instructions in the modules and in those whose device functions they use; launches run here.

        Device functions become their Python functions, and what is cached (kernels, device functions and plans) is made anew.
        """
        replacements, done, left = names(self.memory), set(), list(modules)
        while left:
            module = left.pop()
            if module in done:
                continue
            done.add(module)
            for name, value in list(vars(module).items()):
                if name in replacements:
                    monkeypatch.setattr(module, name, replacements[name])
                    continue
                if isinstance(value, type(_no_instruction)):
                    monkeypatch.setattr(module, name, missing(name))
                    continue
                plain = getattr(value, "py_func", None) or getattr(value, "__wrapped__", None)
                if plain is not None and plain.__module__.startswith("zhilight.kernels."):
                    monkeypatch.setattr(module, name, plain)
                    left.append(sys.modules[plain.__module__])
        monkeypatch.setattr(Kernel, "launch", _launch)
        monkeypatch.setattr(BoundLaunch, "__call__", _launch_bound)

    def launch(self, kernel: Kernel, grid: int | tuple[int, int, int], *arguments: Any) -> None:
        """Run the blocks one after the other, not in the order of their index. Raises the first error of a thread."""
        values = []
        for (name, annotation), argument in zip(kernel.parameters, arguments, strict=True):
            if not isinstance(annotation, Pointer):
                values.append(annotation(argument))
                continue
            if isinstance(argument, Tensor):
                assert argument.dtype is annotation.dtype, f"{name} is {argument.dtype}"
                argument = argument.address
            dtype = annotation.dtype
            values.append(Array(self.memory, argument, {16: "uint16", 8: "uint8"}.get(dtype.bits, dtype.name)))
        sizes = grid if isinstance(grid, tuple) else (grid, 1, 1)
        indices = list(itertools.product(*map(range, sizes)))
        random.Random(len(indices)).shuffle(indices)
        for index in indices:
            self.memory.begin_block()
            Block(index, kernel.threads, kernel.shared).run(kernel.function, values)


def _launch(kernel: Kernel, grid: int | tuple[int, int, int], *arguments: Any, stream: Emulator, overlap: bool = False) -> None:
    stream.launch(kernel, grid, *arguments)


def _launch_bound(bound: BoundLaunch, stream: Emulator, *addresses: int) -> None:
    stream.launch(bound.kernel, bound.grid, *addresses, *bound.numbers)


@intrinsic
def _no_instruction(typingctx):
    """For its type."""
