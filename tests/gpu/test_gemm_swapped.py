"""gemm_swapped on the GPU against float64: every wgmma width, splits of K, tile heights, ragged N and K, epilogues, overlap."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from gemm_cases import EPILOGUES, Case, argument, assert_case, make_runtime  # noqa: E402

from zhilight.errors import ShapeError  # noqa: E402
from zhilight.kernels.gemm_swapped import MAX_TOKENS, gemm_swapped, ring, tokens_of  # noqa: E402


@pytest.fixture(scope="module")
def runtime(device):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma needs sm_90")
    return make_runtime()


@pytest.mark.parametrize("m", [1, 5, 8, 9, 16, 17, 31, 33, 50, 64, 65, 100, 127, 128])
def test_token_counts(runtime, m):
    assert_case(gemm_swapped, runtime, Case(m, 1280, 1024), seed=m)


@pytest.mark.parametrize(("n", "k"), [(8, 8), (24, 520), (120, 72), (4096, 4096), (4608, 3584), (28672, 520)])
@pytest.mark.parametrize("m", [3, 100])
def test_ragged_shapes(runtime, m, n, k):
    assert_case(gemm_swapped, runtime, Case(m, n, k), seed=n + k)


@pytest.mark.parametrize(("rows", "split", "m"), [(8, 1, 64), (56, 1, 40), (64, 2, 64), (72, 1, 7), (72, 2, 30), (128, 1, 64),
                                                  (128, 4, 64), (24, 8, 7)])
def test_every_cut(runtime, rows, split, m):
    gemm = functools.partial(gemm_swapped, shape=ring(rows, split, tokens_of(m)))
    assert_case(gemm, runtime, Case(m, 776, 2056), seed=m)


@pytest.mark.parametrize(("dtype", "bias", "silu_mul", "wide"), EPILOGUES)
def test_epilogues(runtime, dtype, bias, silu_mul, wide):
    for m in (6, 60):
        scale = 0.25 if wide else 1.0
        case = Case(m, 1504, 3080, dtype, torch.float32 if wide else None, bias, silu_mul, scale, x_gap=8, out_gap=4)
        assert_case(gemm_swapped, runtime, case, seed=m)


def test_equal_bits_every_time(runtime):
    x, weight = torch.randn(64, 4096, device="cuda").bfloat16(), torch.randn(4608, 4096, device="cuda").bfloat16()
    outs = [torch.empty(64, 4608, device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    for out in outs:
        gemm_swapped(runtime, argument(x), argument(weight), argument(out), shape=ring(72, 2, 64))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_overlapped_chain(runtime):
    """Each call reads what the one before wrote: with overlap it must still wait for it."""
    weights = [(torch.randn(2048, 2048, device="cuda") / 45).bfloat16() for _ in range(24)]
    for m in (4, 48):
        x = torch.randn(m, 2048, device="cuda").bfloat16()
        chains = {}
        for overlap in (False, True):
            buffers = [x] + [torch.full_like(x, float("nan")) for _ in weights]
            for weight, source, target in zip(weights, buffers, buffers[1:], strict=False):
                gemm_swapped(runtime, argument(source), argument(weight), argument(target), overlap=overlap)
            chains[overlap] = buffers[-1]
        assert torch.equal(chains[False], chains[True])
        assert not torch.isnan(chains[True]).any()


def test_refuses_too_many_tokens(runtime):
    x, weight = (torch.zeros(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((MAX_TOKENS + 1, 64), (64, 64)))
    with pytest.raises(ShapeError, match="serves up to"):
        gemm_swapped(runtime, argument(x), argument(weight), argument(torch.empty_like(x)))
