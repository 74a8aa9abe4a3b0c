"""Dense GEMM for few tokens beside cuBLAS, and the weights of a whole decode step of Llama-3-8B as one CUDA graph.

python bench/kernels/gemm_small.py [--json FILE] [--tokens 1 8 64] [--alone 1 16] [--variants] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import Bench, Record, copies, view, write

from zhilight.driver.compiler import compile_all
from zhilight.driver.dtype import bfloat16, float32
from zhilight.kernels import gemm_small as small
from zhilight.kernels import gemm_swapped as swapped
from zhilight.kernels.attention_decode import attention_decode
from zhilight.kernels.norm import add_rms_norm, rms_norm_kernel
from zhilight.kernels.rotary import rotary_and_cache, rotary_kernel

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096))
LAYER = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False))
FLOOR_GB_S = 4264


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def isolated(bench: Bench, m: int, gemms: dict[str, Callable], shapes: Any = SHAPES) -> list[Record]:
    """Each shape by itself, beside cuBLAS in the same rounds. Prints microseconds, a column a shape."""
    records, rows = [], {name: [] for name in ("cuBLAS", *gemms)}
    for n, k in shapes:
        sets = [(random(m, k), random(n, k), torch.empty(m, n, device="cuda", dtype=torch.bfloat16))
                for _ in range(copies(n * k * 2))]
        candidates: dict[str, list] = {"cuBLAS": [functools.partial(torch.matmul, x, w.T, out=out) for x, w, out in sets]}
        for name, gemm in gemms.items():
            candidates[name] = [functools.partial(gemm, bench.runtime, *map(view, arrays)) for arrays in sets]
        times = bench.compare(candidates, rounds=3, target_ms=3)
        for name in gemms:
            records.append(Record(name, f"{m}x{n}x{k}", times[name], "cuBLAS", times["cuBLAS"],
                                  gb_s=n * k * 2 / times[name] / 1e3))
        for name, row in rows.items():
            row.append(f"{times[name]:8.2f} ({times['cuBLAS'] / times[name]:5.3f})")
    print(f"M={m:<20}", *(f"{n}x{k}".rjust(16) for n, k in shapes))
    for name, row in rows.items():
        print(f"{name:<22}", *row, flush=True)
    return records


class Step:
    """The decode step of Llama-3-8B as it is queued, each layer with random weights of its own.

    whole: attention, norms and rotary embedding too, else the GEMMs alone, which shows what they cost each other.
    """

    CONTEXT, BLOCK = 512, 64

    def __init__(self, bench: Bench, m: int, layers: int = 32):
        self.bench, self.m = bench, m
        self.weights = [[random(n, k).mul_(0.02) for n, k, _ in LAYER] for _ in range(layers)]
        self.head = random(128256, 4096)
        self.x = {width: random(m, width) for width in (4096, 6144, 14336)}
        self.block, self.residual, self.norm = random(m, 4096), random(m, 4096), random(4096)
        self.logits = torch.empty(m, 128256, device="cuda", dtype=torch.float32)
        blocks = self.CONTEXT // self.BLOCK
        self.caches = [random(blocks * m, 2, 8, self.BLOCK, 128) for _ in range(layers)]
        self.tables = torch.randperm(blocks * m, device="cuda").int().view(m, blocks)
        self.lens = torch.full((m,), self.CONTEXT, device="cuda", dtype=torch.int32)
        self.positions = self.lens - 1
        self.slots = self.tables[:, -1].long() * self.BLOCK + self.BLOCK - 1
        self.cos_sin = torch.randn(self.CONTEXT, 128, device="cuda", dtype=torch.float32)
        self.nbytes = 2 * (sum(w.numel() for layer in self.weights for w in layer) + self.head.numel())

    def calls(self, gemm: Callable, overlap: bool, whole: bool = False) -> list[Callable]:
        runtime, x = self.bench.runtime, {width: view(t) for width, t in self.x.items()}
        options = {"overlap": overlap}
        attended, block, residual, norm = view(random(self.m, 4096)), view(self.block), view(self.residual), view(self.norm)
        add_norm = functools.partial(add_rms_norm, runtime, block, residual, norm, 1e-5, 1.0, x[4096], **options)
        out = []
        for layer, cache in zip(self.weights, self.caches, strict=True):
            qkv, o, gate_up, down = map(view, layer)
            if whole:
                out.append(add_norm)
            out.append(functools.partial(gemm, runtime, x[4096], qkv, x[6144], **options))
            if whole:
                out.append(functools.partial(rotary_and_cache, runtime, x[6144], view(self.positions), view(self.slots),
                                             view(self.cos_sin), view(cache), 32, 8, **options))
                out.append(functools.partial(attention_decode, runtime, x[6144], view(cache), view(self.tables),
                                             view(self.lens), attended, self.m, 32, 8, 0.088, self.CONTEXT, **options))
            out.append(functools.partial(gemm, runtime, attended, o, block, **options))
            if whole:
                out.append(add_norm)
            out.append(functools.partial(gemm, runtime, x[4096], gate_up, x[14336], silu_mul=True, **options))
            out.append(functools.partial(gemm, runtime, x[14336], down, block, **options))
        if whole:
            out.append(add_norm)
        out.append(functools.partial(gemm, runtime, x[4096], view(self.head), view(self.logits), **options))
        return out

    def cublas(self) -> list[Callable]:
        out = []
        up = torch.empty(self.m, 28672, device="cuda", dtype=torch.bfloat16)
        for qkv, o, gate_up, down in self.weights:
            out.append(functools.partial(torch.matmul, self.x[4096], qkv.T, out=self.x[6144]))
            out.append(functools.partial(torch.matmul, self.x[4096], o.T, out=torch.empty_like(self.x[4096])))
            out.append(functools.partial(torch.matmul, self.x[4096], gate_up.T, out=up))
            out.append(functools.partial(torch.matmul, self.x[14336], down.T, out=self.x[4096]))
        out.append(functools.partial(torch.matmul, self.x[4096], self.head.T))
        return out

    def time(self, calls: list[Callable], replays: int = 5, rounds: int = 3) -> float:
        """Median milliseconds a step."""
        graph = self.bench.graph(calls)
        times = []
        for _ in range(rounds + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(self.bench.stream):
                start.record()
                for _ in range(replays):
                    graph.replay()
                end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / replays)
        return statistics.median(times[1:])

    def report(self, name: str, candidates: dict[str, list[Callable]]) -> Record:
        """Prints milliseconds of each; the record is of the last."""
        milliseconds = {label: self.time(calls) for label, calls in candidates.items()}
        best = list(milliseconds.values())[-1]
        print(f"step M={self.m} {name:<20}", "  ".join(f"{label} {ms:.3f} ms" for label, ms in milliseconds.items()),
              f"  floor {self.nbytes / FLOOR_GB_S / 1e6:.3f}", flush=True)
        return Record(name, f"step M={self.m}", best * 1e3, gb_s=self.nbytes / best / 1e6, note=list(milliseconds)[-1])


def variant_kernel(dtype: Any, out_dtype: Any, m: int, n: int, silu_mul: bool, overlap: bool, multiprocessors: int,
                   capability: Any, constants: dict) -> tuple[Any, Any]:
    """gemm_small's kernel and plan with other constants than its plan's."""
    p = small.plan(m, n, silu_mul, multiprocessors, capability)
    options = {"k_tile": p.k_tile, "stages": p.stages} | constants
    return small.gemm_small_kernel(dtype, out_dtype, p.token_tiles, p.row_tiles, silu_mul=silu_mul, overlap=overlap,
                                   **options), p


def variant(runtime: Any, x: Any, weight: Any, out: Any, silu_mul: bool = False, overlap: bool = False, *, constants: dict,
            grid_scale: int = 1) -> None:
    m, n, k = small.check_arguments("gemm_small", x, weight, out, None, silu_mul)
    kernel, p = variant_kernel(x.dtype, out.dtype, m, n, silu_mul, overlap, runtime.multiprocessors * grid_scale,
                               runtime.capability, constants)
    kernel.launch(p.grid, x, weight, weight, out, m, n, k, x.strides[0], out.strides[0], p.rows, 1.0, stream=runtime.stream,
                  overlap=overlap)


def small_kernels(tokens: list[int], constants: dict, multiprocessors: int, shapes: Any, overlaps: tuple) -> list[Any]:
    return [variant_kernel(bfloat16, out_dtype, m, n, silu_mul, overlap, multiprocessors, (9, 0, "a"), constants)[0]
            for m in tokens for n, silu_mul, out_dtype in shapes for overlap in overlaps]


def all_kernels(tokens: list[int], alone: list[int], quick: bool, multiprocessors: int,
                variants: dict[str, tuple[dict, int]]) -> list[Any]:
    """What a run launches, to be compiled on all cores before anything is timed."""
    steps = [(n, silu_mul, bfloat16) for n, _, silu_mul in LAYER] + [(128256, False, float32)]
    shapes = [(n, False, bfloat16) for n, _ in SHAPES]
    found = [rms_norm_kernel(4096, bfloat16, True, True), rotary_kernel(32, 8, 128, 128, 64, bfloat16, True)]
    overlaps = (True,) if quick else (False, True)
    for constants, scale in variants.values():
        found += small_kernels([m for m in tokens if m <= 16], constants, multiprocessors * scale, steps, overlaps)
        found += small_kernels([m for m in alone if m <= 16], constants, multiprocessors * scale, shapes, (False,))
    found += swapped_kernels(tokens, multiprocessors, steps, overlaps)
    found += swapped_kernels(alone, multiprocessors, shapes, (False,))
    return list({kernel.name: kernel for kernel in found}.values())


def swapped_kernels(tokens: list[int], multiprocessors: int, shapes: Any, overlaps: tuple) -> list[Any]:
    found = []
    for m in tokens:
        for n, silu_mul, out_dtype in shapes:
            for overlap in overlaps:
                s = swapped.choose_shape(m, n, 4096, multiprocessors)
                found.append(swapped.gemm_swapped_kernel(bfloat16, out_dtype, swapped.tokens_of(m), s.rows, s.split, s.stages,
                                                         False, silu_mul, overlap, s.steps_a_stage))
    return found


VARIANTS = {
    "8x128 s6": ({}, 1),
    "8x128 s5": ({"stages": 5}, 1),
    "8x128 s4": ({"stages": 4}, 1),
    "8x64 s12": ({"k_tile": 64, "stages": 12}, 1),
    "8x128 s3 2 blocks": ({"stages": 3}, 2),
    "8x64 s6 2 blocks": ({"k_tile": 64, "stages": 6}, 2),
    "4x128 s6 2 blocks": ({"warps": 4}, 2),
}
"""Constants and blocks a multiprocessor."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64], help="of the steps")
    parser.add_argument("--alone", type=int, nargs="*", help="token counts to time each shape by itself at; default --tokens")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="overlapped steps only")
    parser.add_argument("--variants", action="store_true", help="gemm_small with other constants than the chosen ones")
    arguments = parser.parse_args()
    alone = arguments.tokens if arguments.alone is None else arguments.alone
    bench = Bench()
    variants = VARIANTS if arguments.variants else {"gemm_small": ({}, 1)}
    gemms: dict[str, Callable] = {"gemm_swapped": swapped.gemm_swapped}
    gemms |= {name: functools.partial(variant, constants=constants, grid_scale=scale)
              for name, (constants, scale) in variants.items()}
    kernels = all_kernels(arguments.tokens, alone, arguments.quick, bench.runtime.multiprocessors, variants)
    for result in compile_all(kernels, bench.runtime.capability, progress=False):
        if result.error or (result.resources and result.resources.stack):
            print(result.name, result.error or result.resources, flush=True)
    records = []
    for m in arguments.tokens:
        step = Step(bench, m, arguments.layers)
        records.append(step.report("cuBLAS", {"GEMMs": step.cublas()}))
        for name, gemm in serving(gemms, m).items():
            records.append(step.report(name, {label: step.calls(gemm, overlap, whole) for label, overlap, whole in (
                ("GEMMs", False, False), ("overlapped", True, False), ("whole, overlapped", True, True)) if label != "GEMMs"
                or not arguments.quick}))
        del step
        torch.cuda.empty_cache()
    for m in alone:
        records += isolated(bench, m, serving(gemms, m))
    write(arguments.json, records)


def serving(gemms: dict[str, Callable], m: int) -> dict[str, Callable]:
    """Those that take m tokens at the constants compiled: gemm_small is timed up to 16."""
    return {name: gemm for name, gemm in gemms.items() if m <= 16 or name == "gemm_swapped"}


if __name__ == "__main__":
    main()
