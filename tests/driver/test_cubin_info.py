"""What a cubin says of itself is what the linker reported, and is what counts where the linker says nothing."""

from __future__ import annotations

import pytest

from zhilight.driver import compiler
from zhilight.driver.compiler import KernelCompileError, compile_kernel
from zhilight.driver.cubin_info import kernel_resources
from zhilight.driver.dtype import bfloat16
from zhilight.kernels.attention_prefill_sm80 import prefill_sm80_kernel
from zhilight.kernels.embedding import embedding_kernel
from zhilight.kernels.sampling import argmax_kernel

AMPERE = (8, 0, "")


@pytest.mark.parametrize("kernel", [embedding_kernel(576, bfloat16, True), argmax_kernel(1003, 1008, False)], ids=str)
def test_a_silent_linker(kernel, monkeypatch):
    reported = compile_kernel(kernel, AMPERE)
    resources = reported.resources
    assert kernel_resources(reported.code) == (resources.registers, resources.shared, 0)
    monkeypatch.setattr(compiler, "_log", lambda *_: "")
    silent = compile_kernel(kernel, AMPERE).resources
    assert (silent.registers, silent.shared, silent.stack, silent.spill_stores) == (resources.registers, resources.shared, 0, 0)


def test_a_stack_of_which_the_linker_says_nothing_is_an_error(monkeypatch):
    kernel = prefill_sm80_kernel(bfloat16, 64, 64, False, False, False, 4, 64, 2)  # a tile too large for its registers
    reported = compile_kernel(kernel, AMPERE)
    assert kernel_resources(reported.code)[2] == reported.resources.stack > 0
    monkeypatch.setattr(compiler, "_log", lambda *_: "")
    with pytest.raises(KernelCompileError, match="bytes of stack"):
        compile_kernel(kernel, AMPERE)


def test_what_is_no_cubin_is_refused(monkeypatch):
    for bad, message in ((b"", "cannot be read"), (b"\x7fELF" + b"\xff" * 100, "cannot be read"), (bytes(100), "no registers")):
        with pytest.raises(ValueError, match=message):
            kernel_resources(bad)
    monkeypatch.setattr(compiler, "_log", lambda *_: "")
    monkeypatch.setattr(compiler, "kernel_resources", lambda code: kernel_resources(bytes(100)))
    with pytest.raises(KernelCompileError, match="names no registers: '', and the cubin names no registers"):
        compile_kernel(embedding_kernel(576, bfloat16, True), AMPERE)
