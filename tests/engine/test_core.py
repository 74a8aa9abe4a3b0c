"""The engine loop: sampling parameters in a batch, aborts at every moment, failures, grammars, embeddings."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
from history_model import EOS, VOCAB, Collected, HistoryModel, abort, add, expected, logits_after, make_core, run

from zhilight.config.sampling import SamplingParams, StructuredOutput
from zhilight.engine.messages import Embed
from zhilight.engine.runner import _FetchedLogprobs
from zhilight.engine.sampler import pack_bits
from zhilight.errors import DeviceError, RequestError
from zhilight.ops.cpu_sampling import log_probabilities

PROMPT = [9, 10, 11, 12]


def greedy(**extra) -> SamplingParams:
    return SamplingParams(temperature=0, **{"max_tokens": 12, "ignore_eos": True, **extra})


def generate(params: SamplingParams, prompt=PROMPT, core=None, **extra) -> list[int]:
    """The request's tokens, in a batch with neighbours of other settings."""
    core = core or make_core()
    add(core, 1000, [4, 5], SamplingParams(temperature=1.0, seed=1, max_tokens=20))
    add(core, 1001, prompt, params, **extra)
    add(core, 1002, [6] * 30, greedy(repetition_penalty=1.5, logit_bias={7: 3.0}))
    return run(core).tokens[1001]


def follow(prompt, count, change) -> list[int]:
    """Greedy tokens by hand: `change(logits, output)` edits the logits of each step."""
    tokens = list(prompt)
    for _ in range(count):
        logits = logits_after(tokens).astype(np.float64)
        change(logits, tokens[len(prompt):])
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt):]


# ---- sampling parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_penalties_count_the_prompt_and_the_output_as_they_should(overlap):
    def change(logits, output):
        seen = sorted({*PROMPT, *output})
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.7, logits[seen] * 1.7)
        for token in set(output):
            logits[token] -= 0.6 + 0.4 * output.count(token)

    params = greedy(repetition_penalty=1.7, presence_penalty=0.6, frequency_penalty=0.4, max_tokens=30)
    assert generate(params, core=make_core(overlap=overlap)) == follow(PROMPT, 30, change)


def test_penalties_survive_preemption():
    core = make_core(num_blocks=8, max_model_len=128)
    params = greedy(repetition_penalty=1.4, frequency_penalty=0.3, max_tokens=60)

    def change(logits, output):
        seen = sorted({*prompt, *output})
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / 1.4, logits[seen] * 1.4)
        for token in set(output):
            logits[token] -= 0.3 * output.count(token)

    prompts = {handle: [handle + 4] * 25 for handle in range(5)}
    for handle, prompt in prompts.items():
        add(core, handle, prompt, params)
    collected = run(core)
    assert core.scheduler.num_preemptions
    for handle, prompt in prompts.items():
        assert collected.tokens[handle] == follow(prompt, 60, change)


def test_logit_bias():
    assert generate(greedy(logit_bias={7: 100.0})) == [7] * 12
    favourite = follow(PROMPT, 1, lambda logits, output: None)[0]
    assert generate(greedy(logit_bias={favourite: -100.0}))[0] != favourite


def test_min_tokens_holds_back_every_stop_token():
    stops = tuple(range(4, 30))
    params = SamplingParams(temperature=0, max_tokens=30, min_tokens=6, stop_token_ids=stops)
    tokens = generate(params)

    def change(logits, output):
        if len(output) < 6:
            logits[[EOS, *stops]] = -np.inf

    assert tokens == follow(PROMPT, len(tokens), change)
    assert len(tokens) > 6
    assert not {EOS, *stops} & set(tokens[:6])
    assert tokens[-1] in stops or tokens[-1] == EOS


@pytest.mark.parametrize("overlap", [True, False])
def test_bad_words_of_one_and_of_several_tokens(overlap):
    free = follow(PROMPT, 8, lambda logits, output: None)
    words = [[free[0]], [free[2], free[3]], [21, 22, 23]]

    def change(logits, output):
        for word in words:
            if output[len(output) - len(word) + 1:] == word[:-1] and len(output) >= len(word) - 1:
                logits[word[-1]] = -np.inf

    core = make_core(overlap=overlap)
    assert generate(greedy(max_tokens=30), core=core, bad_words=words) == follow(PROMPT, 30, change)
    prompt = [9, free[2]]  # the phrase must not begin in the prompt
    assert follow(prompt, 3, lambda logits, output: None)[:1] == generate(
        greedy(max_tokens=1), prompt, bad_words=[[free[2], follow(prompt, 1, lambda logits, output: None)[0]]])


def test_allowed_token_ids():
    tokens = generate(SamplingParams(temperature=2.0, seed=3, max_tokens=30, ignore_eos=True, allowed_token_ids=(5, 8, 39)))
    assert set(tokens) == {5, 8, 39}


