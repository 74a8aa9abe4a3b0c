"""Worker processes: results, errors, death, and that they leave the program's main module alone."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from zhilight.driver.compile_workers import CompileWorkers
from zhilight.driver.compiler import FactoryCall, compile_kernel
from zhilight.driver.dtype import bfloat16, float32
from zhilight.errors import DeviceError
from zhilight.kernels.catalogue import catalogue
from zhilight.kernels.gemm_small import gemm_small_kernel

SCRIPT = """
from zhilight.driver.compile_workers import CompileWorkers
print("main")
with CompileWorkers(2) as workers:
    print([future.result() for future in [workers.submit(divmod, 7, n) for n in (1, 2, 3, 4)]])
"""


def test_a_script_without_a_guard_runs_once(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    run = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, check=True,
                         env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)})
    assert run.stdout.splitlines() == ["main", "[(7, 0), (3, 1), (2, 1), (1, 3)]"]


def test_errors_and_prints_of_a_task():
    with CompileWorkers(1) as workers:
        with pytest.raises(ZeroDivisionError):
            workers.submit(divmod, 1, 0).result()
        assert workers.submit(print, "does not disturb the results").result() is None
        assert workers.submit(divmod, 9, 2).result() == (4, 1)


def test_a_worker_that_dies_is_an_error():
    with pytest.raises(DeviceError, match="exit code 3"), CompileWorkers(1) as workers:
        workers.submit(os._exit, 3).result()


def test_work_that_waits_is_dropped_when_something_fails():
    with pytest.raises(KeyError), CompileWorkers(1) as workers:
        for _ in range(3):
            workers.submit(__import__("time").sleep, 60)
        raise KeyError("a failure elsewhere")


def test_a_kernel_is_the_same_in_a_worker():
    """Each constant reaches it as the object that it was: factories compare element types by identity."""
    kernel = gemm_small_kernel(bfloat16, float32, 1, 8, k_tile=64, stages=5)
    with CompileWorkers(1) as workers:
        assert workers.submit(code_of, kernel.call).result() == code_of(kernel.call)


def code_of(call: FactoryCall) -> bytes:
    return compile_kernel(call.make(), (8, 0, "")).code


def test_every_kernel_is_made_again_from_its_call():
    for kernel in catalogue():
        assert pickle.loads(pickle.dumps(kernel.call)).make() is kernel, kernel.name
