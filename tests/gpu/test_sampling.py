"""The sampling kernels against the CPU backend: the same tokens for the same seeds, whatever the filters."""

from __future__ import annotations

import numpy as np
import pytest

from zhilight.driver import dtype as dtypes
from zhilight.kernels import logprobs as logprob_kernels
from zhilight.kernels import sampling
from zhilight.ops.base import SamplingBatch
from zhilight.ops.cpu_sampling import log_probabilities, sample_tokens


@pytest.fixture
def rng():
    seed = int(np.random.SeedSequence().entropy % 2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def parameters(rng, rows, **given):
    values = {"temperature": np.full(rows, 0.8, np.float32), "top_k": np.full(rows, 10**6, np.int32),
              "top_p": np.ones(rows, np.float32), "min_p": np.zeros(rows, np.float32),
              "seeds": rng.integers(0, 2**63, rows).astype(np.uint64), "positions": rng.integers(0, 10**6, rows)}
    return values | given


def both(runtime, put, poisoned, stream, logits, stride=None, **values):
    """(tokens of the kernels, tokens of the CPU) for one batch."""
    rows, vocab = logits.shape
    plain = {"num_logprobs", "all_greedy"}
    want = sample_tokens(logits.copy(), SamplingBatch(**values)).token_ids
    padded = np.full((rows, stride or -(-vocab // 8) * 8), 1e9, np.float32)
    padded[:, :vocab] = logits
    on_device = put(padded)[:, :vocab]
    batch = SamplingBatch(**{k: v if k in plain or v is None else put(v) for k, v in values.items()})
    tokens = poisoned((rows,), dtypes.int32)
    sampling.sample(runtime, on_device, batch, tokens, on_device)
    return tokens.to_host(stream), want


@pytest.mark.parametrize("rows,vocab", [(1, 128256), (7, 49152), (256, 32000), (3, 100), (5, 4097)])
def test_greedy(runtime, put, poisoned, stream, rng, rows, vocab):
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    logits[:, vocab // 3] = logits[:, 2 * vocab // 3] = 9  # a tie goes to the lower id
    got, want = both(runtime, put, poisoned, stream, logits, all_greedy=True,
                     **parameters(rng, rows, temperature=np.zeros(rows, np.float32)))
    np.testing.assert_array_equal(got, want)
    assert (got == vocab // 3).all()


@pytest.mark.parametrize("name,values", [
    ("temperature", {}), ("top_k", {"top_k": 50}), ("top_p", {"top_p": 0.9}), ("min_p", {"min_p": 0.1}),
    ("all", {"top_k": 200, "top_p": 0.8, "min_p": 0.01}), ("top_k 1", {"top_k": 1}), ("tiny top_p", {"top_p": 1e-6})])
@pytest.mark.parametrize("vocab,spread", [(128256, 3.0), (32003, 1.0), (1000, 0.1), (50, 2.0)])
def test_filters(runtime, put, poisoned, stream, rng, name, values, vocab, spread):
    rows = 64
    logits = (rng.standard_normal((rows, vocab)) * spread).astype(np.float32)
    given = {k: np.full(rows, v, np.int32 if k == "top_k" else np.float32) for k, v in values.items()}
    got, want = both(runtime, put, poisoned, stream, logits, **parameters(rng, rows, **given))
    # the CPU adds float64, the kernels 40-bit integers: a draw within rounding of a boundary may fall to the neighbour
    assert (got != want).sum() <= 1, f"{name}: {got[got != want]} for {want[got != want]}"


def test_ties_at_the_edges(runtime, put, poisoned, stream, rng):
    """Logits of few distinct values: which of the equals are kept decides the token."""
    rows, vocab = 128, 5000
    logits = rng.integers(0, 4, (rows, vocab)).astype(np.float32)
    for values in ({"top_k": np.full(rows, 700, np.int32)}, {"top_p": np.full(rows, 0.3, np.float32)},
                   {"top_k": np.full(rows, 2000, np.int32), "top_p": np.full(rows, 0.5, np.float32)}):
        got, want = both(runtime, put, poisoned, stream, logits, **parameters(rng, rows, **values))
        assert (got != want).sum() <= 1, values


def test_mixed_rows_and_repeats(runtime, put, poisoned, stream, rng):
    """Greedy and sampled rows side by side; the same bits ten times; a row alone draws what it drew in the batch."""
    rows, vocab = 9, 49152
    logits = (rng.standard_normal((rows, vocab)) * 2).astype(np.float32)
    values = parameters(rng, rows, top_p=np.full(rows, 0.95, np.float32))
    values["temperature"][::2] = 0
    got, want = both(runtime, put, poisoned, stream, logits, **values)
    assert (got[::2] == want[::2]).all() and (got != want).sum() <= 1
    for _ in range(10):
        again, _ = both(runtime, put, poisoned, stream, logits, **values)
        np.testing.assert_array_equal(got, again)
    alone, _ = both(runtime, put, poisoned, stream, logits[3:4], **{k: v[3:4] for k, v in values.items()})
    assert alone[0] == got[3]


def test_penalties_bias_and_mask(runtime, put, poisoned, stream, rng):
    rows, vocab, slots = 6, 3001, 10
    words = -(-vocab // 32)
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    allowed = rng.integers(0, 2**32, (rows, words), dtype=np.uint32)
    values = parameters(
        rng, rows, temperature=np.zeros(rows, np.float32), all_greedy=True, slots=np.array([3, 9, -1, 0, 5, 7], np.int32),
        repetition=rng.uniform(0.5, 2, rows).astype(np.float32), presence=rng.uniform(-2, 2, rows).astype(np.float32),
        frequency=rng.uniform(-2, 2, rows).astype(np.float32),
        prompt_mask=rng.integers(0, 2**32, (slots, words), dtype=np.uint32),
        output_counts=rng.integers(0, 3, (slots, vocab)).astype(np.int32),
        bias_rows=np.array([0, 0, 5], np.int32), bias_ids=np.array([7, 9, 11], np.int32),
        bias_values=np.array([50, -np.inf, 100], np.float32), allowed_mask=allowed)
    allowed[0, 0] |= 1 << 7
    got, want = both(runtime, put, poisoned, stream, logits, stride=3008, **values)
    np.testing.assert_array_equal(got, want)


def test_count_tokens(runtime, put, stream):
    counts = put(np.zeros((4, 33), np.int32))
    for _ in range(2):
        sampling.count_tokens(runtime, counts, put(np.array([2, -1, 0], np.int32)), put(np.array([32, 5, 1], np.int32)))
    got = counts.to_host(stream)
    assert got.sum() == 4 and got[2, 32] == 2 and got[0, 1] == 2


@pytest.mark.parametrize("rows,vocab,num_top", [(1, 128256, 20), (40, 49152, 5), (3, 100, 0), (2, 50, 20), (5, 122753, 1)])
def test_logprobs(runtime, put, poisoned, stream, rng, rows, vocab, num_top):
    logits = (rng.standard_normal((rows, vocab)) * 4).astype(np.float32)
    logits[0, : vocab // 2] = np.float32(0.5)  # many ties, at the edge of the top when the spread is small
    tokens = rng.integers(0, vocab, rows).astype(np.int32)
    want = log_probabilities(logits, tokens, num_top)
    chosen, ranks = poisoned((rows,), dtypes.float32), poisoned((rows,), dtypes.int32)
    ids, values = poisoned((rows, num_top), dtypes.int32), poisoned((rows, num_top), dtypes.float32)
    padded = np.full((rows, -(-vocab // 8) * 8), np.float32(1e9))
    padded[:, :vocab] = logits
    logprob_kernels.logprobs(runtime, put(padded)[:, :vocab], put(tokens), chosen, ranks, ids, values)
    np.testing.assert_allclose(chosen.to_host(stream), want.logprobs, atol=2e-4)
    np.testing.assert_array_equal(ranks.to_host(stream), want.ranks)
    np.testing.assert_array_equal(ids.to_host(stream), want.top_ids)
    np.testing.assert_allclose(values.to_host(stream), want.top_logprobs, atol=2e-4)


def test_logprobs_ties(runtime, put, poisoned, stream):
    """All logits equal: the lowest ids are the most probable ones."""
    ids, values = poisoned((2, 5), dtypes.int32), poisoned((2, 5), dtypes.float32)
    logprob_kernels.logprobs(runtime, put(np.zeros((2, 3000), np.float32)), put(np.array([0, 2999], np.int32)),
                             poisoned((2,), dtypes.float32), poisoned((2,), dtypes.int32), ids, values)
    assert ids.to_host(stream).tolist() == [[0, 1, 2, 3, 4]] * 2
    np.testing.assert_allclose(values.to_host(stream), -np.log(3000), atol=1e-4)
