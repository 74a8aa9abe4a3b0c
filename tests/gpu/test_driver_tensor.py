"""Copies on real memory and exchange with a library that reads device arrays by itself (numba)."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from zhilight.driver.dtype import BY_NAME, bfloat16, float32, int4, int32
from zhilight.driver.tensor import Tensor


@pytest.mark.parametrize("dtype", BY_NAME.values(), ids=repr)
def test_round_trip(pool, stream, dtype):
    tensor = pool.allocate("weights", (33, 66), dtype)
    raw = np.random.default_rng(2).integers(0, 256, dtype.nbytes(33 * 66), np.uint8)
    source = raw.view(dtype.numpy).reshape(tensor.host_shape)
    tensor.copy_from_host(source, stream)
    assert tensor.to_host(stream).tobytes() == source.tobytes()


@pytest.mark.parametrize("cut", [
    np.s_[:, 3:9], np.s_[1:3], np.s_[:, ::2], np.s_[2], np.s_[..., 1], np.s_[1:, :2, 1:, 2:4], np.s_[3, 4, 5, 6]])
def test_strided_copies(pool, stream, cut):
    expected = np.random.default_rng(4).integers(0, 1000, (5, 9, 6, 7), np.int32)
    tensor = pool.allocate("weights", expected.shape, int32)
    tensor.copy_from_host(expected, stream)
    np.testing.assert_array_equal(tensor[cut].to_host(stream), expected[cut])
    fresh = np.random.default_rng(5).integers(0, 1000, expected[cut].shape, np.int32)
    tensor[cut].copy_from_host(fresh, stream)
    expected[cut] = fresh
    np.testing.assert_array_equal(tensor.to_host(stream), expected)
    other = pool.allocate("weights", fresh.shape, int32)
    other.copy_(tensor[cut], stream)
    np.testing.assert_array_equal(other.to_host(stream), fresh)
    tensor[cut].fill_zero(stream)
    expected[cut] = 0
    np.testing.assert_array_equal(tensor.to_host(stream), expected)


def test_numba_reads_and_writes_through_the_cuda_array_interface(pool, stream):
    from numba import cuda

    expected = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensor = pool.allocate("weights", (4, 6), float32)
    tensor.copy_from_host(expected, stream)
    stream.synchronize()
    np.testing.assert_array_equal(cuda.as_cuda_array(tensor[:, 2:5]).copy_to_host(), expected[:, 2:5])
    cuda.as_cuda_array(tensor).copy_to_device(expected * 2)
    cuda.synchronize()
    np.testing.assert_array_equal(tensor.to_host(stream), expected * 2)


def test_dlpack_round_trip_and_an_independent_reader(pool, stream):
    tensor = pool.allocate("weights", (4, 6), bfloat16)
    tensor.copy_from_host(np.arange(24, dtype=np.float32).astype(bfloat16.numpy).reshape(4, 6), stream)
    again = Tensor.from_dlpack(tensor[:, 1:4], stream)
    assert again.address == tensor.address + 2 and again.dtype is bfloat16 and again.strides == (6, 1)
    assert again.to_host(stream).astype(np.float32).tolist() == [[6 * r + c for c in (1, 2, 3)] for r in range(4)]
    del again
    gc.collect()
    utils = pytest.importorskip("cuda.core.utils")
    integers = pool.allocate("weights", (4, 6), int32)
    view = utils.StridedMemoryView.from_dlpack(integers[1:], stream_ptr=stream.handle)
    assert view.ptr == integers.address + 24 and tuple(view.shape) == (3, 6) and view.device_id == integers.device


def test_packed_rows(pool, stream):
    tensor = pool.allocate("weights", (3, 8), int4)
    source = np.arange(12, dtype=np.uint8).reshape(3, 4)
    tensor.copy_from_host(source, stream)
    np.testing.assert_array_equal(tensor[1:, 2:6].to_host(stream), source[1:, 1:3])


def test_a_source_may_be_freed_as_soon_as_the_copy_returns(pool, stream):
    """Temporary arrays, whose memory the next one takes at once, while the stream is busy: each tensor has its own values."""
    busy = pool.allocate("kv", (1 << 28,), int32)
    tensors = []
    for number in range(64):
        busy.fill_zero(stream)
        tensor = pool.allocate("weights", (1 << 16,), int32)
        tensor.copy_from_host(np.full(1 << 16, number, np.int32), stream)
        tensors.append(tensor)
    for number, tensor in enumerate(tensors):
        assert (tensor.to_host(stream) == number).all()
