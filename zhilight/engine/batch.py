"""The running sequences as arrays: one row (slot) each, from which a step's integers are gathered.

Everything that changes every step lives here, in NumPy arrays indexed by slot, so that a decode step of hundreds of
sequences costs a dozen array operations and no Python work a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from zhilight.engine.request import Request
from zhilight.ops.base import StepArrays

STOP_IDS = 8
"""Stop tokens of a sequence that are compared as an array; a request with more of them is looked up in a set."""


class Chunk(NamedTuple):
    """Prompt tokens start .. end - 1 of the sequence in `slot`; `samples` when they end what it must compute first."""

    slot: int
    start: int
    end: int
    samples: bool


@dataclass(frozen=True)
class PromptRows:
    """Logit rows of one sequence whose prompt log-probabilities are wanted: those that predict tokens first .. last - 1."""

    handle: int
    first: int
    last: int
    num_top: int


@dataclass
class StepPlan:
    """One step: the arrays of its forward pass and what to do with what it samples.

    sample_slots [R], epochs [R], positions [R] (index of the token to come) and ends [R] (tokens with KV after the step)
    are parallel to the first R logit rows; the rows after them belong to `prompt_rows`, in order.
    """

    arrays: StepArrays
    sample_slots: np.ndarray
    epochs: np.ndarray
    positions: np.ndarray
    ends: np.ndarray
    assigned: list[Request]
    """Requests that got their slot in this step."""
    requests: list[Request]
    """Everyone with a prefill chunk in this step."""
    prompt_rows: list[PromptRows] = field(default_factory=list)
    prompt_targets: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """[rows] int32: the prompt token each prompt row predicts."""

    @property
    def num_samples(self) -> int:
        """R, the tokens that the step samples."""
        return len(self.sample_slots)


class SlotTable:
    """State of the running sequences. L is max_model_len, W the blocks of a sequence that long.

    tokens [S, L] int32 and blocks [S, W] int32 are the sequences and their block tables; the rest is [S]:
    computed: tokens whose KV is computed, steps in flight included; length: tokens, sampled ones in flight included;
    known: tokens the host has seen; limit: length at which it ends; num_blocks: blocks held; registered: blocks known to
    the prefix cache; protected: tokens in shared blocks, which must not be written again; epoch: changes when the slot
    is given back; row: the row of the last step's samples that holds its newest token.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int):
        self.shift = block_size.bit_length() - 1
        if 1 << self.shift != block_size:
            raise ValueError(f"block_size is {block_size}; it must be a power of two")
        width = -(-max_model_len // block_size)
        self._mask = block_size - 1
        self._positions = np.arange(max_model_len, dtype=np.int32)
        self._in_block = np.arange(block_size)
        self.tokens = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.blocks = np.zeros((max_num_seqs, width), np.int32)
        self.computed, self.length, self.known, self.limit, self.num_blocks, self.registered, self.protected, self.row = (
            np.zeros(max_num_seqs, np.int64) for _ in range(8))
        self.epoch = np.zeros(max_num_seqs, np.int64)
        self.handle = np.zeros(max_num_seqs, np.int64)
        self.stop_ids = np.full((max_num_seqs, STOP_IDS), -1, np.int32)
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.free = list(range(max_num_seqs - 1, -1, -1))

    def assign(self, request: Request, blocks: list[int], computed: int, protected: int) -> int:
        """Put a request into a free slot; its first `computed` tokens already have KV in `blocks`."""
        slot = self.free.pop()
        count = len(request.tokens)
        self.tokens[slot, :count] = request.tokens
        self.blocks[slot, : len(blocks)] = blocks
        self.blocks[slot, len(blocks) :] = 0
        self.computed[slot] = computed
        self.length[slot] = self.known[slot] = count
        self.limit[slot] = request.limit
        self.num_blocks[slot] = len(blocks)
        self.protected[slot] = protected
        self.registered[slot] = protected >> self.shift
        self.handle[slot] = request.handle
        self.requests[slot] = request
        request.slot = slot
        return slot

    def release(self, slot: int) -> list[int]:
        """Free the slot and return its blocks in order."""
        request = self.requests[slot]
        if request is None:
            raise ValueError(f"slot {slot} is released but nobody has it")
        blocks = self.table(slot)
        self.requests[slot] = None
        self.epoch[slot] += 1
        self.free.append(slot)
        request.slot = -1
        return blocks

    def append_block(self, slot: int, block: int) -> None:
        """Give the sequence in `slot` one more block to grow into."""
        count = self.num_blocks[slot]
        self.blocks[slot, count] = block
        self.num_blocks[slot] = count + 1

    def table(self, slot: int) -> list[int]:
        """The blocks of a slot, in order."""
        return self.blocks[slot, : self.num_blocks[slot]].tolist()

    def sequence(self, slot: int) -> np.ndarray:
        """A view of the tokens of a slot that the host knows."""
        return self.tokens[slot, : self.known[slot]]

    def build(self, decodes: np.ndarray, chunks: list[Chunk], prompt_rows: np.ndarray | None = None) -> StepArrays:
        """The integers of a step: `decodes` [D] slots with one token each, then `chunks`.

        Reads `computed` and `length` as they were before the step. prompt_rows: logit rows beside the sampling ones.
        """
        positions = self.computed[decodes]
        unknown = np.flatnonzero(self.known[decodes] < self.length[decodes])
        num_decodes = len(decodes)
        token_ids, row_positions = self.tokens[decodes, positions], positions.astype(np.int32)
        mapping = self._places(self.blocks[decodes, positions >> self.shift]) | (positions & self._mask)
        slots, context_lens = decodes, positions + 1
        query_start = np.arange(num_decodes + 1, dtype=np.int32)
        logit_rows = query_start[:-1]
        if chunks:
            chunk_slots, starts, ends = np.array([(chunk.slot, chunk.start, chunk.end) for chunk in chunks]).T
            token_ids = np.concatenate([token_ids, *[self.tokens[chunk.slot, chunk.start : chunk.end] for chunk in chunks]])
            row_positions = np.concatenate([row_positions, *[self._positions[chunk.start : chunk.end] for chunk in chunks]])
            query_start = np.concatenate((query_start, num_decodes + np.cumsum(ends - starts)), dtype=np.int32)
            mapping = np.concatenate([mapping, *self._chunk_mappings(chunks)])
            protected = self.protected[chunk_slots]
            for i in np.flatnonzero(starts < protected).tolist():
                # a cached prompt's last token is computed again, but its block may be shared: leave it as it is
                first, last = query_start[num_decodes + i : num_decodes + i + 2]
                mapping[first : min(last, first + protected[i] - starts[i])] = -1
            slots, context_lens = np.concatenate((decodes, chunk_slots)), np.concatenate((context_lens, ends))
            samples = np.array([chunk.samples for chunk in chunks])
            logit_rows = np.concatenate((logit_rows, query_start[num_decodes + 1 :][samples] - 1))
        if prompt_rows is not None and len(prompt_rows):
            logit_rows = np.concatenate((logit_rows, prompt_rows))
        elif not len(logit_rows):
            logit_rows = query_start[1:2] - 1  # backends need not handle a head without rows
        width = int(((context_lens.max() - 1) >> self.shift) + 1)
        return StepArrays(
            token_ids=token_ids,
            positions=row_positions,
            slot_mapping=mapping,
            block_tables=self.blocks[slots, :width],
            context_lens=context_lens.astype(np.int32),
            query_start=query_start,
            logit_rows=logit_rows.astype(np.int32, copy=False),
            num_decodes=num_decodes,
            feed_rows=unknown.astype(np.int32),
            feed_sources=self.row[decodes[unknown]].astype(np.int32),
        )

    def _places(self, blocks: np.ndarray) -> np.ndarray:
        """Where blocks begin in the cache, in tokens (int64)."""
        return blocks.astype(np.int64) << self.shift

    def _chunk_mappings(self, chunks: list[Chunk]) -> list[np.ndarray]:
        """Where each token of each chunk lies in the cache. Block by block: chunks have many tokens and few blocks."""
        spans = [self.blocks[chunk.slot, chunk.start >> self.shift : -(-chunk.end >> self.shift)] for chunk in chunks]
        places = (self._places(np.concatenate(spans))[:, None] | self._in_block).ravel()  # of all tokens of those blocks
        mappings, first = [], 0
        for chunk, span in zip(chunks, spans, strict=True):
            skipped = first + (chunk.start & self._mask)
            mappings.append(places[skipped : skipped + chunk.end - chunk.start])
            first += len(span) << self.shift
        return mappings
