"""CUDA graphs: record a stretch of queued work once, replay it with one call (about 1 us of device time a node).

    with Graph.capture(stream, lambda: model.forward(step)) as graph:
        decode = graph.instantiate()
    decode.replay(stream)

During capture nothing runs; memory must already be mapped (MemoryPool.reserve, or an earlier run of the same step) and the
host must not wait. Every address is baked in, which is why the pool's addresses never move.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from zhilight.driver.device import check, driver
from zhilight.driver.stream import DriverObject, Stream


class Graph(DriverObject):
    """Recorded work, not yet executable."""

    __slots__ = ()
    destroy = "cuGraphDestroy"

    def __init__(self, handle: int):
        """Takes a CUgraph over."""
        self.handle = handle

    @staticmethod
    def capture(stream: Stream, work: Callable[[], Any]) -> Graph:
        """Record what `work` queues on `stream`, and on streams that it forks from it and joins again.

        Calls of other threads are left alone (thread-local mode). When `work` raises, the capture is ended and its error
        passed on.
        """
        cu = driver()
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(cu.cuStreamBeginCapture(stream.handle, mode), "cuStreamBeginCapture")
        try:
            work()
        except BaseException:
            result = cu.cuStreamEndCapture(stream.handle)
            if result[0] == 0 and int(result[1]):
                cu.cuGraphDestroy(result[1])
            raise
        return Graph(int(check(cu.cuStreamEndCapture(stream.handle), "cuStreamEndCapture")))

    @property
    def num_nodes(self) -> int:
        cu = driver()
        return check(cu.cuGraphGetNodes(self.handle), "cuGraphGetNodes")[-1]

    def nodes(self) -> list[Any]:
        """The CUgraphNodes, in the order they were recorded."""
        cu = driver()
        count = self.num_nodes
        return list(check(cu.cuGraphGetNodes(self.handle, count), "cuGraphGetNodes")[0])[:count] if count else []

    def kernel_nodes(self) -> list[Any]:
        """The nodes that launch kernels, in the order they were recorded."""
        return [node for node in self.nodes() if _kind(node) == "KERNEL"]

    def node_kinds(self) -> dict[str, int]:
        """Nodes by kind: KERNEL, MEMCPY, MEMSET ..."""
        return dict(Counter(map(_kind, self.nodes())))

    def instantiate(self) -> ExecutableGraph:
        """Make it executable. This graph may then be closed, unless its nodes are needed for `set_kernel`."""
        return ExecutableGraph(int(check(driver().cuGraphInstantiate(self.handle, 0), "cuGraphInstantiate",
                                         "making a graph executable")))


def _kind(node: Any) -> str:
    return check(driver().cuGraphNodeGetType(node), "cuGraphNodeGetType").name.removeprefix("CU_GRAPH_NODE_TYPE_")


class ExecutableGraph(DriverObject):
    """A graph ready to replay. Two replays never overlap each other."""

    __slots__ = ()
    destroy = "cuGraphExecDestroy"

    def __init__(self, handle: int):
        """Takes a CUgraphExec over."""
        self.handle = handle

    def replay(self, stream: Stream) -> None:
        """Queue the whole graph on `stream`."""
        check(driver().cuGraphLaunch(self.handle, stream.handle), "cuGraphLaunch", "replaying a graph")

    def upload(self, stream: Stream) -> None:
        """Bring it to the device now, so that the first replay does not pay for that."""
        check(driver().cuGraphUpload(self.handle, stream.handle), "cuGraphUpload")

    def update(self, graph: Graph) -> None:
        """Take the parameters of a newly captured graph with the same nodes and edges.

        Raises DriverCallError (CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) when it differs in more: then instantiate it. Replays
        already queued keep the old parameters.
        """
        check(driver().cuGraphExecUpdate(self.handle, graph.handle), "cuGraphExecUpdate",
              f"updating a graph from one of {graph.num_nodes} nodes")

    def set_kernel(self, node: Any, *, grid: tuple[int, int, int] | None = None,
                   arguments: Sequence[Any] | None = None) -> None:
        """Change a kernel's grid or arguments in later replays. What is None stays as `node`, of the captured graph, has it.

        arguments: all of the kernel's, as ctypes values of its parameter types (c_uint64 for a pointer).
        """
        cu = driver()
        parameters = check(cu.cuGraphKernelNodeGetParams(node), "cuGraphKernelNodeGetParams")
        if grid is not None:
            parameters.gridDimX, parameters.gridDimY, parameters.gridDimZ = grid
        if arguments is not None:
            # the driver copies the values before the call returns; until then these two locals hold them
            values = list(arguments)
            pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(value) for value in values])
            parameters.kernelParams = ctypes.addressof(pointers)
        check(cu.cuGraphExecKernelNodeSetParams(self.handle, node, parameters), "cuGraphExecKernelNodeSetParams")
