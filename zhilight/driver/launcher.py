"""Launching a kernel: packed arguments and cuLaunchKernelEx, nothing allocated.

The call goes to the driver library through ctypes with a block of memory that is made once and that the driver has copied when
it returns: the configuration, the arguments, and the address of each argument. A Launcher has one for its kernel, into which
each launch is packed anew (2 us of host time beside the driver's); a BoundLaunch has one for a grid and its numbers, into which
only the addresses go (1 us). One thread launches the kernels of a process (the engine's); neither is for two threads at once.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from typing import Any

from zhilight.driver.compiler import Capability, Kernel, LaunchRecorder, Pointer, TensorMapParameter, target_of
from zhilight.errors import DeviceError, ShapeError

_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


_CONFIG = struct.Struct("@7IPPI4x")
"""CUlaunchConfig: grid (x, y, z), block (x, y, z), bytes of shared memory, stream, attributes, their number."""
_pack_config = _CONFIG.pack_into
_ARGUMENTS = 64
"""Where the arguments begin in a launch's memory, behind the configuration."""


@functools.cache
def _launch_function() -> Any:
    """cuLaunchKernelEx of the driver library. PyDLL: the call takes 2 us, less than giving the interpreter lock away.

    Without argtypes: what it is called with are C pointers made once (byref, c_void_p), which need no conversion.
    """
    try:
        function = ctypes.PyDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError) as error:
        raise DeviceError("cuLaunchKernelEx is not in the driver library (libcuda.so.1). It needs an NVIDIA driver of CUDA "
                          f"12.0 or newer: install or update the driver. ({error})") from error
    function.restype = ctypes.c_int
    return function


class Launcher:
    """One kernel loaded into the current context."""

    def __init__(self, kernel: Kernel, capability: Capability | None = None):
        from cuda.bindings import driver

        from zhilight.driver.device import check

        if capability is None:
            capability = current_capability()
        if not kernel.supports(capability):
            raise DeviceError(f"kernel {kernel.name} needs capability {kernel.min_capability}; this GPU has {capability}.")
        self.kernel = kernel
        self.cubin = kernel.cubin(capability)
        module = check(driver.cuModuleLoadData(self.cubin.code), "cuModuleLoadData")
        function = check(driver.cuModuleGetFunction(module, self.cubin.entry.encode()), "cuModuleGetFunction")
        attribute = driver.CUfunction_attribute
        if kernel.shared > 48 * 1024:
            check(driver.cuFuncSetAttribute(
                function, attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, kernel.shared), "cuFuncSetAttribute")
        if kernel.cluster > 8:
            check(driver.cuFuncSetAttribute(
                function, attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1), "cuFuncSetAttribute")
        self._module = module
        self._function = ctypes.c_void_p(int(function))
        self._launch = _launch_function()
        self._prepare_arguments()
        self._prepare_config()

    def _prepare_arguments(self) -> None:
        codes, pointers = [], []
        for _, annotation in self.kernel.parameters:
            if isinstance(annotation, (Pointer, TensorMapParameter)):
                codes.append("Q")
                pointers.append((len(codes) - 1, getattr(annotation, "dtype", None)))
            else:
                codes.append({"int32": "i", "uint32": "I", "int64": "q", "uint64": "Q", "float32": "f"}[str(annotation)])
        layout = struct.Struct("@" + "".join(codes))
        self._pack_arguments = layout.pack_into
        self._pointers = pointers
        self._offsets, offset = [], _ARGUMENTS
        for code in codes:
            size = struct.calcsize(code)
            offset = (offset + size - 1) // size * size
            self._offsets.append(offset)
            offset += size
        self._table = (offset + 7) // 8 * 8
        self._memory_type = ctypes.c_char * (self._table + 8 * len(codes))
        self._pack_table = struct.Struct(f"@{len(codes)}P").pack_into
        self._memory, self._config, self._parameters = self.new_memory()

    def new_memory(self) -> tuple[ctypes.Array, Any, Any]:
        """A launch's memory, and what the driver is given: pointers to the configuration and to the arguments' addresses."""
        memory = self._memory_type()
        base = ctypes.addressof(memory)
        self._pack_table(memory, self._table, *[base + offset for offset in self._offsets])
        return memory, ctypes.byref(memory), ctypes.byref(memory, self._table)

    def _prepare_config(self) -> None:
        self._attributes = (_Attribute * 2)()
        count = 0
        if self.kernel.cluster > 1:
            self._attributes[count].id = _CLUSTER_DIMENSION
            self._attributes[count].value[0:3] = [self.kernel.cluster, 1, 1]
            count += 1
        self._attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
        self._attributes[count].value[0] = 1
        self._attributes_address = ctypes.addressof(self._attributes)
        self._plain_count = count
        self._threads, self._shared = self.kernel.threads, self.kernel.shared

    def pack_config(self, memory: ctypes.Array, grid: int | tuple[int, int, int], handle: int, overlap: bool) -> None:
        """Write a launch's configuration."""
        x, y, z = (grid, 1, 1) if type(grid) is int else grid
        _pack_config(memory, 0, x, y, z, self._threads, 1, 1, self._shared, handle, self._attributes_address,
                     self._plain_count + overlap)

    @property
    def entry(self) -> tuple[Any, ctypes.c_void_p]:
        """The driver's launch function, and the kernel for it."""
        return self._launch, self._function

    def __call__(self, grid: int | tuple[int, int, int], arguments: tuple, stream: Any, overlap: bool) -> None:
        try:
            self._pack_arguments(self._memory, _ARGUMENTS, *arguments)
        except struct.error:  # not numbers alone
            self._pack_tensors(arguments)
        self.pack_config(self._memory, grid, stream.handle, overlap)
        code = self._launch(self._config, self._function, self._parameters, None)
        if code:
            self.fail(code, grid)

    def _pack_tensors(self, arguments: tuple) -> None:
        """Pack the addresses of tensors, whose element types must be those that the kernel reads."""
        values = list(arguments)
        for index, dtype in self._pointers:
            value = values[index] if index < len(values) else 0
            if type(value) is not int:
                if value.dtype is not dtype and dtype is not None:
                    raise ShapeError(f"{self.kernel.name}: {self.kernel.parameters[index][0]} is {value.dtype}, the kernel "
                                     f"reads {dtype}")
                values[index] = value.address
        self.pack_numbers(self._memory, values)

    def pack_numbers(self, memory: ctypes.Array, values: Sequence[int | float]) -> None:
        """Write a launch's arguments, all of them numbers. Raises ShapeError."""
        try:
            self._pack_arguments(memory, _ARGUMENTS, *values)
        except struct.error as error:
            raise ShapeError(f"{self.kernel.name} takes {[name for name, _ in self.kernel.parameters]}, got {values}: "
                             f"{error}") from error

    def fail(self, code: int, grid: Any) -> None:
        """Raise the DriverCallError of a launch that returned `code`."""
        from zhilight.driver.device import driver_error

        raise driver_error("cuLaunchKernelEx", code, f"{self.kernel.name}, grid {grid}, {self.kernel.threads} threads, "
                           f"{self.kernel.shared} B of shared memory, cluster {self.kernel.cluster}")


