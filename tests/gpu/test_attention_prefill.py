"""Prefill attention against float32 attention: lengths around the tiles, cached prefixes, windows, caps, strides."""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.attention_cases import Case, bfloat16, float16, torch
from zhilight.errors import ShapeError
from zhilight.kernels import attention_prefill as module


def run(runtime, case: Case, launch: str = "auto", first: int = 0, overlap: bool = False) -> None:
    starts, contexts = case.query_start, np.asarray(case.contexts, np.int32)
    arguments = case.arguments()
    chunks = module.Chunks(starts, contexts, first)
    if launch == "auto":
        module.attention_prefill(runtime, query_start=case.device_query_start, chunks=chunks, **arguments)
    else:
        if launch == "sm90" and runtime.capability[0] != 9:
            pytest.skip("wgmma needs capability 9.0")
        kernel = module.launch_sm90 if launch == "sm90" else module.launch_sm80
        kernel(runtime, query_start=case.device_query_start, chunks=chunks, overlap=overlap, **arguments)
    runtime.stream.synchronize()


KERNELS = ["sm80", "sm90"]
ODD = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193, 257, 509]


@pytest.mark.parametrize("launch", KERNELS)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
def test_whole_prompts_of_odd_lengths(runtime, launch, head_dim):
    case = Case(ODD, ODD, head_dim=head_dim, seed=head_dim)
    run(runtime, case, launch)
    case.check()


@pytest.mark.parametrize("launch", KERNELS)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
def test_chunks_after_a_cached_prefix(runtime, launch, block_size):
    queries = [1, 33, 64, 128, 129, 300, 5]
    prefixes = [900, 31, 64, 0, 127, 1000, 129]
    case = Case([p + q for p, q in zip(prefixes, queries, strict=True)], queries, block_size=block_size, seed=block_size)
    run(runtime, case, launch)
    case.check()


@pytest.mark.parametrize("launch", KERNELS)
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (7, 1), (16, 1), (12, 3)])
def test_groups(runtime, launch, heads):
    case = Case([200, 77], [150, 77], num_heads=heads[0], num_kv_heads=heads[1], seed=sum(heads))
    run(runtime, case, launch)
    case.check()


@pytest.mark.parametrize("launch", KERNELS)
@pytest.mark.parametrize(("window", "soft_cap"), [(1, None), (50, None), (128, None), (1000, None), (None, 20.0), (97, 5.0)])
def test_window_and_soft_cap(runtime, launch, window, soft_cap):
    case = Case([700, 129, 64], [700, 100, 1], window=window, soft_cap=soft_cap, seed=3)
    run(runtime, case, launch)
    case.check()


@pytest.mark.parametrize("launch", KERNELS)
def test_float16_with_strided_rows(runtime, launch):
    case = Case([300, 70], [290, 70], dtype=float16, extra_columns=24, seed=4)
    run(runtime, case, launch)
    case.check()


@pytest.mark.parametrize("launch", KERNELS)
def test_sequences_before_first_are_left_alone(runtime, launch):
    case = Case([90, 1, 200], [1, 1, 170], seed=5)
    run(runtime, case, launch, first=2)
    torch.cuda.synchronize()
    assert case.out[:2].isnan().all()
    case.out[:2] = case.reference()[:2].to(case.out.dtype)
    case.check()


@pytest.mark.parametrize("launch", KERNELS)
def test_many_short_sequences(runtime, launch):
    rng = np.random.default_rng(6)
    queries = rng.integers(1, 40, 100).tolist()
    prefixes = rng.integers(0, 90, 100).tolist()
    case = Case([p + q for p, q in zip(prefixes, queries, strict=True)], queries, seed=6)
    run(runtime, case, launch)
    case.check()


@pytest.mark.parametrize("launch", KERNELS)
def test_many_long_sequences_with_dependent_launch(runtime, launch):
    case = Case([129, 700, 1025, 391, 64, 513, 1500, 200], [129, 700, 1000, 260, 64, 513, 1500, 1], num_heads=16, seed=9)
    for _ in range(3):
        case.out.fill_(torch.nan)
        run(runtime, case, launch, overlap=runtime.capability[0] >= 9)
        case.check()


@pytest.mark.parametrize("launch", KERNELS)
def test_equal_bits_every_time(runtime, launch):
    case = Case([1500, 333], [1500, 200], seed=7)
    run(runtime, case, launch)
    first = case.out.clone()
    for _ in range(10):
        case.out.fill_(torch.nan)
        run(runtime, case, launch)
        torch.cuda.synchronize()
        assert torch.equal(first, case.out)


@pytest.mark.parametrize("launch", KERNELS)
def test_block_ids_past_2_to_the_31_elements(runtime, launch):
    case = Case([150], [150], num_kv_heads=8, seed=8)
    blocks = (1 << 31) // (2 * 8 * 64 * 128) + 10
    big = torch.empty(blocks, *case.kv_cache.shape[1:], dtype=torch.bfloat16, device="cuda")
    big[-case.kv_cache.shape[0]:] = case.kv_cache
    case.kv_cache = big
    case._device[0] += blocks - 5  # the case has 5 blocks
    run(runtime, case, launch)
    case.check()


def test_errors_name_the_argument(runtime):
    case = Case([10], [10])
    case.kv_cache = case.kv_cache[..., :72].contiguous()
    with pytest.raises(ShapeError, match="head size 72"):
        run(runtime, case)
    case = Case([10], [10], window=0)
    with pytest.raises(ShapeError, match="window is 0"):
        run(runtime, case)
    case = Case([10], [10], dtype=bfloat16)
    case.contexts = [5]
    with pytest.raises(ShapeError, match="context_lens"):
        run(runtime, case)
