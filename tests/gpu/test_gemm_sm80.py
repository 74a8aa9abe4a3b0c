"""gemm_sm80 on the GPU (any from sm_80 on) against float64: every tile, split K, ragged sizes, epilogues, determinism."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from gemm_cases import EPILOGUES, Case, argument, assert_case, make_runtime  # noqa: E402

from zhilight.errors import ShapeError  # noqa: E402
from zhilight.kernels.gemm_sm80 import FLAT, LARGE, SQUARE, gemm_sm80  # noqa: E402

TILES = {"large": LARGE, "square": SQUARE, "flat": FLAT}


@pytest.fixture(scope="module")
def runtime(device):
    return make_runtime()


@pytest.fixture(params=sorted(TILES))
def tile(request):
    return TILES[request.param]


@pytest.mark.parametrize("split", [1, 2, 5])
def test_every_tile(runtime, tile, split):
    gemm = functools.partial(gemm_sm80, tile=(tile, split))
    for m, n, k in ((1, 8, 8), (64, 128, 64), (63, 120, 1032), (65, 136, 1024), (129, 264, 520), (300, 776, 2056)):
        if split == 1 or k // tile.step >= split:
            assert_case(gemm, runtime, Case(m, n, k), seed=m + n + k)


@pytest.mark.parametrize(("m", "n", "k"), [(33, 4096, 4096), (128, 6144, 4096), (500, 4608, 3584), (1031, 2304, 5760),
                                       (2048, 28672, 512)])
def test_model_shapes(runtime, m, n, k):
    assert_case(gemm_sm80, runtime, Case(m, n, k), seed=m)


@pytest.mark.parametrize(("dtype", "bias", "silu_mul", "wide"), [*EPILOGUES, (torch.bfloat16, True, True, True)])
def test_epilogues(runtime, dtype, bias, silu_mul, wide):
    for m, split in ((70, 3), (200, 1)):
        scale = 0.25 if wide and not silu_mul else 1.0
        case = Case(m, 1504, 3080, dtype, torch.float32 if wide else None, bias, silu_mul, scale, x_gap=8, out_gap=8)
        assert_case(functools.partial(gemm_sm80, tile=(FLAT, split)), runtime, case, seed=m)


def test_equal_bits_with_split(runtime):
    x, weight = torch.randn(100, 4096, device="cuda").bfloat16(), torch.randn(1024, 4096, device="cuda").bfloat16()
    outs = [torch.empty(100, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    for out in outs:
        gemm_sm80(runtime, argument(x), argument(weight), argument(out), tile=(FLAT, 6))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_overlapped_chain(runtime):
    """Each call reads what the one before wrote, and they share the scratch memory of the split."""
    if runtime.capability[0] < 9:
        pytest.skip("programmatic dependent launch needs sm_90")
    weights = [(torch.randn(2048, 2048, device="cuda") / 45).bfloat16() for _ in range(16)]
    x = torch.randn(96, 2048, device="cuda").bfloat16()
    chains = {}
    for overlap in (False, True):
        buffers = [x] + [torch.full_like(x, float("nan")) for _ in weights]
        for weight, source, target in zip(weights, buffers, buffers[1:], strict=False):
            gemm_sm80(runtime, argument(source), argument(weight), argument(target), overlap=overlap, tile=(FLAT, 4))
        chains[overlap] = buffers[-1]
    assert torch.equal(chains[False], chains[True])
    assert not torch.isnan(chains[True]).any()


def test_refuses_unaligned_out(runtime):
    x, weight = (torch.zeros(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((4, 64), (64, 64)))
    out = torch.zeros(4, 67, device="cuda", dtype=torch.bfloat16)[:, :64]
    with pytest.raises(ShapeError, match="row stride"):
        gemm_sm80(runtime, argument(x), argument(weight), argument(out))
