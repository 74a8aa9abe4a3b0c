"""Views against NumPy's, copies through the fake driver, and the two exchange protocols."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zhilight.driver import dlpack
from zhilight.driver.device import check
from zhilight.driver.dtype import BY_NAME, bfloat16, float32, fp8_e4m3, int4, int8, int32, uint8
from zhilight.driver.memory import MemoryPool
from zhilight.driver.tensor import Tensor
from zhilight.errors import ShapeError

BASE = 1 << 40


def matches(tensor: Tensor, array: np.ndarray, base: np.ndarray) -> bool:
    """Whether the tensor at BASE shows the bytes that `array`, a view of `base`, shows."""
    if tensor.shape != array.shape:
        return False
    if array.size == 0:
        return True
    same_start = tensor.address - BASE == array.ctypes.data - base.ctypes.data
    strides = [stride * array.itemsize for stride in tensor.strides]
    return same_start and all(mine == theirs for mine, theirs, size in zip(strides, array.strides, array.shape, strict=True)
                              if size != 1)


def numpy_view(array: np.ndarray, key: tuple) -> np.ndarray:
    """array[key], as an array even where every axis is indexed away."""
    return array[key if ... in key else (*key, ...)]


shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def shape_and_key(draw):
    shape = draw(shapes)
    key = []
    for size in shape[:draw(st.integers(0, len(shape)))]:
        if size and draw(st.booleans()):
            key.append(draw(st.integers(-size, size - 1)))
        else:
            bound = st.none() | st.integers(-7, 7)
            key.append(slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, 3))))
    if draw(st.booleans()):
        key.insert(draw(st.integers(0, len(key))), ...)
        after = len(key) - key.index(...) - 1  # keys behind the ellipsis meet other axes: keep integers in range
        for position in range(after):
            axis = len(shape) - after + position
            if isinstance(key[-after + position], int) and not -shape[axis] <= key[-after + position] < shape[axis]:
                key[-after + position] = slice(None)
    return shape, tuple(key)


@given(shape_and_key())
def test_slicing_equals_numpy(case):
    shape, key = case
    array = np.zeros(shape, np.float32)
    tensor = Tensor(BASE, shape, float32)
    assert matches(tensor[key], numpy_view(array, key), array)
    if len(key) == 1 and key[0] is not ...:
        assert matches(tensor[key[0]], numpy_view(array, key), array)


@given(shape_and_key(), st.data())
def test_reshape_equals_numpy_without_a_copy(case, data):
    shape, key = case
    base = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    array, tensor = numpy_view(base, key), Tensor(BASE, shape, float32)[key]
    if array.ndim >= 2 and data.draw(st.booleans()):
        array, tensor = array.swapaxes(0, -1), tensor.transpose(0, -1)
    factors = data.draw(st.permutations([*array.shape, 1]))
    cut = data.draw(st.integers(0, len(factors)))
    wanted = (*factors[:cut], int(np.prod(factors[cut:], dtype=int)))
    expected = array.reshape(wanted)
    if array.size == 0 or np.shares_memory(expected, base):
        assert matches(tensor.reshape(wanted), expected, base)
    elif array.size > 1:
        with pytest.raises(ShapeError, match="needs a copy"):
            tensor.reshape(wanted)


def test_contiguous_and_sizes():
    tensor = Tensor(BASE, (4, 6), bfloat16)
    assert tensor.contiguous and tensor.nbytes == 48 and tensor.numel == 24 and len(tensor) == 4
    assert tensor[1:3].contiguous and not tensor[:, :3].contiguous
    assert tensor[:1, :3].contiguous  # one row: the gap behind it does not matter
    assert tensor.reshape(2, -1).shape == (2, 12)
    assert tensor[:, 2:4].reshape(4, 2, 1).strides[:2] == (6, 1)
    assert Tensor(BASE, (3, 5), int4).nbytes == 8
    assert [row.address for row in tensor] == [BASE + 12 * row for row in range(4)]


@pytest.mark.parametrize(("action", "text"), [
    (lambda t: t[4], "index 4 is out of range for axis 0"),
    (lambda t: t[0, 0, 0], "3 indices"),
    (lambda t: t[..., ...], "axes"),
    (lambda t: t[::-1], "step is -1"),
    (lambda t: t[None], "not by NoneType"),
    (lambda t: t[1.5], "not by float"),
    (lambda t: t.reshape(5, 5), "24 elements"),
    (lambda t: t.reshape(-1, -1), "24 elements"),
    (lambda t: t.reshape(-1, 7), "24 elements"),
    (lambda t: t[:, ::2].view(int32), "contiguous last axis"),
    (lambda t: t[:, :3].view(int32), "not multiples of 32 bits"),
    (lambda t: t.transpose(0, 2), "axis 2 is out of range"),
])
def test_wrong_views_are_shape_errors(action, text):
    with pytest.raises(ShapeError, match=text):
        action(Tensor(BASE, (4, 6), bfloat16))


def test_view_changes_the_last_axis():
    tensor = Tensor(BASE, (4, 6), bfloat16)
    assert tensor.view(int32).shape == (4, 3) and tensor.view(uint8).shape == (4, 12)
    assert tensor[1:, 2:4].view(uint8).strides == (12, 1)
    packed = Tensor(BASE, (2, 16), int4)
    assert packed.view(uint8).shape == (2, 8) and packed.view(uint8).view(int4).shape == (2, 16)
    assert packed[:, 4:].address == BASE + 2
    with pytest.raises(ShapeError, match="inside a byte"):
        packed[:, 3:]


def test_numpy_does_not_read_device_memory_by_accident():
    with pytest.raises(TypeError, match="to_host"):
        np.asarray(Tensor(BASE, (4,), float32))


# ---- copies -----------------------------------------------------------------------------------------------------


def allocate(fake, shape, dtype) -> Tensor:
    address = int(check(fake.cuMemAlloc(max(1, dtype.nbytes(int(np.prod(shape))))), "cuMemAlloc"))
    return Tensor(address, shape, dtype)


@pytest.mark.parametrize("dtype", [d for d in BY_NAME.values() if d is not int4], ids=repr)
def test_round_trip_of_every_dtype(fake, fake_stream, dtype):
    source = np.random.default_rng(3).integers(0, 100, (3, 5)).astype(dtype.numpy)
    tensor = allocate(fake, (3, 5), dtype)
    tensor.copy_from_host(source, fake_stream)
    back = tensor.to_host(fake_stream)
    assert back.dtype == source.dtype and back.tobytes() == source.tobytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fake only gathers allocations
@given(shape_and_key(), st.booleans())
def test_strided_copies_touch_the_view_and_nothing_else(fake, fake_stream, case, swap):
    shape, key = case
    tensor = allocate(fake, shape, int32)
    expected = np.full(shape, -1, np.int32)
    tensor.copy_from_host(expected, fake_stream)
    view, target = tensor[key], numpy_view(expected, key)
    if swap and view.ndim >= 2:
        view, target = view.transpose(0, -1), target.swapaxes(0, -1)
    source = np.arange(target.size, dtype=np.int32).reshape(target.shape)
    view.copy_from_host(source, fake_stream)
    target[...] = source
    np.testing.assert_array_equal(tensor.to_host(fake_stream), expected)
    np.testing.assert_array_equal(view.to_host(fake_stream), source)
    other = allocate(fake, view.shape, int32)
    other.copy_(view, fake_stream)
    np.testing.assert_array_equal(other.to_host(fake_stream), source)
    view.fill_zero(fake_stream)
    target[...] = 0
    np.testing.assert_array_equal(tensor.to_host(fake_stream), expected)


def test_packed_rows_travel_as_bytes(fake, fake_stream):
    tensor = allocate(fake, (3, 8), int4)
    source = np.arange(12, dtype=np.uint8).reshape(3, 4)
    tensor.copy_from_host(source, fake_stream)
    np.testing.assert_array_equal(tensor[1:, 2:6].to_host(fake_stream), source[1:, 1:3])
    with pytest.raises(ShapeError, match="whole bytes"):
        tensor[:, :3].to_host(fake_stream)


def test_copies_refuse_other_shapes_and_dtypes(fake, fake_stream):
    tensor = allocate(fake, (3, 5), float32)
    with pytest.raises(ShapeError, match=r"\[5, 3\] float32, the tensor wants \[3, 5\] float32"):
        tensor.copy_from_host(np.zeros((5, 3), np.float32), fake_stream)
    with pytest.raises(ShapeError, match="float64"):
        tensor.copy_from_host(np.zeros((3, 5)), fake_stream)
    with pytest.raises(ShapeError, match="C-contiguous"):
        tensor.copy_to_host(np.zeros((5, 3), np.float32).T, fake_stream)
    with pytest.raises(ShapeError, match="copy_"):
        tensor.copy_(allocate(fake, (3, 4), float32), fake_stream)


# ---- exchange protocols -----------------------------------------------------------------------------------------


def test_cuda_array_interface():
    tensor = Tensor(BASE, (4, 6), float32)
    assert tensor.__cuda_array_interface__ == {
        "shape": (4, 6), "typestr": "<f4", "data": (BASE, False), "version": 3, "strides": None, "stream": None}
    assert tensor[:, 2:4].__cuda_array_interface__["strides"] == (24, 4)
    for dtype in (bfloat16, fp8_e4m3, int4):
        with pytest.raises(ShapeError, match="DLPack"):
            _ = Tensor(BASE, (4, 6), dtype).__cuda_array_interface__


def test_dlpack_reads_numpys_capsule():
    array = np.arange(24, dtype=np.int8).reshape(4, 6)[:, 1:4]
    for managed in (dlpack.take(array.__dlpack__()), dlpack.take(array.__dlpack__(max_version=(1, 0)))):
        assert dlpack.describe(managed) == (array.ctypes.data, (4, 3), (6, 1), (0, 8), 0)
        dlpack.Adopted(managed)  # gives it back
    with pytest.raises(ShapeError, match="device type 1"):
        dlpack.adopt(array, 0)


class Producer:
    """An owner whose end can be observed."""


@pytest.mark.parametrize("versioned", [False, True])
def test_dlpack_keeps_the_memory_alive_until_the_last_view_is_gone(fake_stream, versioned):
    class OldProtocol:
        def __init__(self, tensor):
            self.__dlpack_device__ = tensor.__dlpack_device__
            self.tensor = tensor

        def __dlpack__(self, *, stream):
            return self.tensor.__dlpack__(stream=-1)

    class NewProtocol(OldProtocol):
        def __dlpack__(self, *, stream, max_version):
            return self.tensor.__dlpack__(stream=-1, max_version=max_version)

    owner = Producer()
    gone = weakref.ref(owner)
    tensor = Tensor(BASE, (4, 6), bfloat16, 1, owner)[1:, 2:5]
    adopted = Tensor.from_dlpack((NewProtocol if versioned else OldProtocol)(tensor), fake_stream)
    assert (adopted.address, adopted.shape, adopted.strides, adopted.device) == (tensor.address, (3, 3), (6, 1), 1)
    assert adopted.dtype is bfloat16
    view = adopted[1]
    del owner, tensor, adopted
    gc.collect()
    assert gone() is not None
    del view
    gc.collect()
    assert gone() is None


def test_an_unused_capsule_gives_the_tensor_back_and_a_used_one_is_refused():
    owner = Producer()
    gone = weakref.ref(owner)
    tensor = Tensor(BASE, (4,), float32, 0, owner)
    capsule = tensor.__dlpack__(stream=-1)
    del tensor, owner
    gc.collect()
    assert gone() is not None
    del capsule
    gc.collect()
    assert gone() is None
    capsule = Tensor(BASE, (4,), float32).__dlpack__(stream=-1)
    keeper = dlpack.Adopted(dlpack.take(capsule))
    with pytest.raises(ShapeError, match="unused DLPack capsule"):
        dlpack.take(capsule)
    del keeper


def test_dlpack_export_says_no_clearly():
    with pytest.raises(ShapeError, match="uint8"):
        Tensor(BASE, (4,), int4).__dlpack__(stream=-1)
    with pytest.raises(BufferError, match="copy"):
        Tensor(BASE, (4,), int8).__dlpack__(stream=-1, copy=True)
    with pytest.raises(BufferError, match="device"):
        Tensor(BASE, (4,), int8).__dlpack__(stream=-1, dl_device=(1, 0))


def test_an_independent_reader_understands_the_capsule():
    """cuda.core parses DLPack in its own compiled code."""
    utils = pytest.importorskip("cuda.core.utils")
    tensor = Tensor(BASE, (4, 6), float32)[:, 1:3]
    view = utils.StridedMemoryView.from_dlpack(tensor, stream_ptr=-1)
    assert (view.ptr, tuple(view.shape), tuple(view.strides)) == (BASE + 4, (4, 2), (6, 1))
    assert view.is_device_accessible and np.dtype(view.dtype) == np.float32


def test_copies_from_ordinary_memory_end_before_the_call_returns(fake_tensor_stream):
    """The driver may read the source after its own call has returned, and the source may be a temporary array."""
    tensor, stream, waits = fake_tensor_stream
    tensor.copy_from_host(np.zeros(tensor.shape, np.float32), stream)
    assert waits == ["wait"]
    tensor.copy_from_host(np.zeros(tensor.shape, np.float32), stream, wait=False)
    assert waits == ["wait"]


@pytest.fixture
def fake_tensor_stream(fake, fake_device):
    waits: list[str] = []
    with MemoryPool(fake_device, 64 << 20) as pool:
        stream = SimpleNamespace(handle=7, synchronize=lambda: waits.append("wait"))
        yield pool.allocate("weights", (4, 8), float32), stream, waits
