"""Sampling on the CPU: the filters against a plain re-statement, the draw's statistics, and the edges of each setting."""

from __future__ import annotations

import numpy as np
import pytest

from zhilight.ops.base import SamplingBatch
from zhilight.ops.cpu import CpuOps

INF = np.float32(np.inf)


def batch(rows: int, **settings) -> SamplingBatch:
    """Plain temperature-1 sampling of every row, changed by scalars or arrays in `settings`."""
    defaults = {"temperature": 1.0, "top_k": 1 << 30, "top_p": 1.0, "min_p": 0.0, "seeds": 7, "positions": np.arange(rows)}
    dtypes = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seeds": np.uint64,
              "positions": np.int64, "slots": np.int32, "repetition": np.float32, "presence": np.float32,
              "frequency": np.float32}
    values = defaults | settings
    arrays = {name: np.broadcast_to(np.asarray(values.pop(name), dtype), rows)
              for name, dtype in dtypes.items() if name in values}
    return SamplingBatch(**arrays, **values)


def sample(logits: np.ndarray, **settings):
    return CpuOps().sample(np.array(logits, np.float32), batch(len(logits), **settings))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def filtered(logits: np.ndarray, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution that Ops.sample's docstring describes, in float64."""
    probabilities = softmax(np.asarray(logits, np.float64) / temperature)
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))[:top_k]
    total, kept, held = sum(probabilities[i] for i in order), [], 0.0
    for i in order:
        if kept and held >= top_p * total:
            break
        kept.append(i)
        held += probabilities[i]
    best = probabilities[kept[0]]
    kept = [i for i in kept if probabilities[i] >= min_p * best]
    result = np.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@pytest.mark.parametrize("settings", [
    {}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
])
def test_draws_follow_the_filtered_distribution(settings):
    rows = 20_000
    logits = np.random.default_rng(6).standard_normal(16)
    tokens = sample(np.tile(logits, (rows, 1)), **settings).token_ids
    expected = filtered(logits.astype(np.float32), **settings) * rows
    counts = np.bincount(tokens, minlength=16)
    assert not counts[expected == 0].any()
    kept = expected > 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = kept.sum() - 1
    assert freedom >= 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)      # the seed is fixed: this holds or it does not


@pytest.mark.parametrize("vocabulary", [1000, 30_000])
def test_nucleus_of_a_flat_distribution_needs_many_tokens(vocabulary):
    """More tokens than the first guess of the search: the cut is where the exact sum says."""
    logits = np.linspace(0, -1, vocabulary).astype(np.float32)
    kept = np.flatnonzero(filtered(logits, top_p=0.5))
    tokens = sample(np.tile(logits, (300, 1)), top_p=0.5).token_ids
    assert tokens.max() <= kept.max() and tokens.max() > 0.9 * kept.max()


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(4)
    logits = rng.standard_normal((6, 50))
    settings = {"temperature": [0, 1, 0.7, 1, 2, 1], "top_k": [50, 5, 50, 50, 50, 9], "top_p": [1, 1, 0.9, 1, 0.5, 1],
                "seeds": [1, 2, 3, 4, 5, 6], "positions": [10, 11, 12, 13, 14, 15]}
    together = sample(logits, **settings).token_ids
    order = [4, 2, 0, 5, 3, 1]
    shuffled = sample(logits[order], **{name: np.array(value)[order] for name, value in settings.items()}).token_ids
    assert shuffled.tolist() == together[order].tolist()
    for row in range(6):
        alone = sample(logits[row:row + 1], **{name: value[row] for name, value in settings.items()}).token_ids
        assert alone[0] == together[row]


def test_greedy_ties_go_to_the_lowest_id():
    logits = [[0, 5, 5, 1], [2, 2, 2, 2], [-INF, -3, -3, -INF]]
    assert sample(logits, temperature=0, all_greedy=True).token_ids.tolist() == [1, 0, 1]
    assert sample(logits, temperature=0).token_ids.tolist() == [1, 0, 1]
    assert sample(logits, top_k=1).token_ids.tolist() == [1, 0, 1]


def test_edges_keep_the_most_probable_token():
    logits = np.tile(np.array([0, 3, 1, 2], np.float32), (50, 1))
    for settings in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-3}):
        assert set(sample(logits, **settings).token_ids.tolist()) == {1}, settings
    for settings in ({"top_k": 4}, {"top_k": 0}, {"top_k": 1 << 30}):
        assert set(sample(logits, temperature=5, **settings).token_ids.tolist()) == {0, 1, 2, 3}, settings


def test_top_p_keeps_the_token_that_crosses():
    logits = np.log(np.array([0.5, 0.3, 0.2], np.float32))
    assert set(sample(np.tile(logits, (200, 1)), top_p=0.6).token_ids.tolist()) == {0, 1}
    assert set(sample(np.tile(logits, (200, 1)), top_p=0.49).token_ids.tolist()) == {0}


