"""@kernel: from an annotated Python function to a cubin, in process, with or without a GPU.

    @kernel_factory
    def scale_kernel(width: int, dtype: DType) -> Kernel:
        @kernel(threads=256)
        def scale(x: Pointer(dtype), factor: f32, count: i32):
            ...
        return scale

    scale_kernel(4096, bfloat16).launch(grid, x, 2.0, x.numel, stream=stream)

A factory specialises a kernel for constants; its arguments name the specialisation and, with the source of the kernels
package, the capability and the versions of the compilers, key the disk cache. Compilation is of whole programs: numba
makes NVVM IR, NVVM makes LTO-IR, nvJitLink links it to a cubin. (Relocatable PTX, numba's own default, makes ptxas
ignore setmaxnreg, message C7504, and serialise wgmma, C7509; both are errors here.) No CUDA toolkit is needed.

Files with kernels must not say `from __future__ import annotations`: the annotations are read as objects.
"""

import functools
import hashlib
import importlib
import inspect
import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from zhilight.driver.cubin_info import kernel_resources
from zhilight.driver.dtype import DType
from zhilight.errors import ZhiLightError

Capability = tuple[int, int, str]
"""(9, 0, "a") for sm_90a, (8, 0, "") for sm_80."""


_FLOAT64 = re.compile(r"^.* = (f(add|sub|mul|div|rem|neg|cmp)\b|(tail )?call\b).* double .*$", re.MULTILINE)
"""An instruction of the LLVM IR that computes in float64 (constants that are rounded to float32 at once do not)."""


class KernelCompileError(ZhiLightError):
    """A kernel does not compile, or compiles to something that must not be used."""


@dataclass(frozen=True)
class Pointer:
    """Parameter annotation: the address of an array of `dtype`. In the kernel, `x[i]` is element i; 16-bit floats appear
    as their uint16 bits and fp8 as uint8 (use the conversions of kernels/ptx.py)."""

    dtype: DType


@dataclass(frozen=True)
class TensorMapParameter:
    """The kind of `TensorMap`."""


TensorMap = TensorMapParameter()
"""Parameter annotation: the address (u64) of a 128-byte tensor map in device memory, for the bulk tensor copy engine."""


@dataclass(frozen=True)
class Resources:
    """What the compiler says of a kernel: registers a thread, bytes of shared memory a block, stack and spills a thread."""

    registers: int
    shared: int
    stack: int
    spill_stores: int
    spill_loads: int
    seconds: float
    """Compile time."""


@dataclass(frozen=True)
class Cubin:
    """A linked device program with one entry."""

    code: bytes
    entry: str
    resources: Resources


@dataclass(frozen=True)
class FactoryCall:
    """How to make a kernel again in another process: the factory's module and name, and its bound arguments."""

    module: str
    factory: str
    arguments: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        listed = ",".join(f"{key}={value}" for key, value in self.arguments)
        return f"{self.factory.removesuffix('_kernel')}[{listed}]"

    def make(self) -> "Kernel":
        return getattr(importlib.import_module(self.module), self.factory)(**dict(self.arguments))


class Kernel:
    """A compiled-on-demand device function with packed-argument launch. Made by `kernel` inside a `kernel_factory`.

    Attributes: threads a block, dynamic `shared` bytes a block, blocks of a `cluster`, and `call` (its factory call).
    """

    def __init__(self, function: Callable, threads: int, min_blocks: int, shared: int, cluster: int, fastmath: bool,
                 min_capability: Capability, max_registers: int | None, float64: bool):
        self.function = function
        self.threads = threads
        self.min_blocks = min_blocks
        self.shared = shared
        self.cluster = cluster
        self.fastmath = fastmath
        self.min_capability = min_capability
        self.max_registers = max_registers
        self.float64 = float64
        self.parameters = [(p.name, p.annotation) for p in inspect.signature(function).parameters.values()]
        for parameter, annotation in self.parameters:
            if annotation is inspect.Parameter.empty or isinstance(annotation, str):
                raise KernelCompileError(f"kernel {function.__qualname__}: parameter {parameter} has no annotation object")
        self.call: FactoryCall | None = None
        self._launcher: Any = None

    @property
    def name(self) -> str:
        return self.call.name if self.call else self.function.__qualname__

    def __repr__(self) -> str:
        return f"<Kernel {self.name}>"

    def supports(self, capability: Capability) -> bool:
        """Whether this kernel can run there: 'a' kernels on exactly their capability, others on newer ones too."""
        if self.min_capability[2]:
            return capability == self.min_capability
        return capability[:2] >= self.min_capability[:2]

    def cubin(self, capability: Capability, lowered: Any = None) -> Cubin:
        """The compiled program, from the disk cache or compiled now (1 to 10 s). Needs no GPU. `lowered`: see `lower`."""
        cached = _read_cache(self, capability)
        if cached is None:
            cached = compile_kernel(self, capability, lowered)
            _write_cache(self, capability, cached)
        return cached

    def is_cached(self, capability: Capability) -> bool:
        return _cache_file(self, capability).exists()

    def launch(self, grid: int | tuple[int, int, int], *arguments: Any, stream: Any, overlap: bool = False) -> None:
        """Queue the kernel on `stream`. `arguments` follow the annotations: Tensors or addresses for pointers, and numbers.

        A Tensor's element type is held to the annotation. Addresses are quicker: for callers that have checked. A BoundLaunch
        (driver/launcher.py) is quicker still.

        overlap: programmatic dependent launch: the kernel may start before the one before it in the stream has ended, up
        to its own griddepcontrol.wait.
        """
        if stream.__class__ is LaunchRecorder:
            stream.kernels[self] = None
            return
        self.load()(grid, arguments, stream, overlap)

    def load(self) -> Any:
        """The kernel's Launcher, loaded into the current context by the first call."""
        if self._launcher is None:
            from zhilight.driver.launcher import Launcher

            self._launcher = Launcher(self)
        return self._launcher


