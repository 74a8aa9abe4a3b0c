"""Tools, reasoning and structured output through the chat route: the wiring of the parsers, as the SDK sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import Running, Start
from tests.server.test_chat import events
from zhilight.engine.structured import compile_grammar
from zhilight.errors import ConfigError

Body = dict[str, Any]
CHAT = "/v1/chat/completions"
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {
        "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "now"}},
]
CALLS = ('Let me see.\n<tool_call>\n{"name": "look", "arguments": {"city": "Os{lo}"}}\n</tool_call>\n'
         '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')


@pytest.fixture
async def running(start: Start) -> Running:
    running = await start(tool_call_parser="hermes", reasoning_parser="qwen3")
    running.engine.script = lambda ids, params, index: CALLS
    return running


def user(**fields: Any) -> Body:
    return {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | fields


async def test_calls_in_a_whole_answer(running: Running) -> None:
    answer = await running.client().chat.completions.create(
        model="stub-model", messages=[{"role": "user", "content": "hi"}], tools=TOOLS)
    message = answer.choices[0].message
    assert message.content == "Let me see."
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []] == [
        ("look", {"city": "Os{lo}"}), ("now", {})]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert len({call.id for call in message.tool_calls or []}) == 2
    prompt = running.engine.tokenizer.decode(running.engine.requests[0][0], skip_special_tokens=False)
    assert '{"type": "function", "function": {"name": "now"}}' in prompt  # no fields that the client did not send


async def test_calls_in_a_stream(running: Running) -> None:
    raw = await events(running, CHAT, user(stream=True))
    choices = [json.loads(item)["choices"][0] for item in raw[:-1]]
    parts = [part for choice in choices for part in choice["delta"].get("tool_calls", [])]
    assert [part["function"]["name"] for part in parts if "name" in part["function"]] == ["look", "now"]
    assert len([part for part in parts if "id" in part]) == 2
    for index, expected in ((0, {"city": "Os{lo}"}), (1, {})):
        assert json.loads("".join(part["function"]["arguments"] for part in parts if part["index"] == index)) == expected
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Let me see."
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]


async def test_sdk_stream_helper_collects_calls(running: Running) -> None:
    async with running.client().chat.completions.stream(
            model="stub-model", messages=[{"role": "user", "content": "hi"}], tools=TOOLS) as stream:
        names = [event.name async for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = await stream.get_final_completion()
    assert names == ["look", "now"]
    assert final.choices[0].finish_reason == "tool_calls"
    assert [call.function.arguments for call in final.choices[0].message.tool_calls or []] == ['{"city": "Os{lo}"}', "{}"]


async def test_without_parallel_calls_the_first_one_is_reported(running: Running) -> None:
    _, answer = await running.post(CHAT, user(parallel_tool_calls=False))
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 1


async def test_tool_choice_none_shows_no_tools_and_reads_none(running: Running) -> None:
    _, answer = await running.post(CHAT, user(tool_choice="none"))
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["message"]["content"] == CALLS
    assert "look" not in running.engine.tokenizer.decode(running.engine.requests[0][0])


@pytest.mark.parametrize(("choice", "finish"), [
    ("required", "tool_calls"), ({"type": "function", "function": {"name": "look"}}, "stop")])
async def test_forced_calls_are_constrained(start: Start, choice: Any, finish: str) -> None:
    running = await start(tool_call_parser="hermes")
    text = '<tool_call>\n{"name": "look", "arguments": {"city":"Oslo"}}\n</tool_call>'
    running.engine.script = lambda ids, params, index: text
    _, answer = await running.post(CHAT, user(tool_choice=choice))
    structured = running.engine.requests[0][1].structured
    assert structured is not None
    matcher = compile_grammar(structured, running.engine.tokenizer).matcher()
    assert matcher.try_consume_tokens(list(text.encode())) == len(text)
    assert compile_grammar(structured, running.engine.tokenizer).matcher().try_consume_tokens(list(b"Hello")) == 0
    assert answer["choices"][0]["message"]["content"] is None
    assert json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert answer["choices"][0]["finish_reason"] == finish
    raw = await events(running, CHAT, user(tool_choice=choice, stream=True))
    parts = [part for item in raw[:-1] for part in json.loads(item)["choices"][0]["delta"].get("tool_calls", [])]
    assert len(parts) > 2, "arguments of a constrained call stream as they come"
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"city": "Oslo"}


def accepts(running: Running, text: str) -> bool:
    """Whether the grammar of the last request allows `text`, to its end."""
    structured = running.engine.requests[-1][1].structured
    assert structured is not None
    matcher = compile_grammar(structured, running.engine.tokenizer).matcher()
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


async def test_auto_with_a_response_format_gives_calls_or_the_format(start: Start) -> None:
    running = await start(tool_call_parser="hermes")
    status, answer = await running.post(CHAT, user(response_format={"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                                "additionalProperties": False}}}))
    assert status == 200, answer
    assert accepts(running, '{"a":1}')
    assert accepts(running, '<tool_call>\n{"name": "look", "arguments": {"city":"Oslo"}}\n</tool_call>')
    assert not accepts(running, "Hello")
    assert not accepts(running, '{"b":1}')


async def test_strict_tools_constrain_only_what_begins_as_a_call(start: Start) -> None:
    running = await start(tool_call_parser="hermes")
    strict = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    status, answer = await running.post(CHAT, user(tools=strict))
    assert status == 200, answer
    assert accepts(running, "Hello")
    assert accepts(running, '<tool_call>\n{"name": "look", "arguments": {"city":"Oslo"}}\n</tool_call>')
    assert not accepts(running, '<tool_call>\n{"name": "look", "arguments": {"city":5}}\n</tool_call>')
    await running.post(CHAT, user())
    assert running.engine.requests[-1][1].structured is None


async def test_arguments_stream_as_they_come_where_a_tool_is_strict(start: Start) -> None:
    """The grammar vouches for the call; without it, a call is sent when it is whole."""
    running = await start(tool_call_parser="hermes")
    running.engine.script = lambda ids, params, index: CALLS
    strict = [TOOLS[0], {"type": "function", "function": TOOLS[1]["function"] | {"strict": True}}]
    counts = []
    for tools in (strict, TOOLS):
        raw = await events(running, CHAT, user(stream=True, tools=tools))
        parts = [part for item in raw[:-1] for part in json.loads(item)["choices"][0]["delta"].get("tool_calls", [])]
        first = [part["function"] for part in parts if part["index"] == 0]
        assert first[0]["name"] == "look"
        assert json.loads("".join(part["arguments"] for part in first)) == {"city": "Os{lo}"}
        counts.append(len(first))
    assert counts[0] > 2
    assert counts[1] == 1


@pytest.mark.parametrize(("fields", "param"), [
    ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "format": "no-such-format"}}}}}]},
     "tools[0].function.parameters"),
])
async def test_refusals(running: Running, fields: Body, param: str) -> None:
    status, answer = await running.post(CHAT, user(**fields))
    assert (status, answer["error"]["param"]) == (400, param), answer


async def test_auto_needs_a_parser(start: Start) -> None:
    running = await start(tool_call_parser="none")
    status, answer = await running.post(CHAT, user())
    assert (status, answer["error"]["param"]) == (400, "tool_choice")
    status, _ = await running.post(CHAT, user(tool_choice="required"))
    assert status == 200  # a grammar brings its own format


async def test_the_parser_is_told_by_the_template(start: Start) -> None:
    running = await start()
    running.engine.script = lambda ids, params, index: CALLS
    _, answer = await running.post(CHAT, user())
    assert len(answer["choices"][0]["message"]["tool_calls"]) == 2


async def test_unknown_parser_names(start: Start) -> None:
    with pytest.raises(ConfigError, match="tool_call_parser"):
        await start(tool_call_parser="nonsense")
    with pytest.raises(ConfigError, match="reasoning_parser"):
        await start(reasoning_parser="nonsense")


# ---- reasoning ----


async def test_reasoning_and_calls(running: Running) -> None:
    running.engine.script = lambda ids, params, index: "<think>\nhm, well\n</think>\n\n" + CALLS
    _, answer = await running.post(CHAT, user())
    message = answer["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm, well"
    assert message["content"] == "Let me see."
    assert len(message["tool_calls"]) == 2
    raw = await events(running, CHAT, user(stream=True))
    deltas = [json.loads(item)["choices"][0]["delta"] for item in raw[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm, well"
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."


async def test_thought_cut_by_max_tokens_is_reasoning(running: Running) -> None:
    running.engine.script = lambda ids, params, index: "<think>abcdef</think>x"
    _, answer = await running.post(CHAT, user(tools=None, max_tokens=4))
    choice = answer["choices"][0]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("abc", None)
    assert choice["finish_reason"] == "length"


async def test_include_reasoning_false_leaves_it_out(running: Running) -> None:
    running.engine.script = lambda ids, params, index: "<think>abc</think>x"
    _, answer = await running.post(CHAT, user(tools=None, include_reasoning=False))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "x", "refusal": None}


async def test_a_closed_thought_in_the_prompt_means_content(running: Running) -> None:
    running.engine.script = lambda ids, params, index: "x"
    _, answer = await running.post(CHAT, user(tools=None, chat_template_kwargs={"enable_thinking": False}))
    assert answer["choices"][0]["message"]["content"] == "x"
    assert answer["choices"][0]["message"]["reasoning_content"] is None


# ---- structured output ----


@pytest.mark.parametrize(("fields", "kind"), [
    ({"response_format": {"type": "json_object"}}, "json_object"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}, "json_schema"),
    ({"guided_json": {"type": "object"}}, "json_schema"),
    ({"guided_json": '{"type": "object"}'}, "json_schema"),
    ({"guided_regex": "[0-9]+"}, "regex"),
    ({"guided_choice": ["yes", "no"]}, "choice"),
    ({"guided_grammar": 'root ::= "a" | "b"'}, "grammar"),
    ({"structured_outputs": {"regex": "a+"}}, "regex"),
    ({"structured_outputs": {"choice": ["a"]}}, "choice"),
    ({"structured_outputs": {"json": {"type": "string"}}}, "json_schema"),
    ({"structured_outputs": {"json_object": True}}, "json_object"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar"),
])
async def test_constraints_reach_the_engine(start: Start, hello: Body, fields: Body, kind: str) -> None:
    running = await start()
    status, answer = await running.post(CHAT, hello | fields)
    assert status == 200, answer
    structured = running.engine.requests[0][1].structured
    assert structured is not None
    assert structured.kind == kind
    status, answer = await running.post("/v1/completions", {"prompt": "a"} | fields)
    assert status == 200, answer
    assert running.engine.requests[1][1].structured == structured


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"guided_json": "{"}, "guided_json", "not valid JSON"),
    ({"guided_json": {"type": "object", "properties": {"a": {"type": "strin"}}}}, "guided_json", "#/properties/a"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "object", "properties": {"a": {"type": "string", "format": "no-such-format"}}}}}}, "response_format", "format"),
    ({"guided_regex": "("}, "guided_regex", "regex"),
    ({"guided_grammar": "start: ("}, "guided_grammar", "grammar"),
    ({"guided_json": " " * 300_000}, "guided_json", "limit"),
])
async def test_bad_constraints_are_refused_before_they_are_queued(running: Running, hello: Body, fields: Body, param: str,
                                                                   words: str) -> None:
    status, answer = await running.post(CHAT, hello | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert words in answer["error"]["message"]
    assert not running.engine.requests


async def test_a_constraint_waits_for_the_end_of_the_thought(running: Running, hello: Body) -> None:
    body = hello | {"guided_choice": ["yes"]}
    await running.post(CHAT, body)
    await running.post(CHAT, body | {"chat_template_kwargs": {"enable_thinking": False}})
    thinking, plain = (params.structured for _, params, _ in running.engine.requests)
    assert plain is not None
    assert plain.kind == "choice"
    assert thinking is not None
    for text, fits in (("<think>no</think>\n\nyes", True), ("yes", True), ("<think>no</think>no", False)):
        ids = running.engine.tokenizer.encode(text, add_special_tokens=False)
        matcher = compile_grammar(thinking, running.engine.tokenizer).matcher()
        assert (matcher.try_consume_tokens(ids) == len(ids)) is fits, text


async def test_dead_end_of_a_grammar_is_the_requests_error(running: Running, hello: Body) -> None:
    running.engine.fail_after, running.engine.error_param = 0, "response_format"
    status, answer = await running.post(CHAT, hello | {"guided_choice": ["yes"]})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "generation_failed", "response_format")
    running.engine.error_param = None  # a step that failed for the engine's own reasons is no fault of the grammar's
    status, answer = await running.post(CHAT, hello | {"guided_choice": ["yes"]})
    assert (status, answer["error"]["code"]) == (500, "generation_failed")
