"""The sampler's arrays on a device that is not the host: what is copied, and that it is the right thing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zhilight.config.sampling import SamplingParams
from zhilight.engine.batch import SlotTable
from zhilight.engine.request import Request
from zhilight.engine.sampler import Sampler, pack_bits
from zhilight.ops.cpu_sampling import unpack_bits

VOCAB = 70


class RemoteOps:
    """Remembers what was uploaded; its arrays are host arrays all the same."""

    name = "remote"

    def __init__(self):
        self.uploads: list[int] = []
        self.counted: list[tuple[list[int], list[int]]] = []

    def parameter(self, shape, dtype):
        return np.full(shape, 77, dtype.numpy)

    def upload(self, target, source):
        assert target.shape == source.shape
        self.uploads.append(source.nbytes)
        target[...] = source

    def count_tokens(self, output_counts, slots, token_ids):
        self.counted.append((slots.tolist(), token_ids.tolist()))


@pytest.fixture
def world():
    table = SlotTable(4, 64, 16)
    return table, RemoteOps()


def start(table: SlotTable, sampler: Sampler, handle: int, params: SamplingParams, prompt=(5, 6, 7), bad_words=()) -> int:
    request = Request(handle, np.array(prompt, np.int32), params, bad_words=[list(word) for word in bad_words])
    request.limit = 64
    slot = table.assign(request, [0], 0, 0)
    sampler.assign(request)
    return slot


def plan(table: SlotTable, slots) -> SimpleNamespace:
    slots = np.array(slots)
    return SimpleNamespace(sample_slots=slots, positions=table.length[slots].copy(), num_samples=len(slots),
                           epochs=table.epoch[slots])


def test_while_the_same_rows_run_only_positions_are_copied(world):
    table, ops = world
    sampler = Sampler(ops, table, VOCAB, (2,))
    slots = [start(table, sampler, h, SamplingParams(temperature=h / 2, top_k=h, top_p=0.5, seed=h - 2)) for h in (1, 2, 3)]
    first = sampler.batch(plan(table, slots))
    assert first.temperature.tolist() == [0.5, 1.0, 1.5]
    assert first.top_k.tolist() == [1, 2, 3]
    assert first.seeds.tolist() == [2**64 - 1, 0, 1]
    assert first.positions.tolist() == [3, 3, 3]
    assert first.slots is first.bias_rows is first.allowed_mask is None
    ops.uploads.clear()
    table.length[slots] += 1
    second = sampler.batch(plan(table, slots))
    assert len(ops.uploads) == 1
    assert second.positions.tolist() == [4, 4, 4]
    assert second.temperature.tolist() == [0.5, 1.0, 1.5]
    third = sampler.batch(plan(table, slots[:2]))
    assert third.temperature.tolist() == [0.5, 1.0]
    assert len(third.seeds) == 2


def test_a_slot_taken_by_another_request_is_seen(world):
    table, ops = world
    sampler = Sampler(ops, table, VOCAB)
    slot = start(table, sampler, 1, SamplingParams(temperature=0.5, logit_bias={3: 1.0}))
    assert sampler.batch(plan(table, [slot])).bias_ids.tolist() == [3]
    table.release(slot)
    assert start(table, sampler, 2, SamplingParams(temperature=0)) == slot
    batch = sampler.batch(plan(table, [slot]))
    assert batch.all_greedy
    assert batch.bias_rows is None


def test_a_greedy_step_copies_nothing(world):
    """Its kernels read neither temperatures nor seeds. The first step with a draw brings all of them."""
    table, ops = world
    sampler = Sampler(ops, table, VOCAB)
    greedy = [start(table, sampler, h, SamplingParams(temperature=0, seed=h)) for h in (1, 2)]
    for _ in range(2):
        batch = sampler.batch(plan(table, greedy))
        assert batch.all_greedy and batch.temperature.shape == batch.positions.shape == (2,)
    assert not ops.uploads
    drawn = start(table, sampler, 3, SamplingParams(temperature=0.5, top_k=4, seed=3))
    batch = sampler.batch(plan(table, [*greedy, drawn]))
    assert batch.temperature.tolist() == [0.0, 0.0, 0.5] and batch.seeds.tolist() == [1, 2, 3]
    assert batch.top_k.tolist() == [VOCAB, VOCAB, 4] and batch.positions.tolist() == [3, 3, 3]
    assert not batch.all_greedy


def test_penalty_state_is_loaded_for_those_that_need_it(world):
    table, ops = world
    sampler = Sampler(ops, table, VOCAB)
    plain = start(table, sampler, 1, SamplingParams())
    assert sampler._output_counts is None
    slot = start(table, sampler, 2, SamplingParams(repetition_penalty=1.5), prompt=(5, 6, 69))
    batch = sampler.batch(plan(table, [plain, slot]))
    assert batch.repetition.tolist() == [1.0, 1.5]
    assert batch.slots.tolist() == [plain, slot]
    assert np.flatnonzero(unpack_bits(batch.prompt_mask[slot : slot + 1], VOCAB)).tolist() == [5, 6, 69]
    assert not batch.output_counts[slot].any()
    sampler.count(plan(table, [plain, slot]), np.array([8, 9], np.int32))
    assert ops.counted == [([-1, slot], [8, 9])]


def test_min_tokens_end_and_the_batch_is_then_kept(world):
    table, ops = world
    sampler = Sampler(ops, table, VOCAB, (2,))
    slot = start(table, sampler, 1, SamplingParams(min_tokens=2, stop_token_ids=(9,)))
    for held in (True, True, False, False):
        batch = sampler.batch(plan(table, [slot]))
        assert (batch.bias_ids is not None and sorted(batch.bias_ids.tolist()) == [2, 9]) == held
        table.length[slot] += 1
    ops.uploads.clear()
    sampler.batch(plan(table, [slot]))
    assert len(ops.uploads) == 1


def test_masks_grow_no_memory(world):
    table, ops = world
    sampler = Sampler(ops, table, VOCAB)
    slots = [start(table, sampler, h, SamplingParams(allowed_token_ids=(h, 65))) for h in (1, 2)]
    for rows in (slots, slots[:1], slots):
        batch = sampler.batch(plan(table, rows))
        assert [np.flatnonzero(bits).tolist() for bits in unpack_bits(batch.allowed_mask, VOCAB)] == [
            [h, 65] for h in (1, 2)[: len(rows)]]
        assert batch.allowed_mask.base is sampler._buffers["allowed_mask"]


@given(ids=st.sets(st.integers(0, VOCAB - 1)))
def test_bits_come_back(ids):
    bits = unpack_bits(pack_bits(np.array(sorted(ids), np.int64), VOCAB)[None], VOCAB)
    assert set(np.flatnonzero(bits).tolist()) == ids