class LaunchRecorder:
    """Stands in a stream's place: what is launched on it is not run but noted, so that it can be compiled ahead."""

    handle = "recorder"
    """No stream's."""

    def __init__(self) -> None:
        self.kernels: dict[Kernel, None] = {}
        """In the order of their first launch."""


def kernel(*, threads: int, min_blocks: int = 1, shared: int = 0, cluster: int = 1, fastmath: bool = True,
           min_capability: Capability = (8, 0, ""), max_registers: int | None = None,
           float64: bool = False) -> Callable[[Callable], Kernel]:
    """Mark a function as a kernel of `threads` threads a block, `shared` bytes of dynamic shared memory.

    min_blocks: blocks an SM that the compiler must leave registers for. cluster: blocks of a cluster (along x).
    max_registers: a bound that a test holds the compiler to. float64: it means to compute in float64, which is an error
    elsewhere: numba takes a float32 times a plain integer for one.
    """
    def decorate(function: Callable) -> Kernel:
        return Kernel(function, threads, min_blocks, shared, cluster, fastmath, min_capability, max_registers, float64)

    return decorate


def kernel_factory(factory: Callable[..., Kernel]) -> Callable[..., Kernel]:
    """Cache a function that makes kernels by its arguments, and name each kernel by them.

    Arguments must be hashable and, with the package's source, determine the kernel completely.
    """
    signature = inspect.signature(factory)
    made: dict[tuple, Kernel] = {}

    @functools.wraps(factory)
    def specialise(*args: Any, **kwargs: Any) -> Kernel:
        key = (args, tuple(sorted(kwargs.items()))) if kwargs else args
        found = made.get(key)
        if found is None:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = tuple(bound.arguments.items())
            found = made.get(("bound", arguments))
            if found is None:
                found = factory(*bound.args, **bound.kwargs)
                found.call = FactoryCall(factory.__module__, factory.__name__, arguments)
                made["bound", arguments] = found
            made[key] = found
        return found

    return specialise


# ---- compilation ----------------------------------------------------------------------------------------------------


def numba_type(annotation: Any) -> Any:
    """The numba type of a parameter annotation."""
    from numba.cuda import types

    if isinstance(annotation, Pointer):
        element = {16: types.uint16, 8: types.uint8, 4: types.uint8}.get(annotation.dtype.bits)
        if element is None or annotation.dtype.name in ("int8",):
            element = getattr(types, annotation.dtype.name)
        return types.CPointer(element)
    if isinstance(annotation, TensorMapParameter):
        return types.uint64
    return annotation


def target_of(major: int, minor: int) -> Capability:
    """What to compile for on a GPU of that compute capability: Hopper's with its architecture-specific instructions."""
    return major, minor, "a" if major == 9 else ""


def architecture(capability: Capability) -> str:
    return f"sm_{capability[0]}{capability[1]}{capability[2]}"


def parse_capability(text: str) -> Capability:
    """(9, 0, "a") from "9.0a". Raises ConfigError for anything else than MAJOR.MINOR with an optional letter."""
    from zhilight.errors import ConfigError

    match = re.fullmatch(r"(\d+)\.(\d)([af]?)", text)
    if not match:
        raise ConfigError(f"capability is {text!r}; write it as MAJOR.MINOR, such as 8.0, 8.9 or 9.0a.")
    return int(match[1]), int(match[2]), match[3]


