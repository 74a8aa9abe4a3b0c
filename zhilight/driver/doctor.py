"""`zhilight doctor`: what this machine has, what is missing, and how to get it. Works without a GPU."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from zhilight.driver.device import MINIMUM_CAPABILITY, Device, device_count, driver_version
from zhilight.driver.memory import human
from zhilight.errors import DeviceError

CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16",
                "amx_int8")
LIBRARIES = {
    "nvvm": ("NVVM, which compiles kernels", "pip install 'numba-cuda[cu12]' (or [cu13] with the CUDA 13 wheels)"),
    "nvJitLink": ("nvJitLink, which links kernels", "pip install 'numba-cuda[cu12]' (or [cu13] with the CUDA 13 wheels)"),
    "nccl": ("NCCL, for more than one GPU", "pip install nvidia-nccl-cu12 (or nvidia-nccl-cu13)"),
}
EITHER_MAJOR = ("cuda-python", "numba-cuda", "nvidia-nccl-cu12")
"""Requirements whose version is right for CUDA 12 or 13: the libraries themselves are looked for instead."""


@dataclass
class Report:
    """All findings. `errors` keep ZhiLight from working here as installed; `notes` limit it."""

    system: dict[str, Any] = field(default_factory=dict)
    driver: dict[str, Any] = field(default_factory=dict)
    gpus: list[dict[str, Any]] = field(default_factory=list)
    peer_access: list[list[bool]] = field(default_factory=list)
    """[i][j]: GPU i reads and writes GPU j's memory."""
    libraries: dict[str, dict[str, Any]] = field(default_factory=dict)
    cpu: dict[str, Any] = field(default_factory=dict)
    cache: dict[str, Any] = field(default_factory=dict)
    packages: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def usable(self) -> bool:
        return not self.errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def main(args: argparse.Namespace) -> int:
    """Print the report. Returns 0 when ZhiLight can run here (on the GPU, or on the CPU where there is none)."""
    report = examine()
    if args.json:
        print(json.dumps({**asdict(report), "usable": report.usable}, indent=2))
    else:
        print("\n".join(render(report)))
    return 0 if report.usable else 1


def examine() -> Report:
    """Look at everything; nothing that is missing raises."""
    report = Report()
    _system(report)
    _gpus(report)
    _libraries(report)
    _cpu(report)
    _cache(report)
    _packages(report)
    return report


# ---- findings ---------------------------------------------------------------------------------------------------


def _system(report: Report) -> None:
    from zhilight.version import __version__

    report.system = {"zhilight": __version__, "python": platform.python_version(), "system": platform.platform()}
    if not (3, 10) <= sys.version_info[:2] < (3, 14):
        report.errors.append(f"Python is {platform.python_version()}; ZhiLight needs 3.10 to 3.13.")


def _gpus(report: Report) -> None:
    module = Path("/proc/driver/nvidia/version")
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)", module.read_text()) if module.exists() else None
    report.driver = {"version": found[1] if found else None, "cuda": None}
    try:
        count = device_count()
        if count == 0:
            try:
                driver_version()
            except DeviceError as error:  # says whether the driver or only the GPU is missing
                report.notes.append(f"{error} Until then ZhiLight runs on the CPU.")
            else:
                report.notes.append("No NVIDIA GPU is visible, so ZhiLight runs on the CPU. Check nvidia-smi, "
                                    "CUDA_VISIBLE_DEVICES and, in a container, that it was started with --gpus.")
            return
        report.driver["cuda"] = ".".join(map(str, driver_version()))
        devices = []
        for index in range(count):
            devices.append(Device.open(index))
            report.gpus.append(_describe(devices[-1]))
    except DeviceError as error:
        report.errors.append(str(error))
        return
    report.peer_access = [[a.can_access_peer(b) for b in devices] for a in devices]
    for device in devices:
        if device.capability < MINIMUM_CAPABILITY:
            report.errors.append(f"GPU {device.index} ({device.name}) has capability {device.capability[0]}."
                                 f"{device.capability[1]}; ZhiLight's kernels need 8.0 or later. Hide it with "
                                 "CUDA_VISIBLE_DEVICES, or run with device=cpu.")
        device.close()
    if not all(map(all, report.peer_access)):
        report.notes.append("Some GPUs cannot read each other's memory: tensor parallelism goes through host memory.")


def _describe(device: Device) -> dict[str, Any]:
    free, total = device.memory_info()
    return {"index": device.index, "name": device.name, "capability": f"{device.capability[0]}.{device.capability[1]}",
            "multiprocessors": device.multiprocessors, "memory_bytes": total, "free_bytes": free,
            "l2_bytes": device.l2_bytes, "shared_memory_per_block_bytes": device.shared_memory_per_block_optin,
            "virtual_memory": device.virtual_memory, "pci_bus_id": device.pci_bus_id}


