"""`zhilight kernels` over a small catalogue that really compiles."""

import argparse
import json
import re

import pytest
from numba.cuda import types

from zhilight.driver import kernels_cli
from zhilight.driver.compiler import (
    CompileResult,
    KernelCompileError,
    Pointer,
    Resources,
    compile_each,
    compile_kernel,
    kernel,
    kernel_factory,
    lower,
    ptx_of,
)
from zhilight.driver.dtype import float32, int32
from zhilight.errors import ConfigError
from zhilight.kernels import catalogue as catalogue_module


@kernel_factory
def fill_kernel(value: int):
    @kernel(threads=64)
    def fill(x: Pointer(int32), count: types.int32):
        for index in range(count):
            x[index] = value

    return fill


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(catalogue_module, "catalogue", lambda capability=None: iter([fill_kernel(1), fill_kernel(2)]))

    def call(*words: str) -> tuple[int, str]:
        parser = argparse.ArgumentParser()
        kernels_cli.add_arguments(parser)
        code = kernels_cli.main(parser.parse_args(words))
        return code, capsys.readouterr().out

    return call


def test_list(run):
    assert run("list") == (0, "fill[value=1]\nfill[value=2]\n")
    code, text = run("list", "--json", "--match", "=2")
    assert code == 0
    assert json.loads(text) == [{"name": "fill[value=2]", "threads": 64, "min_capability": "sm_80"}]


def test_compile_then_report_from_the_cache(run, tmp_path):
    code, text = run("compile", "--capability", "8.0", "--jobs", "1")
    assert (code, text) == (0, "2 kernels ready, 0 of them were cached.\n")
    assert len(list(tmp_path.rglob("*.cubin"))) == 2
    assert run("compile", "--capability", "8.0")[1] == "2 kernels ready, 2 of them were cached.\n"
    code, text = run("report", "--capability", "8.0", "--json")
    rows = json.loads(text)
    assert code == 0 and [row["name"] for row in rows] == ["fill[value=1]", "fill[value=2]"]
    for row in rows:
        assert set(row) == {"name", "registers", "shared", "stack", "spill_stores", "spill_loads", "threads"}
        assert row["registers"] > 0 and row["stack"] == 0 and row["threads"] == 64
    code, text = run("report", "--capability", "8.0")
    assert text.splitlines()[0].split() == ["kernel", *kernels_cli.COLUMNS] and "fill[value=2]" in text


def test_several_capabilities_share_one_pass_of_numba(run, tmp_path):
    """The IR of one capability serves the others: the PTX made from it is what its own pass gives."""
    ampere, hopper = (8, 0, ""), (9, 0, "a")
    shared = lower(fill_kernel(1), ampere).get_asm_str(cc=hopper)
    entry = re.compile(r"_ZN\w+")
    assert entry.sub("entry", shared) == entry.sub("entry", ptx_of(fill_kernel(1), hopper))
    assert ".target sm_90a" in shared
    (results,) = compile_each([(fill_kernel(1), [ampere, hopper])], jobs=1, progress=False)
    assert [result.cached for result in results] == [False, False]
    assert {path.parent.name for path in tmp_path.rglob("*.cubin")} == {"sm_80", "sm_90a"}
    (again,) = compile_each([(fill_kernel(1), [hopper, ampere])], jobs=1, progress=False)
    assert [(result.cached, result.resources) for result in again] == [(True, result.resources) for result in results[::-1]]


@kernel_factory
def scale_kernel(factor: float | int, cast: bool = False, meant: bool = False):
    @kernel(threads=64, float64=meant)
    def scale(x: Pointer(float32)):
        x[0] = x[0] * (types.float32(factor) if cast else factor)

    return scale


def test_float64_by_accident_is_an_error():
    for factor in (2, 0.5):
        with pytest.raises(KernelCompileError, match="computes in float64"):
            compile_kernel(scale_kernel(factor), (8, 0, ""))
        compile_kernel(scale_kernel(factor, cast=True), (8, 0, ""))
        compile_kernel(scale_kernel(factor, meant=True), (8, 0, ""))


def test_wrong_arguments_name_the_way_out(run, monkeypatch):
    with pytest.raises(ConfigError, match=r"8\.0, 8\.9 or 9\.0a"):
        run("compile", "--capability", "hopper")
    with pytest.raises(ConfigError, match="'gemm'"):
        run("list", "--match", "gemm")
    with pytest.raises(SystemExit):
        run("compile", "--capability", "8.0", "--jobs", "0")
    monkeypatch.setattr("zhilight.driver.device.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"--capability 9\.0a"):
        run("report")


def test_stack_spills_and_failures_are_faults(run, monkeypatch):
    def result(error=None, **figures):
        resources = None if error else Resources(**{
            "registers": 32, "shared": 0, "stack": 0, "spill_stores": 0, "spill_loads": 0, "seconds": 1.0, **figures})
        return CompileResult("fill", 64, resources, error, False)

    assert kernels_cli.fault_of(result()) is None
    assert "8 bytes of stack" in kernels_cli.fault_of(result(stack=8))
    assert "8 of spill stores" in kernels_cli.fault_of(result(spill_stores=8))
    assert "8 of spill loads" in kernels_cli.fault_of(result(spill_loads=8))
    assert kernels_cli.fault_of(result("C7509")) == "fill: C7509"
    monkeypatch.setattr(kernels_cli, "_compile", lambda args, capability: [result(), result("C7509")])
    code, text = run("report", "--capability", "8.0")
    assert code == 1 and "ERROR  fill: C7509" in text
    code, text = run("report", "--capability", "8.0", "--json")
    assert code == 1 and json.loads(text)[1]["error"] == "C7509" and json.loads(text)[1]["registers"] is None
