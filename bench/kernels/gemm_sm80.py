"""The mma.sync GEMM of Ampere and Ada, run on whatever GPU this is, beside torch's cuBLAS (wgmma on Hopper).

python bench/kernels/gemm_sm80.py [--json FILE] [--tiles]
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import Bench, Record, copies, view, write

from zhilight.driver.compiler import compile_all
from zhilight.driver.dtype import bfloat16
from zhilight.kernels import gemm_sm80 as sm80

SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), (2048, 28672, 4096), (2048, 4096, 14336), (512, 6144, 4096),
          (512, 28672, 4096), (128, 6144, 4096), (128, 4096, 14336), (64, 28672, 4096), (64, 4096, 4096))
TILES = {"large": sm80.LARGE, "square": sm80.SQUARE, "flat": sm80.FLAT}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--tiles", action="store_true", help="every tile at its best split, not only the chosen one")
    arguments = parser.parse_args()
    bench = Bench()
    kernels = [sm80.gemm_sm80_kernel(bfloat16, bfloat16, t.rows, t.columns, t.step, t.column_warps, t.stages, t.min_blocks)
               for t in TILES.values()]
    for result in compile_all(kernels, bench.runtime.capability, progress=False):
        print(result.name, result.error or result.resources, flush=True)
    records = []
    for m, n, k in SHAPES:
        sets = [tuple(torch.randn(*s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (n, k), (m, n)))
                for _ in range(copies(2 * (m * k + n * k + m * n)))]
        chosen = sm80.choose_tile(m, n, k, bench.runtime.multiprocessors)
        cuts = {"chosen": chosen}
        if arguments.tiles:
            for name, tile in TILES.items():
                tiles = -(-m // tile.rows) * -(-n // tile.columns)
                slots = bench.runtime.multiprocessors * tile.min_blocks
                for split in (1, 2, 4, 8) if tiles < slots else (1,):
                    if split == 1 or tiles * split <= slots * 1.1:
                        cuts[f"{name} /{split}"] = (tile, split)
        candidates = {"cuBLAS": [functools.partial(torch.matmul, x, w.T, out=out) for x, w, out in sets]}
        for name, cut in cuts.items():
            candidates[name] = [functools.partial(sm80.gemm_sm80, bench.runtime, *map(view, arrays), tile=cut)
                                for arrays in sets]
        times = bench.compare(candidates, rounds=3, target_ms=4)
        for name in cuts:
            records.append(Record("gemm_sm80", f"{m}x{n}x{k}", times[name], "cuBLAS", times["cuBLAS"],
                                  tflop_s=2 * m * n * k / times[name] / 1e6, note=name))
        names = {(tile, split): name for name, (tile, split) in cuts.items() if name != "chosen"}
        print(f"{m}x{n}x{k}: cuBLAS {times['cuBLAS']:.1f} us; chosen {names.get(chosen, chosen)};",
              " ".join(f"{name} {times[name]:.1f} ({2 * m * n * k / times[name] / 1e6:.0f})" for name in cuts), flush=True)
    write(arguments.json, records)


if __name__ == "__main__":
    main()
