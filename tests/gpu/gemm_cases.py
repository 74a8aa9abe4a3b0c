"""What the tests of the dense GEMM kernels share: torch tensors as kernel arguments, the reference, the comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from zhilight.driver.compiler import target_of
from zhilight.driver.dtype import BY_NAME
from zhilight.driver.tensor import Tensor
from zhilight.kernels.runtime import Runtime

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-5}
"""Relative norm of the error by output type: half a unit in the last place of each, and of sums in another order."""


EPILOGUES = [(torch.bfloat16, True, False, False), (torch.bfloat16, False, True, False), (torch.bfloat16, True, True, False),
             (torch.bfloat16, True, False, True), (torch.float16, True, True, False), (torch.float16, False, False, True)]
"""dtype, bias, silu_mul, float32 out: each path of an epilogue, not each combination, because each is a kernel to compile."""


def argument(tensor: torch.Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    dtype = BY_NAME[str(tensor.dtype).removeprefix("torch.")]
    return Tensor(tensor.data_ptr(), tuple(tensor.shape), dtype, owner=tensor, strides=tensor.stride())


@dataclass(frozen=True)
class CurrentStream:
    handle: int


def make_runtime() -> Runtime:
    """On torch's current stream, so that torch's work and the kernels' follow each other."""
    memory = []

    def allocate(nbytes: int) -> int:
        memory.append(torch.empty(nbytes + 256, dtype=torch.uint8, device="cuda"))
        return (memory[-1].data_ptr() + 255) // 256 * 256

    torch.zeros(1, device="cuda")
    runtime = Runtime(CurrentStream(torch.cuda.current_stream().cuda_stream), target_of(*torch.cuda.get_device_capability()),
                      torch.cuda.get_device_properties(0).multi_processor_count, allocate)
    runtime.memory = memory
    return runtime


@dataclass(frozen=True)
class Case:
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    bias: bool = False
    silu_mul: bool = False
    scale: float = 1.0
    x_gap: int = 0
    """Values between the rows of x."""
    out_gap: int = 0


def run_case(gemm: Any, runtime: Runtime, case: Case, seed: int, **options: Any) -> float:
    """Relative error of one call. AssertionError when a value outside of `out` changed or one inside stayed unwritten."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(case.dtype)

    x = random(case.m, case.k + case.x_gap)[:, :case.k]
    weight, bias = random(case.n, case.k), random(case.n) if case.bias else None
    width = case.n // 2 if case.silu_mul else case.n
    full = torch.full((case.m + 1, width + case.out_gap), float("nan"), device="cuda", dtype=case.out_dtype or case.dtype)
    out = full[:case.m, :width]
    options |= {"scale": case.scale} if case.scale != 1.0 else {}
    gemm(runtime, argument(x), argument(weight), argument(out), bias=argument(bias), silu_mul=case.silu_mul, **options)
    y = x.float() @ weight.float().T if case.k < 512 else (x.double() @ weight.double().T).float()
    if bias is not None:
        y = y + bias.float()
    y = y * case.scale
    if case.silu_mul:
        y = torch.nn.functional.silu(y[:, 0::2]) * y[:, 1::2]
    assert not torch.isnan(out).any(), f"{case}: {int(torch.isnan(out).sum())} values unwritten or NaN"
    assert torch.isnan(full[case.m:]).all() and torch.isnan(full[:, width:]).all(), f"{case}: wrote outside of out"
    return float((out.float() - y).norm() / y.norm())


def assert_case(gemm: Any, runtime: Runtime, case: Case, seed: int, **options: Any) -> None:
    error = run_case(gemm, runtime, case, seed, **options)
    limit = TOLERANCE[case.out_dtype or case.dtype]
    assert error < limit, f"{case}, seed {seed}: relative error {error:.2e}, limit {limit:.0e}"
