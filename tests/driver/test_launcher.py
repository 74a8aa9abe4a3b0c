"""What a launch hands to the driver, read back from the buffers: no GPU, and no kernel is compiled."""

import copy
import ctypes
import pickle
import struct
from types import SimpleNamespace

import pytest
from numba.cuda import types

from zhilight.driver.compiler import LaunchRecorder, Pointer, TensorMap, kernel
from zhilight.driver.dtype import BY_NAME, bfloat16, float32, int32
from zhilight.driver.launcher import BoundLaunch, Launcher
from zhilight.driver.tensor import Tensor
from zhilight.errors import ShapeError

STREAM = SimpleNamespace(handle=0x7700)


@kernel(threads=96, shared=640, cluster=2)
def example(table: TensorMap, x: Pointer(bfloat16), count: types.int32, scale: types.float32, total: types.int64):
    pass


class Calls(list):
    """What cuLaunchKernelEx was called with: (grid, block, shared bytes, stream, number of attributes, arguments) each time."""

    def function(self) -> object:
        """A C function in its place, without argtypes as the driver's is."""
        pointer = ctypes.c_void_p
        self.callback = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(self.note)
        return ctypes.PYFUNCTYPE(ctypes.c_int)(ctypes.cast(self.callback, pointer).value)

    def note(self, config: int, function: int | None, parameters: int, extra: None) -> int:
        assert function == 0x1234567890 and extra is None
        words = struct.unpack("@7IPPI", ctypes.string_at(config, 52))
        addresses = (ctypes.c_void_p * 5).from_address(parameters)
        values = [struct.unpack("@" + code, ctypes.string_at(address, struct.calcsize(code)))[0]
                  for code, address in zip("QQifq", addresses, strict=True)]
        self.append((words[:3], words[3:6], words[6], words[7], words[9], values))
        return 0


@pytest.fixture
def calls():
    return Calls()


@pytest.fixture
def launch(calls):
    made = Launcher.__new__(Launcher)
    made.kernel, made._function, made._launch = example, ctypes.c_void_p(0x1234567890), calls.function()
    made._prepare_arguments()
    made._prepare_config()
    return made


def test_tensors_and_addresses_are_packed_alike(launch, calls):
    x = Tensor(0x123456789000, (4, 8), bfloat16)
    launch(5, (0xABC0, x, -3, 0.5, 1 << 40), STREAM, False)
    launch((5, 1, 1), (0xABC0, x.address, -3, 0.5, 1 << 40), STREAM, False)
    assert calls[0] == calls[1] == ((5, 1, 1), (96, 1, 1), 640, 0x7700, 1, [0xABC0, x.address, -3, 0.5, 1 << 40])


def test_overlap_is_one_attribute_more_and_a_grid_may_have_three_sizes(launch, calls):
    launch((5, 6, 7), (0, 0, 0, 0.0, 0), STREAM, True)
    assert calls[0][0] == (5, 6, 7) and calls[0][4] == 2


@pytest.mark.parametrize(("arguments", "message"), [
    ((0, Tensor(64, (4,), float32), 1, 1.0, 1), "x is float32, the kernel reads bfloat16"),
    ((0, Tensor(64, (4,), bfloat16), 1, 1.0), r"takes \['table', 'x', 'count', 'scale', 'total'\], got"),
    ((0, 64, 1 << 31, 1.0, 1), "takes .*, got"),
    ((0, 64, Tensor(64, (1,), int32), 1.0, 1), "takes .*, got"),
    ((), "takes .*, got"),
])
def test_arguments_of_the_wrong_kind_are_named(launch, calls, arguments, message):
    with pytest.raises(ShapeError, match=message):
        launch(1, arguments, STREAM, False)
    assert not calls


def test_a_bound_launch_packs_what_a_launch_does(launch, calls, monkeypatch):
    monkeypatch.setattr(example, "_launcher", launch)
    other = SimpleNamespace(handle=0x8800)
    first = BoundLaunch(example, (5, 6, 7), (-3, 0.5, 1 << 40), True)
    second = BoundLaunch(example, 9, (4, 1.5, 2), False)
    for stream in (STREAM, other, STREAM):
        first(stream, 0xABC0, 64)
        second(stream, 0xDEF0, 128)
        launch((5, 6, 7), (0xABC0, 64, -3, 0.5, 1 << 40), stream, True)
        launch(9, (0xDEF0, 128, 4, 1.5, 2), stream, False)
    first(STREAM, 0, 1 << 63)
    assert calls[0:12:4] == calls[2:12:4] and calls[1:12:4] == calls[3:12:4]
    assert calls[12][5] == [0, 1 << 63, -3, 0.5, 1 << 40]


def test_a_bound_launch_is_recorded_without_loading(monkeypatch):
    monkeypatch.setattr(example, "load", lambda: pytest.fail("loaded"))
    recorder = LaunchRecorder()
    BoundLaunch(example, 1, (4, 1.5, 2), False)(recorder, 0, 0)
    assert list(recorder.kernels) == [example]


def test_numbers_that_do_not_fit_a_bound_launch_are_named(launch, monkeypatch):
    monkeypatch.setattr(example, "_launcher", launch)
    with pytest.raises(ShapeError, match=r"takes .*, got"):
        BoundLaunch(example, 1, (1 << 31, 1.5, 2), False)(STREAM, 0, 0)


def test_there_is_one_object_of_each_element_type():
    """Kernels are named by their dtypes in the processes that compile them."""
    for dtype in BY_NAME.values():
        assert pickle.loads(pickle.dumps(dtype)) is copy.deepcopy(dtype) is dtype
