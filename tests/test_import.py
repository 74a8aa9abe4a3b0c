"""What importing the package costs, and which way its modules import each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import zhilight

PACKAGE = Path(zhilight.__file__).parent
HEAVY = ("numba", "transformers", "torch", "llvmlite", "cuda.bindings", "cuda.core", "gguf", "aiohttp")

FLOORS = ("errors", "version", "config", "driver", "kernels", "comm", "ops", "layers", "models", "weights", "tokenization",
          "engine", "server", "commands", "cli", "__main__")
"""Ground first. The loader (weights) builds the models that it fills."""
UPWARD = {("zhilight/driver/kernels_cli.py", "kernels")}
"""A command that stands beside the compiler it drives; it imports the kernels when it runs."""

REPORT = """
import sys, time
before, begin, cpu = set(sys.modules), time.perf_counter(), time.process_time()
{statement}
print(time.perf_counter() - begin, time.process_time() - cpu, *(set(sys.modules) - before))
"""


def import_in_a_fresh_process(statement: str) -> tuple[float, float, set[str]]:
    """(wall seconds, CPU seconds, modules that came with it)."""
    run = subprocess.run([sys.executable, "-c", REPORT.format(statement=statement)], check=True, capture_output=True, text=True)
    wall, cpu, *modules = run.stdout.split()
    return float(wall), float(cpu), set(modules)


def test_import_costs_nothing() -> None:
    _, cpu, modules = import_in_a_fresh_process("import zhilight; zhilight.__version__; dir(zhilight)")
    ours = {name for name in modules if name.startswith("zhilight")}
    assert ours == {"zhilight", "zhilight.version"}
    assert "numpy" not in modules
    assert cpu < 0.1


def test_public_names_are_light() -> None:
    """CPU seconds, so that a busy machine does not fail it: it is 0.25 s, most of it NumPy's."""
    runs = [import_in_a_fresh_process("from zhilight import *") for _ in range(2)]
    modules = runs[0][2]
    found = {name for name in HEAVY if name in modules}
    assert not found
    assert min(cpu for _, cpu, _ in runs) < 0.5


def test_public_names() -> None:
    assert set(zhilight.__all__) <= set(dir(zhilight))
    for name in zhilight.__all__:
        assert getattr(zhilight, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        zhilight.Engine  # noqa: B018


def imports_of(path: Path) -> set[str]:
    """Floors of zhilight that a file imports when it runs; what only a type checker sees does not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "zhilight" else {node.module}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("zhilight.")}


def test_modules_import_downwards() -> None:
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).parts
        floor = parts[0].removesuffix(".py")
        if floor == "__init__":
            continue
        assert floor in FLOORS, f"{path} stands on no floor"
        above = {name for name in imports_of(path) if FLOORS.index(name) > FLOORS.index(floor)}
        where = "/".join(("zhilight", *parts))
        wrong += [f"{where} imports {name}" for name in sorted(above) if (where, name) not in UPWARD]
    assert not wrong


def test_files_are_small_and_named_after_what_they_hold() -> None:
    for path in PACKAGE.rglob("*.py"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= (160 if path.parent.name == "models" else 600), f"{path} has {lines} lines"
        assert path.stem not in ("utils", "helpers", "common", "misc", "manager"), path
