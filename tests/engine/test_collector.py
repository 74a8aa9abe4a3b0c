"""From tokens to outputs: a fault of one request, waiting counts, and what comes for nobody."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tiny_llama import EOS, write_tiny_llama

from zhilight.config.sampling import SamplingParams
from zhilight.engine.collector import Collector
from zhilight.engine.messages import Finished, Started, StepOutput
from zhilight.engine.outputs import PositionLogprobs, TokenLogprob
from zhilight.tokenization.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tiny_llama(tmp_path_factory.mktemp("tiny")))


def step(tokens: dict[int, int], **extra) -> StepOutput:
    return StepOutput(np.array(list(tokens), np.int64).tobytes(), np.array(list(tokens.values()), np.int32).tobytes(), **extra)


def test_a_fault_in_one_requests_text_ends_only_that_one(tokenizer, caplog):
    collector = Collector(tokenizer)
    good, bad = (collector.open(name, None, [1, 2], SamplingParams()) for name in ("good", "bad"))
    handles = [request.choices[0].handle for request in (good, bad)]
    bad.choices[0]._detokenizer.push = lambda *a, **k: 1 / 0
    with caplog.at_level(logging.CRITICAL):
        touched, stopped = collector.dispatch(step(dict.fromkeys(handles, 70)))
    assert set(touched) == {good, bad}
    assert stopped == [handles[1]]
    output = bad.take()
    assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
    assert "ZeroDivisionError" in output.error
    assert good.take().outputs[0].token_ids == [70]


def test_pieces_are_joined_for_a_consumer_that_looks_late(tokenizer):
    collector = Collector(tokenizer)
    request = collector.open("r", None, [1], SamplingParams())
    handle, ids = request.choices[0].handle, tokenizer.encode("héllo")
    for token in ids:
        collector.dispatch(step({handle: token}))
    output = request.take()
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.finished) == ("héllo", ids, False)
    assert not request.has_news
    collector.dispatch(step({handle: EOS}, finished=[Finished(handle, "stop", stop_token=True)]))
    output = request.take()
    assert (output.outputs[0].text, output.outputs[0].finish_reason, output.finished) == ("", "stop", True)


def test_waiting_counts_what_has_not_started(tokenizer):
    collector = Collector(tokenizer)
    one = collector.open("one", None, [1], SamplingParams(n=3))
    two = collector.open("two", None, [1], SamplingParams())
    assert collector.num_waiting == 4
    collector.dispatch(StepOutput(started=[Started(one.choices[0].handle, 1.0, 5), Started(one.choices[1].handle, 1.0, 0)]))
    assert collector.num_waiting == 2
    assert one.cached_tokens == 5
    assert sorted(collector.close(one)) == [choice.handle for choice in one.choices]
    assert collector.close(one) == []
    assert collector.num_waiting == 1
    collector.close(two)
    assert (collector.num_waiting, collector.num_sequences) == (0, 0)


def test_prompt_log_probabilities_come_whole_though_another_choice_is_faster(tokenizer):
    collector = Collector(tokenizer)
    request = collector.open("r", None, [1, 2, 3], SamplingParams(n=2, prompt_logprobs=0))
    slow, fast = (choice.handle for choice in request.choices)
    entry = PositionLogprobs(TokenLogprob(2, -1.0, 1), [])
    collector.dispatch(step({fast: 70}, prompt_logprobs=[(slow, [entry])]))
    assert not request.has_news
    collector.dispatch(step({fast: 71, slow: 72}, prompt_logprobs=[(slow, [entry])]))
    output = request.take()
    assert output.prompt_logprobs == [None, entry, entry]
    assert [choice.token_ids for choice in output.outputs] == [[72], [70, 71]]
    failed = collector.open("f", None, [1, 2, 3], SamplingParams(n=2, prompt_logprobs=0))
    slow, fast = (choice.handle for choice in failed.choices)
    collector.dispatch(step({fast: 70}, finished=[Finished(slow, "error", error="no", param="seed")]))
    output = failed.take()
    assert (output.error, output.error_param) == ("no", "seed")


def test_what_comes_for_nobody_is_dropped(tokenizer):
    collector = Collector(tokenizer)
    request = collector.open("r", None, [1], SamplingParams())
    handle = request.choices[0].handle
    collector.close(request)
    request.take()
    assert collector.dispatch(step({handle: 5, 99: 6}, finished=[Finished(handle, "length")])) == ([], [])
    assert not request.has_news


def test_bad_words_are_banned_at_the_start_and_after_a_space(tokenizer):
    ids = Collector(tokenizer).bad_word_ids(SamplingParams(bad_words=("ab", " c")))
    assert ids == [tokenizer.encode("ab"), tokenizer.encode(" ab"), tokenizer.encode(" c")]


def test_the_end_brings_all_text_where_nobody_watches(tokenizer):
    collector = Collector(tokenizer)
    request = collector.open("r", None, [1], SamplingParams(), streamed=False)
    handle, ids = request.choices[0].handle, tokenizer.encode("hello")
    for token in ids[:-1]:
        assert collector.dispatch(step({handle: token})) == ([], [])
    first = request.metrics.first_token
    assert first is not None
    collector.dispatch(step({handle: ids[-1]}, finished=[Finished(handle, "length")]))
    assert request.take().outputs[0].text == "hello"
    assert request.metrics.first_token == first <= request.metrics.last_token
