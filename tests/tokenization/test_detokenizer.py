"""The stream of text equals the full decode, whatever the tokens and however they are cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zhilight.config.sampling import SamplingParams
from zhilight.tokenization.detokenizer import Detokenizer

PROPERTY = settings(max_examples=150, deadline=None,
                    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n你好世界𠮷🤗👨‍👩‍👧é▁aehlo")), max_size=40)


def params(**changes) -> SamplingParams:
    return SamplingParams(max_tokens=None, **changes)


def stream(tokenizer, ids, prompt=(), **changes) -> str:
    """Every token pushed alone; the last push is empty and finishes."""
    detokenizer = Detokenizer(tokenizer, prompt, params(**changes))
    return "".join(detokenizer.push([i]).text for i in ids) + detokenizer.push([], finished=True).text


@PROPERTY
@given(data=st.data())
def test_stream_of_random_ids_equals_full_decode(tokenizer, data):
    # Random ids are broken byte sequences, special tokens and ids without a token, at every token boundary.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    assert stream(tokenizer, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


@PROPERTY
@given(text=TEXT)
def test_stream_of_real_text_equals_the_text(demo_tokenizer, text):
    # 21 bytes (0x04, 0xF5 ...) have no token in this vocabulary, so not every text survives: the backend is the judge.
    ids = demo_tokenizer.encode(text)
    assert stream(demo_tokenizer, ids, skip_special_tokens=False) == demo_tokenizer.backend.decode(
        ids, skip_special_tokens=False)


@PROPERTY
@given(text=TEXT)
def test_sentencepiece_round_trip(sentencepiece_tokenizer, text):
    ids = sentencepiece_tokenizer.encode(text.replace("▁", ""))
    assert stream(sentencepiece_tokenizer, ids) == text.replace("▁", "")


@PROPERTY
@given(data=st.data())
def test_pieces_never_show_a_replacement_character_of_their_own(tokenizer, data):
    text = data.draw(TEXT).replace("\ufffd", "")
    detokenizer = Detokenizer(tokenizer, [], params(skip_special_tokens=False))
    ids = tokenizer.encode(text)
    expected = tokenizer.decode(ids, skip_special_tokens=False)
    shown = ""
    for i in ids:
        shown += detokenizer.push([i]).text
        assert expected.startswith(shown)


def test_byte_level_decode_equals_the_backend_on_every_broken_sequence(demo_tokenizer):
    ids = [demo_tokenizer.backend.token_to_id(c) for c in "äħèðŁ¤Ĺ"]
    broken = [i for i in ids if i is not None]
    assert len(broken) >= 4
    for start in range(len(broken)):
        for end in range(start, len(broken) + 1):
            assert demo_tokenizer.decode(broken[start:end]) == demo_tokenizer.backend.decode(broken[start:end])


def test_characters_wait_for_their_last_byte(sentencepiece_tokenizer):
    ids = [3 + byte for byte in "🤗".encode()]
    detokenizer = Detokenizer(sentencepiece_tokenizer, [1], params())
    assert [detokenizer.push([i]).text for i in ids] == ["", "", "", "🤗"]


def test_an_incomplete_character_is_flushed_at_the_end(sentencepiece_tokenizer):
    detokenizer = Detokenizer(sentencepiece_tokenizer, [], params())
    assert detokenizer.push([3 + 0xF0, 3 + 0x9F]).text == ""
    assert detokenizer.push([], finished=True).text == "\ufffd"


def test_output_completes_a_character_that_the_prompt_began(sentencepiece_tokenizer):
    first, *rest = (3 + byte for byte in "你".encode())
    assert stream(sentencepiece_tokenizer, rest, prompt=[1, first]) == "你"


def test_leading_space_is_dropped_only_at_the_start_of_a_text(sentencepiece_tokenizer):
    hello = sentencepiece_tokenizer.backend.token_to_id("▁hello")
    assert stream(sentencepiece_tokenizer, [hello, hello]) == "hello hello"
    assert stream(sentencepiece_tokenizer, [hello], prompt=[1]) == "hello"  # only <s> before it
    assert stream(sentencepiece_tokenizer, [hello], prompt=[1, hello]) == " hello"


@PROPERTY
@given(data=st.data())
def test_stop_strings_cut_the_same_for_every_grouping_of_tokens(demo_tokenizer, data):
    text = data.draw(st.text("ab\n你 ", max_size=30))
    stops = tuple(data.draw(st.lists(st.text("ab\n你 ", min_size=1, max_size=4), min_size=1, max_size=3)))
    include = data.draw(st.booleans())
    ids = demo_tokenizer.encode(text)
    detokenizer = Detokenizer(demo_tokenizer, [], params(stop=stops, include_stop_str_in_output=include))
    shown, stop, position = "", None, 0
    while stop is None and position < len(ids):
        size = data.draw(st.integers(1, 4))
        delta = detokenizer.push(ids[position:position + size])
        shown, stop, position = shown + delta.text, delta.stop, position + size
    if stop is None:
        shown += detokenizer.push([], finished=True).text
    expected, expected_stop = cut(text, stops, include)
    assert (shown, stop) == (expected, expected_stop)


def cut(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The rule, written plainly: the first character at which a stop string ends, and of those the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[:end] if include else text[:end - len(longest)], longest
    return text, None


def test_text_is_held_back_only_while_it_can_become_a_stop_string(demo_tokenizer):
    detokenizer = Detokenizer(demo_tokenizer, [], params(stop=("###",)))
    encode = demo_tokenizer.encode
    assert detokenizer.push(encode("a #")).text == "a "
    assert detokenizer.push(encode("#")).text == ""
    assert detokenizer.push(encode("b")).text == "##b"
    delta = detokenizer.push([*encode("c#"), *encode("#"), *encode("#"), *encode("d")])
    assert (delta.text, delta.stop) == ("c", "###")
    assert delta.num_tokens == len([*encode("c#"), *encode("#"), *encode("#")])
    assert detokenizer.push(encode("more"), finished=True).text == ""


def test_held_back_text_is_flushed_at_the_end(demo_tokenizer):
    detokenizer = Detokenizer(demo_tokenizer, [], params(stop=("END!",)))
    assert detokenizer.push(demo_tokenizer.encode("the END")).text == "the "
    assert detokenizer.push([], finished=True).text == "END"


def test_min_tokens_lets_early_stop_strings_pass(demo_tokenizer):
    ids = [demo_tokenizer.encode(c)[0] for c in "xyxyxy"]
    detokenizer = Detokenizer(demo_tokenizer, [], params(stop=("y",), min_tokens=3))
    delta = detokenizer.push(ids)
    assert (delta.text, delta.stop, delta.num_tokens) == ("xyx", "y", 4)


def test_a_stop_string_that_was_let_pass_is_not_held_back(demo_tokenizer):
    detokenizer = Detokenizer(demo_tokenizer, [], params(stop=("xy", "yz!"), min_tokens=5))
    assert detokenizer.push([demo_tokenizer.encode(c)[0] for c in "xy"]).text == "x"  # "y" may still become "yz!"
    assert detokenizer.push([demo_tokenizer.encode("a")[0]]).text == "ya"


@pytest.mark.parametrize(("include", "skip", "text"), [(False, True, "a"), (False, False, "a"), (True, True, "a"),
                                                       (True, False, "a<|im_end|>")])
def test_the_stop_token_adds_no_text(demo_tokenizer, include, skip, text):
    ids = [*demo_tokenizer.encode("a"), demo_tokenizer.eos_token_id]
    detokenizer = Detokenizer(demo_tokenizer, [], params(include_stop_str_in_output=include, skip_special_tokens=skip))
    assert detokenizer.push(ids, finished=True, stopped_by_token=True).text == text


def test_no_text_without_detokenize(demo_tokenizer):
    detokenizer = Detokenizer(demo_tokenizer, [], params(detokenize=False))
    delta = detokenizer.push(demo_tokenizer.encode("hello world"), finished=True)
    assert (delta.text, delta.num_tokens) == ("", 2)


def test_cost_of_a_token_does_not_grow_with_the_text(demo_tokenizer):
    # A stop string of which the text is a long repetition is the worst case for a search that starts over.
    detokenizer = Detokenizer(demo_tokenizer, [], params(stop=("a" * 5000 + "b",)))
    ids = demo_tokenizer.encode("a" * 4) * 20000
    times = []
    for start in range(0, len(ids), len(ids) // 4):
        begin = time.process_time()
        detokenizer.push(ids[start:start + len(ids) // 4])
        times.append(time.process_time() - begin)
    assert times[-1] < 5 * times[0] + 0.05
