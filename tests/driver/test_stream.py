"""Handles: closed once, refused afterwards. What streams and graphs do is tested in tests/gpu."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cuda.bindings import driver as real

from zhilight.driver import device as device_module
from zhilight.driver.graph import Graph
from zhilight.driver.stream import Event, Stream, elapsed_ms
from zhilight.errors import DeviceError

OK = (real.CUresult.CUDA_SUCCESS,)


@pytest.fixture
def log(monkeypatch) -> list:
    log = []

    def noting(name, *values):
        def call(*arguments):
            log.append((name, *arguments))
            return (*OK, *values)
        return call

    driver = SimpleNamespace(
        CUevent_flags=real.CUevent_flags, CUstream_flags=real.CUstream_flags, CUresult=real.CUresult,
        CUstreamCaptureMode=real.CUstreamCaptureMode,
        cuCtxGetStreamPriorityRange=noting("range", 0, -5),
        cuStreamCreateWithPriority=noting("create", real.CUstream(64)), cuStreamDestroy=noting("destroy stream"),
        cuEventCreate=noting("event", real.CUevent(32)), cuEventDestroy=noting("destroy event"),
        cuStreamBeginCapture=noting("begin"), cuStreamEndCapture=noting("end", real.CUgraph(16)),
        cuGraphDestroy=noting("destroy graph"))
    monkeypatch.setattr(device_module, "_load", lambda: driver)
    return log


def test_streams_do_not_block_and_urgent_ones_take_the_top_priority(log):
    Stream().close()
    Stream(high_priority=True).close()
    assert [entry for entry in log if entry[0] == "create"] == [("create", 1, 0), ("create", 1, -5)]


def test_a_handle_is_destroyed_once_and_never_passes_for_the_default_stream(log):
    stream = Stream()
    assert stream.handle == 64
    stream.close()
    stream.close()
    with pytest.raises(DeviceError, match="Stream is closed"):
        _ = stream.handle
    del stream
    with Event():
        pass
    event = Event()
    del event
    assert [entry[0] for entry in log].count("destroy stream") == 1
    assert [entry[0] for entry in log].count("destroy event") == 2


def test_elapsed_time_needs_timing_events(log):
    with pytest.raises(DeviceError, match="timing=True"):
        elapsed_ms(Event(timing=True), Event())


def test_a_failing_capture_is_ended_and_leaves_no_graph(log):
    def work():
        raise KeyError("from the model")

    with pytest.raises(KeyError):
        Graph.capture(Stream(), work)
    assert [entry[0] for entry in log if entry[0] in ("begin", "end", "destroy graph")] == ["begin", "end", "destroy graph"]
