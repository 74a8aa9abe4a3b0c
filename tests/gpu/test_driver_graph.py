"""Capture, replay and update of graphs with a real kernel."""

# Annotations of kernels are read as objects: no `from __future__ import annotations` here.

import ctypes
import time

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types

from zhilight.driver.compiler import Pointer, kernel
from zhilight.driver.device import DriverCallError
from zhilight.driver.dtype import int32
from zhilight.driver.graph import Graph

COUNT = 1000


@kernel(threads=128)
def add(x: Pointer(int32), amount: types.int32, count: types.int32):
    index = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if index < count:
        x[index] += amount


@pytest.fixture
def x(pool, stream):
    tensor = pool.allocate("weights", (COUNT,), int32)
    tensor.fill_zero(stream)
    return tensor


def values(tensor, stream) -> set[int]:
    return set(tensor.to_host(stream).tolist())


def launch(x, amount, stream):
    add.launch(8, x, amount, COUNT, stream=stream)


def test_capture_runs_nothing_and_each_replay_runs_all(x, stream):
    launch(x, 0, stream)  # loads the kernel

    def work():
        launch(x, 3, stream)
        launch(x, 4, stream)
        x[:10].fill_zero(stream)

    with Graph.capture(stream, work) as graph:
        assert graph.num_nodes == 3 and graph.node_kinds() == {"KERNEL": 2, "MEMSET": 1}
        executable = graph.instantiate()
    assert values(x, stream) == {0}
    executable.upload(stream)
    for _ in range(3):
        executable.replay(stream)
    assert values(x[10:], stream) == {21} and values(x[:10], stream) == {0}
    executable.close()


def test_update_takes_new_parameters_and_refuses_another_shape(x, stream):
    launch(x, 0, stream)
    with Graph.capture(stream, lambda: launch(x, 1, stream)) as one:
        executable = one.instantiate()
    with Graph.capture(stream, lambda: launch(x, 10, stream)) as ten:
        executable.update(ten)
    executable.replay(stream)
    assert values(x, stream) == {10}

    def two_nodes():
        launch(x, 1, stream)
        launch(x, 1, stream)

    with Graph.capture(stream, two_nodes) as other, pytest.raises(DriverCallError, match="GRAPH_EXEC_UPDATE_FAILURE"):
        executable.update(other)
    executable.close()


def test_kernel_node_parameters(x, pool, stream):
    other = pool.allocate("weights", (COUNT,), int32)
    other.fill_zero(stream)
    launch(x, 0, stream)
    with Graph.capture(stream, lambda: launch(x, 1, stream)) as graph, graph.instantiate() as executable:
        (node,) = graph.kernel_nodes()
        executable.set_kernel(node, arguments=[ctypes.c_uint64(other.address), ctypes.c_int32(5), ctypes.c_int32(COUNT)])
        executable.replay(stream)
        assert values(x, stream) == {0} and values(other, stream) == {5}
        executable.set_kernel(node, grid=(1, 1, 1))  # arguments as captured
        executable.replay(stream)
        assert values(x[:128], stream) == {1} and values(x[128:], stream) == {0}


def test_an_error_during_capture_ends_it_and_is_passed_on(x, stream):
    def work():
        launch(x, 1, stream)
        raise KeyError("from the model")

    launch(x, 0, stream)
    with pytest.raises(KeyError, match="from the model"):
        Graph.capture(stream, work)
    launch(x, 2, stream)  # the stream is usable again
    assert values(x, stream) == {2}
    with pytest.raises(DriverCallError, match="STREAM_CAPTURE"):
        Graph.capture(stream, stream.synchronize)
    launch(x, 2, stream)
    assert values(x, stream) == {4}


def test_replay_costs_the_host_little(x, stream):
    launch(x, 0, stream)

    def work():
        for _ in range(300):
            launch(x, 1, stream)

    with Graph.capture(stream, work) as graph, graph.instantiate() as executable:
        executable.replay(stream)
        stream.synchronize()
        times = []
        for _ in range(20):
            start = time.perf_counter()
            executable.replay(stream)
            times.append(time.perf_counter() - start)
            stream.synchronize()
        print(f"replay of 300 nodes: {np.median(times) * 1e6:.0f} us of host time")
        assert np.median(times) < 1e-3  # 300 launches one by one take longer than that
    assert values(x, stream) == {21 * 300}
