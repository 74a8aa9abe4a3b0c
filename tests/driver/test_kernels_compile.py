"""Every kernel of the catalogue compiles for three generations, without a GPU, to code that may be used.

No stack frame, no spills, no ignored setmaxnreg (C7504), no serialised wgmma (C7509), and no more registers than the file
states. The kernel cache is the usual one: its keys cover every source and compiler version and it keeps each kernel's
figures, so a second run with nothing changed checks the same in a second.
"""

from __future__ import annotations

import pytest

from zhilight.driver.compiler import compile_all, parse_capability
from zhilight.driver.kernels_cli import fault_of
from zhilight.kernels.catalogue import catalogue


@pytest.mark.timeout(1200)  # about 2 minutes on two free cores with an empty cache; a busy machine takes longer
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0a"])
def test_the_catalogue_compiles_clean(capability):
    target = parse_capability(capability)
    kernels = list(catalogue(target))
    assert kernels, "the catalogue is empty"
    results = compile_all(kernels, target, jobs=2, progress=False)
    faults = [fault for result in results if (fault := fault_of(result))]
    faults += [f"{kernel.name}: {result.resources.registers} registers, its file states at most {kernel.max_registers}"
               for kernel, result in zip(kernels, results, strict=True)
               if kernel.max_registers and result.resources and result.resources.registers > kernel.max_registers]
    assert not faults, "\n".join(faults)
