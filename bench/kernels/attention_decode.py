"""Paged decode attention over the table of docs/kernels/attention.md, with variants.

python bench/kernels/attention_decode.py [--json FILE] [--variants] [--head-dim 128] [--heads 32 8]
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import L2_BYTES, Bench, Record, view, write

from zhilight.kernels import attention_decode as module

FA3 = {(1, 1024): 10.9, (1, 4096): 13.6, (8, 1024): 17.8, (8, 4096): 40.4, (64, 1024): 75.9, (64, 4096): 249.0,
       (256, 1024): 272.0, (256, 4096): 961.0}
"""FlashAttention-3 as vLLM 0.26 builds it, page 16, 32 heads over 8, head size 128: us on the same kind of card."""


class Layer:
    """One layer's cache and enough sequences that their blocks are out of L2 when their turn comes again."""

    def __init__(self, batch: int, context: int, heads: int, kv_heads: int, head_dim: int, block_size: int, lens: Any = None):
        self.batch, self.context, self.heads, self.kv_heads = batch, context, heads, kv_heads
        lens = torch.full((batch,), context) if lens is None else lens
        blocks = -(-context // block_size)
        self.nbytes = 4 * head_dim * kv_heads * int(lens.sum())
        self.sets = max(2, min(40, -(-3 * L2_BYTES // (4 * head_dim * kv_heads * context * batch))))
        total = blocks * batch * self.sets
        self.cache = torch.empty(total, 2, kv_heads, block_size, head_dim, device="cuda", dtype=torch.bfloat16).normal_()
        order = torch.randperm(total, device="cuda").int()
        self.tables = order.view(self.sets, batch, blocks)
        self.lens = lens.int().cuda()
        self.qkv = torch.randn(batch, (heads + 2 * kv_heads) * head_dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(batch, heads * head_dim, device="cuda", dtype=torch.bfloat16)
        self.scale = head_dim ** -0.5

    def calls(self, bench: Bench, **options: Any) -> list:
        return [functools.partial(module.attention_decode, bench.runtime, view(self.qkv), view(self.cache), view(table),
                                  view(self.lens), view(self.out), self.batch, self.heads, self.kv_heads, self.scale,
                                  self.context, **options) for table in self.tables]


def measure(bench: Bench, layer: Layer, name: str, variants: dict[str, dict]) -> list[Record]:
    times = bench.compare({label: layer.calls(bench, **options) for label, options in variants.items()}, rounds=5, target_ms=6)
    records = []
    for label, microseconds in times.items():
        peer = FA3.get((layer.batch, layer.context)) if (layer.heads, layer.kv_heads) == (32, 8) else None
        records.append(Record(label, name, microseconds, "FA3", peer, gb_s=layer.nbytes / microseconds / 1e3))
        print(records[-1].line(), flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8, 64, 256))
    parser.add_argument("--contexts", type=int, nargs="+", default=(1024, 4096))
    arguments = parser.parse_args()
    bench = Bench()
    heads, kv_heads = arguments.heads
    variants: dict[str, dict] = {"decode": {}}
    if arguments.variants:
        for shape in ((8, 3, 1, 1), (4, 2, 1, 2), (16, 1, 1, 1)):
            variants["w{}s{}p{}b{}".format(*shape)] = {"shape": shape}
    records = []
    for batch in arguments.batches:
        for context in arguments.contexts:
            layer = Layer(batch, context, heads, kv_heads, arguments.head_dim, arguments.block_size)
            records += measure(bench, layer, f"{batch}x{context} {heads}/{kv_heads} hd{arguments.head_dim}", variants)
            del layer
            torch.cuda.empty_cache()
    generator = torch.Generator().manual_seed(0)
    lens = torch.randint(1, 4097, (64,), generator=generator)
    layer = Layer(64, 4096, heads, kv_heads, arguments.head_dim, arguments.block_size, lens)
    records += measure(bench, layer, "64 x 1..4096 uneven", variants)
    write(arguments.json, records)


if __name__ == "__main__":
    main()
