"""Order between streams, events, and the compute / communication pair."""

from __future__ import annotations

import numpy as np
import pytest

from zhilight.driver.dtype import uint8
from zhilight.driver.graph import Graph
from zhilight.driver.stream import Event, Stream, StreamPair, elapsed_ms
from zhilight.errors import DeviceError

SIZE = 1 << 30


def test_events_order_two_streams(pool, stream):
    """The second stream copies what a long row of fills on the first leaves: only the last value may be seen."""
    source, target = (pool.allocate("weights", (SIZE,), uint8) for _ in range(2))
    with Stream(high_priority=True) as second:
        for value in range(1, 21):
            source.fill_bytes(value, stream)
        event = stream.record()
        assert not event.done() and not stream.idle()
        second.wait_event(event)
        target[:64].copy_(source[-64:], second)
        second.synchronize()
        assert event.done()
        assert (target[:64].to_host(second) == 20).all()


def test_elapsed_time_follows_the_work(pool, stream):
    tensor = pool.allocate("weights", (SIZE,), uint8)
    tensor.fill_zero(stream)
    times = []
    for count in (1, 10):
        start = stream.record(timing=True)
        for _ in range(count):
            tensor.fill_zero(stream)
        end = stream.record(timing=True)
        end.synchronize()
        times.append(elapsed_ms(start, end))
    assert 5 < times[1] / times[0] < 20
    with pytest.raises(DeviceError, match="timing=True"):
        elapsed_ms(Event().record(stream), end)


@pytest.mark.parametrize("as_graph", [False, True])
def test_the_pair_forks_and_joins_also_inside_a_graph(pool, stream, as_graph):
    pair = StreamPair()
    a, b = (pool.allocate("weights", (SIZE,), uint8) for _ in range(2))
    seen = pool.allocate("weights", (3, 64), uint8)
    stream.synchronize()  # debug mode's fills are queued there

    def work():
        a.fill_bytes(1, pair.compute)
        pair.fork()
        b.copy_(a, pair.communication)  # must see 1, beside compute's next work
        seen[0].fill_bytes(9, pair.compute)
        pair.join()
        seen[1].copy_(b[-64:], pair.compute)
        a.fill_bytes(2, pair.compute)

    if as_graph:
        with Graph.capture(pair.compute, work) as graph, graph.instantiate() as ready:
            assert graph.num_nodes == 5
            b.fill_bytes(7, pair.compute)
            ready.replay(pair.compute)
            pair.synchronize()
    else:
        pair.synchronize()
        work()
        pair.synchronize()
    seen[2].copy_(a[-64:], pair.compute)
    rows = seen.to_host(pair.compute)
    assert [set(row.tolist()) for row in rows] == [{9}, {1}, {2}]
    pair.close()


def test_closed_handles_are_refused(device):
    stream = Stream()
    stream.close()
    stream.close()
    with pytest.raises(DeviceError, match="Stream is closed"):
        stream.synchronize()
    assert np.isfinite(device.memory_info()[0])  # the context is unharmed