class BoundLaunch:
    """A launch of which all but the stream and the addresses is settled. Called with those, it is queued.

    numbers: the arguments behind the pointers and tensor maps that the kernel's parameters begin with. It is for the maker to
    check element types. Everything is packed by the first call, and when the stream changes, but for the addresses; a
    LaunchRecorder in the stream's place notes the kernel, which is not loaded then.
    """

    __slots__ = ("_config", "_function", "_handle", "_launch", "_memory", "_pack", "_parameters", "grid", "kernel", "numbers",
                 "overlap")

    def __init__(self, kernel: Kernel, grid: int | tuple[int, int, int], numbers: tuple[int | float, ...], overlap: bool):
        self.kernel, self.grid, self.numbers, self.overlap = kernel, grid, numbers, overlap
        self._handle: int | None = None

    def __call__(self, stream: Any, *addresses: int) -> None:
        """Queue it. addresses: of the pointers and tensor maps that the kernel's parameters begin with, all of them."""
        if stream.handle != self._handle:
            if stream.__class__ is LaunchRecorder:
                stream.kernels[self.kernel] = None
                return
            self._prepare(stream.handle)
        self._pack(self._memory, _ARGUMENTS, *addresses)
        code = self._launch(self._config, self._function, self._parameters, None)
        if code:
            self.kernel.load().fail(code, self.grid)

    def _prepare(self, handle: int) -> None:
        launcher = self.kernel.load()
        count = len(self.kernel.parameters) - len(self.numbers)
        self._memory, self._config, self._parameters = launcher.new_memory()
        launcher.pack_numbers(self._memory, (0,) * count + self.numbers)
        launcher.pack_config(self._memory, self.grid, handle, self.overlap)
        self._pack = _pack_addresses(count)
        self._launch, self._function = launcher.entry
        self._handle = handle


@functools.cache
def _pack_addresses(count: int) -> Any:
    """pack_into of `count` addresses."""
    return struct.Struct(f"@{count}Q").pack_into


def current_capability() -> Capability:
    """The capability of the current context's device, with Hopper's architecture-specific instructions where it has them."""
    from cuda.bindings import driver

    from zhilight.driver.device import check

    device = check(driver.cuCtxGetDevice(), "cuCtxGetDevice")
    attribute = driver.CUdevice_attribute
    major = check(driver.cuDeviceGetAttribute(
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device), "cuDeviceGetAttribute")
    minor = check(driver.cuDeviceGetAttribute(
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device), "cuDeviceGetAttribute")
    return target_of(major, minor)
