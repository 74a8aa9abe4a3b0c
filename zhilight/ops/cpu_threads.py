"""The CPU backend's own threads, in place of BLAS's.

OpenBLAS hands every product to all its threads and lets them spin for each other. Where the cores have anything else to do, a
product then takes as long as the last thread waits for its core: measured 5 ms for one of 0.2 ms, two threads on two busy
cores. Here the caller takes pieces of the work itself, the workers that get a core take others, and at the end the caller
waits, without spinning, only for pieces that have been begun. So a busy machine costs nothing against one thread.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

_PIECE_BYTES = 1 << 19
"""A piece of a product reads at least this much of the weight: some 50 us, well above the cost of handing it out."""
_PIECES_A_THREAD = 4
_STALE_TASKS = 1000
_COLUMNS = 64
"""Pieces begin at multiples of this, which suits BLAS's own tiles."""


class Threads:
    """Runs the pieces of a task on the calling thread and on `size - 1` workers, which start at the first task."""

    def __init__(self, size: int):
        self.size = size
        self._tasks: SimpleQueue[_Task] = SimpleQueue()
        self._started = False
        self._lock = threading.Lock()

    def run(self, work: Callable[[Any], None], pieces: Sequence[Any]) -> None:
        """Call work(piece) for each piece, in any order and at once. Raises what one of them raised, after all have ended."""
        if self.size == 1 or len(pieces) < 2:
            for piece in pieces:
                work(piece)
            return
        self._start()
        task = _Task(work, pieces)
        if self._tasks.qsize() < _STALE_TASKS:  # workers that get no core leave tasks behind that have long ended
            for _ in range(min(self.size, len(pieces)) - 1):
                self._tasks.put(task)
        task.help()
        task.wait()

    def matmul(self, x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        """out [M, N] = x [M, K] @ weight [N, K].T, cut along N. The cut depends on shapes and `size` only."""
        pieces = min(_PIECES_A_THREAD * self.size, weight.nbytes // _PIECE_BYTES)
        if self.size == 1 or pieces < 2:
            np.matmul(x, weight.T, out=out)
            return
        columns = -(-weight.shape[0] // (pieces * _COLUMNS)) * _COLUMNS

        def multiply(start: int) -> None:
            np.matmul(x, weight[start:start + columns].T, out=out[:, start:start + columns])

        self.run(multiply, range(0, weight.shape[0], columns))

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                self._started = True
                for number in range(1, self.size):
                    threading.Thread(target=self._serve, name=f"cpu-ops-{number}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._tasks.get().help()


class _Task:
    """Pieces of work, handed out to whoever asks; `wait` returns when all have ended."""

    def __init__(self, work: Callable[[Any], None], pieces: Sequence[Any]):
        self._work, self._pieces = work, pieces
        self._next = count()               # next() and append() are atomic
        self._ended: list[BaseException | None] = []
        self._all = threading.Event()

    def help(self) -> None:
        while (index := next(self._next)) < len(self._pieces):
            error = None
            try:
                self._work(self._pieces[index])
            except BaseException as caught:  # raised again in the thread that waits
                error = caught
            self._ended.append(error)
            if len(self._ended) == len(self._pieces):
                self._all.set()

    def wait(self) -> None:
        self._all.wait()
        for error in self._ended:
            if error is not None:
                raise error


@cache
def shared_threads() -> Threads:
    """The process's threads, as many as BLAS had, which computes on the calling thread alone from now on.

    Where NumPy's BLAS is not an OpenBLAS that can be told so, it keeps its threads, and there is one here.
    """
    library = _openblas()
    if library is None:
        return Threads(1)
    get, set_ = library
    size = get()
    set_(1)
    return Threads(size)


def _openblas() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """(get, set) of the number of threads of the OpenBLAS that NumPy's wheel carries, already loaded; None without it."""
    for path in sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("lib*openblas*")):
        library = ctypes.CDLL(str(path))
        for name in ("scipy_openblas_{}_num_threads64_", "openblas_{}_num_threads64_", "openblas_{}_num_threads"):
            get, set_ = (getattr(library, name.format(verb), None) for verb in ("get", "set"))
            if get and set_:
                get.restype, set_.argtypes, set_.restype = ctypes.c_int, [ctypes.c_int], None
                return get, set_
    return None