def test_temperature_with_top_p_of_one_does_sample():
    counts = [generate(SamplingParams(temperature=1.0, seed=seed, max_tokens=1))[0] for seed in range(40)]
    assert len(set(counts)) > 5


def test_without_a_seed_choices_differ_and_with_one_they_do_not():
    core = make_core(max_num_seqs=16)
    for handle in range(8):
        add(core, handle, PROMPT, SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True))
        add(core, 100 + handle, PROMPT, SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True, seed=-5))
    collected = run(core)
    assert len({tuple(collected.tokens[h]) for h in range(8)}) == 8
    assert len({tuple(collected.tokens[100 + h]) for h in range(8)}) == 1


def test_log_probabilities_are_the_models_own():
    core = make_core()
    add(core, 1, PROMPT, SamplingParams(temperature=1.3, seed=2, max_tokens=6, logprobs=3, top_k=4, repetition_penalty=1.2,
                                        ignore_eos=True))
    add(core, 2, PROMPT, greedy(logprobs=0, max_tokens=6))
    add(core, 3, PROMPT, greedy(max_tokens=6))
    collected = run(core)
    assert 3 not in collected.logprobs
    for handle, count in ((1, 3), (2, 0)):
        tokens = list(PROMPT)
        assert len(collected.logprobs[handle]) == 6
        for entry in collected.logprobs[handle]:
            token = collected.tokens[handle][len(tokens) - len(PROMPT)]
            truth = log_probabilities(logits_after(tokens)[None], np.array([token]), 3)
            assert entry.chosen.token_id == token
            assert entry.chosen.logprob == pytest.approx(float(truth.logprobs[0]), abs=1e-5)
            assert entry.chosen.rank == truth.ranks[0]
            assert [top.token_id for top in entry.top] == truth.top_ids[0].tolist()[:count]
            assert [top.rank for top in entry.top] == list(range(1, count + 1))
            tokens.append(token)


@pytest.mark.parametrize("budget", [7, 64])
def test_prompt_log_probabilities_over_chunks_and_in_spite_of_the_cache(budget):
    prompt = (np.arange(50) * 7 % 30 + 4).tolist()
    core = make_core(budget=budget, max_num_seqs=4)
    for handle in (1, 2):
        add(core, handle, prompt, greedy(prompt_logprobs=2, max_tokens=2))
        add(core, handle + 10, [5] * 20, greedy(max_tokens=5))
        collected = run(core)
        assert collected.cached[handle] == 0
        entries = collected.prompt_logprobs[handle]
        assert len(entries) == len(prompt) - 1
        for position, entry in enumerate(entries, start=1):
            truth = log_probabilities(logits_after(prompt[:position])[None], np.array([prompt[position]]), 2)
            assert entry.chosen.token_id == prompt[position]
            assert entry.chosen.logprob == pytest.approx(float(truth.logprobs[0]), abs=1e-5)
            assert [top.token_id for top in entry.top] == truth.top_ids[0].tolist()
        assert collected.tokens[handle] == expected(prompt, greedy(max_tokens=2))[0]


def test_prompt_log_probabilities_of_a_long_prompt_take_several_steps():
    from zhilight.engine.scheduler import MAX_PROMPT_ROWS

    prompt = (np.arange(600) * 7 % 30 + 4).tolist()
    core = make_core(budget=1000, max_model_len=640, max_num_seqs=4)
    rows, begin = [], core.runner.begin
    core.runner.begin = lambda plan: rows.append(len(plan.arrays.logit_rows)) or begin(plan)
    add(core, 1, prompt, greedy(prompt_logprobs=0, max_tokens=1))
    add(core, 2, prompt[::-1], greedy(prompt_logprobs=0, max_tokens=1))
    collected = run(core)
    for handle, tokens in ((1, prompt), (2, prompt[::-1])):
        assert [entry.chosen.token_id for entry in collected.prompt_logprobs[handle]] == tokens[1:]
        assert collected.tokens[handle] == expected(tokens, greedy(max_tokens=1), 640)[0]
    assert max(rows) <= MAX_PROMPT_ROWS + 4


def test_logits_are_wanted_at_ends_unless_for_a_prompt():
    """The last layer may leave the other rows out in every step: only its last chunk stops short of its prompt's end."""
    core, seen = make_core(budget=48), []
    begin = core.runner.begin
    core.runner.begin = lambda plan: seen.append(plan) or begin(plan)
    rng = np.random.default_rng(8)
    for handle in range(12):
        wanted = {"prompt_logprobs": 1} if handle == 11 else {}
        add(core, handle, rng.integers(4, VOCAB, int(rng.integers(1, 100))), greedy(max_tokens=6, **wanted))
    run(core)
    partial = [plan for plan in seen if 0 < plan.num_samples < len(plan.arrays.context_lens)]
    assert partial and any(not plan.num_samples for plan in seen) and any(plan.prompt_rows for plan in seen)
    assert all(plan.arrays.logits_at_ends for plan in seen if not plan.prompt_rows)


