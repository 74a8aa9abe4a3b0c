"""POST /v1/completions, driven by the openai SDK and by raw HTTP."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.server.conftest import Running, Start
from tests.server.stub_engine import StubEngine
from tests.server.test_chat import events
from zhilight.tokenization.tokenizer import Tokenizer

Body = dict[str, Any]


async def test_whole_answer_has_the_sdks_types(running: Running) -> None:
    answer = await running.client().completions.create(model="stub-model", prompt="say", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Hello", "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)


async def test_default_max_tokens_is_16(running: Running) -> None:
    running.engine.script = lambda ids, params, index: "x" * 100
    _, answer = await running.post("/v1/completions", {"prompt": "a"})
    assert answer["choices"][0]["text"] == "x" * 16


async def test_default_max_tokens_shrinks_at_the_end_of_the_context(running: Running) -> None:
    await running.post("/v1/completions", {"prompt": [1] * 4090})
    assert running.engine.requests[0][1].max_tokens == 6


@pytest.mark.parametrize(("prompt", "expected"), [
    ("ab", [[97, 98]]),
    (["ab", "c"], [[97, 98], [99]]),
    ([97, 98], [[97, 98]]),
    ([[97, 98], [99]], [[97, 98], [99]]),
])
async def test_forms_of_a_prompt(running: Running, prompt: Any, expected: list[list[int]]) -> None:
    status, _ = await running.post("/v1/completions", {"prompt": prompt})
    assert status == 200
    assert sorted(ids for ids, _, _ in running.engine.requests) == sorted(expected)


async def test_choice_index_is_prompt_times_n_plus_choice(running: Running) -> None:
    running.engine.script = lambda ids, params, index: f"{chr(ids[0])}{index}"
    body = {"prompt": ["a", "b", "c"], "n": 2}
    _, answer = await running.post("/v1/completions", body)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "a0"), (1, "a1"), (2, "b0"), (3, "b1"), (4, "c0"), (5, "c1")]
    raw = await events(running, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    assert raw[-1] == "[DONE]"
    chunks = [json.loads(item) for item in raw[:-1]]
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 18, "total_tokens": 21,
                              "prompt_tokens_details": {"cached_tokens": 0}}
    first_seen = list(dict.fromkeys(chunk["choices"][0]["index"] for chunk in chunks))
    assert first_seen == [0, 1, 2, 3, 4, 5]
    for choice in answer["choices"]:
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"


async def test_indexes_appear_in_order_even_when_a_later_prompt_is_first(running: Running) -> None:
    import asyncio

    original = running.engine._tokens
    later_done = asyncio.Event()

    async def reordered(ids: list[int], *rest: Any) -> Any:
        if ids == [97]:
            await later_done.wait()
        async for output in original(ids, *rest):
            yield output
        later_done.set()

    running.engine._tokens = reordered  # type: ignore[method-assign]
    raw = await events(running, "/v1/completions", {"prompt": ["a", "b"], "stream": True})
    indexes = [json.loads(item)["choices"][0]["index"] for item in raw[:-1]]
    assert list(dict.fromkeys(indexes)) == [0, 1]
    texts = {index: "".join(json.loads(item)["choices"][0]["text"] for item in raw[:-1]
                            if json.loads(item)["choices"][0]["index"] == index) for index in (0, 1)}
    assert texts == {0: "Hello, world!", 1: "Hello, world!"}


async def test_logprobs(running: Running) -> None:
    running.engine.script = lambda ids, params, index: "aé!"
    _, answer = await running.post("/v1/completions", {"prompt": "xy", "logprobs": 2, "max_tokens": 4})
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert logprobs["token_logprobs"] == [-0.25] * 4
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert logprobs["top_logprobs"][0] == {"a": -0.25, "b": -2.0}
    _, answer = await running.post("/v1/completions", {"prompt": "xy", "logprobs": 0, "max_tokens": 1})
    assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.25}]
    raw = await events(running, "/v1/completions", {"prompt": "xy", "logprobs": 2, "max_tokens": 4, "stream": True})
    parts = [json.loads(item)["choices"][0]["logprobs"] for item in raw[:-1]]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [value for part in parts if part for value in part[name]] == logprobs[name]


async def test_the_sampled_token_is_beside_the_top_ones(running: Running) -> None:
    position = running.engine.position

    def unlikely(token: int, top: int) -> Any:
        made = position(token, top)
        shifted = position((token + 100) % 200, top)
        return type(made)(made.chosen, shifted.top)

    running.engine.position = unlikely  # type: ignore[method-assign]
    _, answer = await running.post("/v1/completions", {"prompt": "x", "logprobs": 2, "max_tokens": 1})
    assert len(answer["choices"][0]["logprobs"]["top_logprobs"][0]) == 3
    assert "H" in answer["choices"][0]["logprobs"]["top_logprobs"][0]


async def test_echo_with_logprobs_scores_the_prompt(running: Running) -> None:
    body = {"prompt": "hé", "echo": True, "logprobs": 1, "max_tokens": 2}
    _, answer = await running.post("/v1/completions", body)
    choice = answer["choices"][0]
    assert choice["text"] == "héHe"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["h", "bytes:\\xc3", "bytes:\\xa9", "H", "e"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.25]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    raw = await events(running, "/v1/completions", body | {"stream": True})
    parts = [json.loads(item)["choices"][0] for item in raw[:-1]]
    assert "".join(part["text"] for part in parts) == "héHe"
    assert [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]] == \
        logprobs["token_logprobs"]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_choice_echoes_the_scored_prompt(running: Running, stream: bool) -> None:
    """The engine gives the prompt's log-probabilities once, with whichever choice comes first."""
    body = {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 1, "n": 2}
    if stream:
        raw = await events(running, "/v1/completions", body | {"stream": True})
        choices = [json.loads(item)["choices"][0] for item in raw[:-1]]
    else:
        choices = (await running.post("/v1/completions", body))[1]["choices"]
    for index in range(2):
        mine = [choice for choice in choices if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "abH"
        assert [value for choice in mine for value in choice["logprobs"]["token_logprobs"]] == [None, -0.25, -0.25]


async def test_max_tokens_0_with_echo_only_scores(running: Running) -> None:
    """What lm-eval and other harnesses send for a log-likelihood."""
    _, answer = await running.post("/v1/completions", {"prompt": [[104, 105], [120]], "echo": True, "logprobs": 1,
                                                       "max_tokens": 0, "temperature": 0})
    assert [(c["text"], c["finish_reason"]) for c in answer["choices"]] == [("hi", "length"), ("x", "length")]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.25]
    assert answer["usage"]["completion_tokens"] == 0
    status, answer = await running.post("/v1/completions", {"prompt": "a", "max_tokens": 0})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")


