"""Devices, and driver errors that say which call failed, with which code, and what that means for the user.

`cuda.bindings` is loaded on the first call that needs it, so this package imports on a machine without a driver.
A device is used through its primary context, the one that every other CUDA library of the process shares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from zhilight.errors import DeviceError

MINIMUM_DRIVER = (12, 0)
"""Oldest CUDA version that the driver must support; the CUDA 13 wheels ask for (13, 0)."""

MINIMUM_CAPABILITY = (8, 0)
"""Oldest compute capability that the kernels are written for: Ampere."""

INSTALL_DRIVER = "Install the NVIDIA driver (https://www.nvidia.com/drivers), or run on the CPU with device=cpu."

MEANING = {
    "CUDA_ERROR_INVALID_VALUE": "an argument is out of its range; this is a fault of ZhiLight, please report it",
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU's memory is full: lower gpu_memory_utilization, or end the other processes "
                                "that nvidia-smi lists",
    "CUDA_ERROR_NOT_INITIALIZED": "the driver is not initialised in this process: was it forked after CUDA was first "
                                  "used? Start processes with the spawn method",
    "CUDA_ERROR_DEINITIALIZED": "the process is already shutting its CUDA context down",
    "CUDA_ERROR_STUB_LIBRARY": "the libcuda found is the toolkit's link-time stub, not a driver: take the stubs folder "
                               "out of LD_LIBRARY_PATH",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process holds the GPU in exclusive mode (nvidia-smi -q -d COMPUTE)",
    "CUDA_ERROR_NO_DEVICE": "no NVIDIA GPU is visible: check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, "
                            "that it was started with --gpus; or run on the CPU with device=cpu",
    "CUDA_ERROR_INVALID_DEVICE": "there is no GPU with that number: see `zhilight doctor` and CUDA_VISIBLE_DEVICES",
    "CUDA_ERROR_INVALID_CONTEXT": "no context is current in this thread: call Device.make_current() in it first",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "the kernel was compiled for another compute capability; recompile it for this GPU "
                                    "(zhilight kernels compile)",
    "CUDA_ERROR_INVALID_IMAGE": "the compiled kernel is damaged or for another compute capability: delete the kernel "
                                "cache folder that `zhilight doctor` names and start again",
    "CUDA_ERROR_INVALID_PTX": "the PTX is invalid or for another compute capability",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "the PTX is newer than the driver: update the driver",
    "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED": "a CUDA library could not be initialised",
    "CUDA_ERROR_NOT_FOUND": "a symbol is missing in the compiled kernel: delete the kernel cache folder that "
                            "`zhilight doctor` names and start again",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel read or wrote memory it does not own. The context is lost: this process "
                                  "must end. The fault is in an earlier launch; compute-sanitizer finds it",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel used an address that is not aligned for its access. The context is lost: "
                                     "this process must end",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "a kernel met an instruction this GPU does not have. The context is lost: this "
                                      "process must end",
    "CUDA_ERROR_INVALID_PC": "a kernel jumped outside its code. The context is lost: this process must end",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "a kernel's stack is damaged. The context is lost: this process must end",
    "CUDA_ERROR_ASSERT": "a kernel's assertion failed. The context is lost: this process must end",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel failed while it ran. The context is lost: this process must end",
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": "the launch wants more registers, threads or shared memory than the GPU has",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "a kernel ran into the display watchdog's limit. The context is lost: this process "
                                 "must end; use a GPU that drives no display",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory has an uncorrectable error: reset or replace the GPU "
                                    "(nvidia-smi -q -d ECC)",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "an NVLink has an uncorrectable error: reset the GPU",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "these two GPUs cannot read each other's memory (see `zhilight doctor`)",
    "CUDA_ERROR_NOT_PERMITTED": "the call is not allowed here; during graph capture, memory and the default stream "
                                "must be left alone",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU or driver does not offer the function",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the system is not ready: on NVSwitch machines start nvidia-fabricmanager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "the kernel module and libcuda have different versions: reboot after the "
                                         "driver's update",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "the forward-compatibility libcuda does not serve this GPU: take it "
                                                 "out of LD_LIBRARY_PATH or update the driver",
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "an operation that a graph cannot hold was called during capture",
    "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED": "an earlier forbidden call spoiled the capture",
    "CUDA_ERROR_STREAM_CAPTURE_UNJOINED": "a second stream that took part in the capture was not joined back to the "
                                          "first with an event",
    "CUDA_ERROR_STREAM_CAPTURE_ISOLATION": "the capture depends on work queued outside of it",
    "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD": "a capture must end in the thread that began it",
    "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE": "the new graph's shape differs from the instantiated one",
    "CUDA_ERROR_UNKNOWN": "the driver failed without saying why; often nvidia-uvm is not loaded or the machine woke "
                          "from sleep: run nvidia-smi, reload the module or reboot",
}

CONTEXT_LOST = frozenset(name for name, meaning in MEANING.items() if "context is lost" in meaning)


class DriverCallError(DeviceError):
    """A driver call failed. `call` is its name, `code` the CUresult's name."""

    def __init__(self, call: str, code: str, number: int, detail: str = ""):
        self.call, self.code = call, code
        meaning = MEANING.get(code, "")
        explanation = "; ".join(part for part in (detail, meaning) if part)
        super().__init__(f"{call} failed with {code} ({number})" + (f": {explanation}." if explanation else "."))

    @property
    def context_lost(self) -> bool:
        """Whether every further call of this process will fail too."""
        return self.code in CONTEXT_LOST


