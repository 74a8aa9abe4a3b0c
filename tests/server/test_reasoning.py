"""A thought and its answer, told apart the same whether the text comes whole or in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zhilight.errors import ConfigError
from zhilight.server.openai.reasoning import get_reasoning_parser

OPEN = "<|assistant|><think>\n"
PLAIN = "<|assistant|>\n"
CLOSED = "<|assistant|>\n<think>\n\n</think>\n\n"


def stream(name: str, tail: str, pieces) -> tuple[str | None, str | None]:
    parser = get_reasoning_parser(name)(tail)
    deltas = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(r for r, _ in deltas) or None, "".join(c for _, c in deltas) or None


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
@pytest.mark.parametrize(("tail", "text", "reasoning", "content"), [
    (OPEN, "I add.\nTwice.\n</think>\n\nIt is 4.\n", "I add.\nTwice.", "It is 4.\n"),
    (PLAIN, "<think>\nI add.\n</think>\n\nIt is 4.", "I add.", "It is 4."),
    (PLAIN, "\n <think>a</think>b", "a", "b"),
    (PLAIN, "It is 4. <think>no</think>", None, "It is 4. <think>no</think>"),
    (PLAIN, "  indented", None, "  indented"),
    (CLOSED, "It is 4.", None, "It is 4."),
    (OPEN, "cut off by max_tokens </thi", "cut off by max_tokens </thi", None),
    (PLAIN, "<think>\nstill thinking \n", "still thinking", None),
    (PLAIN, "<think>\n\n</think>\n\nanswer", None, "answer"),
    (PLAIN, "<thin", None, "<thin"),
    (OPEN, "a < b </ think> </think>ok", "a < b </ think>", "ok"),
    (OPEN, "x</think>y</think>z", "x", "y</think>z"),
    (OPEN, "</think>", None, None),
    ("", "", None, None),
])
def test_thought_and_answer_cut_everywhere(name, tail, text, reasoning, content):
    expected = (reasoning, content)
    assert get_reasoning_parser(name)(tail).parse(text) == expected
    assert stream(name, tail, list(text)) == expected
    for at in range(len(text) + 1):
        assert stream(name, tail, [text[:at], text[at:]]) == expected, at


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.sampled_from(["<think>", "</think>", "<", "/", "think>", "\n", " ", "word", "你"]), max_size=10),
       tail=st.sampled_from([OPEN, PLAIN, CLOSED]))
def test_any_text_reads_the_same_in_both_faces(parts, tail):
    text = "".join(parts)
    assert stream("qwen3", tail, list(text)) == stream("qwen3", tail, parts) == get_reasoning_parser("qwen3")(tail).parse(text)


def test_reasoning_is_shown_at_once_but_for_what_may_be_the_marker():
    parser = get_reasoning_parser("qwen3")(OPEN)
    assert parser.feed("I add ") == ("I add", "")
    assert parser.feed("</thing") == (" </thing", "")
    assert parser.in_thought
    assert parser.feed("</think>Yes") == ("", "Yes")
    assert not parser.in_thought


def test_whether_the_prompt_opened_the_thought():
    assert get_reasoning_parser("qwen3")(OPEN).starts_open
    assert not get_reasoning_parser("qwen3")(CLOSED).starts_open


def test_an_unknown_parser_is_named():
    with pytest.raises(ConfigError, match="'granite'"):
        get_reasoning_parser("granite")
