"""The offline face on a tiny Llama: switches that must not change the text, choices, stop strings, streams, beams."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tiny_llama import EOS, VOCAB, write_tiny_llama

from zhilight import LLM, RequestOutput, SamplingParams
from zhilight.errors import ConfigError, RequestError

PROMPTS = ["hello world, this is a prompt that fills more than one block of sixteen", "hello world, this is another",
           "short", "hello world, this is a prompt that fills more than one block and then ends otherwise", "x" * 70]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(folder):
    return make(folder)


def make(folder, **config) -> LLM:
    defaults = {"device": "cpu", "block_size": 16, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 512,
                "check_invariants": True}
    return LLM(str(folder), **defaults | config)


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def params(**extra) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **extra})


@pytest.mark.parametrize("sampling", [params(), params(temperature=0.8, top_p=0.9, seed=5)], ids=["greedy", "seeded"])
@pytest.mark.parametrize("config", [
    {}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 24}, {"enable_chunked_prefill": False},
    {"enable_overlap": False}, {"num_kv_blocks": 12, "max_model_len": 160}, {"max_num_seqs": 1}],
    ids=["default", "no-prefix-cache", "small-chunks", "no-chunking", "no-overlap", "preemption", "one-at-a-time"])
def test_the_text_is_that_of_each_request_alone(folder, llm, config, sampling):
    alone = [llm.generate(prompt, sampling, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]
    other = make(folder, **config)
    outputs = other.generate(PROMPTS, sampling, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    if "max_model_len" in config:
        assert other.stats().preemptions > 0


def test_the_text_is_the_same_when_steps_really_overlap(folder, llm, monkeypatch):
    """The CPU has its results at once, so the engine would read them first: make it believe that they are under way."""
    sampling = [params(temperature=0.8 * (i % 2), seed=i, repetition_penalty=1.0 + 0.2 * i) for i in range(len(PROMPTS))]
    alone = [llm.generate(prompt, own, use_tqdm=False)[0].outputs[0].token_ids
             for prompt, own in zip(PROMPTS, sampling, strict=True)]
    monkeypatch.setattr("zhilight.ops.cpu._Fetched.ready", lambda self: False)
    other = make(folder, num_kv_blocks=12, max_model_len=160, max_num_batched_tokens=40)
    fed, prepare = [], other._core.runner.ops.prepare_step
    other._core.runner.ops.prepare_step = lambda arrays, sampled: fed.append(len(arrays.feed_rows)) or prepare(arrays, sampled)
    assert [output.outputs[0].token_ids for output in other.generate(PROMPTS, sampling, use_tqdm=False)] == alone
    assert max(fed) > 1
    assert other.stats().preemptions > 0


def test_the_same_prompt_twice_has_the_same_log_probabilities(folder):
    llm = make(folder)
    ids = llm.tokenizer.encode("a prompt of exactly thirty-two characters"[:32])
    sampling = params(logprobs=20, max_tokens=4)
    first, second = (llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 31)
    for one, two in zip(first.outputs[0].logprobs, second.outputs[0].logprobs, strict=True):
        assert {t.token_id for t in one.top} == {t.token_id for t in two.top}
        np.testing.assert_allclose([t.logprob for t in one.top], [t.logprob for t in two.top], atol=1e-4)


def test_prompts_of_every_form_and_params_for_each(llm):
    ids = llm.tokenizer.encode("short")
    outputs = llm.generate(["short", {"prompt": "short"}, {"prompt_token_ids": ids}, ids],
                           [params(max_tokens=n) for n in (1, 2, 3, 4)], use_tqdm=False)
    assert [output.prompt for output in outputs] == ["short", "short", None, None]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert len({output.outputs[0].token_ids[0] for output in outputs}) == 1
    assert llm.generate(ids, params(max_tokens=4), use_tqdm=False)[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids


def test_choices_have_their_own_seeds_and_the_first_is_that_of_n_1(llm):
    sampling = params(temperature=1.0, seed=3, n=4, max_tokens=20)
    (many,) = llm.generate("short", sampling, use_tqdm=False)
    (again,) = llm.generate("short", sampling, use_tqdm=False)
    (one,) = llm.generate("short", params(temperature=1.0, seed=3, max_tokens=20), use_tqdm=False)
    assert [choice.index for choice in many.outputs] == [0, 1, 2, 3]
    assert len({tuple(choice.token_ids) for choice in many.outputs}) == 4
    assert many.outputs[0].token_ids == one.outputs[0].token_ids
    assert [c.token_ids for c in many.outputs] == [c.token_ids for c in again.outputs]


def test_best_of_returns_the_most_probable(llm):
    sampling = params(temperature=1.0, seed=3, max_tokens=10)
    (every,) = llm.generate("short", SamplingParams(**{**vars(sampling), "n": 6, "logprobs": 0}), use_tqdm=False)
    (best,) = llm.generate("short", SamplingParams(**{**vars(sampling), "n": 2, "best_of": 6}), use_tqdm=False)
    ranked = sorted(every.outputs, key=lambda choice: -choice.cumulative_logprob)
    assert [choice.token_ids for choice in best.outputs] == [choice.token_ids for choice in ranked[:2]]
    assert [choice.index for choice in best.outputs] == [0, 1]
    assert best.outputs[0].logprobs is None


def test_a_stop_string_ends_the_text_and_the_sequence(llm):
    (free,) = llm.generate(PROMPTS[0], params(), use_tqdm=False)
    text = free.outputs[0].text
    stop = text[12:15]
    (cut,) = llm.generate(PROMPTS[0], params(stop=(stop,)), use_tqdm=False)
    choice = cut.outputs[0]
    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.token_ids == free.outputs[0].token_ids[: len(choice.token_ids)]
    assert len(choice.token_ids) < 40
    (kept,) = llm.generate(PROMPTS[0], params(stop=(stop,), include_stop_str_in_output=True), use_tqdm=False)
    assert kept.outputs[0].text == text[: text.index(stop) + len(stop)]
    assert llm.stats().running == 0


def test_the_end_of_sequence_adds_no_text(llm):
    (output,) = llm.generate("short", SamplingParams(temperature=0, max_tokens=5, logit_bias={EOS: 100}), use_tqdm=False)
    choice = output.outputs[0]
    assert (choice.text, choice.token_ids, choice.finish_reason, choice.stop_reason) == ("", [EOS], "stop", None)


def test_a_stream_joins_to_the_whole_and_may_be_left(llm):
    (whole,) = llm.generate(PROMPTS[0], params(), use_tqdm=False)
    pieces = list(llm.stream(PROMPTS[0], params()))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.outputs[0].text
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    stream = llm.stream(PROMPTS[1], params())
    next(stream)
    stream.close()
    assert llm.stats().running == 0
    assert llm._core.pool.usage == 0


def test_two_streams_at_once_give_what_each_gives_alone(llm):
    alone = [texts(llm.generate(prompt, params(), use_tqdm=False))[0] for prompt in PROMPTS[:2]]
    got = ["", ""]
    for pieces in itertools.zip_longest(*(llm.stream(prompt, params()) for prompt in PROMPTS[:2])):
        for i, piece in enumerate(pieces):
            got[i] += piece.outputs[0].text if piece else ""
    assert got == alone


def test_a_refusal_reaches_the_request_it_belongs_to_and_no_other(llm):
    from zhilight import StructuredOutput

    bad = llm.stream("a", SamplingParams(structured=StructuredOutput("regex", "(")))
    (output,) = llm.generate(PROMPTS[0], params(), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    llm._core.wait_for_grammars()
    llm.generate("b", params(max_tokens=2), use_tqdm=False)  # takes in the refusal, which is not its own
    with pytest.raises(RequestError):
        next(bad)


def test_without_a_tokenizer_what_needs_one_is_refused(folder):
    llm = make(folder, skip_tokenizer_init=True)
    ids = {"prompt_token_ids": [5, 6]}
    assert llm.generate(ids, params(max_tokens=3), use_tqdm=False)[0].outputs[0].text == ""
    assert len(llm.beam_search(ids, 2, 2, ignore_eos=True)[0]) == 2
    for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "hi"}]),
                 lambda: llm.generate(ids, params(stop=("x",))), lambda: llm.generate(ids, params(bad_words=("x",)))):
        with pytest.raises(RequestError, match="without a tokenizer"):
            call()


def test_beam_search_with_a_wide_beam_finds_the_best_of_all(llm):
    """Two tokens deep, against every pair of tokens among the first step's ten best."""
    ids = llm.tokenizer.encode("beam")
    beams = llm.beam_search("beam", 5, 2, ignore_eos=True)[0]
    first = llm.generate(ids, params(max_tokens=1, logprobs=10), use_tqdm=False)[0].outputs[0].logprobs[0].top
    pairs = []
    for entry in first[:5]:
        (step,) = llm.generate([*ids, entry.token_id], params(max_tokens=1, logprobs=10), use_tqdm=False)
        pairs += [(entry.logprob + second.logprob, [entry.token_id, second.token_id])
                  for second in step.outputs[0].logprobs[0].top]
    pairs.sort(key=lambda pair: -pair[0])
    assert [beam.token_ids for beam in beams] == [tokens for _, tokens in pairs[:5]]
    assert [beam.cumulative_logprob for beam in beams] == pytest.approx([score for score, _ in pairs[:5]], abs=1e-4)
    with pytest.raises(RequestError, match="beam_width is 11"):
        llm.beam_search("beam", 11, 2)


