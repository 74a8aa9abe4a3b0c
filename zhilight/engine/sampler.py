"""Sampling settings of the running requests, kept by slot, and the SamplingBatch of a step gathered from them.

Rows that ask for nothing special cost nothing: penalty state, bias triples and token masks exist only for the slots
that need them, and while the same slots run, the same arrays are handed out again (a backend that copies them to its
device sees that they are the same objects and copies only `positions`).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import numpy as np

from zhilight.driver import dtype as dtypes
from zhilight.engine.batch import SlotTable, StepPlan
from zhilight.engine.request import Request
from zhilight.errors import RequestError
from zhilight.ops.base import Array, Ops, SamplingBatch

FORBIDDEN = np.float32(-np.inf)


@dataclass
class _Special:
    """What one slot asks for beyond the plain arrays."""

    bias: dict[int, float] = field(default_factory=dict)
    """Constant: logit_bias, and -inf for bad words of one token."""
    quiet_until: int = 0
    """Length below which no stop token may come (min_tokens)."""
    stops: tuple[int, ...] = ()
    phrases: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    """Bad words of several tokens: all but the last token -> the tokens that would complete one."""
    phrase_lengths: tuple[int, ...] = ()
    """Of the keys of `phrases`."""
    mask: np.ndarray | None = None
    """[ceil(V / 32)] uint32 of allowed_token_ids."""
    request: Request | None = None
    """Set when a grammar gives the mask."""

    @property
    def changes(self) -> bool:
        """Whether its bias or mask differs from step to step."""
        return bool(self.quiet_until or self.phrases or self.request)


def penalty_bytes(slots: int, vocab_size: int) -> int:
    """Device memory that `Sampler.reserve` takes: int32 counts and a prompt bit a token, for every slot."""
    return slots * (4 * vocab_size + 4 * -(-vocab_size // 32))


class Sampler:
    """Turns the plans of the scheduler into SamplingBatch arrays on the device of `ops`."""

    def __init__(self, ops: Ops, table: SlotTable, vocab_size: int, eos_token_ids: tuple[int, ...] = (),
                 seed: int | None = None):
        slots = len(table.requests)
        self._ops = ops
        self._table = table
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._eos = eos_token_ids
        self._seeds_of_unseeded = np.random.default_rng(secrets.randbits(128) if seed is None else seed)
        self._temperature = np.ones(slots, np.float32)
        self._top_k = np.full(slots, vocab_size, np.int32)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self._seeds = np.zeros(slots, np.uint64)
        self._repetition = np.ones(slots, np.float32)
        self._presence = np.zeros(slots, np.float32)
        self._frequency = np.zeros(slots, np.float32)
        self._num_logprobs = np.full(slots, -1, np.int32)
        self._penalised = np.zeros(slots, bool)
        self._late = np.zeros(slots, bool)
        self._special: dict[int, _Special] = {}
        self._unseeded: dict[int, int] = {}
        self._drawn: list[int] = []
        self._prompt_mask: Array | None = None
        self._output_counts: Array | None = None
        self.faults: list[tuple[Request, RequestError]] = []
        """Requests whose grammar allows no further token; the engine loop ends them and clears the list."""
        self._last_slots: np.ndarray | None = None
        self._last: SamplingBatch | None = None
        self._last_count_slots: np.ndarray | None = None
        self._buffers: dict[str, Array] = {}
        self._uploaded: dict[str, np.ndarray] = {}

    def reserve(self) -> None:
        """Take the memory of the penalties now ([slots, V] int32 and a bit a token). Without it, at their first use."""
        if self._output_counts is None:
            slots = len(self._table.requests)
            self._prompt_mask = self._ops.parameter((slots, self._words), dtypes.uint32)
            self._output_counts = self._ops.parameter((slots, self._vocab_size), dtypes.int32)

    # ---- slots ------------------------------------------------------------------------------------------------

    def assign(self, request: Request) -> None:
        """Take in the settings of a request that has just got its slot."""
        slot, params = request.slot, request.params
        self._last_slots = None
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = self._seed_of(request)
        self._num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self._repetition[slot] = params.repetition_penalty
        self._presence[slot] = params.presence_penalty
        self._frequency[slot] = params.frequency_penalty
        self._penalised[slot] = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1, 0, 0)
        if self._penalised[slot]:
            self._load_penalties(request)
        special = self._special_of(request)
        self._late[slot] = special is not None and bool(special.phrases or special.request)
        if special is None:
            self._special.pop(slot, None)
        else:
            self._special[slot] = special

    def forget(self, handle: int) -> None:
        """A request has ended for good."""
        self._unseeded.pop(handle, None)

    def _seed_of(self, request: Request) -> int:
        """The request's own seed, or one drawn once for it: a preempted request goes on with the same draws."""
        if request.params.seed is not None:
            return request.params.seed & (2**64 - 1)
        seed = self._unseeded.get(request.handle)
        if seed is None:
            if not self._drawn:  # many at a time: a call costs as much as a hundred numbers
                self._drawn = self._seeds_of_unseeded.integers(2**64, size=256, dtype=np.uint64).tolist()
            seed = self._unseeded[request.handle] = self._drawn.pop()
        return seed

    def _special_of(self, request: Request) -> _Special | None:
        params = request.params
        stops = tuple({*self._eos, *params.stop_token_ids}) if params.min_tokens else ()
        bias = dict(params.logit_bias or {})
        bias.update({ids[0]: float(FORBIDDEN) for ids in request.bad_words if len(ids) == 1})
        phrases: dict[tuple[int, ...], list[int]] = {}
        for ids in request.bad_words:
            if len(ids) > 1:
                phrases.setdefault(tuple(ids[:-1]), []).append(ids[-1])
        mask = None
        if params.allowed_token_ids is not None:
            mask = pack_bits(np.asarray(params.allowed_token_ids), self._vocab_size)
        if not (stops or bias or phrases or mask is not None or request.grammar is not None):
            return None
        return _Special(bias, request.prompt_len + params.min_tokens if stops else 0, stops, phrases,
                        tuple({len(beginning) for beginning in phrases}), mask,
                        request if request.grammar is not None else None)

    def _load_penalties(self, request: Request) -> None:
        self.reserve()
        sequence = self._table.sequence(request.slot)
        counts = np.bincount(sequence[request.prompt_len :], minlength=self._vocab_size).astype(np.int32)
        row = slice(request.slot, request.slot + 1)
        self._ops.upload(self._prompt_mask[row], pack_bits(sequence[: request.prompt_len], self._vocab_size)[None])
        self._ops.upload(self._output_counts[row], counts[None])

    # ---- a step -----------------------------------------------------------------------------------------------

    def is_late(self, plan: StepPlan) -> bool:
        """Whether a row can only be sampled once the host knows the tokens before it (grammars, bad phrases)."""
        return bool(self._special) and bool(self._late[plan.sample_slots].any())

    def batch(self, plan: StepPlan) -> SamplingBatch:
        """The step's parameters. For a late step, call it when the previous tokens have been applied."""
        slots = plan.sample_slots
        same = slots is self._last_slots or (
            self._last_slots is not None and len(slots) == len(self._last_slots) and bool((slots == self._last_slots).all()))
        if same and self._last is not None:
            positions = self._put("positions", plan.positions, read=not self._last.all_greedy)
            return SamplingBatch(**{**vars(self._last), "positions": positions})
        special = [(row, slot) for row, slot in enumerate(slots.tolist()) if slot in self._special] if self._special else []
        values = self._gather(slots)
        values["positions"] = self._put("positions", plan.positions, read=not values["all_greedy"])
        values.update(self._biases(special, plan))
        values.update(self._masks(special, plan))
        batch = SamplingBatch(**values)
        keep = not any(self._special[slot].changes for _, slot in special)
        self._last, self._last_slots = (batch, slots) if keep else (None, None)
        return batch

    def count(self, plan: StepPlan, token_ids: Array) -> None:
        """Add what the step sampled ([R] int32, on the device) to the counts of the rows with penalties."""
        penalised = self._penalised[plan.sample_slots]
        if penalised.any():
            slots = np.where(penalised, plan.sample_slots, -1).astype(np.int32)
            self._ops.count_tokens(self._output_counts, self._put("count_slots", slots), token_ids)

    def num_logprobs(self, plan: StepPlan) -> np.ndarray:
        """[R] int32: most probable tokens wanted beside each row's sampled one; -1 for none and no log-probability."""
        return self._num_logprobs[plan.sample_slots]

    def _gather(self, slots: np.ndarray) -> dict:
        temperature = self._temperature[slots]
        greedy = not temperature.any()
        values = {"temperature": temperature, "top_k": self._top_k[slots], "top_p": self._top_p[slots],
                  "min_p": self._min_p[slots], "seeds": self._seeds[slots]}
        values = {name: self._put(name, array, read=not greedy) for name, array in values.items()}
        values.update(all_greedy=greedy, num_logprobs=int(self._num_logprobs[slots].max()))
        if self._penalised[slots].any():
            values.update(slots=self._put("slots", slots.astype(np.int32)),
                          repetition=self._put("repetition", self._repetition[slots]),
                          presence=self._put("presence", self._presence[slots]),
                          frequency=self._put("frequency", self._frequency[slots]),
                          prompt_mask=self._prompt_mask, output_counts=self._output_counts)
        return values

    def _biases(self, special: list[tuple[int, int]], plan: StepPlan) -> dict:
        rows: list[int] = []
        ids: list[int] = []
        amounts: list[float] = []
        for row, slot in special:
            settings = self._special[slot]
            bias = settings.bias
            if settings.quiet_until:
                if plan.positions[row] < settings.quiet_until:
                    bias = bias | dict.fromkeys(settings.stops, float(FORBIDDEN))
                else:
                    settings.quiet_until = 0
            if settings.phrases and self._alive(plan, row):
                bias = bias | dict.fromkeys(self._phrase_ends(slot, settings), float(FORBIDDEN))
            rows.extend([row] * len(bias))
            ids.extend(bias)
            amounts.extend(bias.values())
        if not rows:
            return {}
        return {"bias_rows": self._put("bias_rows", np.array(rows, np.int32)),
                "bias_ids": self._put("bias_ids", np.array(ids, np.int32)),
                "bias_values": self._put("bias_values", np.array(amounts, np.float32))}

    def _phrase_ends(self, slot: int, settings: _Special) -> list[int]:
        """Tokens that would complete one of the phrases after the output so far."""
        output = self._table.sequence(slot)[self._table.requests[slot].prompt_len :]
        ends: list[int] = []
        for length in settings.phrase_lengths:
            if len(output) >= length:
                ends += settings.phrases.get(tuple(output[-length:].tolist()), ())
        return ends

    def _masks(self, special: list[tuple[int, int]], plan: StepPlan) -> dict:
        masks = [(row, self._special[slot]) for row, slot in special
                 if self._special[slot].mask is not None or self._special[slot].request is not None]
        if not masks:
            return {}
        allowed = np.full((plan.num_samples, self._words), 0xFFFFFFFF, np.uint32)
        for row, settings in masks:
            if settings.mask is not None:
                allowed[row] = settings.mask
            if settings.request is not None and self._alive(plan, row):
                try:
                    grammar_mask = settings.request.grammar.mask()
                except RequestError as error:
                    self.faults.append((settings.request, error))
                    continue
                allowed[row, : len(grammar_mask)] &= grammar_mask[: self._words]
                allowed[row, len(grammar_mask) :] = 0  # ids that the tokenizer does not have
        return {"allowed_mask": self._put("allowed_mask", allowed)}

    def _alive(self, plan: StepPlan, row: int) -> bool:
        """Whether the row's request still holds its slot; what a dead row samples is dropped."""
        return self._table.epoch[plan.sample_slots[row]] == plan.epochs[row]

    def _put(self, name: str, values: np.ndarray, read: bool = True) -> Array:
        """`values` on the device, in a buffer of its name that only grows; nothing is copied when they are there already.

        read=False: no kernel of the step reads them, so there is only the buffer, holding what it held.
        """
        if self._ops.name == "cpu":
            return values
        buffer = self._buffers.get(name)
        count = values.shape[0]
        if buffer is None or buffer.shape[0] < count or buffer.shape[1:] != values.shape[1:]:
            capacity = max(len(self._table.requests), 1 << (count - 1).bit_length())
            buffer = self._buffers[name] = self._ops.parameter((capacity, *values.shape[1:]), dtypes.from_numpy(values.dtype))
            self._uploaded.pop(name, None)
        if read and self._uploaded.get(name) is not values:
            self._ops.upload(buffer[:count], values)
            self._uploaded[name] = values
        return buffer[:count]


def pack_bits(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """A set of token ids -> [ceil(vocab_size / 32)] uint32, lowest bit first."""
    words = -(-vocab_size // 32)
    bits = np.zeros(words * 32, bool)
    bits[ids] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)
