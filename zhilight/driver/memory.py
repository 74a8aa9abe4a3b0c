"""All device memory of a GPU comes from one MemoryPool, all pinned host memory from one PinnedPool.

The pool reserves an address range for each region and maps physical memory into it as the region grows, so no address
ever moves and captured graphs stay valid. Where the driver refuses virtual memory, plain allocations take its place. A
budget bounds what is mapped in all regions together. Regions:

    weights     parameters, for the life of the engine           bump
    kv          the paged KV cache                                bump
    workspace   activations of a step, equal addresses a step     stack with scopes
    comm        buffers that other GPUs read                      bump
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from math import prod
from types import TracebackType
from typing import Any

import numpy as np

from zhilight.driver.device import Device, DriverCallError, check, driver
from zhilight.driver.dtype import DType
from zhilight.driver.region import ALIGNMENT, Allocation, MemoryFault, Region, RegionStatistics, Scope, Segment
from zhilight.driver.tensor import Shape, Tensor
from zhilight.errors import OutOfMemory

log = logging.getLogger(__name__)

MIB = 1 << 20
GROWTH = 64 * MIB
"""A region grows by at least this many bytes where the budget allows: fewer driver calls."""
MOST_KEPT = 1 << 14
"""Tensors of the workspace that are kept."""
POISON = 0xFF
"""Byte of debug mode's fill: NaN as bf16, fp16, fp32 and fp8, -1 as an integer."""

ADVICE = {
    "weights": "Raise gpu_memory_utilization, take a GPU with more memory or a smaller model.",
    "kv": "Lower num_kv_blocks or max_model_len, or raise gpu_memory_utilization.",
    "workspace": "Lower max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization.",
    "comm": "Lower max_num_batched_tokens, or raise gpu_memory_utilization.",
    "pinned": "Lower max_num_batched_tokens, or give the process more host memory (ulimit -l, the "
              "container's limit).",
}
REGIONS = ("weights", "kv", "workspace", "comm")


def human(nbytes: int) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", MIB), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} bytes"


def _round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


# ---- sources of memory ------------------------------------------------------------------------------------------


class _Budget:
    """What may be mapped in all, and the message when it is not enough."""

    def __init__(self, what: str, limit: int):
        self.what = what
        self.limit = limit
        self.mapped = 0
        self.regions: dict[str, Region] = {}

    def grant(self, region: Region, need: int, granularity: int) -> int:
        """Bytes to map for a region that lacks `need`: at least that, more while there is plenty. Raises OutOfMemory."""
        least = _round_up(need, granularity)
        left = min(self.limit - self.mapped, region.capacity - region.mapped) // granularity * granularity
        if least > left:
            raise self.exhausted(region, need, left)
        return min(max(least, _round_up(GROWTH, granularity)), left)

    def exhausted(self, region: Region, need: int, have: int) -> OutOfMemory:
        shares = ", ".join(f"{name} {human(each.mapped)}" for name, each in self.regions.items())
        limit = f"its limit of {human(region.capacity)}" if region.capacity < self.limit else \
            f"{self.what} of {human(self.limit)}"
        return OutOfMemory(f"{region.name} memory: need {human(need)} more, have {human(have)} left of {limit} "
                           f"({shares}). {ADVICE[region.name]}")

    def refused(self, region: Region, need: int, error: DriverCallError, device: Device) -> OutOfMemory:
        free, total = device.memory_info()
        return OutOfMemory(f"{region.name} memory: need {human(need)} more, but GPU {device.index} has only {human(free)} of "
                           f"{human(total)} free, though {self.what} of {human(self.limit)} would allow it ({error.call}: "
                           f"{error.code}). Another process uses the GPU (see nvidia-smi): end it or lower "
                           "gpu_memory_utilization.")