def _numba_capability(capability: Capability) -> tuple:
    """The capability as numba-cuda takes it: without the letter where there is none."""
    return capability if capability[2] else capability[:2]


def lower(kernel: Kernel, capability: Capability) -> Any:
    """Numba's part of compilation, three quarters of the time: a code library with the LLVM IR.

    The IR is the same whichever capability is named, so the library of one serves `compile_kernel` for all of them.
    """
    from numba.cuda import dispatcher, types
    from numba.cuda.compiler import _compile_pyfunc_with_fixup

    # numba-cuda asks the current device for its capability whenever a kernel calls a device function; the answer is
    # the capability that is compiled for, so that no GPU is needed.
    asked, dispatcher.get_current_device = dispatcher.get_current_device, lambda: _Target(capability[:2])
    try:
        signature = types.void(*[numba_type(annotation) for _, annotation in kernel.parameters])
        library, _ = _compile_pyfunc_with_fixup(
            kernel.function, signature, device=False, fastmath=kernel.fastmath, opt=True, abi="numba",
            cc=_numba_capability(capability), launch_bounds=(kernel.threads, kernel.min_blocks))
    finally:
        dispatcher.get_current_device = asked
    if not kernel.float64 and (found := _FLOAT64.search(library.get_llvm_str())):
        raise KernelCompileError(f"{kernel.name} computes in float64, which none of its types ask for: {found[0].strip()}")
    return library


def compile_kernel(kernel: Kernel, capability: Capability, lowered: Any = None) -> Cubin:
    """Compile without any cache. Raises KernelCompileError with the compiler's own words."""
    import time

    start = time.perf_counter()
    arch = architecture(capability)
    library = lowered or lower(kernel, capability)
    ltoir = library.get_ltoir(cc=_numba_capability(capability))
    code, log = _link(kernel, arch, ltoir)
    for message in ("C7504", "C7509"):
        if message in log:
            raise KernelCompileError(f"{kernel.name} for {arch}: the assembler gave up an optimisation it must not: {log}")
    return Cubin(code, library._entry_name, _resources(kernel, code, log, time.perf_counter() - start))


def _link(kernel: Kernel, arch: str, ltoir: bytes) -> tuple[bytes, str]:
    """(cubin, the linker's log)."""
    from cuda.bindings import nvjitlink

    # -no-cache: what comes out of the linker's own cache has no report (and the driver's cache is used all the same)
    handle = nvjitlink.create(4, [f"-arch={arch}", "-verbose", "-lto", "-O3", "-no-cache"])
    try:
        try:
            nvjitlink.add_data(handle, nvjitlink.InputType.LTOIR, ltoir, len(ltoir), kernel.function.__name__)
            nvjitlink.complete(handle)
        except nvjitlink.nvJitLinkError as error:
            raise KernelCompileError(f"{kernel.name} for {arch}: {error}\n{_log(nvjitlink, handle, 'error')}") from error
        code = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, code)
        return bytes(code), _log(nvjitlink, handle, "info")
    finally:
        nvjitlink.destroy(handle)


@dataclass(frozen=True)
class _Target:
    compute_capability: tuple[int, int]


def _log(nvjitlink: Any, handle: int, which: str) -> str:
    text = bytearray(getattr(nvjitlink, f"get_{which}_log_size")(handle))
    if text:
        getattr(nvjitlink, f"get_{which}_log")(handle, text)
    return text.decode(errors="replace").rstrip("\0")


