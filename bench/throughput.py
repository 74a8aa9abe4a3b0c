"""Output tokens a second of a whole model, all requests submitted at once.

python bench/throughput.py --model bench/models/llama-3-8b --load-format dummy --load 512x512/128 256x1000/500 [--json FILE]

A load is requests x prompt tokens / output tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path

import numpy as np

from zhilight import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load", nargs="*", default=["512x512/128", "256x1000/500"])
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, help="default: the engine's own")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    llm = LLM(arguments.model, load_format=arguments.load_format, device=arguments.device, skip_tokenizer_init=True,
              max_model_len=2048, max_num_seqs=arguments.max_num_seqs, max_num_batched_tokens=arguments.max_num_batched_tokens)
    rng = np.random.default_rng()
    results = {}

    def run(count: int, prompt: int, output: int) -> float:
        inputs = [{"prompt_token_ids": rng.integers(1000, llm.model_config.vocab_size - 1000, prompt).tolist()}
                  for _ in range(count)]
        params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        return sum(len(o.outputs[0].token_ids) for o in outputs) / seconds

    for load in arguments.load:
        count, rest = load.split("x")
        prompt, output = rest.split("/")
        run(8, int(prompt), 16)  # the first requests load kernels
        results[load] = run(int(count), int(prompt), int(output))
        print(f"{load}: {results[load]:.0f} output tokens/s", flush=True)
        print(llm.stats(), flush=True)
    llm.close()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
