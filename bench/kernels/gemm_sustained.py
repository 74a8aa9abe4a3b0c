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
from harness import Bench, Record, view, write

from zhilight.driver.compiler import Kernel, compile_all
from zhilight.driver.dtype import bfloat16
from zhilight.kernels.gemm_sm90 import gemm_sm90, gemm_sm90_kernel
from zhilight.kernels.gemm_sm90_tiles import Tile, choose_tile

HIDDEN, INTERMEDIATE, QKV = 4096, 14336, 6144
SHAPES = {"qkv": (QKV, HIDDEN), "output": (HIDDEN, HIDDEN), "gate_up": (2 * INTERMEDIATE, HIDDEN),
          "down": (HIDDEN, INTERMEDIATE)}
"""N x K."""
LAYERS = 4
VARIANTS = {
    "chosen": None,
    "alone": Tile(256),
    "alone, band 16": Tile(256, band=16),
    "pairs share weights": Tile(256, 2),
    "the same, band 2": Tile(256, 2, band=2),
    "the same, band 4": Tile(256, 2, band=4),
    "the same, band 16": Tile(256, 2, band=16),
    "pairs share x, band 16": Tile(256, 1, 2, band=16),
    "fours share weights, band 4": Tile(256, 4, band=4),
    "2 x 2 share both": Tile(256, 2, 2),
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
    tiles = {tile or choose_tile(m, n, k, multiprocessors) for tile in VARIANTS.values() for n, k in SHAPES.values()}
    return [gemm_sm90_kernel(tile, bfloat16, bfloat16, False, silu_mul, True, add)
            for tile in tiles for silu_mul, add in ((False, False), (True, False), (False, True))]


def ours(bench: Bench, layer: dict[str, torch.Tensor], tile: Tile | None) -> dict[str, Callable[[], None]]:
    v = {name: view(tensor) for name, tensor in layer.items()}

    def product(x: str, weight: str, out: str, **options: bool) -> Callable[[], None]:
        return lambda: gemm_sm90(bench.runtime, v[x], v[weight], v[out], overlap=True, tile=tile, **options)

    return {"qkv": product("x", "qkv", "qkv_out"), "output": product("x", "output", "residual", add=True),
            "gate_up": product("x", "gate_up", "inner", silu_mul=True), "down": product("inner", "down", "residual", add=True)}


def cublas(layer: dict[str, torch.Tensor]) -> dict[str, Callable[[], None]]:
    def product(x: str, weight: str, out: str) -> Callable[[], None]:
        return lambda: torch.mm(layer[x], layer[weight].T, out=layer[out])

    return {"qkv": product("x", "qkv", "qkv_out"), "output": product("x", "output", "residual"),
            "gate_up": product("x", "gate_up", "gate_up_out"), "down": product("inner", "down", "residual")}


def sustained(bench: Bench, calls: list[Callable[[], None]], seconds: float) -> tuple[float, float, float]:
    """(milliseconds a call, MHz, watts) over about that many seconds."""
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
            if len(clocks) < (time.perf_counter() - start) * 20:
                clocks.append(torch.cuda.clock_rate())
                watts.append(torch.cuda.power_draw() / 1e3)
        bench.stream.synchronize()
        elapsed = time.perf_counter() - start
    return elapsed / count * 1e3, sum(clocks) / max(1, len(clocks)), sum(watts) / max(1, len(watts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=0.5, help="a variant and round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", help="write the records there")
    options = parser.parse_args()
    bench, m = Bench(), options.tokens
    compile_all(kernels(m, bench.runtime.multiprocessors), (9, 0, "a"), progress=False)
    weights = layers(m)
    made = {"cuBLAS": [cublas(layer) for layer in weights]}
    made |= {name: [ours(bench, layer, tile) for layer in weights] for name, tile in VARIANTS.items()}
    sustained(bench, [call for layer in made["chosen"] for call in layer.values()], 2.0)
    records = []
    for name, (n, k) in SHAPES.items():
        runs = {variant: [layer[name] for layer in each] for variant, each in made.items()}
        records += measure(bench, f"{name} {n} x {k}, M {m}", runs, 2 * m * n * k, options)
    runs = {variant: [call for layer in each for call in layer.values()] for variant, each in made.items()}
    operations = sum(2 * m * n * k for n, k in SHAPES.values()) / len(SHAPES)
    records += measure(bench, f"of a layer, mean, M {m}", runs, operations, options)
    write(options.json, records)


def measure(bench: Bench, what: str, runs: dict[str, list[Callable[[], None]]], operations: float,
            options: argparse.Namespace) -> list[Record]:
    """A record a variant. operations: of a call, on average."""
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in runs}
    for turn in range(options.rounds):
        for name in list(runs)[:: 1 if turn % 2 == 0 else -1]:
            results[name].append(sustained(bench, runs[name], options.seconds))
    means = {name: [sum(column) / len(found) for column in zip(*found, strict=True)] for name, found in results.items()}
    peer = means.pop("cuBLAS")
    records = []
    for name, (ms, clock, watts) in means.items():
        note = f"{name}: {clock:.0f} MHz, {watts:.0f} W (cuBLAS {peer[1]:.0f} MHz, {peer[2]:.0f} W)"
        records.append(Record("gemm, sustained", what, ms * 1e3, "cuBLAS", peer[0] * 1e3, operations / ms / 1e9, note=note))
        print(records[-1].line(), flush=True)
    return records


if __name__ == "__main__":
    main()
