"""gemm_small on the GPU against float64: every token count's path, ragged N and K, epilogues, strides, determinism, overlap."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gemm_cases import EPILOGUES, Case, argument, assert_case, make_runtime, run_case  # noqa: E402

from zhilight.errors import ShapeError  # noqa: E402
from zhilight.kernels.gemm_small import MAX_TOKENS, gemm_small, gemm_small_kernel  # noqa: E402


@pytest.fixture(scope="module")
def runtime(device):
    torch.backends.cuda.matmul.allow_tf32 = False
    return make_runtime()


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 13, 16, 17, 24, 31, 32])
def test_token_counts(runtime, m):
    assert_case(gemm_small, runtime, Case(m, 1280, 1024), seed=m)


@pytest.mark.parametrize(("n", "k"), [(8, 8), (16, 24), (8, 4096), (24, 520), (120, 72), (1000, 1032), (4096, 4096),
                                      (4608, 3584), (6144, 4096), (152064, 64), (3584, 18944), (2104, 56), (17000, 264)])
@pytest.mark.parametrize("m", [1, 5, 16, 19])
def test_ragged_shapes(runtime, m, n, k):
    assert_case(gemm_small, runtime, Case(m, n, k), seed=n + k)


@pytest.mark.parametrize(("dtype", "bias", "silu_mul", "wide"), EPILOGUES)
def test_epilogues(runtime, dtype, bias, silu_mul, wide):
    for m in (3, 8, 11):
        scale = 0.25 if wide else 1.0
        case = Case(m, 1504, 776, dtype, torch.float32 if wide else None, bias, silu_mul, scale, x_gap=8, out_gap=3)
        assert_case(gemm_small, runtime, case, seed=m)


@pytest.mark.parametrize(("warps", "k_tile", "stages"), [(8, 128, 6), (8, 128, 3), (8, 64, 5), (4, 128, 6)])
def test_every_cut(runtime, warps, k_tile, stages):
    """Rings and steps of other capabilities, row groups that end early, K that ends within a step."""
    def gemm(runtime, x, weight, out, bias, silu_mul):
        (m, k), n = x.shape, weight.shape[0]
        for rows in (40, 114):
            kernel = gemm_small_kernel(x.dtype, out.dtype, 1, 4, warps=warps, k_tile=k_tile, stages=stages)
            kernel.launch(-(-n // rows), x, weight, weight, out, m, n, k, x.strides[0], out.strides[0], rows, 1.0,
                          stream=runtime.stream)

    for m, n, k in ((1, 776, 2056), (8, 1000, 1032), (5, 48, 8)):
        assert_case(gemm, runtime, Case(m, n, k), seed=n)


def test_equal_bits_every_time(runtime):
    x, weight = torch.randn(8, 4096, device="cuda").bfloat16(), torch.randn(6144, 4096, device="cuda").bfloat16()
    outs = [torch.empty(8, 6144, device="cuda", dtype=torch.bfloat16) for _ in range(10)]
    for out in outs:
        gemm_small(runtime, argument(x), argument(weight), argument(out))
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_overlapped_chain(runtime):
    """Each call reads what the one before wrote: with overlap it must still wait for it."""
    if runtime.capability[0] < 9:
        pytest.skip("programmatic dependent launch needs sm_90")
    weights = [(torch.randn(2048, 2048, device="cuda") / 45).bfloat16() for _ in range(24)]
    for m in (1, 12):
        x = torch.randn(m, 2048, device="cuda").bfloat16()
        chains = {}
        for overlap in (False, True):
            buffers = [x] + [torch.full_like(x, float("nan")) for _ in weights]
            for weight, source, target in zip(weights, buffers, buffers[1:], strict=False):
                gemm_small(runtime, argument(source), argument(weight), argument(target), overlap=overlap)
            chains[overlap] = buffers[-1]
        assert torch.equal(chains[False], chains[True])
        assert not torch.isnan(chains[True]).any()


def test_huge_out_offsets(runtime):
    """Rows of out farther apart than 2^31 bytes."""
    weight, x = torch.randn(64, 64, device="cuda").bfloat16(), torch.randn(3, 64, device="cuda").bfloat16()
    memory = torch.empty(2 * (1 << 30) + (1 << 20), device="cuda", dtype=torch.bfloat16)
    out = memory.as_strided((3, 64), ((1 << 30) + 8, 1))
    gemm_small(runtime, argument(x), argument(weight), argument(out))
    assert torch.allclose(out.float(), x.float() @ weight.float().T, rtol=2e-2, atol=1e-1)


def test_refuses_what_it_cannot_do(runtime):
    def tensors(m=1, n=64, k=64):
        return [torch.zeros(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (n, k), (m, n))]

    for match, arguments in (("serves up to", tensors(m=MAX_TOKENS + 1)), ("multiples of 8", tensors(k=60)),
                             ("out is", [*tensors()[:2], tensors(n=72)[2]])):
        with pytest.raises(ShapeError, match=match):
            gemm_small(runtime, *map(argument, arguments))
    assert run_case(gemm_small, runtime, Case(1, 64, 64), seed=0) < 1e-2
