"""Tests that need a GPU. Without one each is skipped, by name and with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from zhilight.driver.device import Device, device_count
from zhilight.driver.memory import MemoryPool
from zhilight.driver.stream import Stream
from zhilight.errors import DeviceError

HERE = Path(__file__).parent


def _why_not() -> str | None:
    try:
        return None if device_count() else "no NVIDIA GPU is visible"
    except DeviceError as error:
        return str(error)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    reason = _why_not() if mine else None
    if reason is not None:
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=f"{item.name} needs a GPU: {reason}"))


@pytest.fixture(scope="session")
def device() -> Device:
    """GPU 0, its primary context current."""
    return Device.open(0)


@pytest.fixture
def stream(device):
    with Stream() as stream:
        yield stream
        stream.synchronize()


@pytest.fixture
def pool(device, stream):
    """Up to 16 GiB in debug mode: what is handed out is filled with NaN bytes, and use after release is an error."""
    budget = min(16 << 30, MemoryPool.budget_for(device, 0.9))
    with MemoryPool(device, budget, debug=True, stream=stream) as pool:
        yield pool
        stream.synchronize()


@pytest.fixture
def runtime(device, stream, pool):
    """What the host side of a kernel needs, with 512 MiB of scratch memory."""
    from zhilight.driver import dtype as dtypes
    from zhilight.driver.compiler import target_of
    from zhilight.kernels.runtime import Runtime

    return Runtime(stream, target_of(*device.capability), device.multiprocessors,
                   lambda nbytes: pool.allocate("weights", (nbytes,), dtypes.uint8, 1024).address, 512 << 20)


@pytest.fixture
def put(pool, stream):
    """put(array, dtype=None) -> a Tensor with the host array's values, on the device."""
    from zhilight.driver.dtype import from_numpy

    def upload(array, dtype=None):
        dtype = dtype or from_numpy(array.dtype)
        tensor = pool.allocate("weights", array.shape, dtype)
        tensor.copy_from_host(array.astype(dtype.numpy), stream)
        return tensor

    return upload


@pytest.fixture
def poisoned(pool):
    """poisoned(shape, dtype) -> a Tensor full of 0xFF bytes (NaN), so that what is not written shows."""
    return lambda shape, dtype: pool.allocate("weights", shape, dtype)