# ---- aborts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("moment", range(8))
def test_an_abort_frees_everything_at_any_moment(moment, overlap):
    """Moments: before the first step, in the prefill's chunks, at the first token, later, and after the end."""
    core = make_core(budget=16, overlap=overlap, max_num_seqs=2)
    add(core, 1, [4] * 40, greedy(max_tokens=3))
    add(core, 2, [5] * 10, greedy(max_tokens=30))
    collected = Collected()
    for _ in range(moment):
        collected.take(core.step())
    abort(core, 1)
    abort(core, 1, 1, 77)
    if 1 not in collected.finished:
        assert all(r is None or r.handle != 1 for r in core.table.requests), "the slot is not free"
    while core.has_work:
        out = core.step()
        assert 1 not in np.frombuffer(out.handles, np.int64), "stray output"
        collected.take(out)
    assert collected.tokens[2] == expected([5] * 10, greedy(max_tokens=30))[0]
    assert core.pool.available == core.pool.num_blocks


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_step_ends_its_requests_and_not_the_engine(overlap, caplog):
    core = make_core(model=HistoryModel(fail_on=39), overlap=overlap, max_num_seqs=2)
    ban = {39: -100.0}
    add(core, 1, [4, 5, 6], greedy(max_tokens=10, logit_bias=ban))
    collected = Collected()
    for _ in range(3):
        collected.take(core.step())
    shared = list(range(10, 30))
    add(core, 2, [*shared, 39], greedy(logit_bias=ban))
    add(core, 3, shared, greedy(logit_bias=ban))  # waits for a slot; its first block is one that was never computed
    with caplog.at_level(logging.CRITICAL):
        while core.has_work:
            collected.take(core.step())
    assert collected.finished[1].reason == collected.finished[2].reason == "error"
    assert "token 39 is poison" in collected.finished[2].error
    assert collected.tokens[3] == follow(shared, 12, lambda logits, output: logits.__setitem__(39, -np.inf))
    assert collected.cached[3] == 0
    assert core.pool.available == core.pool.num_blocks
    assert core.pool.num_cached == 1, "only what ran after the failure is cached: its 20 + 12 tokens but the last"


def test_a_failure_while_sampling_is_the_same():
    core = make_core()
    sample = core.runner.ops.sample
    core.runner.ops.sample = lambda logits, batch: (_ for _ in ()).throw(ValueError("no"))
    add(core, 1, PROMPT, greedy())
    assert run(core).finished[1].error == "ValueError: no"
    core.runner.ops.sample = sample
    assert generate(greedy(), core=core) == expected(PROMPT, greedy())[0]


def test_a_failure_after_a_request_has_ended_still_tells_its_client(monkeypatch):
    core = make_core()
    add(core, 1, PROMPT, greedy(max_tokens=1, logprobs=0))
    monkeypatch.setattr(_FetchedLogprobs, "positions", lambda *_: 1 / 0)
    assert run(core).finished[1].reason == "error"
    assert not core._requests
    assert core.pool.available == core.pool.num_blocks


def test_a_lost_device_is_not_survived():
    core = make_core()
    core.runner.forward = lambda arrays, sampled: (_ for _ in ()).throw(DeviceError("lost"))
    add(core, 1, PROMPT, greedy())
    with pytest.raises(DeviceError):
        core.step()


def test_wrong_bookkeeping_is_healed(caplog):
    core = make_core(check=False)
    add(core, 1, [4] * 20, greedy(max_tokens=30))
    for _ in range(3):
        core.step()
    core.pool._references[core.scheduler.block_tables()[0][0]] += 1
    core.pool._free.pop()
    with caplog.at_level(logging.CRITICAL):
        assert core.check()
    assert core.check() == []
    assert core.stats().kv_faults == 1
    assert run(core).finished[1].reason == "length"
    assert core.pool.available == core.pool.num_blocks


# ---- grammars and embeddings ----------------------------------------------------------------------------------------


class Alternating:
    """A grammar: 4s and 5s in turn, `length` of them; the token `forbidden_at` cannot be followed by anything."""

    def __init__(self, length: int, stuck_at: int | None = None):
        self.length, self.stuck_at, self.count = length, stuck_at, 0

    def mask(self):
        if self.count == self.stuck_at:
            raise RequestError("nothing fits", param="response_format")
        return pack_bits(np.array([4 + self.count % 2]), VOCAB)

    def advance(self, token):
        assert token == 4 + self.count % 2, "the mask was not followed"
        self.count += 1

    @property
    def is_finished(self):
        return self.count == self.length


