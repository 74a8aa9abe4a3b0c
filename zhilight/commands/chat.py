"""`zhilight chat MODEL`: a conversation in the terminal, streamed, with its history."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from zhilight.commands.sampling_flags import add_model_and_sampling, load, sampling_params
from zhilight.errors import RequestError

if TYPE_CHECKING:
    from zhilight.config.sampling import SamplingParams
    from zhilight.engine.llm import LLM

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    add_model_and_sampling(parser, max_tokens=1024)


def main(arguments: argparse.Namespace) -> int:
    llm = load(arguments)
    try:
        _converse(llm, sampling_params(llm, arguments), arguments.system)
        return 0
    finally:
        llm.close()


def _converse(llm: LLM, params: SamplingParams, system: str | None) -> None:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (line editing and history in `input`)
    interactive = sys.stdin.isatty()
    beginning = [{"role": "system", "content": system}] if system else []
    messages = list(beginning)
    if interactive:
        print(f"{llm.config.model}: {HELP}")
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if not text:
            continue
        if text in ("/exit", "/quit"):
            return
        if text == "/reset":
            messages = list(beginning)
            print("(forgotten)")
            continue
        if text == "/help":
            print(HELP)
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _answer(llm, messages, params, show_speed=interactive)
        except RequestError as error:
            messages.pop()
            print(f"{error}\n/reset starts over.", file=sys.stderr)
            continue
        messages.append({"role": "assistant", "content": answer})


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams, *, show_speed: bool) -> str:
    """Print an answer as it comes; Ctrl-C ends it early and keeps what was said."""
    rendered = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    token_ids = llm.tokenizer.encode(rendered, add_special_tokens=False)
    left = llm.max_model_len - len(token_ids)
    if left < 1:
        raise RequestError(f"the conversation has {len(token_ids)} tokens and the context {llm.max_model_len}.")
    pieces: list[str] = []
    tokens, begin = 0, time.monotonic()
    stream = llm.stream({"prompt": rendered, "prompt_token_ids": token_ids},
                        replace(params, max_tokens=min(params.max_tokens or left, left)))
    with contextlib.closing(stream), contextlib.suppress(KeyboardInterrupt):
        for output in stream:
            for choice in output.outputs:
                pieces.append(choice.text)
                tokens += len(choice.token_ids)
                print(choice.text, end="", flush=True)
    seconds = time.monotonic() - begin
    print(f"\n({tokens} tokens, {tokens / seconds:.1f} a second)" if show_speed else "")
    return "".join(pieces)
