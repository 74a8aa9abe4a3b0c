"""The dispatcher with dependent launch, as the engine calls it, on the products of the demo model (SmolLM2-135M)."""

from __future__ import annotations

import functools

import pytest

torch = pytest.importorskip("torch")

from gemm_cases import Case, assert_case, make_runtime  # noqa: E402

from zhilight.kernels.gemm import gemm  # noqa: E402

HIDDEN, INTERMEDIATE, VOCABULARY = 576, 1536, 49152


@pytest.fixture(scope="module")
def runtime():
    return make_runtime()


@pytest.mark.parametrize("m", [1, 8, 37, 64, 65, 242, 1000])
@pytest.mark.parametrize("product", ["qkv", "output", "gate_up", "down", "head"])
def test_products_of_the_demo_model(runtime, m, product):
    case = {
        "qkv": Case(m, 960, HIDDEN),
        "output": Case(m, HIDDEN, HIDDEN),
        "gate_up": Case(m, 2 * INTERMEDIATE, HIDDEN, silu_mul=True),
        "down": Case(m, HIDDEN, INTERMEDIATE),
        "head": Case(min(m, 256), VOCABULARY, HIDDEN, out_dtype=torch.float32),
    }[product]
    overlap = runtime.capability[0] >= 9
    assert_case(functools.partial(gemm, overlap=overlap), runtime, case, seed=m)


def test_a_runtime_after_another():
    """The maps of the second one lie where no map of the first was, whatever memory the allocator hands out again."""
    for m, seed in ((200, 1), (90, 2), (333, 3)):
        runtime = make_runtime()
        for n, k in ((576, 576), (1160, 520), (272, 136)):
            assert_case(gemm, runtime, Case(m + seed * n // 8, n, k), seed=seed)
        torch.cuda.synchronize()
        del runtime
