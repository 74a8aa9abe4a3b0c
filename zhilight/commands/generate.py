"""`zhilight generate MODEL --prompt TEXT`: complete prompts and print the texts as they come."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from zhilight.commands.sampling_flags import add_model_and_sampling, load, sampling_params
from zhilight.errors import RequestError

if TYPE_CHECKING:
    from zhilight.engine.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", nargs="+", metavar="TEXT", help="prompts; left out, the prompt is read from stdin")
    parser.add_argument("--chat", action="store_true", help="put each prompt through the chat template, as a user's message")
    parser.add_argument("--n", type=int, default=1, help="completions of each prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object a completion")
    add_model_and_sampling(parser, max_tokens=128)


def main(arguments: argparse.Namespace) -> int:
    texts = arguments.prompt or [sys.stdin.read()]
    if not all(texts):
        raise RequestError("the prompt is empty; give one with --prompt TEXT or on stdin.", param="prompt")
    llm = load(arguments)
    try:
        prompts = [_chat_prompt(llm, text) if arguments.chat else text for text in texts]
        params = sampling_params(llm, arguments, n=arguments.n)
        if len(prompts) == 1 and arguments.n == 1 and not arguments.json:
            for output in llm.stream(prompts[0], params):
                print("".join(choice.text for choice in output.outputs), end="", flush=True)
            print()
            return 0
        for text, output in zip(texts, llm.generate(prompts, params, use_tqdm=sys.stderr.isatty()), strict=True):
            for choice in output.outputs:
                if arguments.json:
                    print(json.dumps({"prompt": text, "text": choice.text, "tokens": len(choice.token_ids),
                                      "finish_reason": choice.finish_reason}, ensure_ascii=False))
                else:
                    print(choice.text if len(texts) * arguments.n == 1 else f"--- {text!r} [{choice.index}]\n{choice.text}")
        return 0
    finally:
        llm.close()


def _chat_prompt(llm: LLM, text: str) -> dict[str, Any]:
    rendered = llm.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    return {"prompt": rendered, "prompt_token_ids": llm.tokenizer.encode(rendered, add_special_tokens=False)}
