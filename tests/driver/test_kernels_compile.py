"""Every kernel of the catalogue compiles for three generations, without a GPU, to code that may be used.

No stack frame, no spills, no ignored setmaxnreg (C7504), no serialised wgmma (C7509), and no more registers than the file
states. The kernel cache is the usual one: its keys cover every source and compiler version and it keeps each kernel's
figures, so a second run with nothing changed checks the same in a second.
"""

from __future__ import annotations

import pytest

from zhilight.driver.compiler import architecture, compile_each, parse_capability
from zhilight.driver.kernels_cli import fault_of
from zhilight.kernels.catalogue import catalogue

CAPABILITIES = [parse_capability(text) for text in ("8.0", "8.9", "9.0a")]


@pytest.mark.timeout(1800)  # some minutes on two free cores with an empty cache; a busy machine takes longer
def test_the_catalogue_compiles_clean():
    wanted = [(kernel, [target for target in CAPABILITIES if kernel.supports(target)]) for kernel in catalogue()]
    assert {target for _, targets in wanted for target in targets} == set(CAPABILITIES)
    faults = []
    for (kernel, targets), results in zip(wanted, compile_each(wanted, jobs=2, progress=False), strict=True):
        for target, result in zip(targets, results, strict=True):
            arch = architecture(target)
            if fault := fault_of(result):
                faults.append(f"{arch} {fault}")
            elif kernel.max_registers and result.resources.registers > kernel.max_registers:
                faults.append(f"{arch} {kernel.name}: {result.resources.registers} registers, its file states at most "
                              f"{kernel.max_registers}")
    assert not faults, "\n".join(faults)
