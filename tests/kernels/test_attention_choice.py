"""What the host side of attention chooses and refuses, without a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from zhilight.driver.dtype import DType, bfloat16, float16, float32, int32
from zhilight.driver.tensor import Tensor
from zhilight.errors import ShapeError
from zhilight.kernels import attention_prefill_sm80 as sm80
from zhilight.kernels import attention_prefill_sm90 as sm90
from zhilight.kernels.attention_decode import FEW_PAIRS, tiling
from zhilight.kernels.attention_decode_kernel import attention_decode_kernel
from zhilight.kernels.attention_prefill import BLOCK_SIZES, HEAD_DIMS, Chunks, check_arguments

ADA, AMPERE, HOPPER = 100 << 10, 164 << 10, 228 << 10


@pytest.mark.parametrize("limit", [ADA, AMPERE, HOPPER])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_blocks_fit_the_multiprocessor(head_dim, limit):
    for group in range(1, 17):
        for pairs in (1, FEW_PAIRS - 1, FEW_PAIRS, 4096):
            warps, stages, passes, blocks = tiling(head_dim, group, pairs, limit)
            kernel = attention_decode_kernel(bfloat16, head_dim, 64, group, False, False, False, warps, stages, passes, blocks)
            assert blocks * (kernel.shared + 1024) <= limit
            assert blocks * kernel.threads * 255 <= 65536 or kernel.min_blocks == 1
            assert stages >= 2, "one stage leaves the memory idle while it is read"
            assert head_dim // passes % 8 == 0


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefill_blocks_fit_the_smallest_device_they_run_on(head_dim):
    for block_size in BLOCK_SIZES:
        for capped in (False, True):
            small = sm80.prefill_sm80_kernel(bfloat16, head_dim, block_size, False, capped, False,
                                             *sm80.tiling(head_dim, block_size, capped))
            assert small.shared + 1024 <= ADA
        large = sm90.prefill_sm90_kernel(bfloat16, head_dim, block_size, False, False, False, *sm90.TILES[head_dim])
        assert large.shared + 1024 <= HOPPER


def test_prefill_takes_fewer_keys_only_where_the_kernel_would_spill():
    fewer = {(head_dim, block_size, capped) for head_dim in HEAD_DIMS for block_size in BLOCK_SIZES for capped in (False, True)
             if sm80.tiling(head_dim, block_size, capped) != sm80.TILES[head_dim]}
    assert fewer == {(128, 128, True), (192, 128, True), *((96, block_size, True) for block_size in BLOCK_SIZES)}
    assert sm80.tiling(128, 128, True) == (2, 32, 4)
    assert sm80.tiling(192, 128, True) == (1, 32, 4)


def test_a_prefill_tile_must_come_out_even():
    with pytest.raises(ShapeError, match="32 keys"):
        sm80.prefill_sm80_kernel(bfloat16, 80, 64, False, False, False, 2, 32, 4)


def array(shape: tuple[int, ...], dtype: DType = bfloat16, address: int = 4096,
          given_strides: tuple[int, ...] | None = None) -> Tensor:
    """Of device memory that is never touched."""
    return Tensor(address, shape, dtype, strides=given_strides)


GOOD = {"qkv": array((5, 6 * 128)), "kv_cache": array((9, 2, 1, 64, 128)), "block_tables": array((2, 4), int32),
        "out": array((5, 4 * 128)), "num_heads": 4, "num_kv_heads": 1, "window": None, "soft_cap": None}


def test_good_arguments_give_head_and_block_size():
    assert check_arguments(**GOOD) == (128, 64)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("kv_cache", array((9, 2, 2, 64, 128)), r"kv_cache is \[9, 2, 2, 64, 128\]; expected \[blocks, 2, 1"),
    ("kv_cache", array((9, 2, 1, 64, 72)), "head size 72"),
    ("kv_cache", array((9, 2, 1, 48, 128)), "block size 48"),
    ("kv_cache", array((9, 2, 1, 64, 128), float16), "kv_cache float16"),
    ("kv_cache", array((9, 2, 1, 64, 128), given_strides=(32768, 8192, 8192, 128, 1)), "must be contiguous"),
    ("qkv", array((5, 6 * 128), float32), "qkv is float32"),
    ("qkv", array((5, 3 * 128)), "qkv is .* at least 512"),
    ("qkv", array((5, 6 * 128), given_strides=(771, 1)), "multiple of 16 bytes"),
    ("out", array((5, 4 * 128), address=4098), "out must start at a multiple of 16 bytes"),
    ("num_heads", 17, "num_heads 17"),
    ("block_tables", array((2, 4), float32), "block_tables must be int32"),
    ("window", 0, "window is 0"),
    ("soft_cap", -1.0, "soft_cap is -1.0"),
])
def test_bad_arguments_are_named(name, value, message):
    with pytest.raises(ShapeError, match=message):
        check_arguments(**(GOOD | {name: value}))


@pytest.mark.parametrize(("starts", "contexts", "message"), [
    ([0, 2], [9, 9], "host_query_start has 2 entries"),
    ([0, 2, 5], [9, 2], "more queries than context"),
])
def test_host_copies_must_agree(starts, contexts, message):
    with pytest.raises(ShapeError, match=message):
        Chunks(np.array(starts), np.array(contexts))


def test_tiles_are_of_one_sequence_each():
    """The first sequence decodes; the others have 1, 64 and 65 queries."""
    chunks = Chunks(np.array([0, 1, 2, 66, 131]), np.array([9, 9, 64, 100]), first=1)
    assert (chunks.first, chunks.count) == (1, 3)
    assert [chunks.tiles(rows) for rows in (64, 128, 64)] == [4, 3, 4]
