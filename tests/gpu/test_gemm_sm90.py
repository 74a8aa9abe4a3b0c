"""gemm_sm90 against float64: odd sizes, every tile kind and epilogue, strides, clipping, determinism, overlap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zhilight.driver.dtype import BY_NAME, DType
from zhilight.driver.tensor import Tensor
from zhilight.errors import ShapeError
from zhilight.kernels.gemm_sm90 import gemm_sm90
from zhilight.kernels.gemm_sm90_tiles import Tile
from zhilight.kernels.runtime import Runtime

torch = pytest.importorskip("torch")


TILES = [Tile(columns, share) for columns in (64, 112, 160, 208, 256) for share in (1, 2)]
TILES += [Tile(columns, share_x=2) for columns in (64, 192)]
TILES += [Tile(256, 2, band=4), Tile(256, 2, 2), Tile(112, 2, 4), Tile(128, 2, 1, 2),
          Tile(80, 1, 2, 2), Tile(96, 1, 1, 2), Tile(128, 1, 4, 2), Tile(128, 2, 2, 2)]
TILES += [Tile(48), Tile(256, share_x=2)]
TILES += [Tile(columns, split=2) for columns in (64, 112, 128)]
EPILOGUE_TILES = [Tile(256), Tile(160, 2), Tile(128, 1, 2, 2), Tile(256, share_x=2)]
EPILOGUES = [
    {"bias": True}, {"silu_mul": True}, {"silu_mul": True, "bias": True}, {"out_dtype": torch.float32, "scale": 0.25},
    {"dtype": torch.float16}, {"dtype": torch.float16, "bias": True, "silu_mul": True},
    {"dtype": torch.float16, "out_dtype": torch.float32, "bias": True}]


def dtype_of(dtype) -> DType:
    return BY_NAME[str(dtype).removeprefix("torch.")]


def view(tensor) -> Tensor:
    return Tensor(tensor.data_ptr(), tuple(tensor.shape), dtype_of(tensor.dtype), strides=tensor.stride())


@pytest.fixture(scope="module")
def runtime():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("gemm_sm90 needs a Hopper GPU")
    blocks = []

    def allocate(nbytes: int) -> int:
        blocks.append(torch.empty(nbytes + 256, dtype=torch.uint8, device="cuda"))
        return (blocks[-1].data_ptr() + 255) // 256 * 256

    torch.empty(1, device="cuda")
    stream = SimpleNamespace(handle=torch.cuda.current_stream().cuda_stream)
    return Runtime(stream, (9, 0, "a"), torch.cuda.get_device_properties(0).multi_processor_count, allocate, 1 << 20)


def expected(x, weight, bias, silu_mul, scale):
    y = x.double() @ weight.double().T
    if bias is not None:
        y += bias.double()
    if silu_mul:
        y = torch.nn.functional.silu(y[:, 0::2]) * y[:, 1::2]
    return y * scale


def check(runtime, m, n, k, dtype=torch.bfloat16, out_dtype=None, bias=False, silu_mul=False, overlap=False, scale=1.0,
          tile=None, seed=0, stride=0):
    """One product into a poisoned window of a larger buffer; the frame around the window must stay as it was."""
    torch.manual_seed(seed)
    out_dtype = out_dtype or dtype
    x = torch.randn(m, k + stride, device="cuda").to(dtype)[:, :k]
    weight = (torch.randn(n, k, device="cuda") * k ** -0.5).to(dtype)
    values = torch.randn(n, device="cuda").to(dtype) if bias else None
    columns = n // 2 if silu_mul else n
    poison = 12288.0  # exact in all three types
    frame = torch.full((m + 256, columns + 8 + stride), poison, dtype=out_dtype, device="cuda")
    rows = slice(128, 128 + m)
    frame[rows, :columns] = float("nan")
    out = frame[rows, :columns]
    gemm_sm90(runtime, view(x), view(weight), view(out), bias=view(values) if bias else None, silu_mul=silu_mul,
              overlap=overlap, scale=scale, tile=tile)
    torch.cuda.synchronize()
    reference = expected(x, weight, values, silu_mul, scale)
    error = ((out.double() - reference).norm() / reference.norm()).item()
    limit = {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 2e-5}[out_dtype]
    assert error < limit, f"relative error {error:.2e} at {m} x {n} x {k}, {tile}"
    frame[rows, :columns] = poison
    assert bool((frame == poison).all()), "wrote outside of out"


@pytest.mark.parametrize("n, k", [(16, 8), (264, 72), (1000, 520), (96, 1032), (4096, 4096), (2064, 11008)])
@pytest.mark.parametrize("m", [1, 63, 65, 127, 128, 129, 255, 300, 1031])
def test_sizes(runtime, m, n, k):
    check(runtime, m, n, k)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(runtime, tile):
    check(runtime, 391, 1160, 1480, tile=tile)
    check(runtime, 256, 8192, 4096, tile=tile)
    check(runtime, 140, 272, 136, tile=tile)


@pytest.mark.parametrize("tile", EPILOGUE_TILES, ids=str)
@pytest.mark.parametrize("options", EPILOGUES, ids=str)
def test_epilogues(runtime, tile, options):
    check(runtime, 300, 1200, 776, tile=tile, **options)
    check(runtime, 77, 16, 64, tile=tile, **options)


@pytest.mark.parametrize("tile", [Tile(160, 2), Tile(128, 1, 2, 2)], ids=str)
def test_strides_and_overlap(runtime, tile):
    for overlap in (False, True):
        check(runtime, 321, 1032, 1096, tile=tile, stride=64, overlap=overlap)


def test_overlap_waits_for_the_kernel_before(runtime):
    """x of each product is the output of the one before."""
    torch.manual_seed(3)
    weights = [(torch.randn(1024, 1024, device="cuda") * 1024 ** -0.5).bfloat16() for _ in range(6)]
    first = torch.randn(300, 1024, device="cuda").bfloat16()
    for tile in (Tile(256), Tile(128, 1, 2, 2)):
        for _ in range(5):
            x, reference = first, first
            for weight in weights:
                out = torch.full_like(x, float("nan"))
                gemm_sm90(runtime, view(x), view(weight), view(out), overlap=True, tile=tile)
                reference = (reference.float() @ weight.float().T).bfloat16()
                x = out
            torch.cuda.synchronize()
            assert ((x.double() - reference.double()).norm() / reference.double().norm()).item() < 1e-2


@pytest.mark.parametrize("tile", [Tile(160, 2), Tile(128, 1, 2, 2)], ids=str)
def test_same_bits_again(runtime, tile):
    torch.manual_seed(5)
    x = torch.randn(777, 2048, device="cuda").bfloat16()
    weight = (torch.randn(3000, 2048, device="cuda") * 2048 ** -0.5).bfloat16()
    results = []
    for _ in range(10):
        out = torch.full((777, 3000), float("nan"), device="cuda", dtype=torch.bfloat16)
        gemm_sm90(runtime, view(x), view(weight), view(out), tile=tile)
        results.append(out)
    torch.cuda.synchronize()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("tile", [Tile(256), Tile(176), Tile(112, 2), Tile(224, 2), Tile(80, 1, 2, 2), Tile(256, 1, 2)],
                         ids=str)
@pytest.mark.parametrize("m, n, k", [(1, 16, 64), (127, 272, 136), (128, 512, 256), (130, 1160, 520), (255, 1000, 520),
                                     (391, 1160, 1480), (1024, 4096, 1024)])
def test_adds_to_the_output(runtime, tile, m, n, k):
    """Once to each value, also where row tiles or slabs overlap, with the two roundings of a product and an addition."""
    torch.manual_seed(m)
    x = torch.randn(m, k, device="cuda").bfloat16()
    weight = (torch.randn(n, k, device="cuda") * k ** -0.5).bfloat16()
    poison = 12288.0
    frame = torch.full((m + 256, n + 8), poison, dtype=torch.bfloat16, device="cuda")
    out = frame[128:128 + m, :n]
    out.copy_(torch.randn(m, n, device="cuda"))
    before, product = out.clone(), torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    gemm_sm90(runtime, view(x), view(weight), view(product), tile=tile)
    gemm_sm90(runtime, view(x), view(weight), view(out), tile=tile, add=True)
    torch.cuda.synchronize()
    assert torch.equal(out, (before.float() + product.float()).bfloat16())
    out.fill_(poison)
    assert bool((frame == poison).all()), "wrote outside of out"


def test_rejects_what_it_does_not_take(runtime):
    x, weight, out = (view(torch.empty(s, device="cuda", dtype=torch.bfloat16)) for s in ((4, 64), (32, 64), (4, 32)))
    odd = view(torch.empty((4, 64), device="cuda"))
    for arguments, message in (((x, weight, odd), "out is"), ((odd, weight, out), "both"), ((x, x, out), "N is 4"),
                               ((x, weight, x), "must be")):
        with pytest.raises(ShapeError, match=message):
            gemm_sm90(runtime, *arguments)
    with pytest.raises(ShapeError, match="add is for plain outputs"):
        gemm_sm90(runtime, x, weight, view(torch.empty((4, 16), device="cuda", dtype=torch.bfloat16)), silu_mul=True, add=True)
