"""q, k and v straight from the product: rotated q in out, k and v in their slots of the cache, nothing anywhere else."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from gemm_cases import TOLERANCE, argument, make_runtime  # noqa: E402

from zhilight.kernels import gemm_sm90  # noqa: E402
from zhilight.kernels.gemm import heads_plan  # noqa: E402
from zhilight.kernels.gemm_sm90_rotary import Heads  # noqa: E402
from zhilight.kernels.gemm_sm90_tiles import Tile  # noqa: E402

POISON = 12288.0  # exact in both types


@pytest.fixture(scope="module")
def runtime():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("gemm_sm90 needs a Hopper GPU")
    return make_runtime()


class Case:
    """Random tokens at random positions, one in nine of which has no slot."""

    def __init__(self, tokens: int, k: int, heads: Heads, dtype=torch.bfloat16, bias: bool = False, seed: int = 0):
        torch.manual_seed(seed)
        self.heads, half, count = heads, heads.head_dim // 2, heads.num_heads + 2 * heads.num_kv_heads
        width = count * heads.head_dim
        self.x = torch.randn(tokens, k, device="cuda").to(dtype)
        self.weight = (torch.randn(width, k, device="cuda") * k**-0.5).to(dtype)
        self.bias = torch.randn(width, device="cuda").to(dtype) if bias else None
        self.positions = torch.randint(0, 500, (tokens,), device="cuda", dtype=torch.int32)
        angles = torch.rand(500, half, device="cuda") * 6 - 3
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        self.blocks = tokens // heads.block_size + 3
        slots = torch.randperm(self.blocks * heads.block_size, device="cuda")[:tokens]
        self.slots = torch.where(torch.arange(tokens, device="cuda") % 9 == 4, -1, slots)
        self.out = torch.full((tokens, width), POISON, dtype=dtype, device="cuda")
        self.cache = torch.full((self.blocks, 2, heads.num_kv_heads, heads.block_size, heads.head_dim), POISON, dtype=dtype,
                                device="cuda")
        y = self.x.double() @ self.weight.double().T
        if bias:
            y += self.bias.double()
        y = y.view(tokens, count, 2, half)
        cos, sin = (table[self.positions.long()].double()[:, None] for table in self.cos_sin.split(half, 1))
        turned = heads.num_heads + heads.num_kv_heads
        low, high = y[:, :turned, 0].clone(), y[:, :turned, 1].clone()
        y[:, :turned, 0], y[:, :turned, 1] = low * cos - high * sin, high * cos + low * sin
        self.expected = y.reshape(tokens, count, heads.head_dim)

    def arguments(self) -> list:
        return [argument(a) for a in (self.x, self.weight, self.out, self.bias)]

    def layouts(self) -> list:
        return [None if a is None else a.layout for a in self.arguments()]

    def run(self, runtime, queue) -> None:
        queue(runtime, *self.arguments(), *(a.data_ptr() for a in (self.positions, self.slots, self.cos_sin, self.cache)))
        torch.cuda.synchronize()

    def check(self) -> None:
        heads, limit = self.heads, TOLERANCE[self.out.dtype]
        q_width = heads.num_heads * heads.head_dim
        q = self.out[:, :q_width].double().view(-1, heads.num_heads, heads.head_dim)
        assert self._error(q, self.expected[:, : heads.num_heads]) < limit
        assert bool((self.out[:, q_width:] == POISON).all()), "k and v are the cache's alone"
        kept = self.slots >= 0
        block, offset = self.slots[kept] // heads.block_size, self.slots[kept] % heads.block_size
        for kind in range(2):
            first = heads.num_heads + kind * heads.num_kv_heads
            written = self.cache[block, kind, :, offset]
            assert self._error(written.double(), self.expected[kept, first : first + heads.num_kv_heads]) < limit
            self.cache[block, kind, :, offset] = POISON
        assert bool((self.cache == POISON).all()), "wrote to slots that nobody has"

    @staticmethod
    def _error(found, wanted) -> float:
        return ((found - wanted).norm() / wanted.norm()).item()


LLAMA, QWEN, MINICPM, ODD = Heads(32, 8, 128, 64), Heads(28, 4, 128, 16), Heads(12, 12, 64, 64), Heads(5, 1, 64, 32)


@pytest.mark.parametrize(("heads", "tile"), [
    (LLAMA, Tile(256)), (LLAMA, Tile(256, 2)), (LLAMA, Tile(128)), (QWEN, Tile(256)), (QWEN, Tile(128, share_x=2)),
    (MINICPM, Tile(256)), (MINICPM, Tile(192)), (MINICPM, Tile(64)), (ODD, Tile(64)), (ODD, Tile(64, 2))], ids=str)
@pytest.mark.parametrize("tokens", [130, 391, 1024])
def test_tiles_and_heads(runtime, heads, tile, tokens):
    for overlap in (False, True):
        case = Case(tokens, 328, heads, seed=tokens)
        case.run(runtime, gemm_sm90.plan(*case.layouts(), False, overlap, 1.0, tile, False, runtime.multiprocessors, heads))
        case.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bias_and_dtypes(runtime, dtype):
    case = Case(300, 520, QWEN, dtype, bias=True)
    case.run(runtime, gemm_sm90.plan(*case.layouts(), False, True, 1.0, Tile(256), False, runtime.multiprocessors, QWEN))
    case.check()


def test_many_tiles_a_block_as_the_engine_chooses_them(runtime):
    case = Case(8448, 4096, LLAMA)
    queue = heads_plan(*case.layouts(), (argument(case.positions).dtype, argument(case.slots).dtype),
                       argument(case.cos_sin).layout, argument(case.cache).layout, 32, 8, True, runtime.capability,
                       runtime.multiprocessors)
    assert queue is not None
    case.run(runtime, queue)
    case.check()
