"""The emulator itself: what it must refuse, and that its integers have the types that numba gives them."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from emulation import Emulator
from emulation_names import _cuda, names
from emulation_threads import Block
from emulation_values import I32, I64, KINDS, U32, U64
from numba.cuda import types
from numba.cuda.descriptor import cuda_target

cuda = _cuda()


def run(function, threads: int = 64) -> None:
    """Run function(thread, shared array of 64 uint32) in each thread of a block."""
    def kernel() -> None:
        function(int(cuda.threadIdx.x), cuda.shared.array(64, types.uint32))

    Block((0, 0, 0), threads, 0).run(kernel, [])


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.and_,
                                       operator.or_, operator.xor, operator.lshift, operator.rshift])
def test_integers_have_numba_s_types(operation):
    typing = cuda_target.typing_context
    typing.refresh()
    numba_types = {I32: types.int32, U32: types.uint32, I64: types.int64, U64: types.uint64, int: types.int64}
    for left in (I32, U32, I64, U64):
        for right in (I32, U32, I64, U64, int):
            operands = numba_types[left], numba_types[right]
            want = typing.resolve_function_type(operation, operands, {}).return_type
            assert KINDS[str(want)] is type(operation(left(7), right(3))), (left, right)


def test_integers_wrap():
    assert U32(-1) == 2**32 - 1 and I32(2**31) == -(2**31) and I32(2.9) == 2
    assert U32(2**32 - 1) + U32(1) == 2**32 and U64(2**64 - 1) + U64(1) == 0 and U64(0) - U64(1) == 2**64 - 1
    assert I64(2**63 - 1) + I64(1) == -(2**63) and U64(1) << U64(63) == 2**63 and I32(-8) >> I32(1) == -4


def test_floats_round():
    found = names(Emulator().memory)
    assert found["f32"](1) + found["f32"](2.0**-25) == 1
    assert found["reciprocal_approx"](np.float32(2.0**127)) == 0  # subnormal
    with np.errstate(over="ignore"):
        assert found["exp2_approx"](np.float32(128)) == np.inf


def test_accesses_outside_or_misaligned_are_refused():
    memory = Emulator().memory
    place = memory.place(bytes(24))
    assert memory.read(place + 16, 8, noted=False) == bytes(8)
    for address, nbytes in ((place + 16, 16), (place + 4, 8), (place - 4, 4), (0, 4)):
        with pytest.raises(AssertionError, match=r"in no array|not aligned"):
            memory.read(address, nbytes, noted=False)


@pytest.mark.parametrize("barrier,kind", [(lambda: None, "none"), (cuda.syncwarp, "warp"), (cuda.syncthreads, "block")])
@pytest.mark.parametrize("reader", [1, 32])
def test_races_are_refused(barrier, kind, reader):
    """Thread 0 writes what another thread of its warp, or of the next, reads: ahead of it in time, or after."""
    def write_then_read(thread, shared):
        if thread == 0:
            shared[5] = 1
        barrier()
        if thread == reader:
            assert shared[5] == 1

    def read_then_write(thread, shared):
        if thread == 0:
            assert shared[5] == 0xFFFFFFFF
        barrier()
        if thread == reader:
            shared[5] = 2

    for function in (write_then_read, read_then_write):
        if kind == "block" or (kind == "warp" and reader < 32):
            run(function)
        else:
            with pytest.raises(AssertionError, match="race"):
                run(function)


def test_barriers_that_do_not_meet_are_refused():
    with pytest.raises(AssertionError, match="wait for others"):
        run(lambda thread, shared: cuda.syncthreads() if thread != 3 else None)
    with pytest.raises(AssertionError, match="meets"):
        run(lambda thread, shared: cuda.syncwarp() if thread % 2 else cuda.shfl_xor_sync(0xFFFFFFFF, thread, 1))
    with pytest.raises(IndexError):
        run(lambda thread, shared: [][thread])
