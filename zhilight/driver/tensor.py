"""Arrays in device memory: an address with a shape, strides and an element type. No arithmetic: kernels do that.

A Tensor is small and cheap (a few hundred nanoseconds), because model code makes hundreds of views a step. Work is
queued on the stream given; only `to_host` waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from zhilight.driver.device import check, driver
from zhilight.driver.dtype import DType
from zhilight.errors import ShapeError

Shape = tuple[int, ...]


@lru_cache(maxsize=4096)
def contiguous_strides(shape: Shape) -> Shape:
    """Row-major strides of `shape`, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, eq=False)
class Layout:
    """What of an array shapes a launch: all but where it is. Made by `layout_of`.

    Kernels' host functions keep what they have checked and worked out by layouts, which as keys cost what an integer costs.
    """

    shape: Shape
    strides: Shape
    dtype: DType


layout_of = lru_cache(maxsize=1 << 14)(Layout)
"""The Layout of (shape, strides, dtype): one object for equal ones. (One that the cache has forgotten is made anew, and what is
kept by it worked out again.)"""


@lru_cache(maxsize=1 << 14)
def _row_major(shape: Shape, dtype: DType) -> Layout:
    return layout_of(shape, contiguous_strides(shape), dtype)


class Tensor:
    """A strided array in the memory of one device.

    Attributes:
        address: of element 0, an integer.
        shape, strides: tuples of integers; strides in elements. int4 counts elements of half a byte, low nibble first.
        dtype: a DType.
        layout: the three together.
        device: the GPU's index.
        owner: what keeps the memory alive, shared by every view; None when the caller sees to that.
    """

    __slots__ = ("address", "device", "dtype", "layout", "owner", "shape", "strides")

    def __init__(self, address: int, shape: Shape, dtype: DType, device: int = 0, owner: Any = None,
                 strides: Shape | None = None):
        """`strides` None is row-major."""
        self.owner = owner
        self.address = address
        self.layout = layout = _row_major(shape, dtype) if strides is None else layout_of(shape, strides, dtype)
        self.shape = shape
        self.strides = layout.strides
        self.dtype = dtype
        self.device = device

    # ---- description ------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, without the gaps of a strided view."""
        return self.dtype.nbytes(prod(self.shape))

    @property
    def contiguous(self) -> bool:
        """Whether the elements lie one after the other in row-major order."""
        if self.strides == contiguous_strides(self.shape):
            return True
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size == 0:
                return True
            if size != 1:
                if stride != expected:
                    return False
                expected *= size
        return True

    def __len__(self) -> int:
        if not self.shape:
            raise ShapeError("a tensor without axes has no length.")
        return self.shape[0]

    def __repr__(self) -> str:
        gaps = "" if self.contiguous else f", strides={self.strides}"
        return f"Tensor({list(self.shape)} {self.dtype}{gaps}, cuda:{self.device} at {self.address:#x})"

    # ---- views ------------------------------------------------------------------------------------------------

    def _view(self, offset: int, shape: Shape, strides: Shape) -> Tensor:
        bits = offset * self.dtype.bits
        if bits & 7:
            raise ShapeError(f"a view of {self!r} would begin inside a byte (element {offset}); "
                             "slice packed types at even elements.")
        return type(self)(self.address + (bits >> 3), shape, self.dtype, self.device, self.owner, strides)

    def __getitem__(self, key: Any) -> Tensor:
        """A view: integers, slices with a positive step, and one `...`; as NumPy, but an integer out of range is a
        ShapeError."""
        if type(key) is slice:  # the two common forms first
            return self._slice_axis(0, key)
        if type(key) is not tuple:
            key = (key,)
        key = self._without_ellipsis(key)
        offset, shape, strides = 0, [], []
        for axis, item in enumerate(key):
            size, stride = self.shape[axis], self.strides[axis]
            if isinstance(item, slice):
                start, stop, step = self._bounds(item, size)
                offset += start * stride
                shape.append(max(0, -((start - stop) // step)))
                strides.append(stride * step)
            else:
                offset += self._position(item, axis) * stride
        return self._view(offset, (*shape, *self.shape[len(key):]), (*strides, *self.strides[len(key):]))

    def _slice_axis(self, axis: int, item: slice) -> Tensor:
        if not self.shape:
            raise ShapeError("a tensor without axes cannot be sliced.")
        start, stop, step = self._bounds(item, self.shape[axis])
        stride = self.strides[axis]
        return self._view(start * stride, (max(0, -((start - stop) // step)), *self.shape[1:]),
                          (stride * step, *self.strides[1:]))

    def _bounds(self, item: slice, size: int) -> tuple[int, int, int]:
        start, stop, step = item.indices(size)
        if step < 1:
            raise ShapeError(f"slice step is {step}; a tensor's must be at least 1.")
        return start, max(start, stop), step

    def _position(self, item: Any, axis: int) -> int:
        try:
            index = item.__index__()
        except AttributeError:
            raise ShapeError(f"a tensor is indexed by integers, slices and ..., not by {type(item).__name__}.") from None
        size = self.shape[axis]
        if not -size <= index < size:
            raise ShapeError(f"index {index} is out of range for axis {axis} of {self!r}.")
        return index + size if index < 0 else index

    def _without_ellipsis(self, key: tuple) -> tuple:
        where = [position for position, item in enumerate(key) if item is Ellipsis]
        if where:
            missing = len(self.shape) - len(key) + 1
            key = key[:where[0]] + (slice(None),) * missing + key[where[0] + 1:]
        if len(where) > 1 or len(key) > len(self.shape):
            raise ShapeError(f"{len(key)} indices for {self!r}, which has {len(self.shape)} axes.")
        return key

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    def reshape(self, *shape: int | Shape) -> Tensor:
        """A view with another shape; one size may be -1. Never copies: raises ShapeError where a copy would be needed."""
        wanted: Shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        wanted = self._complete(tuple(wanted))
        if self.strides == contiguous_strides(self.shape):
            return self._view(0, wanted, contiguous_strides(wanted))
        strides = _reshaped_strides(self.shape, self.strides, wanted)
        if strides is None:
            raise ShapeError(f"reshape of {self!r} to {list(wanted)} needs a copy; copy it into a contiguous tensor first.")
        return self._view(0, wanted, strides)

    def _complete(self, wanted: Shape) -> Shape:
        count = prod(self.shape)
        if -1 in wanted:
            known = -prod(wanted)
            if wanted.count(-1) == 1 and known > 0 and count % known == 0:
                return tuple(count // known if size == -1 else size for size in wanted)
        elif prod(wanted) == count:
            return wanted
        raise ShapeError(f"{self!r} has {count} elements; it cannot be reshaped to {list(wanted)}.")

    def view(self, dtype: DType) -> Tensor:
        """The same bytes as elements of another type; the last axis must be contiguous and its size changes."""
        if not self.shape or (self.strides[-1] != 1 and self.shape[-1] != 1):
            raise ShapeError(f"view of {self!r} as {dtype} needs a contiguous last axis.")
        old, new = self.dtype.bits, dtype.bits
        inner = self.shape[-1] * old
        outer = [stride * old for stride in self.strides[:-1]]
        if inner % new or any(bits % new for bits in outer) or self.address * 8 % max(new, 8):
            raise ShapeError(f"view of {self!r} as {dtype}: rows or address are not multiples of {new} bits.")
        return type(self)(self.address, (*self.shape[:-1], inner // new), dtype, self.device, self.owner,
                          (*(bits // new for bits in outer), 1))

    def transpose(self, first: int, second: int) -> Tensor:
        """A view with two axes exchanged."""
        shape, strides = list(self.shape), list(self.strides)
        for axis in (first, second):
            if not -len(shape) <= axis < len(shape):
                raise ShapeError(f"axis {axis} is out of range for {self!r}.")
        shape[first], shape[second] = shape[second], shape[first]
        strides[first], strides[second] = strides[second], strides[first]
        return self._view(0, tuple(shape), tuple(strides))

    # ---- copies -----------------------------------------------------------------------------------------------

    @property
    def host_shape(self) -> Shape:
        """Shape of the NumPy array with the same bytes: two int4 elements are one uint8, otherwise `shape`."""
        if self.dtype.bits >= 8:
            return self.shape
        if not self.shape or self.shape[-1] * self.dtype.bits % 8:
            raise ShapeError(f"{self!r}: the last axis of a packed tensor must fill whole bytes to be copied.")
        return (*self.shape[:-1], self.shape[-1] * self.dtype.bits // 8)

    def copy_from_host(self, source: np.ndarray, stream: Any, *, wait: bool = True) -> None:
        """Copy `source`, behind what the stream has queued: same shape (`host_shape`) and element type; its order is free.

        On return `source` may be changed or freed. With wait=False the copy is only queued, and `source`, C-contiguous and
        page-locked, must stay as it is until the stream has passed it. (The driver may read ordinary memory too after its
        call has returned: on systems whose GPU can read all of the host's memory it does.)
        """
        if source.shape != self.host_shape or source.dtype != self.dtype.numpy:
            raise ShapeError(f"copy_from_host: source is {list(source.shape)} {source.dtype}, the tensor wants "
                             f"{list(self.host_shape)} {self.dtype.numpy}.")
        source = np.ascontiguousarray(source)
        _copy(self, source.ctypes.data, contiguous_strides(self.shape), stream, to_tensor=True)
        if wait:
            stream.synchronize()

    def to_host(self, stream: Any) -> np.ndarray:
        """A host copy (`host_shape`; bf16 and fp8 as ml_dtypes) after all work queued on `stream`. Waits for it."""
        target = np.empty(self.host_shape, self.dtype.numpy)
        self.copy_to_host(target, stream)
        stream.synchronize()
        return target

    def copy_to_host(self, target: np.ndarray, stream: Any) -> None:
        """Queue a copy into `target` (`host_shape`, C-contiguous; pinned, so that the call does not wait for it)."""
        if target.shape != self.host_shape or target.dtype != self.dtype.numpy or not target.flags.c_contiguous:
            raise ShapeError(f"copy_to_host: target is {list(target.shape)} {target.dtype}, it must be a C-contiguous "
                             f"{list(self.host_shape)} {self.dtype.numpy}.")
        _copy(self, target.ctypes.data, contiguous_strides(self.shape), stream, to_tensor=False)

    def copy_(self, source: Tensor, stream: Any) -> None:
        """Queue a copy of another tensor, of any device, with the same shape and dtype. They must not overlap."""
        if source.shape != self.shape or source.dtype is not self.dtype:
            raise ShapeError(f"copy_: source is {source!r}, the target {self!r}; shapes and dtypes must be equal.")
        _copy(self, source.address, source.strides, stream, to_tensor=True)

    def fill_zero(self, stream: Any) -> None:
        """Queue a memset of every element to zero bytes; gaps of a strided view are left alone."""
        self.fill_bytes(0, stream)

    def fill_bytes(self, value: int, stream: Any) -> None:
        """Queue a memset of every byte to `value`, 0 to 255."""
        cu, handle = driver(), stream.handle
        for offset, _, rows, pitch, _, width in _runs(self, self.strides):
            if rows == 1:
                check(cu.cuMemsetD8Async(self.address + offset, value, width, handle), "cuMemsetD8Async")
            else:
                check(cu.cuMemsetD2D8Async(self.address + offset, pitch, value, width, rows, handle), "cuMemsetD2D8Async")

    # ---- exchange with other libraries ------------------------------------------------------------------------

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        """A DLPack capsule. Unless `stream` is -1 this waits for the device, so any consumer's stream may read on."""
        from zhilight.driver import dlpack

        if copy:
            raise BufferError("ZhiLight does not copy for DLPack; copy on the consumer's side.")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the tensor is on device {self.__dlpack_device__()}, not on {tuple(dl_device)}.")
        if stream != -1:
            check(driver().cuCtxSynchronize(), "cuCtxSynchronize")
        return dlpack.export(self, versioned=max_version is not None and max_version[0] >= 1)

    def __dlpack_device__(self) -> tuple[int, int]:
        from zhilight.driver import dlpack

        return dlpack.CUDA, self.device

    @staticmethod
    def from_dlpack(source: Any, stream: Any) -> Tensor:
        """A tensor over the memory of an object with `__dlpack__` (PyTorch, CuPy, JAX ...), which is kept alive.

        The producer orders its work before what is queued on `stream` from now on. Raises ShapeError for host memory or
        an element type that no kernel knows.
        """
        from zhilight.driver import dlpack

        return dlpack.adopt(source, int(stream.handle))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, without a stream: the reader sees to the order. Raises ShapeError for bf16, fp8 and int4, which the
        protocol cannot name: handing out their bits as integers would be read as integers. Those go through DLPack, or
        through `view(uint8)`.
        """
        if self.dtype.numpy.kind not in "fiu" or self.dtype.bits < 8 or self.dtype.numpy_name.startswith("float8"):
            raise ShapeError(f"__cuda_array_interface__ has no name for {self.dtype}; use DLPack (from_dlpack) or "
                             "view the tensor as uint8.")
        size = self.dtype.itemsize
        return {"shape": self.shape, "typestr": self.dtype.numpy.str, "data": (self.address, False), "version": 3,
                "strides": None if self.contiguous else tuple(stride * size for stride in self.strides),
                "stream": None}

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("a device Tensor does not turn into a NumPy array by itself; call to_host(stream).")


@lru_cache(maxsize=4096)
def _reshaped_strides(shape: Shape, strides: Shape, wanted: Shape) -> Shape | None:
    """Strides that show a strided array as `wanted` without a copy, or None where there are none.

    Axes that follow each other without a gap are merged into runs; every run must then be cut up by whole axes of
    `wanted`.
    """
    if 0 in shape:
        return contiguous_strides(wanted)
    runs = _merge(shape, strides)
    result: list[int] = []
    axis = 0
    for (size, stride), last in zip(runs, [*[False] * (len(runs) - 1), True], strict=True):
        begin, count = axis, 1
        while axis < len(wanted) and (count < size or (last or wanted[axis] == 1)):
            count *= wanted[axis]
            axis += 1
        if count != size:
            return None
        result.extend(step * stride for step in contiguous_strides(wanted[begin:axis]))
    return tuple(result)


def _merge(shape: Shape, *strides: Shape) -> list[tuple[int, ...]]:
    """(size, stride, ...) of the fewest axes that visit the same elements in the same order, for all strides at once."""
    merged: list[tuple[int, ...]] = []
    for size, *steps in zip(shape, *strides, strict=True):
        if size == 1:
            continue
        if merged and all(before == size * step for before, step in zip(merged[-1][1:], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, *steps)
        else:
            merged.append((size, *steps))
    return merged or [(1, *(1 for _ in strides))]


def _runs(tensor: Tensor, other_strides: Shape) -> Iterator[tuple[int, int, int, int, int, int]]:
    """The two-dimensional pieces of a strided copy, all in bytes:
    (offset, other's offset, rows, pitch, other's pitch, width)."""
    if 0 in tensor.shape:
        return
    bits = tensor.dtype.bits
    axes = _merge(tensor.shape, tensor.strides, other_strides)
    width, inner, other_inner = axes[-1]
    if inner != 1 or other_inner != 1:
        width = 1
        axes.append((1, 1, 1))
        if bits % 8:
            raise ShapeError(f"{tensor!r}: packed elements with gaps cannot be copied.")
    sizes = [width, *(step for axis in axes[:-1] for step in axis[1:])]
    if any(size * bits % 8 for size in sizes):
        raise ShapeError(f"{tensor!r}: rows of packed elements must fill whole bytes to be copied.")
    rows, pitch, other_pitch = axes[-2] if len(axes) > 1 else (1, width, width)
    outer = axes[:-2]
    for position in np.ndindex(*(size for size, _, _ in outer)):
        offset = sum(index * axis[1] for index, axis in zip(position, outer, strict=True))
        other = sum(index * axis[2] for index, axis in zip(position, outer, strict=True))
        yield offset * bits // 8, other * bits // 8, rows, pitch * bits // 8, other_pitch * bits // 8, width * bits // 8


def _copy(tensor: Tensor, other: int, other_strides: Shape, stream: Any, *, to_tensor: bool) -> None:
    """Queue the copy between a tensor and the memory at `other` (host or device: addresses are unified)."""
    cu, handle = driver(), stream.handle
    for offset, other_offset, rows, pitch, other_pitch, width in _runs(tensor, other_strides):
        mine, theirs = tensor.address + offset, other + other_offset
        if to_tensor:
            target, target_pitch, source, source_pitch = mine, pitch, theirs, other_pitch
        else:
            target, target_pitch, source, source_pitch = theirs, other_pitch, mine, pitch
        if rows == 1:
            check(cu.cuMemcpyAsync(target, source, width, handle), "cuMemcpyAsync", f"{width} bytes of {tensor!r}")
            continue
        if max(target_pitch, source_pitch) >= 2**31:  # the driver refuses larger pitches
            for row in range(rows):
                check(cu.cuMemcpyAsync(target + row * target_pitch, source + row * source_pitch, width, handle),
                      "cuMemcpyAsync", f"{width} bytes of {tensor!r}")
            continue
        plan = cu.CUDA_MEMCPY2D()
        plan.srcMemoryType = plan.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        plan.srcDevice, plan.srcPitch = cu.CUdeviceptr(source), source_pitch
        plan.dstDevice, plan.dstPitch = cu.CUdeviceptr(target), target_pitch
        plan.WidthInBytes, plan.Height = width, rows
        check(cu.cuMemcpy2DAsync(plan, handle), "cuMemcpy2DAsync", f"{rows} rows of {width} bytes of {tensor!r}")
