"""Soak: random load on an engine with a tiny random model, with aborts and bad requests, for a bounded time.

    python bench/soak.py --seconds 1200

Fails (exit code 1) when a request neither ends nor is refused, when blocks, slots or requests are left over at the end,
when the KV bookkeeping was ever wrong, when a reproducible request gives another text, or when memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from zhilight import AsyncEngine, EngineConfig, SamplingParams, StructuredOutput
from zhilight.errors import EngineBusy, RequestError

VOCAB = 260
MAX_LEN = 384
ALLOWED_GROWTH_MB = 6.0
"""Of one process from the middle of the run to its end, which buffers that still find their final size need."""


def write_model(folder: Path) -> None:
    """A Llama of one layer without weights (load_format "dummy") and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": 257, "torch_dtype": "float32"}))
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|begin|>", "eos_token": "<|end|>"}))


def random_params(rng: random.Random) -> SamplingParams:
    """Settings of all kinds, most of them plain."""
    extra: dict = {}
    if rng.random() < 0.3:
        extra |= {"repetition_penalty": 1.2, "frequency_penalty": 0.5}
    if rng.random() < 0.2:
        extra |= {"logprobs": rng.randrange(5)}
    if rng.random() < 0.1:
        extra |= {"prompt_logprobs": rng.randrange(3)}
    if rng.random() < 0.2:
        extra |= {"stop": tuple(rng.choice("abcdefgh") for _ in range(2))}
    if rng.random() < 0.1:
        extra |= {"logit_bias": {rng.randrange(256): 5.0}, "bad_words": ("ab", "x")}
    if rng.random() < 0.1:
        extra |= {"n": rng.randint(2, 4)}
    elif rng.random() < 0.05:
        extra |= {"structured": StructuredOutput("regex", "[a-z]{3,9}")}
    return SamplingParams(temperature=rng.choice((0.0, 0.7, 1.0)), top_p=rng.choice((1.0, 0.9)), top_k=rng.choice((0, 20)),
                          max_tokens=rng.randint(1, 60), **extra)


@dataclass
class Soak:
    """The load's state and what it has counted."""

    engine: AsyncEngine
    rng: random.Random
    deadline: float
    counts: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    reference: dict[int, list[int]] = field(default_factory=dict)
    number: int = 0

    def prompt(self) -> list[int]:
        """One of a few stems, cut, with a tail of its own."""
        stem = random.Random(self.rng.randrange(6)).choices(range(256), k=200)
        return stem[: self.rng.randrange(200)] + self.rng.choices(range(256), k=self.rng.randint(1, 60))

    async def client(self) -> None:
        """Requests one after the other until the time is up."""
        while time.monotonic() < self.deadline:
            self.number += 1
            action = self.rng.choices((self.plain, self.leave, self.abort, self.bad, self.embed, self.repeat),
                                      (60, 12, 8, 6, 4, 10))[0]
            try:
                await asyncio.wait_for(action(f"r{self.number}"), 60)
                self.counts[action.__name__] += 1
            except EngineBusy:
                self.counts["busy"] += 1
                await asyncio.sleep(0.05)
            except asyncio.TimeoutError:
                self.wrong.append(f"r{self.number} ({action.__name__}) did not end within 60 s")

    async def plain(self, request_id: str) -> None:
        last = None
        async for last in self.engine.generate(self.prompt(), random_params(self.rng), request_id):
            self.counts["tokens"] += sum(len(choice.token_ids) for choice in last.outputs)
        if last is None or not last.finished or last.error:
            self.wrong.append(f"{request_id} ended with {last}")

    async def leave(self, request_id: str) -> None:
        stream = self.engine.generate(self.prompt(), random_params(self.rng), request_id)
        for _ in range(self.rng.randrange(4)):
            if await anext(stream, None) is None:
                break
        await stream.aclose()

    async def abort(self, request_id: str) -> None:
        async def later() -> None:
            await asyncio.sleep(self.rng.random() * 0.05)
            await self.engine.abort(request_id)
            await self.engine.abort(request_id)

        task = asyncio.create_task(later())
        async for _ in self.engine.generate(self.prompt(), random_params(self.rng), request_id):
            pass
        await task

    async def bad(self, request_id: str) -> None:
        prompt, params = self.rng.choice((
            ([], SamplingParams()), ([VOCAB], SamplingParams()), ([1] * MAX_LEN, SamplingParams()),
            ([1], SamplingParams(max_tokens=MAX_LEN)), ([1], SamplingParams(structured=StructuredOutput("regex", "(")))))
        try:
            await anext(self.engine.generate(prompt, params, request_id))
            self.wrong.append(f"{request_id}: a bad request was served")
        except RequestError:
            pass

    async def embed(self, request_id: str) -> None:
        await self.engine.embed(self.prompt())

    async def repeat(self, request_id: str) -> None:
        """A seeded request of few kinds: whatever runs beside it, the same tokens each time."""
        kind = self.rng.randrange(5)
        prompt = random.Random(kind).choices(range(256), k=20 + 13 * kind)
        tokens: list[int] = []
        async for output in self.engine.generate(prompt, SamplingParams(temperature=1.0, seed=kind, max_tokens=20), request_id):
            tokens += output.outputs[0].token_ids
        if self.reference.setdefault(kind, tokens) != tokens:
            self.counts["other text"] += 1


