"""A forced call can be sampled in the parser's format, nothing else can, and the parser reads it back."""

from __future__ import annotations

import numpy as np
import pytest

from zhilight.engine.structured import GrammarState, compile_grammar
from zhilight.errors import RequestError
from zhilight.server.openai.tools import get_tool_parser
from zhilight.server.openai.tools.constrain import allow_calls, force_calls
from zhilight.tokenization.tokenizer import Tokenizer, TokenizerSettings, load_tokenizer

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city"], "additionalProperties": False, "$defs": {"city": {"enum": ["Paris", "北京"]}}}}},
    {"type": "function", "function": {"name": "now"}},
]
NAMES = ("hermes", "llama3_json", "mistral", "deepseek_v3")


@pytest.fixture(scope="module")
def tokenizer(demo_source):
    return load_tokenizer(demo_source.path)


def allowed(state: GrammarState) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little")).tolist())


def accepts(tokenizer: Tokenizer, grammar, text: str) -> bool:
    state = GrammarState(compile_grammar(grammar, tokenizer))
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in allowed(state):
            return False
        state.advance(token)
    return tokenizer.eos_token_id in allowed(state)


def written(name: str, *calls: tuple[str, str]) -> str:
    style = get_tool_parser(name).format
    each = (style.before_name + called + style.before_arguments + arguments + style.after_arguments
            for called, arguments in calls)
    return style.begin + style.separator.join(each) + style.end


@pytest.mark.parametrize("name", NAMES)
def test_forced_calls_are_what_the_parser_reads(tokenizer, name):
    parser = get_tool_parser(name)
    grammar = force_calls(parser, TOOLS, tokenizer)
    good = [("get_weather", '{"city": "Paris"}'), ("now", "{}"), ("get_weather", '{"city": "北京", "days": 3}')]
    for calls in (good[:1], good[1:2], good):
        text = written(name, *calls)
        assert accepts(tokenizer, grammar, text)
        message = parser(TOOLS, constrained=True).parse(text)
        assert message.content is None
        assert [(call.name, call.arguments) for call in message.tool_calls] == calls
    for call in (("get_weather", '{"city": "Rome"}'), ("get_weather", "{}"), ("now", '{"x": 1}'), ("other", "{}")):
        assert not accepts(tokenizer, grammar, written(name, call)), call
    assert not accepts(tokenizer, grammar, "Hello.")
    assert not accepts(tokenizer, grammar, "")


@pytest.mark.parametrize("name", NAMES)
def test_a_named_choice_and_no_parallel_calls_mean_one_call(tokenizer, name):
    parser = get_tool_parser(name)
    named = force_calls(parser, TOOLS, tokenizer, name="now")
    assert accepts(tokenizer, named, written(name, ("now", "{}")))
    assert not accepts(tokenizer, named, written(name, ("get_weather", '{"city": "Paris"}')))
    assert not accepts(tokenizer, named, written(name, ("now", "{}"), ("now", "{}")))
    single = force_calls(parser, TOOLS, tokenizer, parallel=False)
    assert accepts(tokenizer, single, written(name, ("get_weather", '{"city": "Paris"}')))
    assert not accepts(tokenizer, single, written(name, ("now", "{}"), ("now", "{}")))


STRICT = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]


@pytest.mark.parametrize("name", NAMES)
def test_allowed_calls_are_well_formed_and_fit_strict_tools(tokenizer, name):
    parser = get_tool_parser(name)
    grammar = allow_calls(parser, STRICT, tokenizer)
    good = [("get_weather", '{"city": "Paris"}'), ("now", '{"loose": [1]}'), ("get_weather", '{"city": "北京", "days": 3}')]
    for calls in (good[:1], good[1:2], good):
        text = written(name, *calls)
        assert accepts(tokenizer, grammar, text)
        assert [(call.name, call.arguments) for call in parser(STRICT, constrained=True).parse(text).tool_calls] == calls
    bad = written(name, ("get_weather", '{"city": "Rome"}'))
    assert not accepts(tokenizer, grammar, bad)
    for text in ("", "Hello {there}.\n", '{"answer": {"name": "x"}}', "a < b"):
        assert accepts(tokenizer, grammar, text), text
    if parser.format.markers:
        assert accepts(tokenizer, grammar, "Let me look.\n" + written(name, good[0]) + "\nDone.")
        assert not accepts(tokenizer, grammar, "Let me look.\n" + bad)
        assert not accepts(tokenizer, grammar, written(name, ("unknown", "{}")))
    if name != "hermes":
        assert not accepts(tokenizer, allow_calls(parser, STRICT, tokenizer, parallel=False), written(name, *good[:2]))


@pytest.mark.parametrize(("name", "marker"), [("mistral", "[TOOL_CALLS]"), ("hermes", "<tool_call>")])
@pytest.mark.parametrize("special", [True, False])
def test_markers_that_are_tokens(tokenizer, name, marker, special):
    # Whether the vocabulary holds the marker as a special token or as an ordinary added one, that token is allowed.
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(tokenizer.backend.to_str())
    backend.add_tokens([AddedToken(marker, special=special, normalized=False)])
    extended = Tokenizer(backend, TokenizerSettings({"eos_token": "<|im_end|>"}))
    token = extended.token_id(marker)
    parser = get_tool_parser(name)
    grammar = force_calls(parser, TOOLS, extended)
    assert token in allowed(GrammarState(compile_grammar(grammar, extended)))
    text = written(name, ("now", "{}"))
    assert extended.encode(text)[0] == token
    assert accepts(extended, grammar, text)
    optional = allow_calls(parser, STRICT, extended)
    assert accepts(extended, optional, "Wait. " + text + " Done.")
    assert not accepts(extended, optional, "Wait. " + written(name, ("get_weather", "{}")))


@pytest.mark.parametrize(("tools", "name", "param"), [
    ([], None, "tool_choice"),
    (TOOLS, "missing", "tool_choice"),
    ([{"function": {"name": "f", "parameters": {"type": "array"}}}], None, "tools[0].function.parameters"),
    ([TOOLS[1], {"function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}}}], None,
     "tools[1].function.parameters"),
    ([{"function": {"name": 'a"b'}}], None, "tools[0].function.name"),
])
def test_what_cannot_be_forced_is_named(tokenizer, tools, name, param):
    with pytest.raises(RequestError) as raised:
        force_calls(get_tool_parser("hermes"), tools, tokenizer, name=name)
    assert raised.value.param == param


def test_the_place_within_a_tools_schema_is_named(tokenizer):
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "strin"}}}}}]
    with pytest.raises(RequestError, match=r"#/properties/a.*'type'"):
        force_calls(get_tool_parser("hermes"), tools, tokenizer)


