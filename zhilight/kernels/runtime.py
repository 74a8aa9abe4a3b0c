"""What the host side of a kernel needs of its device: stream, scratch memory, counters and tensor maps.

One Runtime a device and stream. Everything it hands out has an address that never moves, so captured graphs stay valid:
scratch is one buffer that each operation reuses (operations of a stream follow each other), counters are zero between
launches (a kernel that uses them leaves them at zero), tensor maps are made once for equal arguments.

The memory of tensor maps is the process's and is never given back. Multiprocessors keep the maps that they have read, and
nothing but a fence in every kernel would tell them that another one has taken an address: a second Runtime in a process, whose
maps lay where those of the first had been, wrote through the old ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zhilight.driver.compiler import Capability
from zhilight.driver.dtype import DType
from zhilight.errors import OutOfMemory, ShapeError

MAX_TENSOR_MAPS = 1 << 16
"""Of one device, in the life of a process. An engine makes some hundreds: its workspace has few different addresses
(ops/cuda.py)."""
TENSOR_MAP_BYTES = 128
MAPS_AT_ONCE = 1 << 14
"""Tensor maps whose memory is taken from the driver together: 2 MiB."""
PLANS = 1 << 12
"""Launches that an operation keeps, by the layouts of its arrays and what else they depend on: those of the last thousands of
different steps."""
STEP_PLANS = 64
"""The same, of operations whose launches hardly any two steps share; the layers of a step do."""
COUNTERS = 1 << 16
ZEROS_BYTES = 8 << 20


@dataclass(frozen=True, eq=False)
class MapForm:
    """A tensor map but for the address; made by `map_form`.

    shape and box are in elements, outermost first as NumPy has them; strides are in bytes, of all dimensions but the
    innermost, which is contiguous. Reads outside the shape give zeros, writes are dropped. swizzle: 0, 32, 64 or 128.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 128


map_form = functools.cache(MapForm)
"""The MapForm of these arguments: one object for equal ones, so that it is a quick key."""


class TensorMaps(dict[tuple[int, MapForm], int]):
    """Device addresses of tensor maps, for the bulk copy engine, by (address of the array, form): made when first asked for."""

    def __init__(self, make: Callable[[int, MapForm], int]):
        super().__init__()
        self._make = make

    def __missing__(self, key: tuple[int, MapForm]) -> int:
        made = self[key] = self._make(*key)
        return made


class Runtime:
    """See the module.

    allocate(bytes) -> address gives memory for the life of the runtime, aligned to 256 bytes.
    scratch_bytes is the largest workspace an operation may ask for (split-K and split-KV partials).
    """

    def __init__(self, stream: Any, capability: Capability, multiprocessors: int, allocate: Callable[[int], int],
                 scratch_bytes: int = 256 << 20):
        self.stream = stream
        self.capability = capability
        self.multiprocessors = multiprocessors
        self.scratch_bytes = scratch_bytes
        self._scratch = allocate(scratch_bytes)
        self._counters = allocate(COUNTERS * 4)
        self._zeros = allocate(ZEROS_BYTES)
        self._zero(self._counters, COUNTERS)
        self._zero(self._zeros, ZEROS_BYTES // 4)
        self.tensor_maps = TensorMaps(self._make_map)

    def scratch(self, nbytes: int) -> int:
        """Address of `nbytes` of uninitialised memory, valid for the operation being queued."""
        if nbytes > self.scratch_bytes:
            raise OutOfMemory(f"an operation needs {nbytes:,} bytes of scratch memory; the runtime has {self.scratch_bytes:,}. "
                              "Lower max_num_batched_tokens.")
        return self._scratch

    def counters(self, count: int) -> int:
        """Address of `count` uint32 zeros; the kernel must leave zeros (atom.inc wraps by itself)."""
        if count > COUNTERS:
            raise OutOfMemory(f"an operation needs {count:,} counters; the runtime has {COUNTERS:,}.")
        return self._counters

    def zeros(self, nbytes: int) -> int:
        """Address of `nbytes` of zeros, which the operation must leave zero. One use an operation."""
        if nbytes > ZEROS_BYTES:
            raise OutOfMemory(f"an operation needs {nbytes:,} bytes of zeros; the runtime has {ZEROS_BYTES:,}. "
                              "Lower max_num_seqs.")
        return self._zeros

    @property
    def num_tensor_maps(self) -> int:
        """Tensor maps made so far."""
        return len(self.tensor_maps)

    def _make_map(self, address: int, form: MapForm) -> int:
        from cuda.bindings import driver

        from zhilight.driver.device import check

        if address % 16 or any(s % 16 for s in form.strides):
            raise ShapeError("the bulk copy engine needs an address and strides that are multiples of 16 bytes, got "
                             f"{address:#x} and {form.strides}")
        kinds, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
        kind = {"bfloat16": kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "float16": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                "float32": kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32, "int32": kinds.CU_TENSOR_MAP_DATA_TYPE_INT32,
                }.get(form.dtype.name, kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8)
        tensor_map = check(driver.cuTensorMapEncodeTiled(
            kind, len(form.shape), address,
            [driver.cuuint64_t(n) for n in reversed(form.shape)], [driver.cuuint64_t(n) for n in reversed(form.strides)],
            [driver.cuuint32_t(n) for n in reversed(form.box)], [driver.cuuint32_t(1)] * len(form.shape),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(swizzles, f"CU_TENSOR_MAP_SWIZZLE_{form.swizzle}B" if form.swizzle else "CU_TENSOR_MAP_SWIZZLE_NONE"),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE), "cuTensorMapEncodeTiled")
        import numpy as np

        host = np.array([int(word) for word in tensor_map.opaque], dtype=np.uint64)
        context = int(check(driver.cuCtxGetCurrent(), "cuCtxGetCurrent"))
        target = next(_map_addresses(context), None)
        if target is None:
            raise OutOfMemory(f"more than {MAX_TENSOR_MAPS} tensor maps; a caller makes a new one each step.")
        # the copy returns when the bytes are staged; only the wait makes sure that the map is in place before any kernel that
        # is queued after this call, on whatever stream
        check(driver.cuMemcpyHtoD(target, host.ctypes.data, TENSOR_MAP_BYTES), "cuMemcpyHtoD")
        check(driver.cuStreamSynchronize(0), "cuStreamSynchronize")
        return target

    def _zero(self, address: int, words: int) -> None:
        """In stream order, and done on return: a fill that the allocator queued must not come after it."""
        from cuda.bindings import driver

        from zhilight.driver.device import check

        check(driver.cuMemsetD32Async(address, 0, words, self.stream.handle), "cuMemsetD32Async")
        check(driver.cuStreamSynchronize(self.stream.handle), "cuStreamSynchronize")


@functools.cache
def _map_addresses(context: int) -> Iterator[int]:
    """Where the tensor maps of a context may lie: each address once in the life of the process. See the module."""
    from cuda.bindings import driver

    from zhilight.driver.device import check

    for _ in range(MAX_TENSOR_MAPS // MAPS_AT_ONCE):
        base = int(check(driver.cuMemAlloc(MAPS_AT_ONCE * TENSOR_MAP_BYTES), "cuMemAlloc"))
        yield from range(base, base + MAPS_AT_ONCE * TENSOR_MAP_BYTES, TENSOR_MAP_BYTES)
