"""Latency of a whole model: time to first token of prompts, and milliseconds a token of decode batches.

python bench/latency.py --model bench/models/llama-3-8b --load-format dummy [--json FILE]

Decode: B sequences with a context of C tokens each generate; the time is the mean of the engine's steps once all decode,
from wall clocks around the steps, so it holds all that a user pays: scheduling, copies, graph, sampling.
Prefill: prompts submitted together; the time is from submission to the last one's first token.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import numpy as np

from zhilight import LLM, SamplingParams


def prompts(rng: np.random.Generator, count: int, length: int, vocab: int) -> list[dict]:
    """Random prompts, no two alike, so that the prefix cache cannot help."""
    return [{"prompt_token_ids": rng.integers(1000, vocab - 1000, length).tolist()} for _ in range(count)]


def decode(llm: LLM, rng: np.random.Generator, batch: int, context: int, steps: int) -> float:
    """Milliseconds a token: the time that `steps` further tokens of every sequence take.

    The prompts are computed once before; the timed runs find them in the prefix cache, so all sequences start together.
    """
    inputs = prompts(rng, batch, context, llm.model_config.vocab_size)

    def run(tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - start

    run(8)
    short = min(run(8), run(8))
    return (min(run(8 + steps), run(8 + steps)) - short) / steps * 1e3


def graph_milliseconds(llm: LLM, replays: int = 20) -> dict[str, float]:
    """Device time of each captured decode graph, replayed back to back: what a step costs without the host and sampling."""
    from zhilight.driver.stream import elapsed_ms

    runner, times = llm.runner, {}
    for (size, _), graph in sorted(getattr(runner, "graphs", {}).items()):
        stream = runner.ops.stream
        with runner.ops.scope():
            start = stream.record(timing=True)
            for _ in range(replays):
                graph.replay()
            end = stream.record(timing=True)
            end.synchronize()
        times[f"graph {size} ms"] = elapsed_ms(start, end) / replays
    return times


def prefill(llm: LLM, rng: np.random.Generator, count: int, length: int, repeats: int = 3) -> float:
    """Milliseconds until all of `count` prompts have their first token; the median of `repeats`."""
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    times = []
    for _ in range(repeats + 1):
        inputs = prompts(rng, count, length, llm.model_config.vocab_size)
        start = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:])) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompts", nargs="*", default=["1x2048", "1x8192", "16x1024"])
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    begin = time.perf_counter()
    longest = max([arguments.context + arguments.steps + 16, *(int(p.split("x")[1]) + 1 for p in arguments.prompts)])
    llm = LLM(arguments.model, load_format=arguments.load_format, device=arguments.device, skip_tokenizer_init=True,
              max_model_len=min(longest, 8192), max_num_seqs=max([*arguments.batches, 16]))
    rng = np.random.default_rng()
    first = prompts(rng, 1, 16, llm.model_config.vocab_size)
    llm.generate(first, SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)
    results: dict[str, float] = {"start to first token s": time.perf_counter() - begin}
    print(f"start to first token {results['start to first token s']:.1f} s", flush=True)
    for text in arguments.prompts:
        count, length = map(int, text.split("x"))
        length = min(length, llm.max_model_len - 1)
        results[f"prefill {text} ms"] = prefill(llm, rng, count, length)
        print(f"prefill {text}: {results[f'prefill {text} ms']:.1f} ms", flush=True)
    for batch in arguments.batches:
        results[f"decode {batch} ms"] = decode(llm, rng, batch, arguments.context, arguments.steps)
        print(f"decode batch {batch}, context {arguments.context}: {results[f'decode {batch} ms']:.3f} ms a token, "
              f"{batch / results[f'decode {batch} ms'] * 1e3:.0f} tokens/s", flush=True)
    for name, milliseconds in graph_milliseconds(llm).items():
        results[name] = milliseconds
        print(f"{name[:-3]}, device alone: {milliseconds:.3f} ms", flush=True)
    print(llm.stats())
    llm.close()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
