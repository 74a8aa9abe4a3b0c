"""The threads of one block. One runs at a time, until it waits, so that a run is the same each time.

A thread waits at a meeting: a barrier of the block, or a barrier or collective instruction of its warp.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from emulation_values import Memory


class Stopped(BaseException):
    """Raised in the other threads of a block when one has failed."""


class Meeting:
    """Where `size` threads wait for each other, and exchange values."""

    def __init__(self, size: int, number: int = 0):
        self.size, self.number = size, number
        self.waiting: list[Thread] = []
        self.instruction = ""


class Thread:
    """A CUDA thread: where it stands in its block, what it has issued, how many barriers it has passed."""

    def __init__(self, block: Block, number: int):
        self.block, self.number, self.lane, self.warp = block, number, number % 32, block.warps[number // 32]
        self.barriers = self.warp_barriers = self.shared_arrays = 0
        self.copies: list[tuple] = []
        self.groups: list[list[tuple]] = []
        self.value = self.result = None
        self.turn = threading.Lock()
        self.turn.acquire()

    def meet(self, meeting: Meeting, instruction: str, value: Any = None, combine: Callable[[list], list] | None = None) -> Any:
        """Wait until all threads of the meeting are here, at the same instruction; combine: the values of all, in thread order,
        to the results of all."""
        assert not meeting.waiting or meeting.instruction == instruction, f"{instruction} meets {meeting.instruction}"
        meeting.instruction, self.value = instruction, value
        meeting.waiting.append(self)
        if len(meeting.waiting) == meeting.size:
            threads, meeting.waiting = sorted(meeting.waiting, key=lambda thread: thread.number), []
            if combine:
                for thread, result in zip(threads, combine([thread.value for thread in threads]), strict=True):
                    thread.result = result
            self.block.ready.extend(threads)
        if self.block.next_turn() is not self:
            self.wait()
        return self.result

    def wait(self) -> None:
        """Until it is this thread's turn."""
        self.turn.acquire()
        if self.block.error is not None:
            raise Stopped
        running[0] = self


running: list[Thread | None] = [None]
"""The thread whose turn it is."""


class Block:
    """index: its place in the grid. Its shared memory begins as NaN bytes (see `cuda.shared.array` in emulation_names.py)."""

    def __init__(self, index: tuple[int, int, int], threads: int, dynamic_shared: int):
        self.index, self.dynamic_shared = index, dynamic_shared
        self.shared = Memory(20, lambda: running[0])
        self.shared_arrays: list = []
        self.meeting = Meeting(threads)
        self.warps = [Meeting(32, warp) for warp in range(threads // 32)]
        self.threads = [Thread(self, number) for number in range(threads)]
        self.ready: deque[Thread] = deque(self.threads)
        self.left = threads
        self.error: BaseException | None = None

    def run(self, function: Callable, arguments: list) -> None:
        """Run the kernel's function in each thread. Raises the first error of a thread."""
        workers = [threading.Thread(target=self._run, args=(thread, function, arguments)) for thread in self.threads]
        with _one_processor():
            for worker in workers:
                worker.start()
            self.next_turn()
            for worker in workers:
                worker.join()
        running[0] = None
        if self.error is not None:
            raise self.error

    def next_turn(self) -> Thread | None:
        """Pass the turn on; the thread that has it, which may be the one that runs."""
        if not self.ready:
            if self.left:
                raise AssertionError("threads wait for others that have left or wait elsewhere")
            return None
        thread = self.ready.popleft()
        if thread is not running[0]:
            thread.turn.release()
        return thread

    def _run(self, thread: Thread, function: Callable, arguments: list) -> None:
        try:
            thread.wait()
            with np.errstate(all="ignore"):
                function(*arguments)
            self.left -= 1
            self.next_turn()
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
            for other in self.threads:  # one whose turn has been given, or that has ended, is released in vain
                if other is not thread and other.turn.locked():
                    other.turn.release()


@contextmanager
def _one_processor() -> Iterator[None]:
    """Threads started inside share a processor: as one alone runs at a time, a turn then passes ten times as fast."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(processors)[os.getpid() % len(processors)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, processors)