def check(result: tuple, call: str, detail: str = "") -> Any:
    """The value (or tuple of values, or None) of a cuda.bindings call, whose result is (code, *values).

    `call` is the driver function's name; `detail` says what it was for. Raises DriverCallError when it failed.
    """
    code = result[0]
    if code != 0:
        raise DriverCallError(call, getattr(code, "name", str(code)), int(code), detail)
    if len(result) == 2:
        return result[1]
    return result[1:] or None


def driver_error(call: str, code: int, detail: str = "") -> DriverCallError:
    """The error of a call that was made past cuda.bindings, from its numeric CUresult."""
    from cuda.bindings.driver import CUresult

    try:
        name = CUresult(code).name
    except ValueError:
        name = f"CUresult {code}"
    return DriverCallError(call, name, code, detail)


@cache
def _load() -> ModuleType:
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise DeviceError(f"The package cuda-bindings is not installed or broken ({error}): "
                          "pip install 'cuda-python>=12.9'.") from error
    try:
        version = _version_of(bindings)
        bindings_major = _bindings_major()
    except RuntimeError as error:  # cuda-bindings found no libcuda, or one without the function it looked for
        if isinstance(error, DeviceError):
            raise
        raise NoDriver(f"No NVIDIA driver on this machine: libcuda.so.1 was not found. {INSTALL_DRIVER}") from error
    minimum = max(MINIMUM_DRIVER, (bindings_major, 0))
    if version < minimum:
        advice = "Update the driver"
        if version >= MINIMUM_DRIVER:
            advice += f", or install the CUDA {version[0]} wheels: pip install 'cuda-python<{version[0] + 1}'"
        raise DeviceError(f"The NVIDIA driver is too old: it supports CUDA {dotted(version)}, and ZhiLight with the "
                          f"installed CUDA {bindings_major} wheels needs {dotted(minimum)} or later. {advice}, "
                          "or run on the CPU with device=cpu.")
    check(bindings.cuInit(0), "cuInit")
    return bindings


def _version_of(bindings: ModuleType) -> tuple[int, int]:
    number = check(bindings.cuDriverGetVersion(), "cuDriverGetVersion")
    return number // 1000, number % 1000 // 10


def _bindings_major() -> int:
    from importlib.metadata import version

    return int(version("cuda-bindings").split(".")[0])


def dotted(version: tuple[int, int]) -> str:
    """A version or capability as people write it."""
    return f"{version[0]}.{version[1]}"


class NoDriver(DeviceError):
    """libcuda is not installed."""


def driver() -> ModuleType:
    """cuda.bindings.driver, initialised. Raises DeviceError when the driver is absent, too old or fails to start."""
    return _load()


def driver_version() -> tuple[int, int]:
    """Highest CUDA version that the driver supports, such as (12, 9). Raises DeviceError without a usable driver."""
    return _version_of(driver())