def test_chat_uses_the_template_and_the_models_defaults(llm):
    message = [{"role": "user", "content": "hi"}]
    one = llm.chat(message, params(max_tokens=4), use_tqdm=False)
    assert one[0].prompt == "<|user|>hi<|assistant|>"
    two = llm.chat([message, message], params(max_tokens=4), use_tqdm=False)
    assert texts(two) == texts(one) * 2
    defaults = llm.default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens) == (0.7, 40, 16)


def test_prompt_log_probabilities_begin_with_none(llm):
    (output,) = llm.generate("short", params(prompt_logprobs=1, max_tokens=2), use_tqdm=False)
    assert output.prompt_logprobs[0] is None
    assert [entry.chosen.token_id for entry in output.prompt_logprobs[1:]] == output.prompt_token_ids[1:]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_grammar_is_followed(llm, overlapped, monkeypatch):
    from zhilight import StructuredOutput

    if overlapped:
        monkeypatch.setattr("zhilight.ops.cpu._Fetched.ready", lambda self: False)
    (output,) = llm.generate("short", SamplingParams(temperature=1.0, seed=1, max_tokens=60, structured=StructuredOutput(
        "regex", "(yes|no), [0-9]{3}")), use_tqdm=False)
    import re

    assert re.fullmatch("(yes|no), [0-9]{3}", output.outputs[0].text)
    assert output.outputs[0].finish_reason == "stop"
    with pytest.raises(RequestError):
        llm.generate("short", SamplingParams(structured=StructuredOutput("regex", "(")), use_tqdm=False)
    assert texts(llm.generate("short", params(), use_tqdm=False)), "the engine goes on after a refusal"


