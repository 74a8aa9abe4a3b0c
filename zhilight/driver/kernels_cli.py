"""`zhilight kernels list | compile | report`: the kernels that are compiled ahead, without a GPU.

`report` prints what the compiler gave each kernel; a stack frame or spills are faults, and so is a kernel that fails to
compile: the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from zhilight.errors import ConfigError

if TYPE_CHECKING:
    from zhilight.driver.compiler import Capability, CompileResult, Kernel

COLUMNS = ("registers", "shared", "stack", "spill_stores", "spill_loads", "threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="kernels_action", required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="names of the kernels that are compiled ahead")
    compiling = actions.add_parser("compile", help="compile them into the cache folder, for this or another GPU")
    reporting = actions.add_parser("report", help="registers, shared memory, stack and spills of each")
    for action in (listing, compiling, reporting):
        action.add_argument("--capability", metavar="MAJOR.MINOR",
                            help="compute capability, such as 8.0, 8.9 or 9.0a; default: this machine's GPU"
                            if action is not listing else "only those that run at this compute capability")
        action.add_argument("--match", default="", metavar="TEXT", help="only kernels with this text in their name")
    for action in (compiling, reporting):
        action.add_argument("--jobs", type=_jobs, metavar="N", help="processes at once; default: one a core")
    for action in (listing, reporting):
        action.add_argument("--json", action="store_true", help="print as JSON")


def main(args: argparse.Namespace) -> int:
    """Returns 0, or 1 when a kernel does not compile or uses stack or spills."""
    if args.kernels_action == "list":
        return _list(args)
    capability = _capability(args.capability)
    results = _compile(args, capability)
    faults = [fault for result in results if (fault := fault_of(result))]
    if args.kernels_action == "report":
        _print_report(results, args.json)
    else:
        cached = sum(result.cached for result in results)
        print(f"{len(results) - len(faults)} kernels ready, {cached} of them were cached.")
    if not (args.kernels_action == "report" and args.json):
        for fault in faults:
            print(f"ERROR  {fault}")
    return 1 if faults else 0


def fault_of(result: CompileResult) -> str | None:
    """Why a kernel must not be used, or None."""
    if result.error is not None:
        return f"{result.name}: {result.error}"
    figures = result.resources
    if figures.stack or figures.spill_stores or figures.spill_loads:
        return (f"{result.name}: {figures.stack} bytes of stack, {figures.spill_stores} of spill stores, "
                f"{figures.spill_loads} of spill loads; all must be 0")
    return None


def _jobs(text: str) -> int:
    jobs = int(text)
    if jobs < 1:
        raise argparse.ArgumentTypeError(f"{jobs} is less than 1")
    return jobs


def _capability(text: str | None) -> Capability:
    from zhilight.driver.compiler import parse_capability, target_of

    if text is not None:
        return parse_capability(text)
    from zhilight.driver.device import Device, device_count

    if device_count() == 0:
        raise ConfigError("No GPU here to take the compute capability from: name one, such as --capability 9.0a.")
    device = Device.open(0)
    device.close()
    return target_of(*device.capability)


def _kernels(args: argparse.Namespace, capability: Capability | None) -> list[Kernel]:
    from zhilight.driver.device import MINIMUM_CAPABILITY, dotted
    from zhilight.kernels.catalogue import catalogue

    if capability is not None and capability[:2] < MINIMUM_CAPABILITY:
        raise ConfigError(f"capability is {dotted(capability[:2])}; ZhiLight's kernels need {dotted(MINIMUM_CAPABILITY)} or "
                          "later.")
    found = {kernel.name: kernel for kernel in catalogue(capability) if args.match in kernel.name}
    if not found:
        raise ConfigError(f"no kernel has {args.match!r} in its name. See `zhilight kernels list`.")
    return list(found.values())


def _list(args: argparse.Namespace) -> int:
    from zhilight.driver.compiler import architecture, parse_capability

    capability = parse_capability(args.capability) if args.capability else None
    kernels = _kernels(args, capability)
    if args.json:
        print(json.dumps([{"name": each.name, "threads": each.threads, "min_capability": architecture(each.min_capability)}
                          for each in kernels], indent=2))
    else:
        print("\n".join(each.name for each in kernels))
    return 0


def _compile(args: argparse.Namespace, capability: Capability) -> list[CompileResult]:
    from zhilight.driver.compiler import compile_all

    return compile_all(_kernels(args, capability), capability, args.jobs)


def _print_report(results: list[CompileResult], as_json: bool) -> None:
    rows = [_figures(result) for result in results]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    width = max(len(row["name"]) for row in rows)
    print(f"{'kernel':<{width}}  " + "  ".join(f"{column:>12}" for column in COLUMNS))
    for row in rows:
        print(f"{row['name']:<{width}}  " + "  ".join(f"{'-' if row[c] is None else row[c]:>12}" for c in COLUMNS))


def _figures(result: CompileResult) -> dict[str, Any]:
    """One line of the report; figures are None where the kernel does not compile, and then `error` says why."""
    row: dict[str, Any] = {"name": result.name, "threads": result.threads}
    for column in COLUMNS[:-1]:
        row[column] = None if result.resources is None else getattr(result.resources, column)
    if result.error is not None:
        row["error"] = result.error
    return row
