"""The pool against a simple model, and its prefix cache by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zhilight.engine.block_pool import BlockPool

SIZE = 4


class PoolMachine(RuleBasedStateMachine):
    """Sequences come and go as the scheduler would have it; `content` is what a perfect memory would say."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(12, SIZE)
        self.root = self.pool.root()
        self.sequences: list[tuple[list[int], np.ndarray]] = []
        self.content: dict[int, bytes] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=30))
    def admit(self, tokens):
        tokens = np.array(tokens, np.int32)
        hashes: list[bytes] = []
        self.pool.extend_hashes(hashes, self.root, tokens)
        hits = self.pool.lookup(hashes)
        for i, block in enumerate(hits):
            assert self.content[block] == tokens[: (i + 1) * SIZE].tobytes(), "a hit has other tokens"
        needed = -(-len(tokens) // SIZE) - len(hits)
        if needed + self.pool.count_unreferenced(hits) > self.pool.available:
            with pytest.raises(IndexError):
                self.pool.allocate(self.pool.available + 1)
            return
        self.pool.acquire(hits)
        fresh = self.pool.allocate(needed)
        in_use = {block for blocks, _ in self.sequences for block in blocks}
        assert not in_use & set(fresh), "a block of another sequence was given out"
        blocks = hits + fresh
        for i, digest in enumerate(hashes):
            self.content.setdefault(blocks[i], b"")
            if i >= len(hits):
                self.content[blocks[i]] = tokens[: (i + 1) * SIZE].tobytes()
            self.pool.register([blocks[i]], [digest])
        self.sequences.append((blocks, tokens))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data):
        blocks, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.release(blocks)

    @rule()
    def forget(self):
        self.pool.reset_cache()

    @invariant()
    def adds_up(self):
        assert self.pool.check([blocks for blocks, _ in self.sequences]) == []


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase


def fill(pool: BlockPool, tokens, salt=None) -> list[int]:
    """A sequence with all its full blocks registered."""
    tokens = np.asarray(tokens, np.int32)
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, pool.root(salt), tokens)
    blocks = pool.allocate(-(-len(tokens) // pool.block_size))
    for block, digest in zip(blocks, hashes, strict=False):
        pool.register([block], [digest])
    return blocks


def hits(pool: BlockPool, tokens, salt=None) -> list[int]:
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, pool.root(salt), np.asarray(tokens, np.int32))
    return pool.lookup(hashes)


def test_only_whole_blocks_of_the_same_prefix_and_salt_hit():
    pool = BlockPool(16, SIZE)
    blocks = fill(pool, range(10))
    assert hits(pool, range(10)) == blocks[:2]
    assert hits(pool, range(7)) == blocks[:1]
    assert hits(pool, [9, 1, 2, 3, 4, 5, 6, 7]) == [], "the second block's tokens agree but not what is before them"
    assert hits(pool, range(10), salt="other") == []


def test_the_least_recently_used_block_goes_first_and_tails_before_their_prefix():
    pool = BlockPool(4, SIZE)
    old, new = fill(pool, range(8)), fill(pool, range(100, 108))
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == [old[1]]
    assert hits(pool, range(8)) == old[:1]
    assert pool.allocate(1) == [old[0]]
    assert hits(pool, range(100, 108)) == new


def test_a_used_again_block_is_no_longer_the_oldest():
    pool = BlockPool(2, SIZE)
    first, second = fill(pool, range(4)), fill(pool, range(10, 14))
    pool.release(first)
    pool.release(second)
    pool.acquire(first)
    pool.release(first)
    assert pool.allocate(1) == second


def test_a_second_block_of_the_same_content_stays_anonymous():
    pool = BlockPool(4, SIZE)
    first, second = fill(pool, range(4)), fill(pool, range(4))
    assert hits(pool, range(4)) == first
    pool.release(second)
    assert pool.num_cached == 0
    pool.release(first)
    assert pool.num_cached == 1


def test_nothing_is_cached_when_caching_is_off():
    pool = BlockPool(4, SIZE, enable_prefix_caching=False)
    pool.release(fill(pool, range(8)))
    assert hits(pool, range(8)) == []
    assert pool.num_cached == 0


def test_releasing_twice_is_an_error():
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(ValueError, match="no reference"):
        pool.release(blocks)


@pytest.mark.parametrize("damage", ["_references", "_free", "_hash"])
def test_the_check_sees_damage_and_rebuild_mends_it(damage):
    pool = BlockPool(8, SIZE)
    kept, gone = fill(pool, range(8)), fill(pool, range(50, 58))
    pool.release(gone)
    if damage == "_references":
        pool._references[kept[0]] += 1
    elif damage == "_free":
        pool._free.append(kept[0])
    else:
        pool._by_hash.popitem()
    assert pool.check([kept])
    pool.rebuild([kept])
    assert pool.check([kept]) == []
    assert pool.available == 6
