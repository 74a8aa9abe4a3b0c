"""Decode attention against float32 attention: any mix of lengths over any split, groups, pages, windows, graph padding."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.attention_cases import Case, float16, torch
from zhilight.errors import ShapeError
from zhilight.kernels.attention_decode import attention_decode


def make(contexts, **options) -> Case:
    return Case(list(contexts), [1] * len(contexts), **options)


def run(runtime, case: Case, **options) -> None:
    attention_decode(runtime, num_sequences=len(case.contexts), max_context_len=8192, **case.arguments(), **options)
    runtime.stream.synchronize()


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes(runtime, head_dim):
    case = make([1, 2, 63, 64, 65, 127, 300, 1025], head_dim=head_dim, seed=head_dim)
    run(runtime, case)
    case.check()


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_block_sizes(runtime, block_size):
    case = make([15, 16, 17, 31, 33, 100, 129, 2100, 4099], block_size=block_size, seed=block_size)
    run(runtime, case)
    case.check()


GROUPS = [*((group, 128) for group in (1, 2, 3, 4, 5, 7, 8, 9, 16)), (16, 80), (8, 256), (12, 64), (1, 192)]


@pytest.mark.parametrize(("group", "head_dim"), GROUPS)
def test_groups(runtime, group, head_dim):
    case = make([700, 65, 8, 1500], num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, seed=group)
    run(runtime, case)
    case.check()


@pytest.mark.parametrize(("sequences", "low", "high"), [(1, 5000, 5001), (1, 100, 101), (3, 1, 3000), (33, 1, 2000),
                                                        (100, 1, 300), (257, 1, 700), (600, 1, 100)])
def test_uneven_batches(runtime, sequences, low, high):
    rng = np.random.default_rng(sequences)
    case = make(rng.integers(low, high, sequences).tolist(), seed=sequences)
    run(runtime, case)
    case.check()


@pytest.mark.parametrize("contexts", [[0], [0, 0, 0], [0, 70, 0, 0, 1200, 0], [3000] + [0] * 40])
def test_padding_rows_become_zeros(runtime, contexts):
    case = make(contexts, seed=2)
    run(runtime, case)
    if any(contexts):
        case.check()
    torch.cuda.synchronize()
    padding = torch.tensor([c == 0 for c in contexts], device="cuda")
    assert (case.out[padding] == 0).all()


@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (50, None), (128, None), (4096, None), (None, 20.0), (97, 5.0)])
def test_window_and_soft_cap(runtime, window, soft_cap):
    case = make([700, 129, 64, 1, 5000], window=window, soft_cap=soft_cap, seed=3)
    run(runtime, case)
    case.check()


def test_float16_with_strided_rows(runtime):
    case = make([300, 70, 2000], dtype=float16, extra_columns=24, seed=4)
    run(runtime, case)
    case.check()


def test_equal_bits_every_time_and_counters_return_to_zero(runtime):
    case = make([5000, 1, 333, 900], num_heads=32, num_kv_heads=8, seed=5)
    run(runtime, case)
    first = case.out.clone()
    for _ in range(20):
        case.out.fill_(torch.nan)
        run(runtime, case)
        torch.cuda.synchronize()
        assert torch.equal(first, case.out)
    case.check()


def test_dependent_launch(runtime):
    if runtime.capability < (9, 0):
        pytest.skip("programmatic dependent launch needs capability 9.0")
    case = make([500, 1, 3000, 0, 64], num_heads=32, num_kv_heads=8, seed=9)
    for _ in range(5):
        case.out.fill_(torch.nan)
        torch.cuda.synchronize()
        for _ in range(3):  # each launch may start under the one before it
            attention_decode(runtime, num_sequences=5, max_context_len=8192, **case.arguments(), overlap=True)
        runtime.stream.synchronize()
        case.check()


def test_a_row_does_not_depend_on_its_neighbours_beyond_rounding(runtime):
    alone, among = make([777], seed=6), make([777, 3000, 5, 1999], seed=6)
    among.qkv[:1] = alone.qkv
    count = -(-777 // 64)
    among.kv_cache[torch.from_numpy(among.tables[0, :count]).cuda().long()] = (
        alone.kv_cache[torch.from_numpy(alone.tables[0, :count]).cuda().long()])
    run(runtime, alone)
    run(runtime, among)
    torch.cuda.synchronize()
    assert (alone.out[0].float() - among.out[0].float()).abs().max() < 0.02


def test_block_ids_past_2_to_the_31_elements(runtime):
    case = make([150, 90], num_heads=32, num_kv_heads=8, seed=8)
    count = case.kv_cache.shape[0]
    blocks = (1 << 31) // (2 * 8 * 64 * 128) + 10
    big = torch.empty(blocks, *case.kv_cache.shape[1:], dtype=torch.bfloat16, device="cuda")
    big[-count:] = case.kv_cache
    case.kv_cache = big
    case._device[0] += blocks - count
    run(runtime, case)
    case.check()


def test_errors_name_the_argument(runtime):
    case = make([10], num_heads=34, num_kv_heads=2)
    with pytest.raises(ShapeError, match="num_heads 34"):
        run(runtime, case)
    case = make([10])
    with pytest.raises(ShapeError, match="num_sequences is 2"):
        attention_decode(runtime, num_sequences=2, max_context_len=10, **case.arguments())