def _resources(kernel: Kernel, code: bytes, log: str, seconds: float) -> Resources:
    def number(pattern: str) -> int:
        found = re.findall(pattern, log)
        return max(map(int, found)) if found else 0

    registers = number(r"Used (\d+) registers")
    if not registers:
        try:
            registers, shared, stack = kernel_resources(code)
        except ValueError as error:
            raise KernelCompileError(f"{kernel.name}: the linker's report names no registers: {log!r}, and {error}") from error
        if stack:
            raise KernelCompileError(f"{kernel.name}: the kernel has {stack} bytes of stack and the linker did not say what "
                                     "spills. Delete the driver's cache (~/.nv/ComputeCache) and try again.")
        return Resources(registers, shared, 0, 0, 0, round(seconds, 2))
    return Resources(registers, number(r"(\d+) bytes smem"), number(r"(\d+) bytes stack frame"),
                     number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads"), round(seconds, 2))


def ptx_of(kernel: Kernel, capability: Capability) -> str:
    """The PTX of a kernel, for reading; it is not what runs."""
    return lower(kernel, capability).get_asm_str(cc=_numba_capability(capability))


# ---- the disk cache -------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where cubins are kept: $XDG_CACHE_HOME/zhilight/kernels, by default ~/.cache/zhilight/kernels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zhilight" / "kernels"


@functools.cache
def _environment_key() -> str:
    """Hash of all that shapes the code besides the kernel's own constants: sources and compiler versions."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    driver = package / "driver"
    for source in [*sorted((package / "kernels").rglob("*.py")), driver / "compiler.py", driver / "dtype.py"]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for distribution in ("numba-cuda", "llvmlite", "cuda-bindings", *_toolchain_distributions()):
        digest.update(f"{distribution}={metadata.version(distribution)}\n".encode())
    return digest.hexdigest()


def _toolchain_distributions() -> list[str]:
    """The wheels that carry NVVM and nvJitLink, whichever CUDA major is installed."""
    names = ("nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink-cu12", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvcc")
    found = []
    for name in names:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def _cache_file(kernel: Kernel, capability: Capability) -> Path:
    key = f"{_environment_key()}|{kernel.call}|{architecture(capability)}"
    name = re.sub(r"[^A-Za-z0-9]+", "-", kernel.name)[:80].strip("-")
    return cache_folder() / architecture(capability) / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"


def _read_cache(kernel: Kernel, capability: Capability) -> Cubin | None:
    """The cached program, or None. A file is a line of JSON and the cubin; a torn or foreign file counts as absent."""
    if kernel.call is None:
        return None
    try:
        header, _, code = _cache_file(kernel, capability).read_bytes().partition(b"\n")
        described = json.loads(header)
        if described["size"] != len(code):
            return None
        return Cubin(code, described["entry"], Resources(**described["resources"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(kernel: Kernel, capability: Capability, cubin: Cubin) -> None:
    if kernel.call is None:
        return
    path = _cache_file(kernel, capability)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"entry": cubin.entry, "size": len(cubin.code), "resources": asdict(cubin.resources)})
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # renamed whole: readers never see a part
        file.write(header.encode() + b"\n" + cubin.code)
    os.replace(file.name, path)


# ---- many kernels at once -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompileResult:
    """One line of a report. `error` is the compiler's message, or None."""

    name: str
    threads: int
    resources: Resources | None
    error: str | None
    cached: bool


def compile_all(kernels: Sequence[Kernel], capability: Capability, jobs: int | None = None,
                progress: bool = True) -> list[CompileResult]:
    """Bring each kernel into the disk cache for one capability. Order is kept. Otherwise as `compile_each`."""
    return [result for (result,) in compile_each([(item, [capability]) for item in kernels], jobs, progress)]


def compile_each(wanted: Sequence[tuple[Kernel, Sequence[Capability]]], jobs: int | None = None,
                 progress: bool = True) -> list[list[CompileResult]]:
    """Bring each kernel into the disk cache for each of its capabilities, several at once in processes of their own.

    Shows a progress bar on standard error when `progress` and it is a terminal.
    """
    from tqdm import tqdm

    results: list[list[CompileResult]] = []
    missing = []
    for index, (item, capabilities) in enumerate(wanted):
        cached = [_read_cache(item, capability) for capability in capabilities]
        if None in cached:
            missing.append(index)
        results.append([CompileResult(item.name, item.threads, _with_dynamic(item, each.resources), None, True)
                        for each in cached if each is not None])
    jobs = min(jobs or os.cpu_count() or 1, max(1, len(missing)))
    if missing:
        from concurrent.futures import as_completed

        from zhilight.driver.compile_workers import CompileWorkers

        with CompileWorkers(jobs) as pool:
            running = {pool.submit(_compile_in_worker, wanted[i][0].call, tuple(wanted[i][1])): i for i in missing}
            bar = tqdm(as_completed(running), total=len(running), unit="kernel", disable=None if progress else True,
                       desc=f"Compiling kernels for {' '.join(sorted({architecture(c) for _, each in wanted for c in each}))}")
            for future in bar:
                results[running[future]] = future.result()
    return results


def _compile_in_worker(call: FactoryCall, capabilities: Sequence[Capability]) -> list[CompileResult]:
    item = call.make()
    results, lowered = [], None
    for capability in capabilities:
        cached = item.is_cached(capability)
        try:
            if not cached and lowered is None:
                lowered = lower(item, capability)
            resources = _with_dynamic(item, item.cubin(capability, lowered).resources)
        except Exception as error:  # the report names every kernel that fails, whatever the compiler raised
            results.append(CompileResult(item.name, item.threads, None, f"{type(error).__name__}: {error}", False))
        else:
            results.append(CompileResult(item.name, item.threads, resources, None, cached))
    return results


def _with_dynamic(item: Kernel, resources: Resources) -> Resources:
    return replace(resources, shared=resources.shared + item.shared)
