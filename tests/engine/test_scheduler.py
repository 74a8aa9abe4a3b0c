"""The scheduler with its block pool and the loop around it, against requests that run alone."""

from __future__ import annotations

import numpy as np
import pytest
from history_model import EOS, VOCAB, Collected, abort, add, expected, make_core, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zhilight.config.sampling import SamplingParams
from zhilight.engine.scheduler import MAX_OVERTAKEN

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def spy(core) -> list:
    """The plans of all steps that the core will run."""
    plans, begin = [], core.runner.begin
    core.runner.begin = lambda plan: plans.append(plan) or begin(plan)
    return plans


@st.composite
def loads(draw):
    """Requests with the step they arrive in, and perhaps the one they are aborted in."""
    stems = [draw(st.lists(st.integers(4, VOCAB - 1), min_size=1, max_size=70)) for _ in range(2)]
    requests = []
    for handle in range(draw(st.integers(1, 14))):
        stem = draw(st.sampled_from(stems))
        prompt = stem[: draw(st.integers(0, len(stem)))] + draw(st.lists(st.integers(4, VOCAB - 1), min_size=1, max_size=20))
        params = SamplingParams(temperature=draw(st.sampled_from([0.0, 1.0])), seed=draw(st.integers(0, 3)),
                                top_k=draw(st.sampled_from([0, 5])), max_tokens=draw(st.integers(1, 40)),
                                ignore_eos=draw(st.booleans()), stop_token_ids=draw(st.sampled_from([(), (7,), (5, 6)])))
        arrival = draw(st.integers(0, 25))
        end = draw(st.none() | st.integers(arrival, arrival + 30))
        requests.append((handle, prompt, params, arrival, end, draw(st.integers(0, 2))))
    return requests


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(load=loads(), prefix=st.booleans(), chunked=st.booleans(), overlap=st.booleans(), tiny=st.booleans(),
       priority=st.booleans())
def test_every_request_gives_what_it_gives_alone(load, prefix, chunked, overlap, tiny, priority):
    core = make_core(num_blocks=9 if tiny else 64, max_model_len=144, budget=20 if chunked else 144, max_num_seqs=5,
                     prefix_caching=prefix, chunked=chunked, overlap=overlap, policy="priority" if priority else "fcfs")
    plans = spy(core)
    collected, aborted = Collected(), set()
    for step in range(3000):
        for handle, prompt, params, arrival, end, level in load:
            if arrival == step:
                add(core, handle, prompt, params, priority=level)
            if end == step and handle not in collected.finished:
                abort(core, handle)
                abort(core, handle)
                aborted.add(handle)
        if core.has_work:
            before, in_flight = len(plans), core._flight is not None
            out = core.step()
            assert len(plans) > before or in_flight, "a step in which nobody progressed"
            collected.take(out)
        elif step > 60:
            break
    else:
        pytest.fail("it never ends")
    for handle, prompt, params, *_ in load:
        tokens, reason = expected(prompt, params, 144)
        if handle in aborted:
            assert handle not in collected.finished
            seen = collected.tokens.get(handle, [])
            assert seen == tokens[: len(seen)]
        else:
            assert collected.tokens[handle] == tokens
            assert collected.finished[handle].reason == reason
    assert all(len(plan.arrays.token_ids) <= core.scheduler.max_num_batched_tokens for plan in plans)
    assert core.stats().kv_faults == 0
    assert core.pool.available == core.pool.num_blocks
    assert len(core.table.free) == 5
    assert not core._requests


@pytest.mark.parametrize("overlap", [True, False])
def test_tiny_kv_preempts_and_still_gives_the_same(overlap):
    core = make_core(num_blocks=8, max_model_len=128, overlap=overlap)
    rng = np.random.default_rng(0)
    prompts = {h: rng.integers(4, VOCAB, 30) for h in range(6)}
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=60, ignore_eos=True)
    for handle, prompt in prompts.items():
        add(core, handle, prompt, params)
    collected = run(core)
    assert core.scheduler.num_preemptions > 0
    for handle, prompt in prompts.items():
        assert collected.tokens[handle] == expected(prompt, params, 128)[0]
    assert core.stats().prefix_hit_tokens == 0, "what a preempted request finds again is no hit"


