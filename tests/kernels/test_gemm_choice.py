"""How the dense GEMM is cut and which kernel it goes to: host arithmetic, any shape, no GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zhilight.kernels import gemm_sm80, gemm_small, gemm_swapped
from zhilight.kernels.gemm import choose_kernel

tokens = st.integers(1, 4096)
columns = st.integers(1, 20000).map(lambda n: 8 * n)
multiprocessors = st.sampled_from([46, 58, 72, 84, 108, 132, 142])
capabilities = st.sampled_from([(8, 0, ""), (8, 6, ""), (8, 9, ""), (9, 0, "a")])
SHARED_LIMIT = {(8, 0, ""): 166912, (8, 6, ""): 101376, (8, 9, ""): 101376, (9, 0, "a"): 232448}


@given(st.integers(1, gemm_small.MAX_TOKENS), columns, st.booleans(), multiprocessors, capabilities)
def test_small_plan_covers_every_row_once_in_one_wave(m, n, silu_mul, sms, capability):
    plan = gemm_small.plan(m, n, silu_mul, sms, capability)
    assert plan.grid <= sms
    assert (plan.grid - 1) * plan.rows < n <= plan.grid * plan.rows
    assert not (silu_mul and plan.rows % 2)
    assert 8 * plan.token_tiles >= m
    assert 8 * plan.stages * 16 * plan.k_tile * 2 + 8 * 2 * 640 <= SHARED_LIMIT[capability]


@given(st.integers(1, gemm_swapped.MAX_TOKENS), columns, st.integers(1, 4000).map(lambda k: 8 * k), multiprocessors)
def test_swapped_shape_fits(m, n, k, sms):
    shape = gemm_swapped.choose_shape(m, n, k, sms)
    assert shape.rows % 8 == 0 and 8 <= shape.rows <= 128
    assert shape.split <= 2
    steps = -(-k // (gemm_swapped.STEP * shape.steps_a_stage))
    assert shape.split == 1 or steps >= shape.split
    ring = shape.stages * shape.steps_a_stage * (shape.rows + gemm_swapped.tokens_of(m)) * 128
    assert ring <= 110 << 10


@given(tokens, columns, st.integers(1, 4000).map(lambda k: 8 * k), multiprocessors)
def test_sm80_split_leaves_work_for_every_part(m, n, k, sms):
    tile, split = gemm_sm80.choose_tile(m, n, k, sms)
    assert split == 1 or -(-k // tile.step) // split >= 8
    tiles = -(-m // tile.rows) * -(-n // tile.columns)
    assert split == 1 or tiles * split <= sms * tile.min_blocks


@given(tokens, columns, capabilities, st.booleans(), st.booleans(), st.booleans())
def test_the_chosen_kernel_can_do_it(m, n, capability, silu_mul, wide, aligned):
    kernel = choose_kernel(m, n, capability, silu_mul=silu_mul, wide=wide, aligned=aligned)
    if kernel == "gemm_small":
        assert m <= gemm_small.MAX_TOKENS
    elif kernel == "gemm_swapped":
        assert m <= gemm_swapped.MAX_TOKENS and capability[0] == 9 and aligned
    elif kernel == "gemm_sm90":
        assert capability[0] == 9 and aligned and not (silu_mul and (wide or n % 16))
    else:
        assert kernel == "gemm_sm80"