def structured(value: str) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=1, max_tokens=40, structured=StructuredOutput("regex", value))


@pytest.mark.parametrize("overlap", [True, False])
def test_a_grammar_rules_its_request_and_no_other(overlap):
    core = make_core(overlap=overlap, compile_grammar=lambda s: Alternating(int(s.value)))
    add(core, 1, PROMPT, structured("7"))
    add(core, 2, PROMPT, greedy(max_tokens=20))
    add(core, 3, [5] * 30, structured("3"))
    core.wait_for_grammars()
    while core._compiling and not all(future.done() for _, future in core._compiling.values()):
        core.wait_for_grammars()
    collected = run(core)
    assert collected.tokens[1] == [4, 5, 4, 5, 4, 5, 4]
    assert collected.tokens[3] == [4, 5, 4]
    assert collected.finished[1].reason == "stop"
    assert not collected.finished[1].stop_token
    assert collected.tokens[2] == expected(PROMPT, greedy(max_tokens=20))[0]


def test_a_grammar_that_gets_stuck_ends_its_own_request():
    core = make_core(compile_grammar=lambda s: Alternating(9, stuck_at=2))
    add(core, 1, PROMPT, structured("x"))
    add(core, 2, PROMPT, greedy())
    core.wait_for_grammars()
    collected = run(core)
    assert (collected.finished[1].reason, collected.finished[1].error) == ("error", "nothing fits")
    assert collected.tokens[2] == expected(PROMPT, greedy())[0]


def test_a_grammar_that_does_not_compile_is_refused_and_a_slow_one_can_be_aborted():
    gate = threading.Event()

    def compile_grammar(structured_output):
        if structured_output.value == "slow":
            gate.wait(10)
            return Alternating(2)
        raise RequestError("bad grammar", param="response_format")

    core = make_core(compile_grammar=compile_grammar)
    add(core, 1, PROMPT, structured("bad"))
    core.wait_for_grammars()
    finished = run(core).finished[1]
    assert (finished.reason, finished.error, finished.param) == ("refused", "bad grammar", "response_format")
    add(core, 2, PROMPT, structured("slow"))
    assert not core.has_work
    abort(core, 2)
    gate.set()
    assert not core._requests
    assert not core.has_work


def test_a_compiler_that_fails_for_its_own_reasons_blames_no_field(caplog):
    core = make_core(compile_grammar=lambda _: {}["no"])
    add(core, 1, PROMPT, structured("x"))
    with caplog.at_level(logging.CRITICAL):
        core.wait_for_grammars()
        finished = run(core).finished[1]
    assert (finished.reason, finished.error, finished.param) == ("error", "KeyError: 'no'", None)


def test_an_embedding_is_the_last_hidden_state_and_takes_chunks():
    core = make_core(budget=16)
    prompt = (np.arange(50) % 30 + 4).tolist()
    add(core, 1, prompt, greedy())
    core.step()
    core.embed(Embed(2, np.array(prompt, np.int32).tobytes()))
    core.embed(Embed(3, np.array([4, 5], np.int32).tobytes()))
    core.embed(Embed(4, np.array([4, 5], np.int32).tobytes()))
    abort(core, 4)
    collected = run(core)
    assert (collected.embeddings[2] == logits_after(prompt)).all()
    assert (collected.embeddings[3] == logits_after([4, 5])).all()
    assert set(collected.embeddings) == {2, 3}
    assert collected.tokens[1] == expected(prompt, greedy())[0]


def test_an_embedding_gets_its_blocks_in_the_end():
    core = make_core(num_blocks=8, max_model_len=128, max_num_seqs=4)
    core.embed(Embed(0, np.full(120, 4, np.int32).tobytes()))
    handle, collected = 1, Collected()
    for step in range(400):
        while len(core.scheduler.waiting) < 2:
            add(core, handle, [handle % 30 + 4] * 20, greedy(max_tokens=20))
            handle += 1
        if step == 0:
            core._run_embeds = lambda own=core._run_embeds: None
        elif step == 1:
            del core._run_embeds
        collected.take(core.step())
        if 0 in collected.embeddings:
            break
    assert 0 in collected.embeddings
    assert not core.scheduler.hold_admissions


def test_an_embedding_that_is_aborted_holds_nobody_back():
    core = make_core(num_blocks=8, max_model_len=128, max_num_seqs=4)
    add(core, 1, [4] * 20, greedy(max_tokens=100))
    core.step()
    core.embed(Embed(2, np.full(120, 4, np.int32).tobytes()))
    while not core.scheduler.hold_admissions:
        core.step()
    add(core, 3, [5, 6], greedy(max_tokens=2))
    core.step()
    assert core.scheduler.waiting
    abort(core, 2)
    core.step()
    assert not core.scheduler.waiting
    assert run(core).finished[3].reason == "length"
