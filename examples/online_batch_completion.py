"""Many prompts at once against a running server, with the openai SDK and with plain aiohttp.

    zhilight serve demo --device cpu --port 8000 &
    python examples/online_batch_completion.py --url http://127.0.0.1:8000

One request may carry many prompts (the first part); or many requests run side by side (the second part). The engine
batches both the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import time

import aiohttp
import openai

PROMPTS = ["The capital of France is", "Water boils at", "The first prime numbers are", "def add(a, b):"]


async def one_request(client: openai.AsyncOpenAI, model: str, max_tokens: int) -> None:
    """All prompts in one request: choice number i * n + j is completion j of prompt i."""
    answer = await client.completions.create(model=model, prompt=PROMPTS, max_tokens=max_tokens, temperature=0)
    for choice in answer.choices:
        print(f"{PROMPTS[choice.index]!r} -> {choice.text!r} ({choice.finish_reason})")
    print(f"{answer.usage.completion_tokens} tokens generated")


async def many_requests(url: str, key: str, model: str, max_tokens: int) -> None:
    """A request a prompt, side by side, without any SDK."""

    async def complete(session: aiohttp.ClientSession, prompt: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": f"Continue: {prompt}"}], "max_tokens": max_tokens}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise SystemExit(f"{response.status}: {answer['error']['message']}")
            return answer["choices"][0]["message"]["content"]

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session:
        begin = time.monotonic()
        answers = await asyncio.gather(*(complete(session, prompt) for prompt in PROMPTS))
        print(f"\n{len(answers)} chats side by side in {time.monotonic() - begin:.1f} s")
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"{prompt!r} -> {answer!r}")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=16)
    arguments = parser.parse_args()
    async with openai.AsyncOpenAI(base_url=f"{arguments.url}/v1", api_key=arguments.api_key) as client:
        model = (await client.models.list()).data[0].id
        await one_request(client, model, arguments.max_tokens)
    await many_requests(arguments.url, arguments.api_key, model, arguments.max_tokens)


if __name__ == "__main__":
    asyncio.run(main())
