"""Variants of the mma.sync prefill attention, causal, bf16, 32 heads over 8 KV heads, head size 128, pages of 64 tokens.

python bench/kernels/attention_prefill_variants.py [--report] [--only TEXT ...] [--json FILE]

Each is first held against the present kernel's output, then timed in turns with it and with torch's FlashAttention-2.
--report: only what the compiler says of each for sm_80, sm_89 and sm_90a; needs neither a GPU nor torch.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from zhilight.driver.compiler import Kernel, architecture, compile_each, parse_capability
from zhilight.driver.dtype import bfloat16
from zhilight.kernels.attention_prefill_fused import prefill_fused_kernel
from zhilight.kernels.attention_prefill_sm80 import TILES, prefill_sm80_kernel

PRESENT = "present, 32 keys"
VARIANTS = {
    PRESENT: (prefill_sm80_kernel, TILES[128]),
    "present, 64 keys (spills)": (prefill_sm80_kernel, (2, 64, 4)),
    # 16-row tiles a warp, keys a tile, warps, stages of K and V, whether pipelined, growth before a rescaling (log2)
    "fused 64": (prefill_fused_kernel, (2, 64, 4, 1)),
    "fused 64, exact maxima": (prefill_fused_kernel, (2, 64, 4, 1, False, 0)),
    "fused 64, 2 stages": (prefill_fused_kernel, (2, 64, 4, 2)),
    "fused 64, 8 warps 2 stages": (prefill_fused_kernel, (2, 64, 8, 2)),
    "fused 32, 2 stages": (prefill_fused_kernel, (2, 32, 4, 2)),
    "fused 32, 8 warps": (prefill_fused_kernel, (2, 32, 8, 1)),
    "pipelined 32": (prefill_fused_kernel, (2, 32, 4, 2, True)),
}
"""Name -> (factory, what it takes after the switches)."""
SHAPES = ((2, 8192), (16, 1024))


def kernel_of(name: str) -> Kernel:
    factory, tiling = VARIANTS[name]
    return factory(bfloat16, 128, 64, False, False, False, *tiling)


def report(names: list[str]) -> None:
    capabilities = [parse_capability(text) for text in ("8.0", "8.9", "9.0a")]
    for name, results in zip(names, compile_each([(kernel_of(name), capabilities) for name in names]), strict=True):
        line = f"{name:<28} {kernel_of(name).shared:>7} bytes shared"
        for capability, result in zip(capabilities, results, strict=True):
            r = result.resources
            line += f"  {architecture(capability)}: " + (
                f"{r.registers} registers, {r.stack} stack, {r.spill_stores} + {r.spill_loads} spills" if r else result.error)
        print(line, flush=True)


def measure(names: list[str], path: str | None) -> None:
    import torch
    from attention_prefill import Prompts, peers
    from harness import Bench, Record, write

    from zhilight.driver.compiler import target_of
    from zhilight.kernels import attention_prefill as module

    names = [PRESENT, *(name for name in names if name != PRESENT)]
    compile_each([(kernel_of(name), [target_of(*torch.cuda.get_device_capability())]) for name in names])
    bench, records = Bench(), []
    for count, length in SHAPES:
        prompts = Prompts(count, length, 32, 8, 128, 64)
        candidates, reference, notes = {}, None, {}
        for name in names:
            factory, tiling = VARIANTS[name]
            call = prompts.call(bench, module.launch_sm80, factory=factory, tiling=tiling)
            prompts.out.fill_(torch.nan)
            bench.run(call)
            reference = prompts.out.float() if reference is None else reference
            difference = (prompts.out.float() - reference).abs().max().item()
            notes[name] = f"max |difference| {difference:.2e} of {reference.abs().max().item():.2f}"
            if difference < 0.02:  # NaN is not
                candidates[name] = [call]
            else:
                print(f"{name:<28} {count}x{length}: WRONG, {notes[name]}", flush=True)
        found = peers(prompts, ("FA2",))
        times = bench.compare(candidates | found, rounds=5, target_ms=20)
        for name, microseconds in times.items():
            records.append(Record(name, f"{count}x{length}", microseconds, "FA2" if found else "", times.get("FA2"),
                                  tflop_s=prompts.flops / microseconds / 1e6, note=notes.get(name, "")))
            print(records[-1].line(), flush=True)
        del prompts, candidates, found, reference
        torch.cuda.empty_cache()
    write(path, records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--only", nargs="+", default=(), metavar="TEXT", help="variants with one of these in their names")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    names = [name for name in VARIANTS if not arguments.only or any(text in name for text in arguments.only)]
    if arguments.report:
        report(names)
    else:
        measure(names, arguments.json)


if __name__ == "__main__":
    main()
