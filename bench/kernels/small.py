"""The kernels between the GEMMs: norms, rotary with cache write, silu·mul, embedding, sampling, log-probabilities.

python bench/kernels/small.py [--json FILE]

Peers: torch eager, which needs several launches for most of these; sampling beside torch's argmax, and beside sort-based
top-p (softmax, sort, cumsum, draw).
"""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from harness import Bench, Record, copies, view, write

from zhilight.kernels import activation, embedding, logprobs, norm, rotary, sampling
from zhilight.ops.base import SamplingBatch

BF16 = torch.bfloat16


def random(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def report(records: list[Record], name: str, shape: str, nbytes: int, times: dict[str, float], peer: str = "") -> None:
    records.append(Record(name, shape, times["ours"], peer, times.get(peer), gb_s=nbytes / times["ours"] / 1e3))
    print(records[-1].line(), flush=True)


def norms(bench: Bench, records: list[Record]) -> None:
    for tokens, hidden in ((1, 4096), (64, 4096), (8192, 4096), (8192, 8192)):
        nbytes = tokens * hidden * 2
        sets = [(random(tokens, hidden), random(tokens, hidden), random(hidden), random(tokens, hidden))
                for _ in range(copies(4 * nbytes))]

        def eager(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
            residual.add_(x)
            torch.nn.functional.rms_norm(residual, (residual.shape[1],), weight, 1e-5)

        times = bench.compare({
            "ours": [functools.partial(norm.add_rms_norm, bench.runtime, view(x), view(r), view(w), 1e-5, 1.0, view(o))
                     for x, r, w, o in sets],
            "torch": [functools.partial(eager, *arrays) for arrays in sets]})
        report(records, "add_rms_norm", f"{tokens}x{hidden}", 4 * nbytes, times, "torch")
        times = bench.compare({
            "ours": [functools.partial(norm.rms_norm, bench.runtime, view(x), view(w), 1e-5, view(o)) for x, _, w, o in sets],
            "torch": [functools.partial(torch.nn.functional.rms_norm, x, (hidden,), w, 1e-5) for x, _, w, o in sets]})
        report(records, "rms_norm", f"{tokens}x{hidden}", 2 * nbytes, times, "torch")


def rotations(bench: Bench, records: list[Record]) -> None:
    kv_heads, head_dim, block = 8, 128, 64
    angles = torch.rand(8192, head_dim // 2, device="cuda")
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    for tokens, heads in ((1, 32), (256, 32), (8192, 32), (16384, 32), (8192, 64)):
        width = (heads + 2 * kv_heads) * head_dim
        nbytes = 2 * tokens * width * 2
        sets = []
        for _ in range(copies(nbytes)):
            cache = random(tokens // block + 2, 2, kv_heads, block, head_dim)
            slots = torch.randperm(cache.shape[0] * block, device="cuda")[:tokens]
            positions = torch.randint(0, 8192, (tokens,), device="cuda", dtype=torch.int32)
            sets.append((random(tokens, width), positions, slots, table, cache))
        times = bench.compare({"ours": [functools.partial(rotary.rotary_and_cache, bench.runtime, *map(view, arrays), heads,
                                                          kv_heads) for arrays in sets]})
        report(records, "rotary_and_cache", f"{tokens} tokens {heads}/8/128", nbytes, times)


def elementwise(bench: Bench, records: list[Record]) -> None:
    for tokens in (64, 8192):
        sets = [(random(tokens, 28672), random(tokens, 14336)) for _ in range(copies(tokens * 43008 * 2))]
        times = bench.compare({
            "ours": [functools.partial(activation.silu_mul, bench.runtime, view(x), view(o)) for x, o in sets],
            "torch": [functools.partial(lambda x: torch.nn.functional.silu(x[:, ::2]) * x[:, 1::2], x) for x, _ in sets]})
        report(records, "silu_mul", f"{tokens}x28672", tokens * 43008 * 2, times, "torch")
    for tokens, hidden in ((64, 4096), (8192, 4096), (8192, 8192)):
        ids = [torch.randint(0, 128256, (tokens,), device="cuda", dtype=torch.int32) for _ in range(4)]
        rows, outs = random(128256, hidden), [random(tokens, hidden) for _ in ids]
        times = bench.compare({
            "ours": [functools.partial(embedding.embedding, bench.runtime, view(rows), view(i), view(o))
                     for i, o in zip(ids, outs, strict=True)],
            "torch": [functools.partial(torch.index_select, rows, 0, i, out=o) for i, o in zip(ids, outs, strict=True)]})
        report(records, "embedding", f"{tokens}x{hidden}", tokens * hidden * 4, times, "torch")


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The usual way: sort everything."""
    probabilities, order = torch.softmax(logits / 0.8, dim=1).sort(dim=1, descending=True)
    probabilities.masked_fill_(probabilities.cumsum(1) - probabilities > top_p, 0)
    return order.gather(1, (probabilities / torch.empty_like(probabilities).exponential_()).argmax(1, keepdim=True))


def samples(bench: Bench, records: list[Record]) -> None:
    vocab = 128256
    for rows in (1, 32, 128, 256):
        nbytes = rows * vocab * 4
        sets = [torch.randn(rows, vocab, device="cuda") * 3 for _ in range(min(16, copies(nbytes)))]
        tokens = torch.empty(rows, device="cuda", dtype=torch.int32)

        def batch(greedy: bool, top_k: int, top_p: float, rows: int = rows) -> SamplingBatch:
            def array(value: float, dtype: torch.dtype):
                return view(torch.full((rows,), value, device="cuda", dtype=dtype))

            seeds = torch.arange(rows, device="cuda").to(torch.uint64)
            return SamplingBatch(array(0.0 if greedy else 0.8, torch.float32), array(top_k, torch.int32),
                                 array(top_p, torch.float32), array(0.0, torch.float32), view(seeds),
                                 array(11, torch.int64), all_greedy=greedy)

        def sample(logits: torch.Tensor, settings: SamplingBatch, tokens: torch.Tensor = tokens) -> None:
            sampling.sample(bench.runtime, view(logits), settings, view(tokens), view(logits))

        for name, settings, peer in (("greedy", batch(True, vocab, 1.0), lambda x: x.argmax(1)),
                                     ("temperature", batch(False, vocab, 1.0), None),
                                     ("top_k 50", batch(False, 50, 1.0), None),
                                     ("top_p 0.9", batch(False, vocab, 0.9), functools.partial(nucleus, top_p=0.9))):
            candidates = {"ours": [functools.partial(sample, x, settings) for x in sets]}
            if peer is not None:
                candidates["torch"] = [functools.partial(peer, x) for x in sets]
            report(records, f"sample {name}", f"{rows}x{vocab}", nbytes, bench.compare(candidates, rounds=3),
                   "torch" if peer else "")

        top = [torch.empty(rows, n, device="cuda", dtype=d) for n, d in ((5, torch.int32), (5, torch.float32))]
        chosen, ranks = torch.empty(rows, device="cuda"), torch.empty(rows, device="cuda", dtype=torch.int32)
        tokens.zero_()
        times = bench.compare({"ours": [functools.partial(logprobs.logprobs, bench.runtime, view(x), view(tokens), view(chosen),
                                                          view(ranks), view(top[0]), view(top[1])) for x in sets]}, rounds=3)
        report(records, "logprobs top 5", f"{rows}x{vocab}", nbytes, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the records there")
    parts = {"norm": norms, "rotary": rotations, "elementwise": elementwise, "sample": samples}
    parser.add_argument("--only", choices=parts, nargs="*", default=list(parts))
    arguments = parser.parse_args()
    bench, records = Bench(512 << 20), []
    for name in arguments.only:
        parts[name](bench, records)
    write(arguments.json, records)


if __name__ == "__main__":
    main()
