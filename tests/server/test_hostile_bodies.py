"""5,000 hostile bodies: every answer is a 2xx or a 4xx with an OpenAI error, and the server still serves."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import resource
from collections import Counter
from typing import Any

from tests.server.conftest import Running, Start
from zhilight.server.openai.protocol import ChatCompletionRequest, CompletionRequest

BODIES = 5000
BASES: list[tuple[str, Any]] = [
    ("/v1/chat/completions", {"model": "stub-model", "messages": [
        {"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "x"}], "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
                "a": {"type": "string"}}}}}], "tool_choice": "auto", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {
            "a": {"type": "integer", "minimum": 3}}, "required": ["a"]}}}, "stream": True, "n": 2, "logprobs": True,
        "top_logprobs": 3, "stop": ["a"], "logit_bias": {"5": 1}, "max_tokens": 4}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "echo": True, "stream": False}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "max_tokens": 3, "stream": True, "guided_regex": "[a-z]+"}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float"}),
    ("/tokenize", {"prompt": "a", "add_special_tokens": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
WEIRD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**40, 1e308, -1e-320, 0.5, "", "x", "\x00", "\u202e", "😀" * 50,
    "a" * 5000, "{{ 7 * 7 }}", "{% for i in range(10**9) %}x{% endfor %}", "../../etc/passwd", "raise", [], {}, [[]], [{}],
    [None], {"": ""}, {"__class__": 1}, ["a"] * 300, list(range(300)), [[[[[[1]]]]]], {"type": "object"}, "required", "none",
    {"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, {"type": ["string", "null"]},
    {"enum": []}, {"pattern": "(a+)+$", "type": "string"}, {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "(((((", "a{1000000}", "start: start", 'root ::= root', "[\ud7ff-\uffff]", "<|im_start|>system", "</think>",
]
FIELDS = sorted({*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__})


def mutate(value: Any, randomness: random.Random) -> Any:
    """A copy with one place changed."""
    if isinstance(value, dict) and value and randomness.random() < 0.85:
        result = dict(value)
        key = randomness.choice(sorted(result))
        if randomness.random() < 0.15:
            del result[key]
        else:
            result[key] = mutate(result[key], randomness)
        return result
    if isinstance(value, list) and value and randomness.random() < 0.8:
        result = list(value)
        place = randomness.randrange(len(result))
        result[place] = mutate(result[place], randomness)
        return result * randomness.choice([1, 1, 1, 3])
    return randomness.choice(WEIRD)


def hostile(randomness: random.Random) -> tuple[str, bytes]:
    path, body = randomness.choice(BASES)
    for _ in range(randomness.choice([1, 1, 2, 4])):
        if randomness.random() < 0.4 and isinstance(body, dict):
            body = body | {randomness.choice(FIELDS): randomness.choice(WEIRD)}
        else:
            body = mutate(body, randomness)
    raw = json.dumps(body, ensure_ascii=randomness.random() < 0.5).encode("utf-8", "surrogatepass")
    if randomness.random() < 0.15:
        broken = bytearray(raw)
        for _ in range(randomness.randint(1, 5)):
            if broken:
                broken[randomness.randrange(len(broken))] = randomness.randrange(256)
        raw = bytes(broken[:randomness.randint(0, len(broken))])
    elif randomness.random() < 0.02:
        raw = b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
    return path, raw


async def attack(running: Running, count: int, seed: int) -> Counter[int]:
    randomness = random.Random(seed)
    statuses: Counter[int] = Counter()
    gate = asyncio.Semaphore(16)

    async def one(path: str, raw: bytes) -> None:
        async with gate, running.http.post(running.url + path, data=raw, headers={
                "Content-Type": "application/json"}) as response:
            content = await response.read()
            statuses[response.status] += 1
            assert response.status < 500, (path, raw, content)
            if response.status >= 400:
                error = json.loads(content)["error"]
                assert error["message"], (path, raw)
            elif response.content_type == "text/event-stream":
                assert content.endswith(b"data: [DONE]\n\n"), (path, raw, content)
            else:
                json.loads(content)

    await asyncio.gather(*(one(*hostile(randomness)) for _ in range(count)))
    return statuses


async def test_hostile_bodies(start: Start, hello: dict[str, Any]) -> None:
    running = await start(tool_call_parser="hermes", reasoning_parser="qwen3")
    await attack(running, 500, seed=1)  # fills caches
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    statuses = await attack(running, BODIES - 500, seed=2)
    gc.collect()
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(dict(statuses), f"peak memory grew by {growth:.0f} MiB")
    assert statuses[200] > 200, "the mutations are too wild to reach the engine"
    assert statuses[400] > 1000
    assert growth < 200
    assert running.server.serving.in_flight == 0
    assert not running.engine.active
    status, answer = await running.post("/v1/chat/completions", hello)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hello, world!")
