"""A chat whose answer is printed as it is generated, with the openai SDK and with plain aiohttp.

    zhilight serve demo --device cpu --port 8000 &
    python examples/online_stream_chat.py "Why is the sky blue?" --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import asyncio
import json

import aiohttp
import openai


def with_the_sdk(url: str, key: str, question: str, max_tokens: int) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key) as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": question}], max_tokens=max_tokens, stream=True,
            stream_options={"include_usage": True}, extra_body={"top_k": 40})  # vLLM's additional fields go in extra_body
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage:
                print(f"\n({chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} generated)")


async def with_plain_http(url: str, key: str, question: str, max_tokens: int) -> None:
    """Server-sent events: lines `data: {...}`, and `data: [DONE]` at the end."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "stream": True}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as session, \
            session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:  # a request that cannot be served gets a real status, also when it streams
            raise SystemExit(f"{response.status}: {(await response.json())['error']['message']}")
        async for line in response.content:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            chunk = json.loads(line[len(b"data: "):])
            if "error" in chunk:  # something failed after the stream had begun
                raise SystemExit(chunk["error"]["message"])
            print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="Why is the sky blue? Answer in one sentence.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    with_the_sdk(arguments.url, arguments.api_key, arguments.question, arguments.max_tokens)
    asyncio.run(with_plain_http(arguments.url, arguments.api_key, arguments.question, arguments.max_tokens))


if __name__ == "__main__":
    main()
