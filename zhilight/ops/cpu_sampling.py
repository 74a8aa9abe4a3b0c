"""Choosing tokens with NumPy. The order of the filters is that of `Ops.sample`.

Ties are broken by the lower token id everywhere: in the argmax, at the edge of top_k and at the edge of top_p, so that
top_k = 1 is greedy. The draw is `philox.uniform(seed, position)`; the token is the first, in id order, at which the
cumulated probability of what the filters left exceeds the draw.
"""

from __future__ import annotations

import numpy as np

from zhilight.errors import ShapeError
from zhilight.ops.base import SampleResult, SamplingBatch
from zhilight.ops.philox import uniform


def sample_tokens(logits: np.ndarray, batch: SamplingBatch) -> SampleResult:
    """See Ops.sample. logits [R, V] float32 is overwritten."""
    rows = logits.shape[0]
    if batch.temperature.shape != (rows,):
        raise ShapeError(f"temperature is {batch.temperature.shape}; logits have {rows} rows.")
    original = logits.copy() if batch.num_logprobs >= 0 else None
    _penalise(logits, batch)
    if batch.bias_rows is not None:
        np.add.at(logits, (batch.bias_rows, batch.bias_ids), batch.bias_values)
    if batch.allowed_mask is not None:
        np.copyto(logits, np.float32(-np.inf), where=~unpack_bits(batch.allowed_mask, logits.shape[1]))

    token_ids = logits.argmax(axis=1).astype(np.int32)
    if not batch.all_greedy:
        draws = uniform(batch.seeds, batch.positions)
        for row in np.flatnonzero(batch.temperature > 0):
            token_ids[row] = _draw(logits[row], float(batch.temperature[row]), int(batch.top_k[row]),
                                   float(batch.top_p[row]), float(batch.min_p[row]), float(draws[row]))
    if original is None:
        return SampleResult(token_ids)
    return log_probabilities(original, token_ids, batch.num_logprobs)


def log_probabilities(logits: np.ndarray, token_ids: np.ndarray, num_top: int) -> SampleResult:
    """Log-softmax of the chosen tokens, their ranks, and the num_top most probable tokens of each row."""
    rows = np.arange(logits.shape[0])
    maximum = logits.max(axis=1, keepdims=True)
    normaliser = maximum[:, 0] + np.log(np.exp(logits - maximum).sum(axis=1, dtype=np.float64))
    chosen = logits[rows, token_ids]
    ranks = (logits > chosen[:, None]).sum(axis=1) + 1
    num_top = min(num_top, logits.shape[1])
    top_ids = np.empty((logits.shape[0], num_top), np.int32)
    for row in rows if num_top else ():
        top_ids[row] = _most_probable(logits[row], num_top)
    top = np.take_along_axis(logits, top_ids, axis=1)
    return SampleResult(
        token_ids=token_ids,
        logprobs=(chosen - normaliser).astype(np.float32),
        ranks=ranks.astype(np.int32),
        top_ids=top_ids,
        top_logprobs=(top - normaliser[:, None]).astype(np.float32),
    )


def unpack_bits(words: np.ndarray, count: int) -> np.ndarray:
    """words [R, ceil(count / 32)] uint32, lowest bit first -> [R, count] bool."""
    octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(octets, axis=1, count=count, bitorder="little").view(bool)


def _penalise(logits: np.ndarray, batch: SamplingBatch) -> None:
    if batch.slots is None:
        return
    for row, slot in enumerate(batch.slots):
        if slot < 0:
            continue
        counts = batch.output_counts[slot] if batch.output_counts is not None else None
        if batch.repetition is not None and batch.repetition[row] != 1:
            seen = np.zeros(logits.shape[1], bool) if counts is None else counts > 0
            if batch.prompt_mask is not None:
                seen = seen | unpack_bits(batch.prompt_mask[slot:slot + 1], logits.shape[1])[0]
            penalty = np.float32(batch.repetition[row])
            penalised = np.where(logits[row] > 0, logits[row] / penalty, logits[row] * penalty)
            np.copyto(logits[row], penalised, where=seen)
        if counts is None:
            continue
        if batch.presence is not None and batch.presence[row]:
            logits[row] -= np.float32(batch.presence[row]) * (counts > 0)
        if batch.frequency is not None and batch.frequency[row]:
            logits[row] -= np.float32(batch.frequency[row]) * counts.astype(np.float32)


def _draw(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, draw: float) -> int:
    """One token from one row. The candidates stay in id order; only the filters sort, and only what they need."""
    maximum = logits.max()
    if not np.isfinite(maximum):  # +inf: the first of them is certain; all -inf or NaN: nothing to weigh
        return int(logits.argmax())
    probabilities = np.exp((logits - maximum) / np.float32(temperature)).astype(np.float64)
    ids = None
    if 0 < top_k < logits.size:
        ids = np.sort(_most_probable(logits, top_k))
        probabilities = probabilities[ids]
    if top_p < 1:
        kept = _nucleus(probabilities, top_p)
        ids, probabilities = kept if ids is None else ids[kept], probabilities[kept]
    if min_p > 0:
        kept = np.flatnonzero(probabilities >= min_p * probabilities.max())
        ids, probabilities = kept if ids is None else ids[kept], probabilities[kept]
    cumulated = np.cumsum(probabilities)
    index = int(np.searchsorted(cumulated, draw * cumulated[-1], side="right"))
    if index == cumulated.size:  # the product rounded up to the total: the last token that has any probability
        index = int(np.flatnonzero(probabilities)[-1])
    return index if ids is None else int(ids[index])


def _nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Ids, ascending, of the smallest set that holds top_p of the (unnormalised) probability."""
    target = top_p * probabilities.sum()
    count = min(256, probabilities.size)
    while True:
        order = _most_probable(probabilities, count)
        cumulated = np.cumsum(probabilities[order])
        if cumulated[-1] >= target or count == probabilities.size:
            return np.sort(order[:int(np.searchsorted(cumulated, target)) + 1])
        count = min(count * 16, probabilities.size)


def _most_probable(values: np.ndarray, count: int) -> np.ndarray:
    """Ids of the `count` largest values, largest first, lower ids first among equals."""
    if count == 1:
        return np.array([values.argmax()])
    if count >= values.size:
        return np.argsort(-values, kind="stable")
    edge = np.partition(values, values.size - count)[values.size - count]
    above = np.flatnonzero(values > edge)
    candidates = np.concatenate((above, np.flatnonzero(values == edge)[:count - above.size]))
    return candidates[np.argsort(-values[candidates], kind="stable")]