def device_count() -> int:
    """Visible GPUs; 0 without a driver or without a GPU. Raises DeviceError for a driver that is there but unusable."""
    try:
        return check(driver().cuDeviceGetCount(), "cuDeviceGetCount")
    except NoDriver:
        return 0
    except DriverCallError as error:
        if error.code == "CUDA_ERROR_NO_DEVICE":
            return 0
        raise


def require_device(index: int) -> None:
    """Raises DeviceError when there is no usable driver or no GPU `index`. Touches no GPU."""
    driver()
    count = device_count()
    if count == 0:
        raise DeviceError(f"device=cuda, but {MEANING['CUDA_ERROR_NO_DEVICE']}.")
    if not 0 <= index < count:
        raise DeviceError(f"device_index is {index}, but the visible GPUs are numbered 0 to {count - 1}. "
                          "See `zhilight doctor` and CUDA_VISIBLE_DEVICES.")


@dataclass(frozen=True, eq=False)
class Device:
    """One GPU with its primary context retained. Make one with `Device.open`; `close` gives the context back.

    The context is current in the thread that opened the device; another thread calls `make_current` first.
    """

    index: int
    """Number among the visible GPUs."""
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_memory_per_block_optin: int
    """Bytes of shared memory that one block can have."""
    shared_memory_per_multiprocessor: int
    registers_per_multiprocessor: int
    l2_bytes: int
    total_bytes: int
    pci_bus_id: str
    virtual_memory: bool
    """Whether the driver offers reserve / create / map on it."""
    context: Any = field(repr=False)
    """The primary CUcontext."""

    @staticmethod
    def open(index: int = 0) -> Device:
        """Retain GPU `index`'s primary context and make it current. Raises DeviceError without such a GPU."""
        require_device(index)
        cu = driver()
        handle = check(cu.cuDeviceGet(index), "cuDeviceGet")
        context = check(cu.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain", f"opening GPU {index}")
        check(cu.cuCtxSetCurrent(context), "cuCtxSetCurrent")

        def attribute(name: str) -> int:
            which = getattr(cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return check(cu.cuDeviceGetAttribute(which, handle), "cuDeviceGetAttribute", name)

        return Device(
            index=index,
            name=_text(check(cu.cuDeviceGetName(128, handle), "cuDeviceGetName")),
            capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
            multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
            shared_memory_per_block_optin=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            shared_memory_per_multiprocessor=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            registers_per_multiprocessor=attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
            l2_bytes=attribute("L2_CACHE_SIZE"),
            total_bytes=check(cu.cuDeviceTotalMem(handle), "cuDeviceTotalMem"),
            pci_bus_id=_text(check(cu.cuDeviceGetPCIBusId(32, handle), "cuDeviceGetPCIBusId")),
            virtual_memory=bool(attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")),
            context=context)

    def make_current(self) -> None:
        """Make the context current in the calling thread."""
        check(driver().cuCtxSetCurrent(self.context), "cuCtxSetCurrent")

    def synchronize(self) -> None:
        """Wait for all work of the context."""
        check(driver().cuCtxSynchronize(), "cuCtxSynchronize")

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device, other processes' use counted as used."""
        return check(driver().cuMemGetInfo(), "cuMemGetInfo")

    def can_access_peer(self, other: Device) -> bool:
        """Whether kernels on this device can read and write `other`'s memory."""
        if other.index == self.index:
            return True
        cu = driver()
        handles = [check(cu.cuDeviceGet(index), "cuDeviceGet") for index in (self.index, other.index)]
        return bool(check(cu.cuDeviceCanAccessPeer(*handles), "cuDeviceCanAccessPeer"))

    def close(self) -> None:
        """Give the primary context back. Its memory, streams and graphs must have been closed before."""
        cu = driver()
        check(cu.cuDevicePrimaryCtxRelease(check(cu.cuDeviceGet(self.index), "cuDeviceGet")),
              "cuDevicePrimaryCtxRelease")


def _text(raw: bytes | str) -> str:
    """A C string that the bindings return as bytes padded with NULs."""
    return raw.split(b"\0")[0].decode() if isinstance(raw, bytes) else raw
