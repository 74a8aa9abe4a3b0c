"""Paged KV blocks: reference counts, the shared prefix cache and its eviction.

A block is in one of three states. *Free*: nothing worth keeping. *Cached*: nobody uses it, but its content is known by
hash and can be handed out again. *Referenced*: in at least one sequence's table. free + cached + referenced = total.

The identity of a full block is the 128-bit hash of its parent's hash and its own tokens; the first block's parent is a
hash of the cache salt. Equal hashes are taken for equal prefixes. The hash is seeded at random for each pool, so that
nobody outside can make up a collision.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import xxhash


class BlockPool:
    """Blocks 0 .. num_blocks - 1 of `block_size` tokens. Not thread safe: one scheduler owns it."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._seed = secrets.randbits(64)
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    # ---- sizes ------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks that `allocate` could give now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content may still be hit."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, from 0 to 1."""
        return 1 - self.available / self.num_blocks

    # ---- identity ---------------------------------------------------------------------------------------------

    def root(self, cache_salt: str | None = None) -> bytes:
        """The parent hash of a sequence's first block: prompts under different salts never share."""
        return xxhash.xxh3_128_digest((cache_salt or "").encode(), self._seed)

    def extend_hashes(self, hashes: list[bytes], root: bytes, tokens: np.ndarray) -> None:
        """Append to `hashes` those of the full blocks of `tokens` ([n] int32, the sequence from its start) it lacks."""
        size = self.block_size
        first, full = len(hashes), len(tokens) // size
        if first >= full:
            return
        parent = hashes[-1] if hashes else root
        data, width = tokens[first * size : full * size].tobytes(), size * tokens.itemsize
        digest, seed = xxhash.xxh3_128_digest, self._seed
        for begin in range(0, len(data), width):
            parent = digest(parent + data[begin : begin + width], seed)
            hashes.append(parent)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known prefix. Takes no reference."""
        blocks = []
        for digest in hashes:
            block = self._by_hash.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_unreferenced(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` are merely cached, so that acquiring them lowers `available`."""
        references = self._references
        return sum(not references[block] for block in blocks)

    def count_exclusive(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` become available when their only sequence gives them back."""
        references = self._references
        return sum(references[block] == 1 for block in blocks)

    def register(self, blocks: Iterable[int], hashes: Iterable[bytes]) -> None:
        """Make full, referenced blocks known, each by its hash. A second block of the same content stays anonymous."""
        if not self.enable_prefix_caching:
            return
        hash_of, by_hash = self._hash_of, self._by_hash
        for block, digest in zip(blocks, hashes, strict=True):
            if hash_of[block] is None and digest not in by_hash:
                hash_of[block] = digest
                by_hash[digest] = block

    # ---- references -------------------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, content undefined. Raises IndexError when `available` is less."""
        if count > self.available:
            raise IndexError(f"{count} KV blocks wanted, {self.available} available of {self.num_blocks}")
        free, references = self._free, self._references
        first = max(0, len(free) - count)
        blocks = free[first:][::-1]
        del free[first:]
        if len(blocks) < count:
            blocks += self._evict(count - len(blocks))
        for block in blocks:
            references[block] = 1
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """One more reference to each of `blocks`, as `lookup` gave them."""
        references, cached = self._references, self._cached
        for block in blocks:
            if not references[block]:
                del cached[block]
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block of a sequence, in the sequence's order.

        The last block becomes the first to be evicted: a prefix is of no use without its start.
        Raises ValueError on a block that nobody references.
        """
        references, hash_of = self._references, self._hash_of
        for block in reversed(blocks):
            left = references[block] - 1
            if left < 0:
                raise ValueError(f"KV block {block} is released but has no reference")
            references[block] = left
            if not left:
                if hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def reset_cache(self) -> None:
        """Forget all content. Referenced blocks stay referenced."""
        self._by_hash.clear()
        self._hash_of = [None] * self.num_blocks
        self._free.extend(self._cached)
        self._cached.clear()

    def _evict(self, count: int) -> list[int]:
        """The `count` least recently used cached blocks, whose content is forgotten."""
        cached, hash_of, by_hash = self._cached, self._hash_of, self._by_hash
        blocks = []
        for _ in range(count):
            block, _ = cached.popitem(last=False)
            digest = hash_of[block]
            if digest is not None:
                del by_hash[digest]
                hash_of[block] = None
            blocks.append(block)
        return blocks

    # ---- invariants -------------------------------------------------------------------------------------------

    def check(self, tables: Iterable[Sequence[int]]) -> list[str]:
        """What is wrong with the bookkeeping, given the block table of every sequence; empty when all is well."""
        faults = []
        expected = Counter(block for table in tables for block in table)
        wrong = [b for b in range(self.num_blocks) if self._references[b] != expected.get(b, 0)]
        if wrong:
            faults.append(f"reference counts differ from the tables at {len(wrong)} blocks, first at {wrong[0]}: "
                          f"{self._references[wrong[0]]} counted, {expected.get(wrong[0], 0)} in tables")
        referenced = sum(1 for count in self._references if count)
        if len(self._free) + len(self._cached) + referenced != self.num_blocks:
            faults.append(f"{len(self._free)} free + {len(self._cached)} cached + {referenced} referenced blocks "
                          f"are not the {self.num_blocks} of the pool")
        idle = set(self._free)
        if len(idle) != len(self._free) or not idle.isdisjoint(self._cached):
            faults.append("a block is twice among the free and cached ones")
        if any(self._references[b] for b in idle) or any(self._references[b] for b in self._cached):
            faults.append("a referenced block is among the free or cached ones")
        if any(self._hash_of[b] is not None for b in self._free) or any(self._hash_of[b] is None for b in self._cached):
            faults.append("a free block has a hash or a cached block has none")
        named = {digest: b for b, digest in enumerate(self._hash_of) if digest is not None}
        if named != self._by_hash:
            faults.append("the hash table and the blocks' own hashes differ")
        return faults

    def rebuild(self, tables: Iterable[Sequence[int]]) -> None:
        """Make the bookkeeping agree with the tables again; what was cached is forgotten."""
        expected = Counter(block for table in tables for block in table)
        self._references = [expected.get(b, 0) for b in range(self.num_blocks)]
        self._hash_of = [None] * self.num_blocks
        self._by_hash.clear()
        self._cached.clear()
        self._free = [b for b in range(self.num_blocks - 1, -1, -1) if not self._references[b]]
