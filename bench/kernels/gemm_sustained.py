"""The GEMMs of Llama-3-8B layers back to back for seconds, as in a long prefill: python bench/kernels/gemm_sustained.py

Short benches (gemm.py) find the card cool. Under a load that lasts, its power limit sets the clock, and what counts is energy
an operation: bytes through L2 and shared memory as much as instructions. Every variant runs for --seconds in turns, after a
warm-up; TFLOP/s over the whole run, with the clock and power read meanwhile. cuBLAS is the peer, without silu(gate) * up
and the residual add, which ours do as they store.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from harness import Bench, view

from zhilight.driver.compiler import Kernel, compile_all
from zhilight.driver.dtype import bfloat16
from zhilight.kernels.gemm_sm90 import gemm_sm90, gemm_sm90_kernel
from zhilight.kernels.gemm_sm90_tiles import Tile, choose_tile

HIDDEN, INTERMEDIATE, QKV = 4096, 14336, 6144
SHAPES = [(QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
LAYERS = 4
VARIANTS = {
    "chosen": None,
    "256 columns": Tile(256),
    "256, band 4": Tile(256, band=4),
    "256, band 16": Tile(256, band=16),
    "256, band 32": Tile(256, band=32),
    "weights shared by 2": Tile(256, 2),
    "weights shared by 2, band 4": Tile(256, 2, band=4),
    "weights shared by 2, band 2": Tile(256, 2, band=2),
    "x shared by 2": Tile(256, 1, 2),
    "x shared by 2, band 16": Tile(256, 1, 2, band=16),
    "192 columns": Tile(192),
    "128, weights shared by 2": Tile(128, 2),
}


def layers(m: int) -> list[dict[str, torch.Tensor]]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * shape[-1] ** -0.5

    shared = {"x": random(m, HIDDEN) * HIDDEN**0.5, "qkv_out": random(m, QKV), "residual": random(m, HIDDEN),
              "inner": random(m, INTERMEDIATE), "gate_up_out": random(m, 2 * INTERMEDIATE)}
    return [shared | {"qkv": random(QKV, HIDDEN), "output": random(HIDDEN, HIDDEN), "gate_up": random(2 * INTERMEDIATE, HIDDEN),
                      "down": random(HIDDEN, INTERMEDIATE)} for _ in range(LAYERS)]


def kernels(m: int, multiprocessors: int) -> list[Kernel]:
    """All that the variants launch, to be compiled on all cores at once."""
    tiles = {tile or choose_tile(m, n, k, multiprocessors) for tile in VARIANTS.values() for n, k in SHAPES}
    return [gemm_sm90_kernel(tile, bfloat16, bfloat16, False, silu_mul, True, add)
            for tile in tiles for silu_mul, add in ((False, False), (True, False), (False, True))]


def ours(bench: Bench, layer: dict[str, torch.Tensor], tile: Tile | None) -> Callable[[], None]:
    v = {name: view(tensor) for name, tensor in layer.items()}

    def run() -> None:
        gemm_sm90(bench.runtime, v["x"], v["qkv"], v["qkv_out"], overlap=True, tile=tile)
        gemm_sm90(bench.runtime, v["x"], v["output"], v["residual"], overlap=True, tile=tile, add=True)
        gemm_sm90(bench.runtime, v["x"], v["gate_up"], v["inner"], silu_mul=True, overlap=True, tile=tile)
        gemm_sm90(bench.runtime, v["inner"], v["down"], v["residual"], overlap=True, tile=tile, add=True)

    return run


def cublas(layer: dict[str, torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        torch.mm(layer["x"], layer["qkv"].T, out=layer["qkv_out"])
        torch.mm(layer["x"], layer["output"].T, out=layer["residual"])
        torch.mm(layer["x"], layer["gate_up"].T, out=layer["gate_up_out"])
        torch.mm(layer["inner"], layer["down"].T, out=layer["residual"])

    return run


def sustained(bench: Bench, calls: list[Callable[[], None]], seconds: float) -> tuple[float, float, float]:
    """(milliseconds a layer, MHz, watts) over about that many seconds."""
    with torch.cuda.stream(bench.stream):
        for call in calls:
            call()
        bench.stream.synchronize()
        start, count, clocks, watts = time.perf_counter(), 0, [], []
        pending: list[torch.cuda.Event] = []
        while time.perf_counter() - start < seconds:
            for call in calls:
                call()
            count += len(calls)
            pending.append(bench.stream.record_event())
            if len(pending) > 3:
                pending.pop(0).synchronize()
            if count % (8 * len(calls)) == 0:
                clocks.append(torch.cuda.clock_rate())
                watts.append(torch.cuda.power_draw() / 1e3)
        bench.stream.synchronize()
        elapsed = time.perf_counter() - start
    return elapsed / count * 1e3, sum(clocks) / max(1, len(clocks)), sum(watts) / max(1, len(watts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    bench, m = Bench(), options.tokens
    compile_all(kernels(m, bench.runtime.multiprocessors), (9, 0, "a"), progress=False)
    weights = layers(m)
    operations = 2 * m * HIDDEN * (QKV + HIDDEN + 3 * INTERMEDIATE)
    runs = {"cuBLAS": [cublas(layer) for layer in weights]}
    runs |= {name: [ours(bench, layer, tile) for layer in weights] for name, tile in VARIANTS.items()}
    for calls in runs.values():
        sustained(bench, calls, 0.05)  # loads the kernels
    sustained(bench, runs["chosen"], 2.0)
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for turn in range(options.rounds):
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            results[name].append(sustained(bench, runs[name], options.seconds))
    for name, found in results.items():
        rates = " ".join(f"{operations / ms / 1e9:6.1f}" for ms, _, _ in found)
        ms, clock, watts = (sum(column) / len(found) for column in zip(*found, strict=True))
        print(f"{name:28s} {ms:6.3f} ms a layer, {operations / ms / 1e9:6.1f} TFLOP/s ({rates}), {clock:.0f} MHz, "
              f"{watts:.0f} W")


if __name__ == "__main__":
    main()