@pytest.mark.parametrize(("prompt", "sampling", "param", "numbers"), [
    ([], {}, "prompt", "empty"), ([1.5], {}, "prompt", "integers"),
    ([[1]], {}, "prompt", "flat"), ([2**70], {}, "prompt", "integers"),
    ([VOCAB], {}, "prompt", str(VOCAB)), ([-1], {}, "prompt", "-1"),
    ([5] * 512, {}, "prompt", "512"), ([5] * 500, {"max_tokens": 13}, "max_tokens", "513"),
    ([5], {"stop_token_ids": (VOCAB,)}, "stop_token_ids", str(VOCAB)), ([5], {"logit_bias": {999: 1.0}}, "logit_bias", "999"),
    ([5], {"allowed_token_ids": (300,)}, "allowed_token_ids", "300")])
def test_what_cannot_be_served_is_refused_with_the_numbers(llm, prompt, sampling, param, numbers):
    with pytest.raises(RequestError, match=numbers) as caught:
        llm.generate({"prompt_token_ids": prompt}, SamplingParams(**sampling), use_tqdm=False)
    assert caught.value.param == param


def test_one_bad_prompt_runs_none(llm):
    before = llm.stats().generation_tokens
    with pytest.raises(RequestError):
        llm.generate(["fine", {"prompt_token_ids": [VOCAB]}], params(), use_tqdm=False)
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [params()], use_tqdm=False)
    assert llm.stats().generation_tokens == before
    assert llm.stats().waiting == 0


@pytest.mark.parametrize(("config", "message"), [
    ({"max_model_len": 1000}, "1000.*512"), ({"num_kv_blocks": 4, "max_model_len": 80}, "80.*64 tokens"),
    ({"swap_space_gb": 1.0}, "swap_space_gb"), ({"kv_cache_dtype": "int8"}, "float32"),
    ({"num_kv_blocks": None, "cpu_kv_cache_gb": 1e-9}, "cpu_kv_cache_gb"),
    ({"enable_chunked_prefill": False, "max_num_batched_tokens": 100, "max_model_len": 200}, "max_num_batched_tokens")])
def test_a_configuration_that_cannot_work_says_why(folder, config, message):
    with pytest.raises(ConfigError, match=message):
        make(folder, **config)


def test_the_context_is_what_the_kv_cache_holds(folder):
    assert make(folder, num_kv_blocks=10).max_model_len == 160
    assert make(folder, enable_chunked_prefill=False, max_num_batched_tokens=96).max_model_len == 96
