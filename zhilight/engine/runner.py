"""Runs steps on the device: forward pass, sampling, and the copies back to the host, which nobody waits for here.

A step is launched in two halves. `begin` queues the forward pass; `complete` queues sampling and the copies. Between
them the engine may read the tokens of the step before, where a row's mask depends on them. The sampled tokens stay on
the device and feed the next step.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from zhilight.engine.batch import PromptRows, StepPlan
from zhilight.engine.outputs import PositionLogprobs, TokenLogprob
from zhilight.engine.sampler import Sampler
from zhilight.ops.base import Array, Fetch, Ops, SampleResult, StepArrays

if TYPE_CHECKING:
    from zhilight.models.model import Model


@dataclass
class _FetchedLogprobs:
    """Copies of a SampleResult's log-probabilities under way."""

    token_ids: Fetch
    logprobs: Fetch
    ranks: Fetch
    top_ids: Fetch | None
    top_logprobs: Fetch | None

    def positions(self, wanted: list[tuple[int, int]]) -> list[PositionLogprobs]:
        """For each (row, number of most probable tokens) in `wanted`."""
        tokens, logprobs, ranks = self.token_ids.wait(), self.logprobs.wait(), self.ranks.wait()
        top_ids = self.top_ids.wait() if self.top_ids is not None else None
        top_logprobs = self.top_logprobs.wait() if self.top_logprobs is not None else None
        result = []
        for row, count in wanted:
            chosen = TokenLogprob(int(tokens[row]), float(logprobs[row]), int(ranks[row]))
            top = []
            if count and top_ids is not None:
                top = [TokenLogprob(token, value, rank) for rank, (token, value) in enumerate(
                    zip(top_ids[row, :count].tolist(), top_logprobs[row, :count].tolist(), strict=True), start=1)]
            result.append(PositionLogprobs(chosen, top))
        return result


@dataclass
class StepInFlight:
    """A step whose results are not read yet."""

    plan: StepPlan
    scope: ExitStack
    logits: Array | None = None
    tokens: Fetch | None = None
    logprobs: _FetchedLogprobs | None = None
    prompt_logprobs: _FetchedLogprobs | None = None
    num_logprobs: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))

    def ready(self) -> bool:
        """Whether reading the tokens would not have to wait."""
        return self.tokens is None or self.tokens.ready()

    def read_tokens(self) -> np.ndarray:
        """[R] int32 sampled tokens; waits for them."""
        return np.empty(0, np.int32) if self.tokens is None else self.tokens.wait()


class Runner:
    """One model with its KV cache on one device.

    `forward` is the seam for graphs: a backend may override it and replay a captured pass for steps that only decode,
    padding the batch with slot_mapping -1 and context_lens 0.
    """

    def __init__(self, model: Model, ops: Ops, kv_cache: list[Array], sampler: Sampler):
        self.model = model
        self.ops = ops
        self.kv_cache = kv_cache
        self.sampler = sampler
        self._sampled: Array | None = None

    def forward(self, arrays: StepArrays, sampled: Array | None) -> Array:
        """Logits [len(arrays.logit_rows), V] float32 of one step; `sampled` are the last step's tokens on the device."""
        return self.model.forward(self.ops.prepare_step(arrays, sampled), self.kv_cache)

    def begin(self, plan: StepPlan) -> StepInFlight:
        """Queue the forward pass of a step. The step before must be complete, though not read."""
        for request in plan.assigned:
            self.sampler.assign(request)
        scope = ExitStack()
        try:
            scope.enter_context(self.ops.scope())
            logits = self.forward(plan.arrays, self._sampled)
        except BaseException:
            scope.close()
            raise
        return StepInFlight(plan, scope, logits)

    def complete(self, flight: StepInFlight) -> None:
        """Queue sampling and the copies of its results."""
        plan, ops = flight.plan, self.ops
        with flight.scope:
            count = plan.num_samples
            if plan.prompt_rows:
                result = ops.logprobs(flight.logits[count:], self._prompt_targets(plan.prompt_targets),
                                      max(rows.num_top for rows in plan.prompt_rows))
                flight.prompt_logprobs = self._fetch_logprobs(result)
            if count:
                batch = self.sampler.batch(plan)
                result = ops.sample(flight.logits[:count], batch)
                self.sampler.count(plan, result.token_ids)
                flight.tokens = ops.fetch(result.token_ids)
                if batch.num_logprobs >= 0:
                    flight.logprobs = self._fetch_logprobs(result, flight.tokens)
                    flight.num_logprobs = self.sampler.num_logprobs(plan)
                self._sampled = result.token_ids
            flight.logits = None

    def hidden_states(self, arrays: StepArrays) -> np.ndarray:
        """[len(arrays.logit_rows), H] float32 hidden states after the final norm; waits for them."""
        with self.ops.scope():
            step = self.ops.prepare_step(arrays)
            return self.ops.download(self.model.hidden_states(step, self.kv_cache)).astype(np.float32)

    def _prompt_targets(self, targets: np.ndarray) -> Array:
        if self.ops.name == "cpu":
            return targets
        from zhilight.driver import dtype as dtypes

        array = self.ops.empty(targets.shape, dtypes.int32)
        self.ops.upload(array, targets)
        return array

    def _fetch_logprobs(self, result: SampleResult, token_ids: Fetch | None = None) -> _FetchedLogprobs:
        fetch = self.ops.fetch
        has_top = result.top_ids is not None and result.top_ids.shape[1] > 0
        return _FetchedLogprobs(token_ids or fetch(result.token_ids), fetch(result.logprobs), fetch(result.ranks),
                                fetch(result.top_ids) if has_top else None,
                                fetch(result.top_logprobs) if has_top else None)


def prompt_positions(rows: list[PromptRows], fetched: _FetchedLogprobs) -> list[tuple[int, list[PositionLogprobs]]]:
    """(handle, log-probabilities of its prompt tokens first .. last - 1) for each span of a step."""
    result, row = [], 0
    for span in rows:
        count = span.last - span.first
        result.append((span.handle, fetched.positions([(row + i, span.num_top) for i in range(count)])))
        row += count
    return result
