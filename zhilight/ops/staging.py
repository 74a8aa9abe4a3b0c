"""Small copies between host and device that nobody waits for, through page-locked buffers that are used again."""

from __future__ import annotations

from collections import deque

import numpy as np

from zhilight.driver.device import check, driver
from zhilight.driver.memory import PinnedPool
from zhilight.driver.stream import Event, Stream
from zhilight.driver.tensor import Tensor
from zhilight.ops.base import Fetch

_SMALLEST = 1 << 14
_MOST_BUSY = 32
"""Copies under way at once; a loader that is faster than the bus waits for the oldest."""


class PinnedBuffers:
    """Page-locked buffers, each with the event that ends its last use, handed out again once they are given back."""

    def __init__(self, pinned: PinnedPool):
        self._pinned = pinned
        self._free: list[tuple[np.ndarray, Event]] = []

    def take(self, nbytes: int) -> tuple[np.ndarray, Event]:
        """A buffer of at least `nbytes`."""
        for index, (buffer, _) in enumerate(self._free):
            if buffer.nbytes >= nbytes:
                return self._free.pop(index)
        return self._pinned.allocate((max(_SMALLEST, 1 << max(0, nbytes - 1).bit_length()),), np.uint8), Event()

    def give_back(self, buffer: np.ndarray, event: Event) -> None:
        self._free.append((buffer, event))


class Staging:
    """Host to device. A buffer is free again when the copy out of it is done, which its event tells."""

    def __init__(self, pinned: PinnedPool, stream: Stream):
        self._buffers = PinnedBuffers(pinned)
        self._stream = stream
        self._busy: deque[tuple[np.ndarray, Event]] = deque()

    def copy(self, address: int, source: np.ndarray) -> None:
        """Queue a copy of a contiguous host array; `source` may change as soon as this returns."""
        self.copy_parts(address, [(0, source)], source.nbytes)

    def copy_parts(self, address: int, parts: list[tuple[int, np.ndarray]], nbytes: int) -> None:
        """Queue one copy of `nbytes`, of which each part fills what begins at its offset."""
        if not nbytes:
            return
        buffer, event = self._take(nbytes)
        for offset, part in parts:
            buffer[offset : offset + part.nbytes] = part.reshape(-1).view(np.uint8)
        check(driver().cuMemcpyHtoDAsync(address, buffer.ctypes.data, nbytes, self._stream.handle), "cuMemcpyHtoDAsync")
        event.record(self._stream)
        self._busy.append((buffer, event))

    def _take(self, nbytes: int) -> tuple[np.ndarray, Event]:
        if len(self._busy) >= _MOST_BUSY:
            self._busy[0][1].synchronize()
        while self._busy and self._busy[0][1].done():
            self._buffers.give_back(*self._busy.popleft())
        return self._buffers.take(nbytes)


class Fetcher:
    """Device to host."""

    def __init__(self, pinned: PinnedPool, stream: Stream):
        self._buffers = PinnedBuffers(pinned)
        self._stream = stream

    def fetch(self, source: Tensor) -> CudaFetch:
        """Queue a copy of a contiguous tensor and return at once."""
        nbytes = source.nbytes
        buffer, event = self._buffers.take(nbytes)
        if nbytes:
            check(driver().cuMemcpyDtoHAsync(buffer.ctypes.data, source.address, nbytes, self._stream.handle),
                  "cuMemcpyDtoHAsync")
        event.record(self._stream)
        return CudaFetch(self._buffers, buffer, event, source.shape, source.dtype.numpy, nbytes)


class CudaFetch(Fetch):
    """One copy under way; its buffer goes back when the result has been read."""

    def __init__(self, buffers: PinnedBuffers, buffer: np.ndarray, event: Event, shape: tuple[int, ...], kind: np.dtype,
                 nbytes: int):
        self._buffers, self._buffer, self._event = buffers, buffer, event
        self._shape, self._kind, self._nbytes = shape, kind, nbytes
        self._result: np.ndarray | None = None

    def wait(self) -> np.ndarray:
        if self._result is None:
            self._event.synchronize()
            self._result = self._buffer[: self._nbytes].copy().view(self._kind).reshape(self._shape)
            self._buffers.give_back(self._buffer, self._event)
        return self._result

    def ready(self) -> bool:
        return self._result is not None or self._event.done()
