"""Greedy sampling thread by thread without a GPU, against the CPU backend: penalties, bias, mask, argmax, token counts."""

from __future__ import annotations

import numpy as np
import pytest
from emulation import Emulator

from zhilight.kernels import sampling
from zhilight.kernels.sampling import CHUNK
from zhilight.ops.base import SamplingBatch
from zhilight.ops.cpu import CpuOps
from zhilight.ops.cpu_sampling import sample_tokens

BEYOND = np.float32(1e9)
"""Between the rows of logits: what would win if it were looked at."""


@pytest.fixture
def make(monkeypatch):
    """An emulator of so many multiprocessors; none at all makes argmax take four chunks a block."""
    def emulator(multiprocessors: int = 132) -> Emulator:
        made = Emulator(multiprocessors)
        made.install(monkeypatch, sampling)
        return made

    return emulator


def check(emulator: Emulator, logits: np.ndarray, in_place: bool = True, **values: np.ndarray) -> np.ndarray:
    """Sample greedily on the emulator and on the CPU; the tokens and the changed logits must agree. Returns the tokens."""
    rows, vocab = logits.shape
    stride = -(-vocab // 4) * 4 + 8
    values = {"temperature": np.zeros(rows, np.float32), "top_k": np.zeros(rows, np.int32), "top_p": np.ones(rows, np.float32),
              "min_p": np.zeros(rows, np.float32), "seeds": np.zeros(rows, np.uint64), "positions": np.zeros(rows, np.int64)
              } | values
    padded = np.full((rows, stride), BEYOND)
    padded[:, :vocab] = logits
    given = emulator.tensor(padded)
    work = given if in_place else emulator.tensor(np.full_like(padded, BEYOND))
    tokens = emulator.tensor(np.full(rows + 1, -7, np.int32))
    batch = SamplingBatch(**{name: emulator.tensor(array) for name, array in values.items()}, all_greedy=True)
    sampling.sample(emulator.runtime, given[:, :vocab], batch, tokens[:rows], work[:, :vocab])

    want_logits = logits.copy()
    want = sample_tokens(want_logits, SamplingBatch(**values, all_greedy=True)).token_ids
    got = emulator.array(tokens)
    np.testing.assert_array_equal(got, [*want, -7])
    got_logits = emulator.array(work)
    np.testing.assert_allclose(got_logits[:, :vocab], want_logits, rtol=1e-6, atol=1e-6)
    assert (got_logits[:, vocab:] == BEYOND).all(), "wrote beyond the row"
    if not in_place:
        np.testing.assert_array_equal(emulator.array(given), padded)
    assert not emulator.array(emulator.counters).any(), "a counter is not back at zero"
    return got[:rows]


@pytest.mark.parametrize("chunks_a_block,vocab", [(1, 2 * CHUNK + 1037), (4, 4 * CHUNK + 999)])
def test_argmax(make, chunks_a_block, vocab):
    """The lowest of equal ids, wherever the other is; vocabularies of three and two blocks."""
    ties = [
        [8, 9],                       # of one load
        [4 * 7 + 3, 4 * 8],           # of two threads
        [4 * 40 + 3, 4 * 7 + 1024],   # of two warps, the lower id in the higher one
        [1033, 3 * 1024 + 9],         # of one thread
        [1500, CHUNK + 4],            # of two chunks
        [vocab // 3, vocab - 1],      # of two blocks, or of two chunks of one
        [vocab - 2, vocab - 1],
    ][-4 if chunks_a_block == 4 else 0:]
    logits = np.random.default_rng(vocab).standard_normal((len(ties) + 1, vocab)).astype(np.float32)
    for row, ids in zip(logits, ties, strict=False):
        row[ids] = 9
    logits[-1] = -np.abs(logits[-1]) - 1  # no positive one
    got = check(make(132 if chunks_a_block == 1 else 0), logits)
    assert got[:len(ties)].tolist() == [ids[0] for ids in ties]


def test_argmax_of_special_values(make):
    """Rows of -inf alone, zeros of both signs, infinity and NaN, the first of which NumPy takes for the largest."""
    vocab = CHUNK + 6
    logits = np.full((7, vocab), -np.inf, np.float32)
    logits[1, vocab - 1] = -1e38
    logits[2] = -0.0
    logits[2, 77:] = 0.0
    logits[3, 4000:] = 0.0
    logits[3, 5000:] = np.inf
    logits[3, 4099:] = np.inf
    logits[4, [4098, 33]] = np.inf
    logits[5] = 3
    logits[5, [4097, 100]] = np.nan
    logits[6, [9, 4100]] = np.inf, np.nan
    assert check(make(), logits).tolist() == [0, vocab - 1, 0, 4099, 33, 100, 4100]


def test_what_argmax_leaves(make):
    """A row's first word of scratch is the key and the id of its largest logit, for the kernels that follow."""
    emulator, scratch = make(), []
    place = emulator.runtime.scratch
    emulator.runtime.scratch = lambda nbytes: scratch.append(place(nbytes)) or scratch[0]
    logits = np.random.default_rng(1).standard_normal((2, CHUNK + 3)).astype(np.float32) - np.float32([[0], [9]])
    logits[:, CHUNK + 1] = 7, -2  # not in the block whose word it is
    tokens = check(emulator, logits)
    found = np.frombuffer(emulator.memory.content(scratch[0], 2 * 2 * 8), np.uint64).reshape(2, 2)[:, 0]
    np.testing.assert_array_equal(np.uint32(0xFFFFFFFF) - (found & np.uint64(0xFFFFFFFF)).astype(np.uint32), tokens)
    bits = logits.max(axis=1).view(np.int32).astype(np.int64)  # of a positive one and a negative one
    assert (found >> np.uint64(32)).tolist() == [bits[0] + 2**31, ~bits[1]]


@pytest.mark.parametrize("chunks_a_block,vocab", [(1, CHUNK + 1037), (4, 4 * CHUNK + 37)])
def test_mask(make, chunks_a_block, vocab):
    rng, words = np.random.default_rng(vocab), -(-vocab // 32)
    logits = rng.standard_normal((3, vocab)).astype(np.float32)
    mask = rng.integers(0, 2**32, (3, words), dtype=np.uint32)
    mask[1], mask[2] = 0, 0
    mask[2, -1] = 1 << (vocab - 1) % 32  # nothing, and the last alone, allowed
    logits[0, ~np.unpackbits(mask[0].view(np.uint8), bitorder="little")[:vocab].view(bool)] += 5
    logits[1, 5] = np.nan
    got = check(make(132 if chunks_a_block == 1 else 0), logits, allowed_mask=mask)
    assert got[1:].tolist() == [0, vocab - 1]


def test_penalties_and_bias(make):
    rows, vocab, slots, biases = 3, CHUNK + 31, 4, 300
    rng, words = np.random.default_rng(7), -(-vocab // 32)
    row_slots = np.array([3, -1, 0], np.int32)
    check(make(), (rng.standard_normal((rows, vocab)) * 3).astype(np.float32), False, slots=row_slots,
          repetition=np.array([1.7, 1.2, 0.6], np.float32), presence=np.array([0.5, 1, -0.7], np.float32),
          frequency=np.array([0.3, 1, -0.2], np.float32), prompt_mask=rng.integers(0, 2**32, (slots, words), dtype=np.uint32),
          output_counts=rng.integers(0, 3, (slots, vocab)).astype(np.int32),
          bias_rows=rng.integers(0, rows, biases).astype(np.int32), bias_ids=rng.integers(0, vocab, biases).astype(np.int32),
          bias_values=rng.uniform(-9, 9, biases).astype(np.float32))


def test_plain_copy(make):
    """The logits are kept: without penalties they are copied."""
    check(make(), np.random.default_rng(3).standard_normal((2, CHUNK + 5)).astype(np.float32), in_place=False)


def test_count_tokens(make):
    """More rows than a block has threads."""
    emulator, rng, rows, vocab = make(), np.random.default_rng(2), 300, 37
    slots, tokens = rng.permutation(rows).astype(np.int32), rng.integers(0, vocab, rows).astype(np.int32)
    slots[::5] = -1
    counts = rng.integers(0, 9, (rows, vocab)).astype(np.int32)
    on_device = emulator.tensor(counts)
    sampling.count_tokens(emulator.runtime, on_device, emulator.tensor(slots), emulator.tensor(tokens))
    CpuOps().count_tokens(counts, slots, tokens)
    np.testing.assert_array_equal(emulator.array(on_device), counts)
