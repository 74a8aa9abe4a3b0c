"""What runs in the next step: decode tokens first, then prefill chunks, within one token budget.

Order of service is first come, first served, or by (priority, arrival). All KV blocks of a prompt are taken when the
request is admitted, so a chunked prefill can always finish; a decode takes one more block when it crosses a boundary,
and if none is left the request last in order is preempted: its blocks go back and it is computed again later. The first
request in order is never preempted and fits alone (checked at admission), so some request always progresses.

A request that does not fit yet is passed over for those behind it, at most MAX_OVERTAKEN times: then nobody behind it is
admitted any more until it fits.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from zhilight.engine.batch import STOP_IDS, Chunk, PromptRows, SlotTable, StepPlan
from zhilight.engine.block_pool import BlockPool
from zhilight.engine.messages import Started
from zhilight.engine.request import Request, RequestState

MAX_OVERTAKEN = 64
MAX_PASSED_OVER = 16
"""Waiting requests that do not fit which one step looks at."""
MAX_PROMPT_ROWS = 256
"""Logit rows of one step for prompt log-probabilities, which bounds the logits' memory."""

_key = attrgetter("key")


class MustWait(Exception):
    """The step can only be planned once the tokens of the step in flight are known; nothing has been changed."""


@dataclass
class StepResult:
    """What a step gave after the tokens of requests that ended meanwhile were dropped: parallel handles and tokens,
    `rows` of the step's samples they come from, and who finished: (request, reason, stop token or None)."""

    handles: np.ndarray
    tokens: np.ndarray
    rows: np.ndarray
    finished: list[tuple[Request, str, int | None]] = field(default_factory=list)