# ---- prefix cache, by hand ------------------------------------------------------------------------------------------


def cached_tokens(core, prompts, params=GREEDY, **extra) -> list[int]:
    result = []
    for prompt in prompts:
        handle = core._next = getattr(core, "_next", 0) + 1
        add(core, handle, prompt, params, **extra)
        result.append(run(core).cached[handle])
    return result


ONE = SamplingParams(temperature=0, max_tokens=1)


@pytest.mark.parametrize(("length", "second"), [(40, 32), (48, 47), (16, 15), (15, 0), (17, 16)])
def test_the_same_prompt_again_hits_its_whole_blocks(length, second):
    """Blocks of 16. A prompt of whole blocks computes its last token again, and nothing else."""
    prompt = np.arange(length) % 30 + 4
    core = make_core()
    plans = spy(core)
    assert cached_tokens(core, [prompt, prompt], ONE) == [0, second]
    assert len(plans[-1].arrays.token_ids) == length - second
    written = plans[-1].arrays.slot_mapping
    assert (written < 0).all() == (length % 16 == 0), "a shared block is written again"
    assert core.stats().prefix_hit_tokens == second
    assert core.stats().prefix_query_tokens == 2 * length


def test_two_tails_share_the_prefix():
    stem = list(range(4, 39))
    core = make_core()
    assert cached_tokens(core, [[*stem, 5, 6, 7], [*stem, 8, 9], stem[:20] + [4] * 20]) == [0, 32, 16]


def test_generated_tokens_are_cached_too():
    prompt = list(range(4, 24))
    core = make_core()
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    answer = expected(prompt, params)[0]
    cached_tokens(core, [prompt], params)
    # 20 + 30 tokens, of which the last was sampled but never computed: 49 with KV, 3 whole blocks
    assert cached_tokens(core, [prompt + answer + [4]], ONE) == [48]


def test_salts_do_not_share():
    core, prompt = make_core(), list(range(4, 39))
    cached_tokens(core, [prompt], ONE, cache_salt="a")
    assert cached_tokens(core, [prompt], ONE, cache_salt="b") == [0]
    assert cached_tokens(core, [prompt], ONE, cache_salt="a") == [32]


def test_equal_prompts_of_one_step_share_at_once():
    core = make_core(budget=256)
    plans = spy(core)
    prompt = list(range(4, 39))
    for handle in range(4):
        add(core, handle, prompt, SamplingParams(temperature=1.0, seed=handle, max_tokens=10))
    collected = run(core)
    assert [collected.cached[h] for h in range(4)] == [0, 32, 32, 32]
    assert len(plans[0].arrays.token_ids) == 35 + 3 * 3
    for handle in range(4):
        assert collected.tokens[handle] == expected(prompt, SamplingParams(temperature=1.0, seed=handle, max_tokens=10))[0]


def test_the_second_run_gives_the_same_log_probabilities():
    core, prompt = make_core(), np.arange(48) % 30 + 4
    entries = []
    for handle in (1, 2):
        add(core, handle, prompt, SamplingParams(temperature=0, max_tokens=4, logprobs=5))
        entries.append(run(core).logprobs[handle])
    assert entries[0] == entries[1]


# ---- order ----------------------------------------------------------------------------------------------------------


def test_a_request_that_does_not_fit_lets_others_pass():
    core = make_core(num_blocks=8, max_model_len=128, max_num_seqs=4)
    add(core, 1, [4] * 60, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))  # takes 4, grows to 8
    core.step()
    add(core, 2, [5] * 100, GREEDY)
    add(core, 3, [6] * 10, GREEDY)
    collected = run(core)
    order = list(collected.finished)
    assert order.index(3) < order.index(2)
    assert set(order) == {1, 2, 3}


