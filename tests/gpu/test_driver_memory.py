"""The pools on real memory: mapping, growth in place, the fallback, and that closing gives everything back."""

from __future__ import annotations

import numpy as np
import pytest

from zhilight.driver.dtype import float32, int32, uint8
from zhilight.driver.memory import GROWTH, MIB, MemoryPool, PinnedPool
from zhilight.driver.region import MemoryFault
from zhilight.driver.stream import Event, elapsed_ms
from zhilight.errors import OutOfMemory


@pytest.mark.parametrize("virtual", [True, False])
def test_all_of_a_region_is_readable_and_writable(device, stream, virtual):
    with MemoryPool(device, 1 << 30, virtual=virtual) as pool:
        assert pool.virtual is virtual
        tensors = [pool.allocate("weights", (40 * MIB // 4,), int32) for _ in range(5)]  # cross the pieces' borders
        for number, tensor in enumerate(tensors):
            tensor.copy_from_host(np.arange(tensor.numel, dtype=np.int32) + number, stream)
        for number, tensor in enumerate(tensors):
            np.testing.assert_array_equal(tensor.to_host(stream), np.arange(tensor.numel, dtype=np.int32) + number)


def test_a_region_grows_in_place_while_others_grow(device, stream):
    with MemoryPool(device, 1 << 30) as pool:
        if not pool.virtual:
            pytest.skip("this driver refuses virtual memory")
        first = pool.allocate("kv", (GROWTH,), uint8)
        first.fill_bytes(1, stream)
        pool.allocate("weights", (GROWTH,), uint8)
        second = pool.allocate("kv", (GROWTH,), uint8)
        second.fill_bytes(2, stream)
        assert second.address == first.address + GROWTH
        assert (first.to_host(stream) == 1).all() and (second.to_host(stream) == 2).all()


@pytest.mark.parametrize("virtual", [True, False])
def test_close_gives_the_device_its_memory_back(device, virtual):
    before, _ = device.memory_info()
    for _ in range(3):
        with MemoryPool(device, 2 << 30, virtual=virtual) as pool:
            pool.allocate("weights", (1 << 30,), uint8)
            during, _ = device.memory_info()
            assert before - during >= 1 << 30
    after, _ = device.memory_info()
    assert abs(before - after) < 64 * MIB


def test_trim_unmaps(device, stream):
    with MemoryPool(device, 2 << 30) as pool:
        kept = pool.allocate("weights", (3,), float32)
        kept.fill_zero(stream)
        pool.release(pool.allocate("weights", (1 << 30,), uint8))
        stream.synchronize()
        before = pool.statistics()["weights"].mapped
        pool.trim()
        assert pool.statistics()["weights"].mapped <= before - (1 << 30) + GROWTH
        assert (kept.to_host(stream) == 0).all()


def test_a_device_that_is_really_full(device):
    """A budget beyond the device's memory: the refusal becomes a message with figures, and the pool stays usable."""
    _, total = device.memory_info()
    with MemoryPool(device, 2 * total) as pool:
        with pytest.raises(OutOfMemory, match=r"GPU 0 has only .* free.*lower gpu_memory_utilization"):
            pool.allocate("kv", (total,), uint8)
        pool.allocate("kv", (MIB,), uint8)


def test_poison_and_use_after_release(pool, stream):
    with pool.scope():
        tensor = pool.workspace((1000,), float32)
        assert np.isnan(tensor.to_host(stream)).all()
    with pytest.raises(MemoryFault, match="use after release"):
        tensor.to_host(stream)


def test_pinned_memory_is_copied_at_the_bus_speed_and_without_waiting(device, pool, stream):
    size = 256 * MIB
    pinned = PinnedPool(device, 2 * size)
    source = pinned.allocate((size,), uint8)
    target = pinned.allocate((size,), np.uint8)
    source[:] = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    tensor = pool.allocate("weights", (size,), uint8)
    tensor.copy_from_host(source, stream)  # the first copy pays for set-up
    start, end = Event(timing=True), Event(timing=True)
    start.record(stream)
    tensor.copy_from_host(source, stream, wait=False)
    end.record(stream)
    assert not end.done()  # 256 MiB take milliseconds: the call did not wait for them
    tensor.copy_to_host(target, stream)
    stream.synchronize()
    np.testing.assert_array_equal(source, target)
    rate = size / elapsed_ms(start, end) / 1e6
    print(f"pinned host to device: {rate:.1f} GB/s")
    assert rate > 2  # the slowest PCIe link that a GPU for serving sits on
    pinned.release(source)
    pinned.close()