class VirtualSource:
    """Physical memory mapped into address ranges reserved once: regions grow in place."""

    def __init__(self, device: Device, budget: _Budget):
        cu = driver()
        self.device, self.budget = device, budget
        self.property = cu.CUmemAllocationProp()
        self.property.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.property.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.property.location.id = device.index
        self.access = cu.CUmemAccessDesc()
        self.access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.access.location.id = device.index
        self.access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.granularity: int = check(cu.cuMemGetAllocationGranularity(
            self.property, cu.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
            "cuMemGetAllocationGranularity")
        self.span = _round_up(budget.limit, self.granularity)
        self.chunks: dict[int, list[tuple[int, int, Any]]] = {}
        """Segment base -> (address, bytes, physical handle), by address."""
        self.base = int(check(cu.cuMemAddressReserve(self.span * len(REGIONS), 0, 0, 0), "cuMemAddressReserve"))
        try:
            self._unmap(self._map(self.base, self.granularity))  # where mapping is refused, say so now
        except BaseException:
            check(cu.cuMemAddressFree(self.base, self.span * len(REGIONS)), "cuMemAddressFree")
            raise

    def segments(self, position: int) -> list[Segment]:
        """The one segment of region number `position`."""
        return [Segment(self.base + position * self.span, 0, self.span)]

    def grow(self, region: Region, segment: Segment | None, nbytes: int) -> Segment | None:
        """See Source."""
        if segment is None:
            raise self.budget.exhausted(region, nbytes, 0)
        size = self.budget.grant(region, nbytes, self.granularity)
        least = _round_up(nbytes, self.granularity)
        address = segment.base + segment.mapped
        try:
            chunk = self._map(address, size)
        except DriverCallError as error:
            if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            if size == least:
                raise self.budget.refused(region, nbytes, error, self.device) from error
            size = least  # the device is nearly full: do without the extra
            try:
                chunk = self._map(address, size)
            except DriverCallError as second:
                raise self.budget.refused(region, nbytes, second, self.device) from second
        self.chunks.setdefault(segment.base, []).append(chunk)
        segment.mapped += size
        self.budget.mapped += size
        return segment

    def shrink(self, region: Region, segment: Segment, keep: int) -> None:
        """See Source."""
        chunks = self.chunks.get(segment.base, [])
        while chunks and chunks[-1][0] - segment.base >= keep:
            chunk = chunks.pop()
            self._unmap(chunk)
            segment.mapped -= chunk[1]
            self.budget.mapped -= chunk[1]

    def _map(self, address: int, size: int) -> tuple[int, int, Any]:
        cu = driver()
        handle = check(cu.cuMemCreate(size, self.property, 0), "cuMemCreate", human(size))
        try:
            check(cu.cuMemMap(address, size, 0, handle, 0), "cuMemMap")
            try:
                check(cu.cuMemSetAccess(address, size, [self.access], 1), "cuMemSetAccess")
            except BaseException:
                cu.cuMemUnmap(address, size)
                raise
        except BaseException:
            cu.cuMemRelease(handle)
            raise
        return address, size, handle

    def _unmap(self, chunk: tuple[int, int, Any]) -> None:
        cu = driver()
        address, size, handle = chunk
        check(cu.cuMemUnmap(address, size), "cuMemUnmap")
        check(cu.cuMemRelease(handle), "cuMemRelease")

    def close(self) -> None:
        for chunks in self.chunks.values():
            while chunks:
                self._unmap(chunks.pop())
        check(driver().cuMemAddressFree(self.base, self.span * len(REGIONS)), "cuMemAddressFree")


class PlainSource:
    """Separate allocations: each growth of a region is a segment of its own. cuMemAlloc, or cuMemHostAlloc when `pinned`."""

    granularity = 64 << 10

    def __init__(self, device: Device, budget: _Budget, *, pinned: bool = False):
        self.device, self.budget, self.pinned = device, budget, pinned
        self.allocated: dict[int, int] = {}

    def segments(self, position: int) -> list[Segment]:
        return []

    def grow(self, region: Region, segment: Segment | None, nbytes: int) -> Segment | None:
        """See Source."""
        if segment is not None:
            return None
        cu = driver()
        size = self.budget.grant(region, nbytes, self.granularity)
        least = _round_up(nbytes, self.granularity)
        for attempt in dict.fromkeys((size, least)):
            try:
                if self.pinned:
                    base = int(check(cu.cuMemHostAlloc(attempt, cu.CU_MEMHOSTALLOC_PORTABLE), "cuMemHostAlloc",
                                     f"{human(attempt)} of pinned host memory"))
                else:
                    base = int(check(cu.cuMemAlloc(attempt), "cuMemAlloc", human(attempt)))
                break
            except DriverCallError as error:
                if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                    raise
                refusal = error
        else:
            if self.pinned:
                raise OutOfMemory(f"pinned host memory: the system refused {human(nbytes)} more. "
                                  f"{ADVICE['pinned']}") from refusal
            raise self.budget.refused(region, nbytes, refusal, self.device) from refusal
        self.allocated[base] = attempt
        self.budget.mapped += attempt
        return Segment(base, attempt, attempt)

    def shrink(self, region: Region, segment: Segment, keep: int) -> None:
        """See Source: only a segment without any use can go."""
        if keep == 0:
            self._free(segment.base)
            segment.mapped = segment.limit = 0

    def _free(self, base: int) -> None:
        cu = driver()
        self.budget.mapped -= self.allocated.pop(base)
        if self.pinned:
            check(cu.cuMemFreeHost(base), "cuMemFreeHost")
        else:
            check(cu.cuMemFree(base), "cuMemFree")

    def close(self) -> None:
        for base in list(self.allocated):
            self._free(base)


# ---- the pools --------------------------------------------------------------------------------------------------


_slot_address = Tensor.address  # the slot that CheckedTensor's property stands before


class CheckedTensor(Tensor):
    """Debug mode's tensor: reading its address after its memory was given back raises MemoryFault. So do its views."""

    __slots__ = ()

    @property
    def address(self) -> int:
        self.owner.require_live()
        return _slot_address.__get__(self)

    @address.setter
    def address(self, value: int) -> None:
        _slot_address.__set__(self, value)


def _bytes_of(shape: Shape, dtype: DType) -> int:
    return dtype.nbytes(prod(shape))


class MemoryPool:
    """The device memory of one GPU; see the module. Not for two threads at once; `close` frees everything."""

    def __init__(self, device: Device, budget: int, *, limits: dict[str, int] | None = None, debug: bool = False,
                 stream: Any = None, virtual: bool | None = None):
        """
        Args:
            budget: bytes that all regions together may map; see `budget_for`.
            limits: further limits of single regions, in bytes.
            debug: tensors notice use after release, and with `stream` (the compute stream) memory is filled with 0xFF
                bytes in stream order when it is handed out and when it is given back.
            virtual: None takes virtual memory where the driver offers it; False takes plain allocations.
        """
        self.device = device
        self.debug = debug
        self.closed = False
        self._budget = _Budget("the GPU's budget (gpu_memory_utilization)", budget)
        self._source = self._open_source(virtual)
        self._stream = stream
        limits = limits or {}
        unknown = set(limits) - set(REGIONS)
        if unknown:
            raise MemoryFault(f"no region {', '.join(sorted(unknown))}; there are {', '.join(REGIONS)}.")
        self.regions: dict[str, Region] = {
            name: Region(name, self._source, min(limits.get(name, budget), budget), stack=name == "workspace", track=debug,
                         segments=self._source.segments(position), on_change=self._poison if debug and stream else None)
            for position, name in enumerate(REGIONS)}
        self._budget.regions = self.regions
        self._workspace = self.regions["workspace"]
        self._kept: dict[tuple, tuple[Tensor, tuple[int, int]]] = {}

    @staticmethod
    def budget_for(device: Device, utilization: float, slack: int = 0) -> int:
        """Bytes for `budget`: `utilization` of the device's memory less what is in use already (other processes, this
        context) and `slack`. Raises OutOfMemory when nothing is left."""
        free, total = device.memory_info()
        budget = int(total * utilization) - (total - free) - slack
        if budget < 64 * MIB:
            raise OutOfMemory(f"gpu_memory_utilization is {utilization} of {human(total)}, but {human(total - free)} are in "
                              f"use already on GPU {device.index}. Raise it, or end the other processes (nvidia-smi).")
        return budget

    def _open_source(self, virtual: bool | None) -> VirtualSource | PlainSource:
        if virtual is False or not self.device.virtual_memory:
            return PlainSource(self.device, self._budget)
        try:
            return VirtualSource(self.device, self._budget)
        except DriverCallError as error:
            if virtual or error.code not in ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_PERMITTED",
                                             "CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_INVALID_DEVICE"):
                raise
            log.warning("GPU %d: virtual memory is refused (%s: %s); using plain allocations.", self.device.index,
                        error.call, error.code)
            return PlainSource(self.device, self._budget)

    @property
    def virtual(self) -> bool:
        """Whether regions grow in place (virtual memory) rather than by further allocations."""
        return isinstance(self._source, VirtualSource)

    def allocate(self, region: str, shape: Sequence[int], dtype: DType, alignment: int = ALIGNMENT) -> Tensor:
        """An uninitialised contiguous tensor of a bump region (weights, kv, comm), until `release` or `close`.

        In the workspace region: until the enclosing scope ends. alignment: bytes, a power of two; 1024 for swizzled tiles.
        Raises OutOfMemory.
        """
        found = self.regions.get(region)
        if found is None:
            raise MemoryFault(f"no region {region!r}; there are {', '.join(REGIONS)}.")
        shape = tuple(shape)
        return self._tensor(found, shape, dtype, alignment, _bytes_of(shape, dtype))

    def workspace(self, shape: Shape, dtype: DType, alignment: int = ALIGNMENT,
                  room: Callable[[Shape, DType], int] = _bytes_of) -> Tensor:
        """An uninitialised tensor, valid until the enclosing `scope` ends. room(shape, dtype): bytes to take, at least its own.

        The same request at the same place gets the same Tensor, which is kept: a step's layers ask for the same things.
        """
        region = self._workspace
        key = region.cursor, shape, dtype, alignment, room
        kept = self._kept.get(key)
        if kept is None:
            tensor = self._tensor(region, shape, dtype, alignment, room(shape, dtype))
            if not region.track:  # debug mode wants to see each of them
                if len(self._kept) >= MOST_KEPT:
                    self._kept.clear()
                self._kept[key] = tensor, region.cursor
            return tensor
        tensor, region.cursor = kept
        return tensor

    def scope(self) -> Scope:
        """A context manager: workspace taken inside is given back at its end. Scopes nest."""
        return self._workspace.scope()

    def _tensor(self, region: Region, shape: Shape, dtype: DType, alignment: int, nbytes: int) -> Tensor:
        address, allocation = region.take(nbytes, alignment, f"{list(shape)} {dtype}" if region.track else "")
        kind = CheckedTensor if self.debug else Tensor
        return kind(address, shape, dtype, self.device.index, allocation or region)

    def release(self, tensor: Tensor) -> None:
        """Give an allocation of a bump region back, by any of its tensors. Raises MemoryFault the second time."""
        owner = tensor.owner
        if not isinstance(owner, Allocation):
            raise MemoryFault(f"{tensor!r} is no allocation of a bump region; workspace is given back by its scope.")
        if self.regions.get(owner.region.name) is not owner.region:
            raise MemoryFault(f"{owner.what} at {owner.address:#x} belongs to another pool.")
        owner.region.release(owner)

    def reserve(self, region: str, nbytes: int) -> None:
        """Map memory ahead: the next `nbytes` of the region then need no driver call."""
        self.regions[region].reserve(nbytes)

    def trim(self) -> None:
        """Unmap what no region uses now, so that another can grow."""
        self._kept.clear()
        for region in self.regions.values():
            region.trim()

    @property
    def free_bytes(self) -> int:
        """What the budget leaves to map."""
        return self._budget.limit - self._budget.mapped

    def statistics(self) -> dict[str, RegionStatistics]:
        """By region."""
        return {name: region.statistics() for name, region in self.regions.items()}

    def _poison(self, address: int, nbytes: int) -> None:
        if nbytes:
            check(driver().cuMemsetD8Async(address, POISON, nbytes, self._stream.handle), "cuMemsetD8Async",
                  "debug mode's fill")

    def close(self) -> None:
        """Free everything; the device must have finished with it. Tensors of the pool are dead from now on."""
        if self.closed:
            return
        self.closed = True
        self._kept.clear()
        for region in self.regions.values():
            region.close()
        self._source.close()

    def __enter__(self) -> MemoryPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class PinnedPool:
    """Page-locked host memory, which the device copies from and to at full speed and without waiting.

    Arrays must not be used after `release` or `close`: the memory under them is gone.
    """

    def __init__(self, device: Device, budget: int):
        """budget: bytes at most."""
        self.closed = False
        self._budget = _Budget("the pinned pool", budget)
        self._source = PlainSource(device, self._budget, pinned=True)
        self.region = Region("pinned", self._source, budget)
        self._budget.regions = {"pinned": self.region}
        self._allocations: dict[int, Allocation] = {}

    def allocate(self, shape: Sequence[int], dtype: DType | np.dtype | type) -> np.ndarray:
        """An uninitialised C-contiguous array; int4 as packed uint8 rows is the caller's to shape. Raises OutOfMemory."""
        kind = dtype.numpy if isinstance(dtype, DType) else np.dtype(dtype)
        nbytes = prod(shape) * kind.itemsize
        # an empty array still gets a byte, so that every live array has an address of its own
        address, allocation = self.region.take(max(1, nbytes), ALIGNMENT, f"{list(shape)} {kind}")
        self._allocations[address] = allocation
        buffer = (ctypes.c_uint8 * max(1, nbytes)).from_address(address)
        return np.frombuffer(buffer, np.uint8)[:nbytes].view(kind).reshape(shape)

    def release(self, array: np.ndarray) -> None:
        """Give an array of `allocate` back. Raises MemoryFault the second time, and for a foreign array."""
        address = array.ctypes.data
        allocation = self._allocations.pop(address, None)
        if allocation is None:
            raise MemoryFault(f"double free or foreign array: no allocation of the pinned pool begins at {address:#x}.")
        self.region.release(allocation)

    def statistics(self) -> RegionStatistics:
        return self.region.statistics()

    def close(self) -> None:
        """Free everything."""
        if self.closed:
            return
        self.closed = True
        self._allocations.clear()
        self.region.close()
        self._source.close()
