"""Causal prefill attention, 16k tokens a batch, beside torch's cuDNN and FlashAttention-2 on contiguous tensors.

python bench/kernels/attention_prefill.py [--json FILE] [--variants] [--head-dim 128] [--heads 32 8] [--lengths 512 ...]
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))
from harness import Bench, Record, view, write

from zhilight.kernels import attention_prefill as module


class Prompts:
    """`count` prompts of one length in a shuffled paged cache, and the same keys and values contiguous for torch."""

    def __init__(self, count: int, length: int, heads: int, kv_heads: int, head_dim: int, block_size: int):
        self.count, self.length, self.heads, self.kv_heads, self.head_dim = count, length, heads, kv_heads, head_dim
        blocks = -(-length // block_size)
        self.cache = torch.randn(count * blocks + 1, 2, kv_heads, block_size, head_dim, device="cuda", dtype=torch.bfloat16)
        self.tables = torch.randperm(count * blocks, device="cuda").int().view(count, blocks)
        self.qkv = torch.randn(count * length, (heads + 2 * kv_heads) * head_dim, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty(count * length, heads * head_dim, device="cuda", dtype=torch.bfloat16)
        self.lens = np.full(count, length, np.int32)
        self.starts = (np.arange(count + 1) * length).astype(np.int32)
        self.device_lens, self.device_starts = torch.from_numpy(self.lens).cuda(), torch.from_numpy(self.starts).cuda()
        self.flops = 2 * count * length ** 2 * head_dim * heads

    def torch_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = self.qkv[:, :self.heads * self.head_dim].reshape(self.count, self.length, self.heads, self.head_dim).transpose(1, 2)
        paged = self.cache[self.tables.long()]  # [S, W, 2, Hkv, P, D]
        k, v = (paged[:, :, i].transpose(2, 3).reshape(self.count, -1, self.kv_heads, self.head_dim)[:, :self.length]
                .transpose(1, 2).repeat_interleave(self.heads // self.kv_heads, 1).contiguous() for i in range(2))
        return q.contiguous(), k, v

    def call(self, bench: Bench, launch: Any = module.attention_prefill, **options: Any) -> functools.partial:
        arrays = [view(t) for t in (self.qkv, self.cache, self.tables, self.device_lens, self.device_starts, self.out)]
        options |= {"chunks": module.Chunks(self.starts, self.lens)}
        return functools.partial(launch, bench.runtime, *arrays, num_heads=self.heads, num_kv_heads=self.kv_heads,
                                 scale=self.head_dim ** -0.5, **options)


def peers(prompts: Prompts, wanted: tuple[str, ...]) -> dict[str, Any]:
    q, k, v = prompts.torch_inputs()
    found = {}
    for name, backend in (("cuDNN", SDPBackend.CUDNN_ATTENTION), ("FA2", SDPBackend.FLASH_ATTENTION)):
        if name not in wanted:
            continue

        def call(backend: Any = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        try:
            prompts.reference = call()
        except RuntimeError as error:
            print(f"{name}: {str(error)[:80]}")
            continue
        found[name] = [call]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--sm80", action="store_true", help="leave the Hopper kernel out")
    parser.add_argument("--hopper", action="store_true", help="leave the mma.sync kernel out")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=(512, 1024, 2048, 4096, 8192, 16384))
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--peers", nargs="*", default=("cuDNN", "FA2"))
    arguments = parser.parse_args()
    bench = Bench()
    records = []
    for length in arguments.lengths:
        prompts = Prompts(max(1, arguments.tokens // length), length, *arguments.heads, arguments.head_dim,
                          arguments.block_size)
        candidates = {} if arguments.hopper else {"mma.sync": [prompts.call(bench, module.launch_sm80)]}
        if bench.runtime.capability[0] == 9 and not arguments.sm80:
            candidates["wgmma"] = [prompts.call(bench, module.launch_sm90)]
        if arguments.variants:
            for tiling in ((2, 64, 4), (2, 32, 4), (1, 64, 4)):
                candidates["mma m{}k{}w{}".format(*tiling)] = [prompts.call(bench, module.launch_sm80, tiling=tiling)]
        found = peers(prompts, tuple(arguments.peers))
        times = bench.compare(candidates | found, rounds=3, target_ms=6)
        best = min(found, key=times.__getitem__) if found else ""
        name = f"{prompts.count}x{length} {arguments.heads[0]}/{arguments.heads[1]} hd{arguments.head_dim}"
        for label, microseconds in times.items():
            records.append(Record(label, name, microseconds, best, times.get(best), tflop_s=prompts.flops / microseconds / 1e6))
            print(records[-1].line(), flush=True)
        del prompts, candidates, found
        torch.cuda.empty_cache()
    write(arguments.json, records)


if __name__ == "__main__":
    main()
