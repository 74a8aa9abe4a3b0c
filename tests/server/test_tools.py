"""Tool-call parsers: one reading of a text, however it is cut; arguments word for word; what is no call stays content."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zhilight.errors import ConfigError
from zhilight.server.openai.tools import ContentDelta, ParsedMessage, ToolCall, ToolCallDelta, get_tool_parser
from zhilight.server.openai.tools.base import ToolParser
from zhilight.server.openai.tools.deepseek import CALL_BEGIN, CALL_END, CALLS_BEGIN, CALLS_END, SEPARATOR

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("get_weather", "search", "f")]
NAMES = ("hermes", "llama3_json", "mistral", "deepseek_v3")


def reader(name: str, **options) -> ToolParser:
    return get_tool_parser(name)(TOOLS, **options)


def stream(parser: ToolParser, pieces) -> ParsedMessage:
    """Feeds the pieces and joins what comes out, checking the order of things on the way."""
    content, calls = "", []
    for delta in [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish():
        if isinstance(delta, ContentDelta):
            assert delta.text
            content += delta.text
            continue
        assert isinstance(delta, ToolCallDelta)
        if delta.name is not None:
            assert delta.index == len(calls) and delta.id, "id and name come once, with the call's first delta"
            calls.append(ToolCall(delta.name, delta.arguments, delta.id))
        else:
            assert delta.index == len(calls) - 1 and delta.id is None and delta.arguments
            calls[-1] = ToolCall(calls[-1].name, calls[-1].arguments + delta.arguments, calls[-1].id)
    return ParsedMessage(content or None, calls)


def plain(message: ParsedMessage) -> tuple[str | None, list[tuple[str, str]]]:
    return message.content, [(call.name, call.arguments) for call in message.tool_calls]


def check(name: str, text: str, content: str | None, calls: list[tuple[str, str]], **options) -> None:
    """The whole text, every character alone, and a cut at every place."""
    expected = (content, calls)
    assert plain(reader(name, **options).parse(text)) == expected
    assert plain(stream(reader(name, **options), list(text))) == expected
    for at in range(len(text) + 1):
        assert plain(stream(reader(name, **options), [text[:at], text[at:]])) == expected, at


WEATHER = '{"city": "Paris", "note": "braces } ] { and \\"quotes\\" \\\\ 你好", "deep": {"a": [1, {"b": null}]}}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def mistral(*calls: tuple[str, str]) -> str:
    return "[TOOL_CALLS][" + ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls) + "]"


def deepseek(*calls: tuple[str, str]) -> str:
    each = (f"{CALL_BEGIN}function{SEPARATOR}{name}\n```json\n{arguments}\n```{CALL_END}" for name, arguments in calls)
    return CALLS_BEGIN + "\n".join(each) + CALLS_END


def written(name: str, calls: list[tuple[str, str]]) -> str:
    return {"hermes": lambda: "\n".join(hermes(*call) for call in calls), "mistral": lambda: mistral(*calls),
            "llama3_json": lambda: "; ".join(llama(*call) for call in calls), "deepseek_v3": lambda: deepseek(*calls)}[name]()


@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_calls_in_every_format_cut_everywhere(name, constrained):
    one = [("get_weather", WEATHER)]
    check(name, written(name, one), None, one, constrained=constrained)
    several = [("f", "{}"), ("search", '{"q": "</tool_call>[TOOL_CALLS]```"}'), ("f", '{ "x" : -1.5e3 }')]
    check(name, written(name, several), None, several, constrained=constrained)


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v3"])
def test_text_before_and_after_is_content(name):
    call = [("f", '{"a": 1}')]
    check(name, "Let me look.\n\n" + written(name, call) + "\n", "Let me look.", call)
    check(name, "Before " + written(name, call) + " after.", "Before after.", call)
    check(name, written(name, call) + "\n\nDone.", "Done.", call)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["", "Hello.", "  two\n\nlines \n", "a < b <tool", "[TOOL [x]", CALL_BEGIN[:9],
                                  '{"answer": 42}', '{"name": "Ann", "age": 3}', "{", '{"name": "f", "arguments": {"a": '])
def test_text_without_a_call_is_content_word_for_word(name, text):
    check(name, text, text or None, [])


@pytest.mark.parametrize(("name", "text"), [
    ("hermes", "<tool_call>"), ("hermes", "<tool_call>\nnot json</tool_call> x"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b"c"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'), ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'), ("hermes", "<tool_call>" + "[" * 300),
    ("hermes", '<tool_call>{"a":' + "[" * 300), ("hermes", '<tool_call>{"a": ' + "1" * 5000 + "}</tool_call>"),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'), ("llama3_json", '{"name": "f"}'),
    ("llama3_json", "<|python_tag|>print(1)"), ("llama3_json", "<|python_tag|>f.call(x=open('a'))"),
    ("llama3_json", "<|python_tag|>f.call(**{'a': 1})"), ("llama3_json", "<|python_tag|>" + "(" * 3000),
    ("mistral", "[TOOL_CALLS][]"), ("mistral", "[TOOL_CALLS] hello {"), ("mistral", "[TOOL_CALLS]some words{}"),
    ("deepseek_v3", f"{CALLS_BEGIN}x"), ("deepseek_v3", f"{CALL_BEGIN}function"),
    ("deepseek_v3", f"{CALL_BEGIN}{SEPARATOR}{{}}"),
    ("deepseek_v3", f"{CALLS_BEGIN}{CALL_BEGIN}function{SEPARATOR}f\n```json\nnothing\n```{CALL_END}{CALLS_END}"),
])
def test_malformed_calls_are_content_word_for_word(name, text):
    if len(text) < 400:
        check(name, text, text, [])
    else:
        assert plain(reader(name).parse(text)) == plain(stream(reader(name), list(text))) == (text, [])


def test_a_good_call_after_a_broken_one_is_found():
    broken = '<tool_call>{"name": "f", "arguments": {"a": "b"c"}}</tool_call>'
    check("hermes", broken + "\n" + hermes("f", "{}"), broken, [("f", "{}")])


def test_variants_that_models_write():
    check("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, [("f", '{"a": 1}')])
    check("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', None, [("f", '{"a": 1}')])
    check("hermes", '<tool_call>\n{"name": "f"}\n{"name": "search", "arguments": null}\n</tool_call>', None,
          [("f", "{}"), ("search", "{}")])
    check("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("f", '{"a": 1}')])
    check("llama3_json", "<|python_tag|>" + llama("f", '{"a": 1}'), None, [("f", '{"a": 1}')])
    check("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')])
    check("llama3_json", "<|python_tag|>search.call(q=\"x'y\", n=2)", None, [("search", '{"q": "x\'y", "n": 2}')])
    check("llama3_json", "Sure. <|python_tag|>f(a=[1, None], b={'c': True})", "Sure.",
          [("f", '{"a": [1, null], "b": {"c": true}}')])
    check("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]search[CALL_ID]abc[ARGS]{}', None,
          [("f", '{"a": 1}'), ("search", "{}")])
    check("mistral", '[TOOL_CALLS]f{"a": 1}', None, [("f", '{"a": 1}')])
    check("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdefghi"}]', None, [("f", "{}")])
    v31 = "".join(f"{CALL_BEGIN}{name}{SEPARATOR}{{}}{CALL_END}" for name in ("f", "search"))
    check("deepseek_v3", CALLS_BEGIN + v31 + CALLS_END, None, [("f", "{}"), ("search", "{}")])


def test_constrained_reading_announces_only_what_is_a_call():
    check("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [("f", '{"a": 1}')],
          constrained=True)
    answer = '{"name": "Ann", "parameters": {"a": 1}}'
    check("llama3_json", answer, answer, [], constrained=True)
    check("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, [("f", '{"a": 1}')], constrained=True)


def test_line_breaks_inside_strings_become_valid_json():
    check("hermes", hermes("f", '{"code": "a\n\tb é"}'), None, [("f", '{"code": "a\\n\\tb é"}')])


def test_ids():
    message = reader("hermes").parse(hermes("f", "{}") + hermes("f", "{}"))
    assert len({call.id for call in message.tool_calls}) == 2
    given = reader("mistral").parse('[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "abc"}, {"name": "f", "arguments": {}}]')
    assert given.tool_calls[0].id == "abc"
    assert len(given.tool_calls[1].id) == 9 and given.tool_calls[1].id.isalnum()


@pytest.mark.parametrize("constrained", [False, True])
def test_without_parallel_calls_only_the_first_is_reported(constrained):
    text = hermes("f", '{"a": 1}') + hermes("search", '{"b": 2}')
    check("hermes", text, None, [("f", '{"a": 1}')], parallel=False, constrained=constrained)


def test_constrained_arguments_are_sent_as_they_come():
    parser = reader("hermes", constrained=True)
    text = hermes("get_weather", '{"city": "Paris"}')
    deltas = [delta for char in text for delta in parser.feed(char)]
    assert (deltas[0].name, deltas[0].arguments) == ("get_weather", "")
    assert [delta.arguments for delta in deltas[1:]] == list('{"city": "Paris"}')


def test_a_call_cut_off_by_the_token_limit():
    text = '<tool_call>\n{"name": "f", "arguments": {"a": "unfini'
    check("hermes", text, text, [])
    check("hermes", text, None, [("f", '{"a": "unfini')], constrained=True)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from('{}[]"\\<>`;,|')), max_size=12),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                    max_leaves=6)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_random_arguments_and_cuts(data, name):
    values = data.draw(st.lists(st.dictionaries(st.text(max_size=5), JSON, max_size=3), min_size=1, max_size=3))
    style = data.draw(st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 1}, {"separators": (",", ":")}]))
    calls = [("f", json.dumps(value, **style)) for value in values]
    text = written(name, calls)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    constrained = data.draw(st.booleans())
    message = stream(reader(name, constrained=constrained), pieces)
    assert plain(message) == (None, calls)
    assert [json.loads(call.arguments) for call in message.tool_calls] == values


@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_any_text_reads_the_same_in_both_faces_and_loses_nothing(data, name):
    parts = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", CALLS_BEGIN, CALL_BEGIN, SEPARATOR,
             CALL_END, "{", "}", "[", "]", '"', ",", ":", ";", "f", '"name"', '"arguments"', '"parameters"', "\n", " ",
             "```json", "function", '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {"a": "}"}}', "<", "\\"]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=12)))
    whole = reader(name).parse(text)
    assert plain(stream(reader(name), list(text))) == plain(whole)
    for call in whole.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not whole.tool_calls:
        assert (whole.content or "") == text


def test_time_grows_with_the_text_and_not_its_square():
    def seconds(count: int) -> float:
        parser = reader("hermes", constrained=True)
        begin = time.process_time()
        for piece in ['<tool_call>{"name": "f", "arguments": {"a": "', *["word "] * count, '"}}</tool_call>']:
            parser.feed(piece)
        return time.process_time() - begin

    seconds(100)
    assert seconds(16000) < 16 * seconds(2000) + 0.1


def test_an_unknown_parser_is_named():
    with pytest.raises(ConfigError, match="'pythonic'"):
        get_tool_parser("pythonic")
