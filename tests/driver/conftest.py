"""A driver whose device memory is host memory, so that the bookkeeping above the driver is tested without a GPU.

It keeps what the real one would keep (reservations, physical handles, mappings, allocations), refuses what the real one
refuses, and checks that every copy stays inside memory that is mapped. It says nothing about kernels or timing.
"""

from __future__ import annotations

import ctypes
import mmap
from types import SimpleNamespace

import pytest
from cuda.bindings import driver as real

from zhilight.driver import device as device_module
from zhilight.driver.device import Device

OK = real.CUresult.CUDA_SUCCESS
GRANULARITY = 2 << 20


class FakeDriver:
    def __init__(self, total_bytes: int = 1 << 30):
        self.total_bytes = total_bytes
        self.physical: dict[int, int] = {}
        self.reserved: dict[int, tuple[int, mmap.mmap]] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        self.accessible: set[int] = set()
        self.plain: dict[int, tuple[int, mmap.mmap]] = {}
        self.pinned: dict[int, tuple[int, mmap.mmap]] = {}
        self.refuse: dict[str, real.CUresult] = {}
        self.calls: list[str] = []
        self.next_handle = 1

    def __getattr__(self, name: str):
        if name.startswith("cu") and name[2:3].isupper():
            raise AttributeError(f"the fake driver has no {name}")
        return getattr(real, name)  # enums and structures

    def __getattribute__(self, name: str):
        value = object.__getattribute__(self, name)
        if not (name.startswith("cu") and name[2:3].isupper()):
            return value

        def call(*args):
            self.calls.append(name)
            return (self.refuse[name],) if name in self.refuse else value(*args)

        return call

    # ---- memory -----------------------------------------------------------------------------------------------

    def used(self) -> int:
        return sum(self.physical.values()) + sum(size for size, _ in self.plain.values())

    def cuMemGetInfo(self):
        return OK, self.total_bytes - self.used(), self.total_bytes

    def cuMemGetAllocationGranularity(self, prop, flags):
        return OK, GRANULARITY

    def cuMemAddressReserve(self, size, alignment, address, flags):
        assert size % GRANULARITY == 0
        buffer = mmap.mmap(-1, size + GRANULARITY)
        base = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        base += -base % GRANULARITY
        self.reserved[base] = (size, buffer)
        return OK, real.CUdeviceptr(base)

    def cuMemAddressFree(self, address, size):
        assert self.reserved[int(address)][0] == size
        assert not any(int(address) <= mapped < int(address) + size for mapped in self.mapped)
        del self.reserved[int(address)]
        return (OK,)

    def cuMemCreate(self, size, prop, flags):
        assert size % GRANULARITY == 0 and size > 0
        assert prop.location.type == real.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        if self.used() + size > self.total_bytes:
            return (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        handle, self.next_handle = self.next_handle, self.next_handle + 1
        self.physical[handle] = size
        return OK, handle

    def cuMemRelease(self, handle):
        del self.physical[handle]
        return (OK,)

    def cuMemMap(self, address, size, offset, handle, flags):
        address = int(address)
        assert self.physical[handle] == size
        assert any(base <= address and address + size <= base + room for base, (room, _) in self.reserved.items())
        assert not any(address < base + room and base < address + size for base, (room, _) in self.mapped.items())
        self.mapped[address] = (size, handle)
        return (OK,)

    def cuMemUnmap(self, address, size):
        assert self.mapped[int(address)][0] == size
        del self.mapped[int(address)]
        self.accessible.discard(int(address))
        return (OK,)

    def cuMemSetAccess(self, address, size, descriptors, count):
        assert self.mapped[int(address)][0] == size and len(descriptors) == count == 1
        assert descriptors[0].flags == real.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.accessible.add(int(address))
        return (OK,)

    def _host(self, table, size):
        buffer = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        table[address] = (size, buffer)
        return address

    def cuMemAlloc(self, size):
        if self.used() + size > self.total_bytes:
            return (real.CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        return OK, real.CUdeviceptr(self._host(self.plain, size))

    def cuMemFree(self, address):
        del self.plain[int(address)]
        return (OK,)

    def cuMemHostAlloc(self, size, flags):
        return OK, self._host(self.pinned, size)

    def cuMemFreeHost(self, address):
        del self.pinned[int(address)]
        return (OK,)

    # ---- copies -----------------------------------------------------------------------------------------------

    def _require_memory(self, address: int, size: int) -> None:
        """Device addresses must be mapped and accessible; others are taken for the host's."""
        for base, (room, _) in self.reserved.items():
            if base <= address < base + room:
                end = address
                for mapped in sorted(self.accessible):
                    if mapped <= end < mapped + self.mapped[mapped][0]:
                        end = mapped + self.mapped[mapped][0]
                assert address + size <= end, "access to memory that is not mapped"
                return
        for base, (room, _) in self.plain.items():
            if base <= address < base + room:
                assert address + size <= base + room

    def cuMemcpyAsync(self, target, source, size, stream):
        self._require_memory(int(target), size)
        self._require_memory(int(source), size)
        ctypes.memmove(int(target), int(source), size)
        return (OK,)

    def cuMemcpy2DAsync(self, plan, stream):
        assert plan.WidthInBytes <= min(plan.srcPitch, plan.dstPitch)
        for row in range(plan.Height):
            self.cuMemcpyAsync(int(plan.dstDevice) + row * plan.dstPitch, int(plan.srcDevice) + row * plan.srcPitch,
                               plan.WidthInBytes, stream)
        return (OK,)

    def cuMemsetD8Async(self, target, value, size, stream):
        self._require_memory(int(target), size)
        ctypes.memset(int(target), value, size)
        return (OK,)

    def cuMemsetD2D8Async(self, target, pitch, value, width, height, stream):
        assert width <= pitch
        for row in range(height):
            self.cuMemsetD8Async(int(target) + row * pitch, value, width, stream)
        return (OK,)

    def cuCtxSynchronize(self):
        return (OK,)


@pytest.fixture
def fake(monkeypatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setattr(device_module, "_load", lambda: driver)
    return driver


@pytest.fixture
def fake_device(fake) -> Device:
    return Device(index=0, name="fake", capability=(9, 0), multiprocessors=132, shared_memory_per_block_optin=232448,
                  shared_memory_per_multiprocessor=233472, registers_per_multiprocessor=65536, l2_bytes=50 << 20,
                  total_bytes=fake.total_bytes, pci_bus_id="0000:00:00.0", virtual_memory=True, context=None)


@pytest.fixture
def fake_stream() -> SimpleNamespace:
    """The fake copies at once, so there is nothing to wait for."""
    return SimpleNamespace(handle=7, synchronize=lambda: None)
