"""Offline inference: load a model, ask it a question, complete a few prompts.

    python examples/offline_inference.py                      # the demo model on whatever hardware is here
    python examples/offline_inference.py --model /path/to/model --device cuda
"""

from __future__ import annotations

import argparse
import logging

from zhilight import LLM, SamplingParams

QUESTION = "What is the capital of France?"
PROMPTS = ["Once upon a time", "The three primary colours are", "def fibonacci(n):"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help='model folder, GGUF file, hub name, or "demo"')
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")

    llm = LLM(arguments.model, device=arguments.device)
    greedy = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)

    print(f"\nQuestion: {QUESTION}")
    (answer,) = llm.chat([{"role": "user", "content": QUESTION}], greedy, use_tqdm=False)
    print(f"Answer:   {answer.outputs[0].text}")

    for output in llm.generate(PROMPTS, greedy, use_tqdm=False):
        print(f"\nPrompt:     {output.prompt!r}\nCompletion: {output.outputs[0].text!r}")

    seeded = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=arguments.max_tokens)
    print(f"\nStreamed:   {PROMPTS[0]}", end="", flush=True)
    for piece in llm.stream(PROMPTS[0], seeded):
        for choice in piece.outputs:
            print(choice.text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