async def test_prompt_logprobs_and_token_ids(running: Running) -> None:
    _, answer = await running.post("/v1/completions", {"prompt": "ab", "prompt_logprobs": 0, "return_token_ids": True,
                                                       "max_tokens": 2})
    choice = answer["choices"][0]
    assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98], [72, 101])


async def test_cached_tokens_are_reported(running: Running) -> None:
    running.engine.cached_tokens = 2
    _, answer = await running.post("/v1/completions", {"prompt": "abc"})
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize(("fields", "param"), [
    ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt"), ({"prompt": [264]}, "prompt"), ({"prompt": [[1], [-1]]}, "prompt[1]"),
    ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [1] * 4096}, "prompt"), ({"prompt": ["a"] * 2049}, "prompt"),
    ({"prompt": "a" * 200_000}, "prompt"), ({"max_tokens": 4096}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"suffix": "end"}, "suffix"),
    ({"best_of": 1, "n": 2}, "best_of"), ({"prompt": ["a"] * 100, "n": 100}, "n"),
    ({"prompt": "ab " * 30_000}, "prompt"), ({"min_tokens": 17}, "min_tokens"),
    ({"prompt": [True]}, "prompt[0]"), ({"echo": "yes"}, "echo"),
])
async def test_refusals_name_the_field(running: Running, fields: Body, param: str) -> None:
    status, answer = await running.post("/v1/completions", {"prompt": "a"} | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert not running.engine.requests


async def test_one_bad_prompt_of_many_aborts_the_others(running: Running) -> None:
    running.engine.fail_after = 3
    status, answer = await running.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert status == 500
    assert answer["error"]["message"] == "all tokens are masked"
    assert not running.engine.active


async def test_special_tokens_are_added_to_completions_and_not_to_chats(start: Start) -> None:
    engine = StubEngine()
    settings = dataclasses.replace(engine.tokenizer.settings, add_bos=True, special_tokens={
        "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"})
    engine.tokenizer = Tokenizer(engine.tokenizer.backend, settings)
    running = await start(engine)
    await running.post("/v1/completions", {"prompt": "a"})
    await running.post("/v1/completions", {"prompt": "a", "add_special_tokens": False})
    chat = {"messages": [{"role": "user", "content": "a"}]}
    await running.post("/v1/chat/completions", chat)
    await running.post("/v1/chat/completions", chat | {"add_special_tokens": True})
    assert [ids[0] == 256 for ids, _, _ in engine.requests] == [True, False, False, True]
    _, answer = await running.post("/v1/completions", {"prompt": "ab", "echo": True, "logprobs": 0, "max_tokens": 2})
    assert answer["choices"][0]["text"] == "abHe"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["<|endoftext|>", "a", "b", "H", "e"]
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
