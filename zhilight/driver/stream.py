"""Streams and events. There is no current stream: whoever queues work says where.

All of them belong to the context that was current when they were made (Device.open or make_current).
"""

from __future__ import annotations

import contextlib
from types import TracebackType

from zhilight.driver.device import check, driver
from zhilight.errors import DeviceError


class DriverObject:
    """Owner of a driver handle, destroyed by `close`, by `with`, or with its last reference. `handle` is an integer."""

    __slots__ = ("handle",)
    destroy = ""
    """Name of the driver call that destroys it."""

    def close(self) -> None:
        """Destroy it; a second close does nothing. Work already queued still completes."""
        try:
            handle = object.__getattribute__(self, "handle")
        except AttributeError:
            return
        del self.handle
        check(getattr(driver(), self.destroy)(handle), self.destroy)

    def __getattr__(self, name: str) -> int:
        if name == "handle":  # deleted by close: an absent handle must not pass for 0, the default stream
            raise DeviceError(f"this {type(self).__name__} is closed.")
        raise AttributeError(name)

    def __enter__(self):
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at exit the driver may be gone already, and the handle with it
            self.close()


def _has_finished(result: tuple, call: str) -> bool:
    """What a query found. Raises DriverCallError for a fault of the work asked about."""
    if result[0] == driver().CUresult.CUDA_ERROR_NOT_READY:
        return False
    check(result, call)
    return True


class Event(DriverObject):
    """A mark in a stream's work. `timing` allows elapsed_ms and costs a little."""

    __slots__ = ("timing",)
    destroy = "cuEventDestroy"

    def __init__(self, timing: bool = False):
        cu = driver()
        flags = cu.CUevent_flags.CU_EVENT_DEFAULT if timing else cu.CUevent_flags.CU_EVENT_DISABLE_TIMING
        self.timing = timing
        self.handle = int(check(cu.cuEventCreate(int(flags)), "cuEventCreate"))

    def record(self, stream: Stream) -> Event:
        """Move the mark behind what `stream` has queued so far."""
        check(driver().cuEventRecord(self.handle, stream.handle), "cuEventRecord")
        return self

    def done(self) -> bool:
        """Whether the work before the mark has finished. A mark never recorded is done."""
        return _has_finished(driver().cuEventQuery(self.handle), "cuEventQuery")

    def synchronize(self) -> None:
        """Wait on the host for the work before the mark."""
        check(driver().cuEventSynchronize(self.handle), "cuEventSynchronize")


class Stream(DriverObject):
    """A queue of device work, independent of the default stream."""

    __slots__ = ()
    destroy = "cuStreamDestroy"

    def __init__(self, *, high_priority: bool = False):
        """high_priority: its blocks go first whenever multiprocessors become free."""
        cu = driver()
        priority = check(cu.cuCtxGetStreamPriorityRange(), "cuCtxGetStreamPriorityRange")[1] if high_priority else 0
        flags = int(cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.handle = int(check(cu.cuStreamCreateWithPriority(flags, priority), "cuStreamCreateWithPriority"))

    def synchronize(self) -> None:
        """Wait on the host for all queued work. A fault of a kernel queued before surfaces here."""
        check(driver().cuStreamSynchronize(self.handle), "cuStreamSynchronize")

    def idle(self) -> bool:
        """Whether all queued work has finished."""
        return _has_finished(driver().cuStreamQuery(self.handle), "cuStreamQuery")

    def wait_event(self, event: Event) -> None:
        """Work queued from now on waits for the event's mark."""
        check(driver().cuStreamWaitEvent(self.handle, event.handle, 0), "cuStreamWaitEvent")

    def record(self, *, timing: bool = False) -> Event:
        """A new event behind what is queued so far."""
        return Event(timing).record(self)


def elapsed_ms(start: Event, end: Event) -> float:
    """Milliseconds between two recorded timing events that are done (synchronize the later one first)."""
    for event in (start, end):
        if not event.timing:
            raise DeviceError("elapsed_ms needs events made with timing=True.")
    return check(driver().cuEventElapsedTime(start.handle, end.handle), "cuEventElapsedTime")


class StreamPair:
    """A compute stream and a communication stream, ordered against each other with events; capturable as one graph.

        pair.fork()                    # communication starts behind the compute queued so far
        all_reduce(..., pair.communication)
        gemm(..., pair.compute)        # runs beside it
        pair.join()                    # compute from here on sees the result
    """

    def __init__(self) -> None:
        self.compute = Stream()
        # the short kernels of communication must not queue up behind a large GEMM's blocks
        self.communication = Stream(high_priority=True)
        self._forked, self._joined = Event(), Event()

    def fork(self) -> None:
        """Communication queued from now on waits for the compute queued so far."""
        self.communication.wait_event(self._forked.record(self.compute))

    def join(self) -> None:
        """Compute queued from now on waits for the communication queued so far."""
        self.compute.wait_event(self._joined.record(self.communication))

    def synchronize(self) -> None:
        """Wait on the host for both."""
        self.compute.synchronize()
        self.communication.synchronize()

    def close(self) -> None:
        for each in (self._forked, self._joined, self.communication, self.compute):
            each.close()
