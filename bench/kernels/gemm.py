"""Dense GEMM against cuBLAS (torch.mm), bf16, random data: python bench/kernels/gemm.py [--tokens 512,2048] [--json FILE].

Shapes are the projections of Llama-3-8B and 70B and Qwen2-7B: qkv, o, gate_up, down and the head. Weights rotate over more
than the L2 cache. Ours are launched as in the engine, each as a programmatic dependent of the one before; --plain launches
them without. Each line checks the result against cuBLAS's before it is timed. About 25 s with a cold kernel cache.
"""

from __future__ import annotations

import argparse
import math
import sys

import torch
from harness import Bench, Record, copies, view, write

from zhilight.driver.compiler import compile_all
from zhilight.driver.dtype import bfloat16
from zhilight.kernels.gemm_sm90 import gemm_sm90, gemm_sm90_kernel
from zhilight.kernels.gemm_sm90_tiles import choose_tile

SHAPES = {
    "llama-8b": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "llama-70b": [(10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)],
    "qwen2-7b": [(4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)],
}
"""N x K."""
TOKENS = [128, 256, 512, 1024, 2048, 4096, 8192]


def measure(bench: Bench, m: int, n: int, k: int, weights: list[torch.Tensor], overlap: bool, rounds: int) -> Record:
    """One product, ours and cuBLAS's. Raises SystemExit when they differ."""
    inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in weights]
    outputs = [torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in weights]
    sets = [(view(x), view(weight), view(out)) for x, weight, out in zip(inputs, weights, outputs, strict=True)]
    bench.run(lambda: gemm_sm90(bench.runtime, *sets[0], overlap=overlap))
    reference = torch.mm(inputs[0], weights[0].T).float()
    error = ((outputs[0].float() - reference).norm() / reference.norm()).item()
    if not error < 6e-3:
        sys.exit(f"{m} x {n} x {k}: relative difference {error:.2e} from cuBLAS")
    del reference
    times = bench.compare({
        "ours": [lambda s=s: gemm_sm90(bench.runtime, *s, overlap=overlap) for s in sets],
        "cublas": [lambda x=x, w=w, o=o: torch.mm(x, w.T, out=o) for x, w, o in zip(inputs, weights, outputs, strict=True)],
    }, rounds, target_ms=5.0)
    seconds = times["ours"] * 1e-6
    tile = choose_tile(m, n, k, bench.runtime.multiprocessors)
    operations, nbytes = 2 * m * n * k, 2 * (n * k + m * k + m * n)
    return Record("gemm", f"{n} x {k}, M {m}", times["ours"], "cuBLAS", times["cublas"], operations / seconds / 1e12,
                  nbytes / seconds / 1e9, tile.label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="values of M")
    parser.add_argument("--models", default=",".join(SHAPES), help="whose shapes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--json", help="write the records there")
    options = parser.parse_args()
    tokens = [int(m) for m in options.tokens.split(",")]
    shapes = [shape for model in options.models.split(",") for shape in SHAPES[model]]

    bench = Bench()
    tiles = {choose_tile(m, n, k, bench.runtime.multiprocessors) for n, k in shapes for m in tokens}
    kernels = [gemm_sm90_kernel(tile, bfloat16, bfloat16, False, False, not options.plain) for tile in tiles]
    failed = [result for result in compile_all(kernels, (9, 0, "a"), progress=False) if result.error]
    if failed:
        sys.exit(f"{failed[0].name}: {failed[0].error}")
    torch.manual_seed(seed := torch.seed() % 2**31)
    print(f"seed {seed}, {torch.cuda.get_device_name(0)}")
    records = []
    for n, k in shapes:
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5 for _ in range(copies(2 * n * k))]
        for m in tokens:
            records.append(measure(bench, m, n, k, weights, not options.plain, options.rounds))
            print(records[-1].line(), flush=True)
    for name, chosen in (("M >= 512", [m for m in tokens if m >= 512]), ("M < 512", [m for m in tokens if m < 512])):
        ratios = [r.ratio for r in records if int(r.shape.rsplit(" ", 1)[1]) in chosen]
        if ratios:
            print(f"{name}: geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.3f} of cuBLAS, "
                  f"least {min(ratios):.3f}, most {max(ratios):.3f}")
    write(options.json, records)


if __name__ == "__main__":
    main()