def resident_mb(pid: int) -> float:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def watch(engine: AsyncEngine, soak: Soak, seconds: float) -> list[tuple[float, float, float]]:
    """(seconds, resident MB of the front, of the engine) at 40 moments."""
    samples, begin = [], time.monotonic()
    while time.monotonic() < soak.deadline:
        await asyncio.sleep(seconds / 40)
        samples.append((time.monotonic() - begin, resident_mb(os.getpid()), resident_mb(engine.pid)))
    return samples


async def run(seconds: float, clients: int, seed: int) -> list[str]:
    """Run the load; what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        engine = await AsyncEngine.start(EngineConfig(
            folder, device="cpu", load_format="dummy", block_size=16, num_kv_blocks=64, max_num_seqs=16,
            max_num_batched_tokens=128, max_waiting=24, check_invariants=True, stats_interval=max(seconds / 10, 10.0)))
        try:
            soak = Soak(engine, random.Random(seed), time.monotonic() + seconds)
            watcher = asyncio.create_task(watch(engine, soak, seconds))
            await asyncio.gather(*(soak.client() for _ in range(clients)))
            samples = await watcher
            await asyncio.sleep(1.0)
            return report(soak, samples, seconds)
        finally:
            await engine.close()


def report(soak: Soak, samples: list[tuple[float, float, float]], seconds: float) -> list[str]:
    stats, wrong = soak.engine.stats(), soak.wrong
    print(f"{soak.number} requests in {seconds:.0f} s: {dict(soak.counts)}")
    print(stats)
    if soak.engine.dead.is_set():
        wrong.append("the engine died")
    if stats.running or stats.waiting or stats.kv_usage:
        wrong.append(f"left over: {stats.running} running, {stats.waiting} waiting, KV use {stats.kv_usage}")
    if stats.kv_faults:
        wrong.append(f"the KV bookkeeping was wrong {stats.kv_faults} times")
    if stats.failed:
        wrong.append(f"{stats.failed} sequences failed")
    if soak.counts["other text"]:
        wrong.append(f"{soak.counts['other text']} seeded requests gave another text")
    middle, end = samples[len(samples) // 2 - 2 : len(samples) // 2 + 2], samples[-4:]
    for column, name in ((1, "front"), (2, "engine")):
        before, after = (sum(sample[column] for sample in part) / len(part) for part in (middle, end))
        first = samples[0][column]
        print(f"{name}: resident {first:.1f} MB at first, {before:.1f} MB in the middle, {after:.1f} MB at the end")
        if after - before > ALLOWED_GROWTH_MB:
            wrong.append(f"the {name} process grew by {after - before:.1f} MB from the middle to the end")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    wrong = asyncio.run(run(arguments.seconds, arguments.clients, arguments.seed))
    for line in wrong[:20]:
        print("WRONG:", line)
    print("soak failed" if wrong else "soak passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