def test_bias_is_added_and_minus_infinity_forbids():
    logits = np.tile(np.array([0, 1, 2, 3], np.float32), (2, 1))
    bias = {"bias_rows": np.array([0, 0, 1], np.int32), "bias_ids": np.array([3, 0, 3], np.int32),
            "bias_values": np.array([-INF, 5, -1.5], np.float32)}
    assert sample(logits, temperature=0, **bias).token_ids.tolist() == [0, 2]
    drawn = sample(np.tile(logits[0], (300, 1)), temperature=9, bias_rows=np.arange(300, dtype=np.int32),
                   bias_ids=np.full(300, 2, np.int32), bias_values=np.full(300, -INF)).token_ids
    assert set(drawn.tolist()) == {0, 1, 3}


def test_repeated_bias_entries_add_up():
    bias = {"bias_rows": np.zeros(2, np.int32), "bias_ids": np.zeros(2, np.int32), "bias_values": np.full(2, 2, np.float32)}
    assert sample([[0, 3]], temperature=0, **bias).token_ids.tolist() == [0]


def test_allowed_mask_crosses_word_borders():
    logits = np.arange(70, dtype=np.float32)[None]
    mask = np.zeros((1, 3), np.uint32)
    for token in (0, 31, 32, 63):
        mask[0, token // 32] |= np.uint32(1 << token % 32)
    assert sample(logits, temperature=0, allowed_mask=mask).token_ids.tolist() == [63]
    drawn = sample(np.zeros((400, 70)), allowed_mask=np.tile(mask, (400, 1))).token_ids
    assert set(drawn.tolist()) == {0, 31, 32, 63}


def test_penalties():
    logits = np.array([[2, -2, 2, 0.5, 1]], np.float32)
    prompt = np.zeros((3, 1), np.uint32)
    prompt[1, 0] = 0b00011                                     # tokens 0 and 1 in the prompt
    counts = np.zeros((3, 5), np.int32)
    counts[1] = [0, 0, 3, 1, 0]                                # tokens 2 and 3 in the output
    state = {"slots": 1, "prompt_mask": prompt, "output_counts": counts, "num_logprobs": -1, "temperature": 0}

    def after(**penalties):
        values = np.array(logits)
        CpuOps().sample(values, batch(1, **state, **penalties))
        return values[0].tolist()

    neutral = {"repetition": 1, "presence": 0, "frequency": 0}
    assert after(**neutral) == logits[0].tolist()
    assert after(**neutral | {"repetition": 2}) == [1, -4, 1, 0.25, 1]
    assert after(**neutral | {"presence": 0.5}) == [2, -2, 1.5, 0, 1]
    assert after(**neutral | {"frequency": 0.5}) == [2, -2, 0.5, 0, 1]
    assert after(repetition=2, presence=1, frequency=0.5) == [1, -4, -1.5, -1.25, 1]


def test_slot_minus_one_has_no_penalty():
    logits = np.array([[2.0, 1.0]])
    counts = np.array([[9, 0]], np.int32)
    settings = {"temperature": 0, "frequency": 1.0, "output_counts": counts}
    assert sample(logits, slots=-1, **settings).token_ids.tolist() == [0]
    assert sample(logits, slots=0, **settings).token_ids.tolist() == [1]


def test_logprobs_are_of_the_model_before_all_filters():
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((3, 40)).astype(np.float32)
    banned = logits.argmax(1).astype(np.int32)
    result = sample(logits, temperature=0, num_logprobs=4, bias_rows=np.arange(3), bias_ids=banned,
                    bias_values=np.full(3, -INF))
    for row in range(3):
        expected = np.log(softmax(logits[row].astype(np.float64)))
        order = np.argsort(-expected)
        assert result.token_ids[row] == order[1]
        assert result.ranks[row] == 2
        assert result.top_ids[row].tolist() == order[:4].tolist()
        np.testing.assert_allclose(result.top_logprobs[row], expected[order[:4]], atol=1e-5)
        np.testing.assert_allclose(result.logprobs[row], expected[order[1]], atol=1e-5)


def test_zero_top_logprobs_still_gives_the_chosen_one():
    result = sample([[1.0, 2.0]], temperature=0, num_logprobs=0)
    assert result.top_ids.shape == (1, 0)
    np.testing.assert_allclose(result.logprobs, [np.log(softmax(np.array([1.0, 2.0]))[1])], atol=1e-6)
    assert sample([[1.0, 2.0]], temperature=0).logprobs is None


def test_prompt_logprobs():
    logits = np.array([[0, 1, 2, 1], [3, 0, 0, 0]], np.float32)
    result = CpuOps().logprobs(logits, np.array([3, 0]), 3)
    assert result.ranks.tolist() == [2, 1]
    assert result.top_ids.tolist() == [[2, 1, 3], [0, 1, 2]]
    np.testing.assert_allclose(result.logprobs, [np.log(softmax(logits[0]))[3], np.log(softmax(logits[1]))[0]], atol=1e-6)


def test_everything_forbidden_but_one_certain_token():
    logits = np.full((20, 6), -INF)
    logits[:, 4] = -50
    assert set(sample(logits, temperature=2, top_p=0.9, top_k=3).token_ids.tolist()) == {4}


def test_count_tokens():
    counts = np.zeros((3, 4), np.int32)
    CpuOps().count_tokens(counts, np.array([2, -1, 0, 2], np.int32), np.array([1, 3, 0, 1], np.int32))
    assert counts.tolist() == [[1, 0, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0]]