def test_overtaking_has_an_end():
    core = make_core(num_blocks=8, max_model_len=128, max_num_seqs=4)
    holder = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    add(core, 1, [4] * 20, holder)
    core.step()
    add(core, 2, [5] * 120, holder)
    started, handle = [], 10
    for _ in range(2000):
        while len(core.scheduler.waiting) < 3:
            handle += 1
            add(core, handle, [handle % 30 + 4] * 20, holder)
        started += [s.handle for s in core.step().started]
        if 2 in started:
            break
    assert 2 in started
    assert len(started) <= MAX_OVERTAKEN + 8


def test_first_come_first_served_and_priorities():
    for policy, order in (("fcfs", [1, 2, 3]), ("priority", [3, 2, 1])):
        core = make_core(max_num_seqs=1, policy=policy)
        for handle, priority in ((1, 5), (2, 3), (3, -1)):
            add(core, handle, [4, 5, 6], GREEDY, priority=priority)
        assert list(run(core).finished) == order


def test_a_more_urgent_request_preempts():
    core = make_core(max_num_seqs=1, policy="priority")
    slow = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    add(core, 1, [4, 5, 6], slow, priority=1)
    collected = Collected()
    for _ in range(5):
        collected.take(core.step())
    add(core, 2, [7, 8], GREEDY, priority=0)
    while core.has_work:
        collected.take(core.step())
    assert list(collected.finished) == [2, 1]
    assert collected.tokens[1] == expected([4, 5, 6], slow)[0]
    assert core.stats().preemptions == 1


def test_nobody_is_preempted_for_one_that_would_not_fit_even_then():
    core = make_core(num_blocks=9, max_model_len=144, max_num_seqs=4, policy="priority", budget=144)
    add(core, 1, [4] * 40, SamplingParams(temperature=0, max_tokens=45, ignore_eos=True), priority=0)
    add(core, 2, [5] * 20, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), priority=2)
    core.step()
    add(core, 3, [6] * 120, GREEDY, priority=1)  # 8 blocks, of which number 1 holds 3 to 6
    collected = run(core)
    assert core.stats().preemptions == 0
    assert list(collected.finished) == [2, 1, 3]


def test_decodes_and_prefill_chunks_share_a_step():
    core = make_core(budget=24, overlap=False)
    plans = spy(core)
    add(core, 1, [4] * 10, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    core.step()
    add(core, 2, [5] * 60, GREEDY)
    run(core)
    mixed = [plan for plan in plans if plan.arrays.num_decodes and plan.requests]
    assert [len(plan.arrays.token_ids) for plan in mixed] == [24, 24, 15]


def test_without_chunking_a_prompt_runs_in_one_step():
    core = make_core(budget=64, chunked=False, prefix_caching=False, overlap=False)
    plans = spy(core)
    for handle in range(3):
        add(core, handle, [4] * 40, ONE)
    run(core)
    assert [len(plan.arrays.token_ids) for plan in plans] == [40, 40, 40]


def test_a_stop_token_ends_and_names_itself():
    core = make_core()
    prompt = [9, 10, 11]
    tokens = expected(prompt, SamplingParams(temperature=0, max_tokens=50, ignore_eos=True))[0]
    stop = next(token for token in tokens[3:] if token != EOS and token not in tokens[:3])
    many = (*range(30, 40), stop)  # more than fit the array
    for handle, ids in ((1, (stop,)), (2, many)):
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, stop_token_ids=ids)
        add(core, handle, prompt, params)
        collected = run(core)
        reference, reason = expected(prompt, params)
        assert collected.tokens[handle] == reference
        assert (collected.finished[handle].reason, collected.finished[handle].stop_reason) == (reason, reference[-1])