def _libraries(report: Report) -> None:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        report.errors.append(f"cuda-pathfinder is not installed ({error}): pip install cuda-python.")
        return
    for name, (purpose, way) in LIBRARIES.items():
        try:
            loaded = load_nvidia_dynamic_lib(name)
        except RuntimeError:  # pathfinder's own errors derive from it; how they are worded is not for users
            report.libraries[name] = {"path": None, "found_via": None}
            message = f"{purpose}, was not found: {way}."
            (report.errors if name != "nccl" and report.gpus else report.notes).append(message)
        else:
            report.libraries[name] = {"path": loaded.abs_path, "found_via": loaded.found_via}


def _cpu(report: Report) -> None:
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    report.cpu = {"model": model[1].strip() if model else platform.processor() or platform.machine(), "cores": usable,
                  "features": [name for name in CPU_FEATURES if name in present]}


def _cache(report: Report) -> None:
    from zhilight.driver.compiler import cache_folder

    folder = cache_folder().parent
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    files = [file.stat().st_size for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    report.cache = {"path": str(folder), "files": len(files), "bytes": sum(files), "writable": writable}
    if not writable:
        report.errors.append(f"The cache folder {folder} cannot be written ({existing} is not writable): set XDG_CACHE_HOME "
                             "to a folder that is, or every start compiles all kernels again.")


def _packages(report: Report) -> None:
    from packaging.requirements import Requirement

    missing = []
    for line in _requirements():
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        report.packages[name] = {"version": version, "needs": str(requirement.specifier)}
        if name in EITHER_MAJOR:
            continue
        if version is None:
            missing.append(f"{name}{requirement.specifier}")
        elif not requirement.specifier.contains(version, prereleases=True):
            report.errors.append(f"The package {name} is {version}; ZhiLight needs {requirement.specifier}: "
                                 f"pip install '{name}{requirement.specifier}'.")
    if missing:
        listed = " ".join(f"'{each}'" for each in missing)
        report.errors.append(f"{len(missing)} packages are missing: pip install {listed}.")
    for name in ("numba-cuda", "cuda-bindings"):
        try:
            report.packages[name] = {"version": metadata.version(name), "needs": ""}
        except metadata.PackageNotFoundError:
            report.errors.append(f"The package {name} is missing: pip install zhilight.")


def _requirements() -> list[str]:
    """ZhiLight's requirements from its installed metadata, or from the source tree it runs from."""
    try:
        return [line.strip() for line in metadata.requires("zhilight") or []]
    except metadata.PackageNotFoundError:
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        return re.findall(r'^\s*"([^"]+)"', block[1], re.MULTILINE)


# ---- text -------------------------------------------------------------------------------------------------------


def render(report: Report) -> list[str]:
    """The report as lines of text."""
    system, cache = report.system, report.cache
    lines = [_row("ZhiLight", f"{system['zhilight']}, Python {system['python']}, {system['system']}")]
    if report.driver["cuda"]:
        version = report.driver["version"] or "version unknown"
        lines.append(_row("Driver", f"{version}, CUDA {report.driver['cuda']}"))
    else:
        lines.append(_row("Driver", "none in use"))
    for gpu in report.gpus:
        lines.append(_row(f"GPU {gpu['index']}", (
            f"{gpu['name']}, capability {gpu['capability']}, {gpu['multiprocessors']} multiprocessors, "
            f"{human(gpu['memory_bytes'])} ({human(gpu['free_bytes'])} free), PCI {gpu['pci_bus_id']}")))
    if len(report.gpus) > 1:
        lines.append(_row("Peer access", "      " + " ".join(f"GPU {j:<2}" for j in range(len(report.gpus)))))
        for index, row in enumerate(report.peer_access):
            lines.append(_row("", f"GPU {index:<2}" + " ".join(f"{'yes' if each else 'no':<6}" for each in row)))
    for name, library in report.libraries.items():
        where = f"{library['path']} ({library['found_via']})" if library["path"] else "not found"
        lines.append(_row(name, where))
    cpu = report.cpu
    features = " ".join(cpu["features"]) or "no vector extensions known"
    lines.append(_row("CPU", f"{cpu['model']}, {cpu['cores']} cores, {features}"))
    lines.append(_row("Cache", f"{cache['path']}, {cache['files']} files, {human(cache['bytes'])}, "
                               f"{'writable' if cache['writable'] else 'NOT writable'}"))
    packages = [f"{name} {package['version'] or 'missing'}" for name, package in report.packages.items()]
    lines += [_row("Packages" if position == 0 else "", ", ".join(packages[position:position + 5]))
              for position in range(0, len(packages), 5)]
    lines.append("")
    lines += [f"ERROR  {error}" for error in report.errors]
    lines += [f"note   {note}" for note in report.notes]
    if not report.usable:
        lines.append("ZhiLight cannot run here before the errors above are mended.")
    elif report.gpus:
        lines.append(f"ZhiLight is ready on {len(report.gpus)} GPU{'s' if len(report.gpus) > 1 else ''}.")
    else:
        lines.append("ZhiLight is ready on the CPU.")
    return lines


def _row(name: str, value: str) -> str:
    return f"{name:<13}{value}".rstrip()
