"""POST /v1/chat/completions, driven by the openai SDK and by raw HTTP."""

from __future__ import annotations

import json
from typing import Any

import openai
import pydantic
import pytest

from tests.server.conftest import Running, Start

Body = dict[str, Any]


async def events(running: Running, path: str, body: Body) -> list[str]:
    async with running.http.post(running.url + path, json=body) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = await response.text()
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


async def test_whole_answer_has_the_sdks_types(running: Running) -> None:
    answer = await running.client().chat.completions.create(
        model="stub-model", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    assert answer.object == "chat.completion"
    assert answer.model == "stub-model"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    prompt_tokens = len(running.engine.requests[0][0])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompt_tokens, 14)
    assert answer.usage.total_tokens == prompt_tokens + 14


async def test_stream_order_of_chunks(running: Running, hello: Body) -> None:
    raw = await events(running, "/v1/chat/completions", hello | {"stream": True, "n": 2})
    assert raw[-1] == "[DONE]"
    chunks = [json.loads(item) for item in raw[:-1]]
    roles = [chunk["choices"][0] for chunk in chunks if "role" in chunk["choices"][0]["delta"]]
    assert [(choice["index"], choice["delta"]) for choice in roles] == [
        (0, {"role": "assistant", "content": ""}), (1, {"role": "assistant", "content": ""})]
    assert chunks[0]["choices"][0]["index"] == 0
    assert chunks[1]["choices"][0]["index"] == 1
    for index in (0, 1):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello, world!"
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_usage_comes_last_and_only_when_asked(running: Running, hello: Body) -> None:
    raw = await events(running, "/v1/chat/completions", hello | {"stream": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(item) for item in raw[:-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 14
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    raw = await events(running, "/v1/chat/completions", hello | {
        "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
    counts = [json.loads(item)["usage"]["completion_tokens"] for item in raw[:-1]]
    assert counts == sorted(counts)
    assert counts[0] <= 1
    assert counts[-1] == 14


async def test_sdk_stream_helper(running: Running) -> None:
    running.engine.script = lambda ids, params, index: "größe 你好"
    contents = []
    async with running.client().chat.completions.stream(
            model="stub-model", messages=[{"role": "user", "content": "hi"}]) as stream:
        async for event in stream:
            if event.type == "content.delta":
                contents.append(event.delta)
        final = await stream.get_final_completion()
    assert "".join(contents) == "größe 你好"
    assert final.choices[0].message.content == "größe 你好"
    assert final.choices[0].finish_reason == "stop"


async def test_sdk_parse_with_pydantic(start: Start) -> None:
    class City(pydantic.BaseModel):
        name: str
        people: int

    running = await start()
    running.engine.script = lambda ids, params, index: '{"name":"Oslo","people":700000}'
    answer = await running.client().chat.completions.parse(
        model="stub-model", messages=[{"role": "user", "content": "hi"}], response_format=City)
    assert answer.choices[0].message.parsed == City(name="Oslo", people=700000)
    structured = running.engine.requests[0][1].structured
    assert structured is not None
    assert structured.kind == "json_schema"
    assert json.loads(structured.value)["properties"].keys() == {"name", "people"}


def test_sync_sdk(tmp_path: Any) -> None:
    """The synchronous client, from a thread of its own."""
    import asyncio
    import threading

    from tests.server.stub_engine import StubEngine
    from zhilight.server.config import ServerConfig
    from zhilight.server.openai.entrypoints.api_server import Server, bind

    ready, done = threading.Event(), threading.Event()
    port: list[int] = []

    async def serve() -> None:
        config = ServerConfig(host="127.0.0.1", port=0)
        server = Server(StubEngine(), config)
        await server.start(bind(config))
        port.append(server.port)
        ready.set()
        await asyncio.get_running_loop().run_in_executor(None, done.wait)
        await server.stop(drain=0)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port[0]}/v1", api_key="none")
        stream = client.chat.completions.create(model="stub-model", messages=[{"role": "user", "content": "hi"}], stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello, world!"
        assert [model.id for model in client.models.list()] == ["stub-model"]
        client.close()
    finally:
        done.set()
        thread.join(10)


async def test_max_completion_tokens_wins_over_max_tokens(running: Running, hello: Body) -> None:
    _, answer = await running.post("/v1/chat/completions", hello | {"max_completion_tokens": 3, "max_tokens": 7})
    assert answer["choices"][0]["message"]["content"] == "Hel"
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_default_max_tokens_is_what_is_left(running: Running, hello: Body) -> None:
    await running.post("/v1/chat/completions", hello)
    ids, params, _ = running.engine.requests[0]
    assert params.max_tokens == running.engine.max_model_len - len(ids)


async def test_stop_reason(running: Running, hello: Body) -> None:
    _, answer = await running.post("/v1/chat/completions", hello | {"stop": ["wor"]})
    assert answer["choices"][0]["message"]["content"] == "Hello, "
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", "wor")
    _, answer = await running.post("/v1/chat/completions", hello | {"stop_token_ids": [ord("o")]})
    assert answer["choices"][0]["stop_reason"] == ord("o")
    raw = await events(running, "/v1/chat/completions", hello | {"stop": "wor", "stream": True})
    assert json.loads(raw[-2])["choices"][0]["stop_reason"] == "wor"


async def test_logprobs(running: Running, hello: Body) -> None:
    running.engine.script = lambda ids, params, index: "é!"
    answer = await running.client().chat.completions.create(
        model="stub-model", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=7)
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    rebuilt = bytes(value for item in content[:3] for value in item.bytes or [])
    assert rebuilt.decode() == "é!"
    assert content[0].token == "bytes:\\xc3"
    assert content[2].token == "!"
    assert len(content[2].top_logprobs) == 7
    assert content[2].top_logprobs[0].token == "!"
    assert content[2].top_logprobs[6].logprob == -9999.0
    raw = await events(running, "/v1/chat/completions", hello | {"stream": True, "logprobs": True, "top_logprobs": 0})
    items = [item for chunk in raw[:-1] for item in (json.loads(chunk)["choices"][0]["logprobs"] or {}).get("content", [])]
    assert [item["bytes"] for item in items[:3]] == [[0xC3], [0xA9], [0x21]]
    assert all(item["top_logprobs"] == [] for item in items)


async def test_equal_looking_ids_get_distinct_names(running: Running, hello: Body) -> None:
    running.engine.script = lambda ids, params, index: [261]
    _, answer = await running.post("/v1/chat/completions", hello | {"logprobs": True, "top_logprobs": 3, "max_tokens": 1})
    names = [item["token"] for item in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]]
    assert len(set(names)) == 3


async def test_token_ids(running: Running, hello: Body) -> None:
    ids = [*b"Hello, world!", 258]
    _, answer = await running.post("/v1/chat/completions", hello | {"return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == ids
    assert answer["prompt_token_ids"] == running.engine.requests[0][0]
    raw = await events(running, "/v1/chat/completions", hello | {"return_token_ids": True, "stream": True})
    chunks = [json.loads(item) for item in raw[:-1]]
    assert chunks[0]["prompt_token_ids"] == running.engine.requests[0][0]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == ids
    _, answer = await running.post("/v1/chat/completions", hello | {"logprobs": True, "return_tokens_as_token_ids": True})
    assert answer["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{ord('H')}"


async def test_prompt_logprobs(running: Running, hello: Body) -> None:
    _, answer = await running.post("/v1/chat/completions", hello | {"prompt_logprobs": 2})
    entries = answer["prompt_logprobs"]
    ids = running.engine.requests[0][0]
    assert entries[0] is None
    assert len(entries) == len(ids)
    assert entries[1][str(ids[1])] == {"logprob": -0.25, "rank": 1, "decoded_token": chr(ids[1])}
    status, error = await running.post("/v1/chat/completions", hello | {"prompt_logprobs": 2, "stream": True})
    assert (status, error["error"]["param"]) == (400, "prompt_logprobs")


async def test_history_reaches_the_template(running: Running) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "kind"}]},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    status, _ = await running.post("/v1/chat/completions", {"messages": messages})
    assert status == 200
    text = running.engine.tokenizer.decode(running.engine.requests[0][0], skip_special_tokens=False)
    assert text == ("<|im_start|>system\nbe\nkind<|im_end|>\n<|im_start|>user\nweather?<|im_end|>\n"
                    "<|im_start|>assistant\n<tool_call>look:city=Oslo;</tool_call><|im_end|>\n"
                    "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")


async def test_template_options(start: Start) -> None:
    running = await start(trust_request_chat_template=True)
    tokenizer = running.engine.tokenizer

    async def rendered(**fields: Any) -> str:
        status, answer = await running.post("/v1/chat/completions", {"messages": [
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]} | fields)
        assert status == 200, answer
        return tokenizer.decode(running.engine.requests[-1][0], skip_special_tokens=False)

    assert (await rendered()).endswith("b<|im_end|>\n<|im_start|>assistant\n")
    assert (await rendered(add_generation_prompt=False)).endswith("b<|im_end|>\n")
    assert (await rendered(continue_final_message=True)).endswith("<|im_start|>assistant\nb")
    assert (await rendered(chat_template_kwargs={"enable_thinking": False})).endswith("<think>\n\n</think>\n\n")
    assert (await rendered(reasoning_effort="none")).endswith("<think>\n\n</think>\n\n")
    assert "2 documents" in await rendered(documents=[{"text": "x"}, {"text": "y"}])
    assert await rendered(chat_template="{{ messages[1].content }}") == "b"
    _, answer = await running.post("/v1/chat/completions", {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once "}],
        "continue_final_message": True, "echo": True})
    assert answer["choices"][0]["message"]["content"] == "Once Hello, world!"


async def test_truncation_keeps_the_end(running: Running, hello: Body) -> None:
    await running.post("/v1/chat/completions", hello)
    await running.post("/v1/chat/completions", hello | {"truncate_prompt_tokens": 5})
    assert running.engine.requests[1][0] == running.engine.requests[0][0][-5:]
    long = {"messages": [{"role": "user", "content": "x" * 5000}], "truncate_prompt_tokens": -1, "max_tokens": 96}
    status, _ = await running.post("/v1/chat/completions", long)
    assert status == 200
    assert len(running.engine.requests[2][0]) == 4000


@pytest.mark.parametrize(("fields", "param"), [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": "raise"}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "messages[0].tool_calls[0].function.arguments"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt"),
    ({"max_tokens": 4096}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": 1.5}, "n"),
    ({"seed": 2**70}, "seed"),
    ({"logit_bias": {"264": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"stop_token_ids": [264]}, "stop_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 0 + [str(i) for i in range(200)]}, "stop"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"priority": 3}, "priority"), ({"priority": 2**70}, "priority"),
    ({"logit_bias": {str(i): 1 for i in range(4097)}}, "logit_bias"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"stream": True, "best_of": 3}, "best_of"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"suffix": "x"}, "suffix"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"structured_outputs": {}}, "structured_outputs"),
])
async def test_refusals_name_the_field(running: Running, hello: Body, fields: Body, param: str) -> None:
    status, answer = await running.post("/v1/chat/completions", hello | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]
    assert not running.engine.requests


@pytest.mark.parametrize("fields", [
    {"unheard_of": {"deep": [1]}}, {"user": "u", "metadata": {"a": "b"}, "store": False}, {"modalities": ["text"]},
    {"service_tier": "auto"}, {"length_penalty": 1.0}, {"use_beam_search": False}, {"functions": None}, {"top_k": 10**12},
    {"logit_bias": {}}, {"stop": None}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}, {"verbosity": "medium"},
    {"temperature": 1}, {"seed": -5}, {"safety_identifier": "x", "prompt_cache_key": "y"},
])
async def test_harmless_fields_are_accepted(running: Running, hello: Body, fields: Body) -> None:
    status, answer = await running.post("/v1/chat/completions", hello | fields)
    assert status == 200, answer


async def test_fields_reach_the_engine(running: Running, hello: Body) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 0.2,
              "frequency_penalty": -0.2, "seed": 3, "min_tokens": 2, "ignore_eos": True, "skip_special_tokens": False,
              "spaces_between_special_tokens": False, "include_stop_str_in_output": True, "best_of": 3, "n": 2}
    await running.post("/v1/chat/completions", hello | fields | {
        "logit_bias": {"5": -2}, "stop": "zz", "bad_words": ["no"], "allowed_token_ids": [1, 2], "stop_token_ids": [4],
        "cache_salt": "s"})
    _, params, options = running.engine.requests[0]
    assert {name: getattr(params, name) for name in fields} == fields
    assert (params.logit_bias, params.stop, params.bad_words) == ({5: -2.0}, ("zz",), ("no",))
    assert (params.allowed_token_ids, params.stop_token_ids) == ((1, 2), (4,))
    assert options["cache_salt"] == "s"


async def test_generation_defaults_fill_what_is_left_out(start: Start, hello: Body) -> None:
    running = await start()
    running.engine.model_config.generation_defaults.update(temperature=0.6, top_p=0.95, top_k=20)
    await running.post("/v1/chat/completions", hello | {"top_p": 0.5})
    params = running.engine.requests[0][1]
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 20)
    plain = await start(engine=running.engine, generation_config="none")
    await plain.post("/v1/chat/completions", hello)
    assert running.engine.requests[1][1].temperature == 1.0
