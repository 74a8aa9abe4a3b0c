"""Dense GEMM: chooses among gemm_small (few tokens), gemm_sm90 (Hopper) and gemm_sm80 (Ampere, Ada, anything newer).

    out[M, N] = (x[M, K] @ weight[N, K].T + bias[N]) * scale;   silu_mul: out[M, N / 2] = silu(y[:, 0::2]) * y[:, 1::2]

x, weight, bias : bf16 or fp16; out the same dtype or float32. N and K are multiples of 8, rows of x may be strided.
"""

from typing import Any

from zhilight.kernels.gemm_sm80 import gemm_sm80
from zhilight.kernels.gemm_sm90 import gemm_sm90
from zhilight.kernels.gemm_small import gemm_small
from zhilight.kernels.runtime import Runtime

FEW_TOKENS = 32
"""Up to here the weights' bytes decide, and gemm_small streams them best."""


def gemm(runtime: Runtime, x: Any, weight: Any, out: Any, bias: Any = None, silu_mul: bool = False, scale: float = 1.0,
         overlap: bool = False) -> None:
    """See the module. Raises ShapeError when shapes, strides or dtypes disagree."""
    if x.shape[0] <= FEW_TOKENS:
        gemm_small(runtime, x, weight, out, bias, silu_mul, scale, overlap)
    elif runtime.capability == (9, 0, "a"):
        gemm_sm90(runtime, x, weight, out, bias, silu_mul, overlap, scale)
    else:
        gemm_sm80(runtime, x, weight, out, bias, silu_mul, scale, overlap)
