"""What the driver says of the GPU, and how its errors read."""

from __future__ import annotations

import pytest

from zhilight.driver.device import MINIMUM_DRIVER, Device, DriverCallError, check, device_count, driver, driver_version
from zhilight.errors import DeviceError


def test_properties_are_those_of_a_gpu(device):
    assert device.name and device.pci_bus_id.count(":") == 2
    assert device.capability >= (8, 0)
    assert device.multiprocessors > 0 and device.l2_bytes > 1 << 20
    assert device.shared_memory_per_block_optin >= 99 << 10
    assert device.shared_memory_per_multiprocessor > device.shared_memory_per_block_optin
    assert device.registers_per_multiprocessor == 65536
    free, total = device.memory_info()
    assert 0 < free <= total and abs(total - device.total_bytes) < total // 50
    assert driver_version() >= MINIMUM_DRIVER
    assert device.can_access_peer(device)


def test_every_visible_gpu_opens(device):
    for index in range(device_count()):
        other = Device.open(index)
        assert other.index == index and isinstance(device.can_access_peer(other), bool)
        other.close()
    device.make_current()
    with pytest.raises(DeviceError, match="visible GPUs are numbered 0 to"):
        Device.open(device_count())


def test_a_real_failure_carries_call_and_code(device):
    with pytest.raises(DriverCallError, match=r"cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY \(2\).*nvidia-smi"):
        check(driver().cuMemAlloc(1 << 48), "cuMemAlloc")
    with pytest.raises(DriverCallError) as caught:
        check(driver().cuModuleLoadData(b"not a cubin\0"), "cuModuleLoadData")
    assert caught.value.code in ("CUDA_ERROR_INVALID_IMAGE", "CUDA_ERROR_INVALID_PTX")  # drivers differ
    assert not caught.value.context_lost
