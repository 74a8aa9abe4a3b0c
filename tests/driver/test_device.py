"""What a user reads when the driver is absent, too old, or a call fails."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from cuda.bindings import driver as real

from zhilight.driver import device
from zhilight.driver.device import Device, DriverCallError, NoDriver, check, device_count
from zhilight.errors import DeviceError

RESULT = real.CUresult
LOAD = device._load.__wrapped__


def test_check_unpacks_like_the_bindings_return():
    assert check((RESULT.CUDA_SUCCESS,), "cuInit") is None
    assert check((RESULT.CUDA_SUCCESS, 5), "cuDeviceGetCount") == 5
    assert check((RESULT.CUDA_SUCCESS, 1, 2), "cuMemGetInfo") == (1, 2)


def test_a_failed_call_names_itself_its_code_and_the_way_out():
    with pytest.raises(DriverCallError) as caught:
        check((RESULT.CUDA_ERROR_ILLEGAL_ADDRESS,), "cuStreamSynchronize", "step 12")
    message = str(caught.value)
    for part in ("cuStreamSynchronize", "CUDA_ERROR_ILLEGAL_ADDRESS", "700", "step 12", "context is lost"):
        assert part in message
    assert caught.value.context_lost
    with pytest.raises(DriverCallError) as caught:
        check((RESULT.CUDA_ERROR_OUT_OF_MEMORY, None), "cuMemAlloc")
    assert caught.value.code == "CUDA_ERROR_OUT_OF_MEMORY" and not caught.value.context_lost
    assert "gpu_memory_utilization" in str(caught.value)


def test_every_explained_code_exists():
    unknown = set(device.MEANING) - set(RESULT.__members__)
    assert not unknown


def _bindings(monkeypatch, driver_version, wheels=12, init=RESULT.CUDA_SUCCESS, count=1):
    from cuda import bindings

    stand_in = SimpleNamespace(cuDriverGetVersion=driver_version, cuInit=lambda flags: (init,),
                               cuDeviceGetCount=lambda: (RESULT.CUDA_SUCCESS, count))
    monkeypatch.setattr(bindings, "driver", stand_in)
    monkeypatch.setattr(device, "_bindings_major", lambda: wheels)
    monkeypatch.setattr(device, "_load", LOAD)  # neither read nor fill the process's cache


def test_without_libcuda(monkeypatch):
    def missing():
        raise RuntimeError("libcuda not found")

    _bindings(monkeypatch, missing)
    assert device_count() == 0
    with pytest.raises(NoDriver, match=r"Install the NVIDIA driver.*device=cpu"):
        Device.open(0)


@pytest.mark.parametrize(("supports", "wheels", "advice"), [
    (11080, 12, "supports CUDA 11.8.*needs 12.0 or later. Update the driver"),
    (12080, 13, r"supports CUDA 12.8.*needs 13.0 or later.*pip install 'cuda-python<13'"),
])
def test_a_driver_too_old_is_an_error_even_for_auto(monkeypatch, supports, wheels, advice):
    _bindings(monkeypatch, lambda: (RESULT.CUDA_SUCCESS, supports), wheels)
    with pytest.raises(DeviceError, match=advice):
        device_count()


def test_no_gpu_and_broken_driver_are_told_apart(monkeypatch):
    _bindings(monkeypatch, lambda: (RESULT.CUDA_SUCCESS, 12090), init=RESULT.CUDA_ERROR_NO_DEVICE)
    assert device_count() == 0
    _bindings(monkeypatch, lambda: (RESULT.CUDA_SUCCESS, 12090), init=RESULT.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH)
    with pytest.raises(DriverCallError, match="reboot"):
        device_count()


def test_open_names_the_numbers_that_exist(monkeypatch):
    _bindings(monkeypatch, lambda: (RESULT.CUDA_SUCCESS, 12090), count=2)
    with pytest.raises(DeviceError, match="device_index is 2, but the visible GPUs are numbered 0 to 1"):
        Device.open(2)
    _bindings(monkeypatch, lambda: (RESULT.CUDA_SUCCESS, 12090), count=0)
    with pytest.raises(DeviceError, match="device=cuda, but no NVIDIA GPU is visible"):
        Device.open(0)