class Scheduler:
    """Decides the steps of one engine. Single-threaded."""

    def __init__(self, pool: BlockPool, table: SlotTable, *, max_num_batched_tokens: int, eos_token_ids: tuple[int, ...] = (),
                 enable_chunked_prefill: bool = True, policy: str = "fcfs"):
        self.pool = pool
        self.table = table
        self.waiting: list[Request] = []  # sorted by key
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = eos_token_ids
        self.enable_chunked_prefill = enable_chunked_prefill
        self.by_priority = policy == "priority"
        self.hold_admissions = False
        """While true nobody new is admitted: an embedding waits for blocks."""
        self.started: list[Started] = []
        """Requests scheduled for the first time; the engine loop collects and clears it."""
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._arrivals = 0
        self._prefilling: list[Request] = []
        self._decoding: dict[int, None] = {}
        self._decode_slots: np.ndarray | None = None
        self._many_stops: dict[int, frozenset[int]] = {}
        self._stuck_at: int | None = None

    # ---- requests ---------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot: in prefill, or decoding."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def has_work(self) -> bool:
        """Whether anyone waits or runs."""
        return bool(self.waiting or self._prefilling or self._decoding)

    def add(self, request: Request) -> None:
        """Queue a request that `validate_prompt` has let through."""
        self._arrivals += 1
        request.key = (request.priority if self.by_priority else 0, self._arrivals)
        longest = self.table.tokens.shape[1]
        limit = request.params.max_tokens
        request.limit = longest if limit is None else min(longest, request.prompt_len + limit)
        request.root = self.pool.root(request.cache_salt)
        self._enqueue(request)

    def remove(self, request: Request) -> None:
        """Forget a request in whatever state it is; its blocks and slot are free at once. Idempotent.

        A step in flight may still write KV for it, but only before any later step writes to the same blocks.
        """
        if request.state is RequestState.RUNNING:
            self._vacate(request)
        elif request.state is not RequestState.FINISHED:
            del self.waiting[bisect_left(self.waiting, request.key, key=_key)]
            self._stuck_at = None
        request.state = RequestState.FINISHED

    def running_requests(self) -> list[Request]:
        """Who holds a slot, in the order of the slots."""
        return [request for request in self.table.requests if request is not None]

    def block_tables(self) -> list[list[int]]:
        """The block table of every running request, for the pool's invariant check."""
        return [self.table.table(request.slot) for request in self.running_requests()]

    # ---- planning ---------------------------------------------------------------------------------------------

    def schedule(self, in_flight: bool = False) -> StepPlan | None:
        """The next step, or None when nothing can run.

        in_flight: the tokens of the last step are not known yet; raises MustWait where they decide what happens next.
        """
        if self.by_priority and self.waiting:
            self._preempt_for_priority(in_flight)
        decodes = self._grow_decodes(in_flight)
        budget = self.max_num_batched_tokens - len(decodes)
        chunks: list[Chunk] = []
        prompt_rows = _PromptRowBuilder(self.table)
        requests: list[Request] = []
        for request in self._prefilling:
            if budget <= 0:
                break
            budget -= self._chunk(request, budget, chunks, prompt_rows, requests)
        assigned = self._admit(budget, chunks, prompt_rows, requests)
        if not len(decodes) and not chunks:
            return None
        return self._plan(decodes, chunks, prompt_rows, assigned, requests)

    def _plan(self, decodes: np.ndarray, chunks: list[Chunk], prompt_rows: _PromptRowBuilder, assigned: list[Request],
              requests: list[Request]) -> StepPlan:
        table = self.table
        rows, targets = prompt_rows.finish(len(decodes), chunks)
        arrays = table.build(decodes, chunks, rows)
        table.computed[decodes] += 1
        sample_slots = decodes
        if chunks:
            for chunk in chunks:
                table.computed[chunk.slot] = chunk.end
            ending = [chunk.slot for chunk in chunks if chunk.samples]
            if ending:
                sample_slots = np.concatenate((decodes, ending))
            for slot in ending:
                self._decoding[slot] = None
            if ending:
                self._decode_slots = None
                self._prefilling = [request for request in self._prefilling if request.slot not in self._decoding]
        positions = table.length[sample_slots]
        table.length[sample_slots] += 1
        table.row[sample_slots] = np.arange(len(sample_slots))
        return StepPlan(arrays=arrays, sample_slots=sample_slots, epochs=table.epoch[sample_slots], positions=positions,
                        ends=table.computed[sample_slots], assigned=assigned, requests=requests, prompt_rows=prompt_rows.spans,
                        prompt_targets=targets)

    def _grow_decodes(self, in_flight: bool) -> np.ndarray:
        """[D] slots that decode, each with a block for its next token; preempts until the blocks suffice."""
        table, pool = self.table, self.pool
        while True:
            if self._decode_slots is None:
                self._decode_slots = np.fromiter(self._decoding, np.int64, len(self._decoding))
            decodes = self._decode_slots
            goes_on = table.length[decodes] < table.limit[decodes]
            if not goes_on.all():
                decodes = decodes[goes_on]
            short = decodes[(table.computed[decodes] >> table.shift) >= table.num_blocks[decodes]]
            if len(short) <= pool.available:
                break
            if in_flight:
                raise MustWait
            self._preempt(max(self.running_requests(), key=_key))
        if len(short):
            for slot, block in zip(short.tolist(), pool.allocate(len(short)), strict=True):
                table.append_block(slot, block)
        return decodes

    def _chunk(self, request: Request, budget: int, chunks: list[Chunk], prompt_rows: _PromptRowBuilder,
               requests: list[Request]) -> int:
        """Add the next chunk of a request in prefill, and return its tokens; 0 when it has to wait for a later step."""
        start = int(self.table.computed[request.slot])
        end = min(request.prefill_end, start + budget)
        if request.params.prompt_logprobs is not None:
            end = prompt_rows.add(request, start, end)
        if end > start:
            chunks.append(Chunk(request.slot, start, end, end == request.prefill_end))
            requests.append(request)
            if self.pool.enable_prefix_caching:  # now, so that the next one admitted can share its blocks
                self._register(request.slot, end)
        return end - start

    # ---- admission --------------------------------------------------------------------------------------------

    def _admit(self, budget: int, chunks: list[Chunk], prompt_rows: _PromptRowBuilder,
               requests: list[Request]) -> list[Request]:
        assigned: list[Request] = []
        waiting, table = self.waiting, self.table
        if self.hold_admissions or not waiting or not table.free or budget <= 0:
            return assigned
        if self._stuck_at is not None and self.num_running and self._room <= self._stuck_at:
            return assigned  # no one who waits fitted then, and there is no more room now
        index, blocked = 0, True
        while index < len(waiting) and budget > 0 and table.free:
            request = waiting[index]
            fits = self._fit(request, budget)
            if isinstance(fits, str):
                blocked = blocked and fits == "blocks"
                index += 1
                if request.overtaken >= MAX_OVERTAKEN or index >= MAX_PASSED_OVER:
                    break
                continue
            del waiting[index]
            for passed in waiting[:index]:
                passed.overtaken += 1
            self._start(request, *fits)
            assigned.append(request)
            budget -= self._chunk(request, budget, chunks, prompt_rows, requests)
        if blocked and waiting and index >= min(len(waiting), MAX_PASSED_OVER):
            self._stuck_at = self._room
        return assigned

    @property
    def _room(self) -> int:
        """Blocks for new requests. Each running sequence keeps one to grow into: with a full cache that saves a quarter of
        all computing, which preempted requests would do twice, for 3 % more steps (measured with a stub model)."""
        return self.pool.available - self.num_running

    def _fit(self, request: Request, budget: int) -> tuple[list[int], int] | str:
        """(shared blocks, tokens they save), or what it lacks: "blocks" or "budget"."""
        hits, lacking = self._lookup(request)
        count = len(request.tokens)
        cached = min(len(hits) << self.table.shift, count - 1)
        if not self.enable_chunked_prefill and count - cached > budget:
            return "budget"
        return "blocks" if lacking > 0 else (hits, cached)

    def _lookup(self, request: Request) -> tuple[list[int], int]:
        """The blocks of its longest known prefix, and how many blocks it lacks for the rest; 0 or less when it fits."""
        pool = self.pool
        hits: list[int] = []
        if pool.enable_prefix_caching:
            pool.extend_hashes(request.hashes, request.root, request.tokens)
            if request.params.prompt_logprobs is None:  # those need the logits of every prompt token
                hits = pool.lookup(request.hashes)
        lacking = -(-len(request.tokens) // pool.block_size) - self._room
        if hits:
            lacking += pool.count_unreferenced(hits) - len(hits)
        return hits, lacking

    def _start(self, request: Request, hits: list[int], cached: int) -> None:
        table, pool = self.table, self.pool
        count = len(request.tokens)
        if hits:
            pool.acquire(hits)
        blocks = hits + pool.allocate(-(-count // pool.block_size) - len(hits))
        slot = table.assign(request, blocks, cached, len(hits) << table.shift)
        request.prefill_end = count
        if request.state is RequestState.WAITING:  # what a preempted request finds again is no hit
            request.cached_tokens = cached
            self.prompt_tokens += count
            if pool.enable_prefix_caching:
                self.prefix_query_tokens += count
                self.prefix_hit_tokens += cached
            self.started.append(Started(request.handle, time.monotonic(), cached))
        request.state = RequestState.RUNNING
        request.overtaken = 0
        self._prefilling.append(request)
        stops = set(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            stops.update(self.eos_token_ids)
        table.stop_ids[slot] = -1
        self._many_stops.pop(slot, None)
        if len(stops) > STOP_IDS:
            self._many_stops[slot] = frozenset(stops)
        elif stops:
            table.stop_ids[slot, : len(stops)] = sorted(stops)

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=_key)
        self._stuck_at = None

    # ---- preemption -------------------------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        """Send a running request back to the queue, to its old place in the order, with the tokens it has."""
        request.tokens = self.table.sequence(request.slot).copy()
        self._vacate(request)
        request.state = RequestState.PREEMPTED
        self.num_preemptions += 1
        self._enqueue(request)

    def _preempt_for_priority(self, in_flight: bool) -> None:
        """Make room for the first waiting request by preempting running ones of strictly lower priority, if that is enough."""
        head = self.waiting[0]
        lower = [request for request in self.running_requests() if request.key[0] > head.key[0]]
        if not lower:
            return
        lacking, slots = self._lookup(head)[1], len(self.table.free)
        victims: list[Request] = []
        for request in sorted(lower, key=_key, reverse=True):
            if lacking <= 0 and slots > 0:
                break
            victims.append(request)
            lacking -= self.pool.count_exclusive(self.table.table(request.slot)) + 1
            slots += 1
        if not victims or lacking > 0:
            return
        if in_flight:
            raise MustWait
        for request in victims:
            self._preempt(request)

    def _vacate(self, request: Request) -> None:
        slot = request.slot
        if slot in self._decoding:
            del self._decoding[slot]
            self._decode_slots = None
        else:
            self._prefilling.remove(request)
        self._many_stops.pop(slot, None)
        self.pool.release(self.table.release(slot))

    # ---- results ----------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, tokens: np.ndarray) -> StepResult:
        """Take in the tokens [R] that `plan` sampled. Those of requests that ended or were preempted since are dropped."""
        table = self.table
        slots, ends, rows = plan.sample_slots, plan.ends, np.arange(plan.num_samples)
        alive = table.epoch[slots] == plan.epochs
        if not alive.all():
            slots, ends, rows = slots[alive], ends[alive], rows[alive]
            tokens = tokens[alive]
        known = table.known[slots]
        table.tokens[slots, known] = tokens
        known += 1
        table.known[slots] = known
        if self.pool.enable_prefix_caching:
            for i in np.flatnonzero((ends >> table.shift) > table.registered[slots]).tolist():
                self._register(int(slots[i]), int(ends[i]))
        result = StepResult(table.handle[slots], tokens, rows)
        stopped = (table.stop_ids[slots] == tokens[:, None]).any(axis=1)
        if self._many_stops:
            for i in (i for i, slot in enumerate(slots.tolist()) if slot in self._many_stops):
                stopped[i] = int(tokens[i]) in self._many_stops[int(slots[i])]
        for i in np.flatnonzero(stopped | (known >= table.limit[slots])).tolist():
            request = table.requests[slots[i]]
            token = int(tokens[i])
            if stopped[i]:
                is_eos = token in self.eos_token_ids and not request.params.ignore_eos
                result.finished.append((request, "stop", None if is_eos else token))
            else:
                result.finished.append((request, "length", None))
            self.remove(request)
        return result

    def _register(self, slot: int, end: int) -> None:
        """Make the blocks that hold the first `end` tokens of a slot, all with KV, known to the prefix cache."""
        table, pool = self.table, self.pool
        full, first = end >> table.shift, int(table.registered[slot])
        if full <= first:
            return
        request = table.requests[slot]
        hashes = request.hashes
        if len(hashes) < full:
            pool.extend_hashes(hashes, request.root, table.tokens[slot, : full << table.shift])
        pool.register(table.blocks[slot, first:full].tolist(), hashes[first:full])
        table.registered[slot] = full


class _PromptRowBuilder:
    """Collects the rows of a step whose logits give prompt log-probabilities, at most MAX_PROMPT_ROWS."""

    def __init__(self, table: SlotTable):
        self._table = table
        self._left = MAX_PROMPT_ROWS
        self._by_slot: dict[int, PromptRows] = {}
        self.spans: list[PromptRows] = []

    def add(self, request: Request, start: int, end: int) -> int:
        """Plan the rows of the chunk start .. end - 1 and return its end, earlier where there would be too many rows."""
        first = max(start + 1, request.prompt_logprobs_sent + 1)  # the row at position p predicts token p + 1
        last = min(end, request.prompt_len - 1) + 1
        if last - first > self._left:
            last = first + self._left
            end = last - 1
        if last <= first:
            return end
        self._left -= last - first
        request.prompt_logprobs_sent = last - 1
        span = PromptRows(request.handle, first, last, request.params.prompt_logprobs or 0)
        self._by_slot[request.slot] = span
        self.spans.append(span)
        return end

    def finish(self, num_decodes: int, chunks: list[Chunk]) -> tuple[np.ndarray | None, np.ndarray]:
        """The logit rows, in the order of `spans`, and the tokens they predict."""
        if not self.spans:
            return None, np.empty(0, np.int32)
        rows, targets, row = [], [], num_decodes
        for chunk in chunks:
            span = self._by_slot.get(chunk.slot)
            if span is not None:
                rows.append(np.arange(span.first - 1 - chunk.start + row, span.last - 1 - chunk.start + row))
                targets.append(self._table.tokens[chunk.slot, span.first : span.last])
            row += chunk.end - chunk.start
        return np.concatenate(rows), np.concatenate(targets)
