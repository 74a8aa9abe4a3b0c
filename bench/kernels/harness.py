"""Timing shared by the kernel benches: our kernels and torch's on one stream, medians over rotating buffers.

Calls are captured into a CUDA graph, one per set of buffers, so that host time stays out and every call finds its inputs
outside the L2 cache. Peers are timed in turns with ours, because the card's clock follows its temperature and power.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zhilight.driver.compiler import target_of
from zhilight.driver.dtype import BY_NAME
from zhilight.driver.tensor import Tensor
from zhilight.kernels.runtime import Runtime

COPY_GB_S = 4276
"""Device copy, read + write, of the H200 that the ceilings were measured on."""
BF16_TFLOP_S = 798
"""cuBLAS at 8192^3 on that card."""
L2_BYTES = 60 << 20


def view(tensor: torch.Tensor) -> Tensor:
    """A torch tensor as kernels' host functions see arrays."""
    name = str(tensor.dtype).removeprefix("torch.").replace("float8_e4m3fn", "fp8_e4m3")
    return Tensor(tensor.data_ptr(), tuple(tensor.shape), BY_NAME[name], owner=tensor, strides=tensor.stride())


@dataclass(frozen=True)
class TorchStream:
    """A torch stream with the `handle` that Kernel.launch takes."""

    stream: torch.cuda.Stream

    @property
    def handle(self) -> int:
        return self.stream.cuda_stream


class Bench:
    """One stream, one Runtime on it, and the timing."""

    def __init__(self, scratch_bytes: int = 256 << 20):
        torch.cuda.init()
        self.stream = torch.cuda.Stream()
        self._memory: list[torch.Tensor] = []
        properties = torch.cuda.get_device_properties(0)
        torch.empty(1, device="cuda")  # makes the primary context current
        self.runtime = Runtime(TorchStream(self.stream), target_of(*torch.cuda.get_device_capability()),
                               properties.multi_processor_count, self._allocate, scratch_bytes)

    def _allocate(self, nbytes: int) -> int:
        block = torch.empty(nbytes + 256, dtype=torch.uint8, device="cuda")
        self._memory.append(block)
        return (block.data_ptr() + 255) // 256 * 256

    def run(self, call: Callable[[], Any]) -> None:
        """One call on the stream, to its end."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            call()
        self.stream.synchronize()

    def graph(self, calls: Sequence[Callable[[], Any]]) -> torch.cuda.CUDAGraph:
        """The calls in order as a graph. They are run once before, so that nothing is compiled or made during capture."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for call in calls:
                call()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for call in calls:
                call()
        return graph

    def compare(self, candidates: dict[str, Sequence[Callable[[], Any]]], rounds: int = 5,
                target_ms: float = 12.0) -> dict[str, float]:
        """Median microseconds a call of each candidate, timed in turns. A candidate is its calls over rotating buffers."""
        graphs = {name: self.graph(calls) for name, calls in candidates.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        replays = dict.fromkeys(graphs, 1)
        for turn in range(rounds + 1):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                with torch.cuda.stream(self.stream):
                    start.record()
                    for _ in range(replays[name]):
                        graph.replay()
                    end.record()
                end.synchronize()
                elapsed = start.elapsed_time(end)
                if turn == 0:
                    replays[name] = max(1, min(200, round(target_ms / elapsed)))
                else:
                    times[name].append(elapsed * 1e3 / replays[name] / len(candidates[name]))
        return {name: statistics.median(values) for name, values in times.items()}


def copies(nbytes: int) -> int:
    """How many sets of buffers of `nbytes` it takes that a set is out of L2 when its turn comes again."""
    return max(2, min(64, -(-2 * L2_BYTES // nbytes)))


@dataclass
class Record:
    """One line of a table. ratio is the peer's time over ours: above 1 is faster than the peer."""

    operation: str
    shape: str
    microseconds: float
    peer: str = ""
    peer_microseconds: float | None = None
    tflop_s: float | None = None
    gb_s: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.peer_microseconds / self.microseconds if self.peer_microseconds else None

    def line(self) -> str:
        parts = [f"{self.operation:<18} {self.shape:<28} {self.microseconds:9.1f} us"]
        if self.tflop_s is not None:
            parts.append(f"{self.tflop_s:6.0f} TFLOP/s ({self.tflop_s / BF16_TFLOP_S:4.0%})")
        if self.gb_s is not None:
            parts.append(f"{self.gb_s:6.0f} GB/s ({self.gb_s / COPY_GB_S:4.0%})")
        if self.ratio is not None:
            parts.append(f"{self.peer} {self.peer_microseconds:9.1f} us  ratio {self.ratio:5.3f}")
        return "  ".join([*parts, self.note]).rstrip()


def environment() -> dict[str, str]:
    """Card, driver, versions and commit."""
    def output(*command: str) -> str:
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return "unknown"

    found = {"card": torch.cuda.get_device_name(0), "python": platform.python_version(), "torch": torch.__version__,
             "cuda": str(torch.version.cuda),
             "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
             "commit": output("git", "rev-parse", "--short", "HEAD")}
    for name in ("numba-cuda", "cuda-bindings", "numpy"):
        found[name] = metadata.version(name)
    return found


def write(path: str | None, records: Sequence[Record]) -> None:
    """The records with their environment as JSON; no path, no file."""
    if path is None:
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [asdict(record) | {"ratio": record.ratio} for record in records]
    target.write_text(json.dumps({"environment": environment(), "records": lines}, indent=1) + "\n")
