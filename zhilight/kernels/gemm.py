"""The dense GEMM: which kernel serves a shape on this GPU.

    gemm_swapped   up to 64 tokens on Hopper: weights as wgmma's M side
    gemm_sm90      more tokens on Hopper: wgmma, clusters, bulk copies
    gemm_small     few tokens elsewhere, and on Hopper where out is of odd alignment: mma.sync, weights through cp.async rings
    gemm_sm80      more tokens elsewhere, and on Hopper what the copy engine cannot write

The limits between them are measured on an H200, in whole decode steps (docs/kernels/gemm_small.md); within each kernel's file
a rule cuts the shape by M, N, K and the number of multiprocessors.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

from zhilight.driver.compiler import Capability
from zhilight.driver.dtype import DType, float32
from zhilight.driver.tensor import Layout
from zhilight.errors import ShapeError
from zhilight.kernels import gemm_sm80, gemm_sm90, gemm_small, gemm_swapped, rotary
from zhilight.kernels.gemm_sm90_rotary import Heads, rotates
from zhilight.kernels.gemm_sm90_tiles import FEW_ROWS, choose_tile
from zhilight.kernels.runtime import PLANS, Runtime

SWAPPED_TOKENS = 64
SMALL_TOKENS = 32


def choose_kernel(m: int, n: int, capability: Capability, *, silu_mul: bool = False, wide: bool = False,
                  aligned: bool = True) -> str:
    """Name of the kernel for out[m, n]. wide: out is float32. aligned: out's address and rows are multiples of 16 bytes."""
    if capability[0] != 9:
        return "gemm_small" if m <= SMALL_TOKENS else "gemm_sm80"
    if m <= SWAPPED_TOKENS and aligned:
        return "gemm_swapped"
    if not aligned:
        return "gemm_small" if m <= SMALL_TOKENS else "gemm_sm80"
    if silu_mul and (wide or n % 16):
        return "gemm_sm80"
    return "gemm_sm90"


def adds_as_it_stores(m: int, capability: Capability) -> bool:
    """Whether `gemm` takes add for as many rows. With fewer, the norm that follows adds for nothing: both wait, not work."""
    return capability[0] == 9 and m > FEW_ROWS


@lru_cache(maxsize=PLANS)
def heads_plan(x: Layout, weight: Layout, qkv: Layout, bias: Layout | None, index_dtypes: tuple[DType, DType], cos_sin: Layout,
               kv_cache: Layout, num_heads: int, num_kv_heads: int, overlap: bool, capability: Capability,
               multiprocessors: int) -> gemm_sm90.Queue | None:
    """The product that rotates q and k and writes k and v to the cache as it stores (gemm_sm90_rotary).

    None where no kernel does both: then it takes `gemm` and `rotary_and_cache`, whose arguments these are. With few rows the
    second kernel waits more than it works, and the first is chosen by other things. Raises ShapeError.
    """
    (m, k), n = x.shape, weight.shape[0]
    if capability[0] != 9 or m <= FEW_ROWS:
        return None
    rotary.check_arguments(qkv, index_dtypes, cos_sin, kv_cache, num_heads, num_kv_heads)
    heads = Heads(num_heads, num_kv_heads, kv_cache.shape[4], kv_cache.shape[3])
    tile = choose_tile(m, n, k, multiprocessors)
    if n % tile.columns or not rotates(heads, cos_sin.shape[1], tile.columns):
        return None
    return gemm_sm90.plan(x, weight, qkv, bias, False, overlap, 1.0, tile, False, multiprocessors, heads)


def gemm(runtime: Runtime, x: Any, weight: Any, out: Any, bias: Any = None, silu_mul: bool = False, scale: float = 1.0,
         overlap: bool = False, add: bool = False) -> None:
    """Queue out = (x @ weight.T + bias) * scale, or out[:, j] = silu(y[:, 2j]) * y[:, 2j + 1] with y = x @ weight.T + bias.

    x [M, K] bf16 or fp16 (rows may be strided), weight [N, K] contiguous, bias [N]; out [M, N], or [M, N / 2] with silu_mul, in
    x's type or float32. N and K are multiples of 8. scale multiplies a float32 out only. Sums are in float32.
    add: out += the product, where adds_as_it_stores.
    overlap: programmatic dependent launch (Hopper; ignored elsewhere): weights are fetched while the kernel before still runs.
    Raises ShapeError naming the argument: each kernel checks what it is given.
    """
    queue = _plan(x.layout, weight.layout, out.layout, None if bias is None else bias.layout, silu_mul, scale, overlap, add,
                  out.address % 16 == 0, runtime.capability, runtime.multiprocessors)
    queue(runtime, x, weight, out, bias)


@lru_cache(maxsize=PLANS)
def _plan(x: Layout, weight: Layout, out: Layout, bias: Layout | None, silu_mul: bool, scale: float, overlap: bool, add: bool,
          out_aligned: bool, capability: Capability, multiprocessors: int) -> gemm_sm90.Queue:
    """What `gemm` does for arrays of these layouts. out_aligned: out begins at a multiple of 16 bytes."""
    m, wide = x.shape[0], out.dtype is float32
    kernel = choose_kernel(m, weight.shape[0], capability, silu_mul=silu_mul, wide=wide,
                           aligned=out_aligned and not out.strides[0] % (4 if wide else 8))
    if kernel == "gemm_sm90":
        return gemm_sm90.plan(x, weight, out, bias, silu_mul, overlap, scale, None, add, multiprocessors)
    if add:
        raise ShapeError(f"gemm: {kernel}, which serves {m} rows here, cannot add to out; ask adds_as_it_stores.")
    function = {"gemm_small": gemm_small.gemm_small, "gemm_swapped": gemm_swapped.gemm_swapped,
                "gemm_sm80": gemm_sm80.gemm_sm80}[kernel]
    return partial(function, silu_mul=silu_mul, scale=scale, overlap=overlap)
