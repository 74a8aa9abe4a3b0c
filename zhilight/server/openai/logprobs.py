"""Log-probabilities in the two shapes of the OpenAI API.

A token's string is its bytes as text. Bytes that are no whole character are written `bytes:\\xe4\\xbd`, as OpenAI does in
completions; two ids of one position that read the same are told apart by `token_id:N`, so that no entry is lost.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from zhilight.engine.outputs import PositionLogprobs, TokenLogprob
from zhilight.server.openai.responses import CompletionLogprobs, TokenLogprobItem, TopLogprob

if TYPE_CHECKING:
    from zhilight.tokenization.tokenizer import Tokenizer

LOWEST = -9999.0
"""What minus infinity becomes: JSON has no such number."""


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


class TokenNames:
    """Writes token ids as strings, for one request."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool):
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def text_bytes(self, token_id: int, *, opens: bool, skip_special: bool) -> bytes:
        """What the token adds to the text; `opens`: nothing of the text stands before it."""
        if skip_special and token_id in self._tokenizer.all_special_ids:
            return b""
        return self._tokenizer.first_token_bytes(token_id) if opens else self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self.bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def distinct(self, token_ids: Sequence[int]) -> list[str]:
        """Names of the tokens of one position; the first of two equal names keeps it."""
        names: list[str] = []
        seen: dict[str, int] = {}
        for token_id in token_ids:
            name = self.name(token_id)
            if seen.setdefault(name, token_id) != token_id:
                name = f"token_id:{token_id}"
            names.append(name)
        return names


def chat_logprobs(names: TokenNames, positions: Sequence[PositionLogprobs], top: int) -> list[TokenLogprobItem]:
    """One item a token: the sampled one, and the `top` most probable ones."""
    items = []
    for position in positions:
        chosen = position.chosen
        best = position.top[:top]
        written = names.distinct([chosen.token_id, *(entry.token_id for entry in best)])
        items.append(TokenLogprobItem(
            token=written[0], logprob=finite(chosen.logprob), bytes=list(names.bytes(chosen.token_id)),
            top_logprobs=[TopLogprob(token=name, logprob=finite(entry.logprob), bytes=list(names.bytes(entry.token_id)))
                          for name, entry in zip(written[1:], best, strict=True)]))
    return items


class CompletionLogprobsBuilder:
    """Collects one choice's tokens; `take` gives what came since the last call, with offsets into the whole text."""

    def __init__(self, names: TokenNames, top: int, skip_special: bool = True):
        self._names = names
        self._top = top
        self._skip_special = skip_special
        self._opens = False
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._reset()

    def _reset(self) -> None:
        self._lists = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])

    def add_prompt(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> None:
        """The echoed prompt: the first token has no log-probability."""
        self._opens = True
        for token_id, position in zip(token_ids, positions, strict=True):
            self._add(token_id, position)

    def add(self, positions: Sequence[PositionLogprobs]) -> None:
        for position in positions:
            self._add(position.chosen.token_id, position)

    def _add(self, token_id: int, position: PositionLogprobs | None) -> None:
        entries = [] if position is None else _with_chosen(position, self._top)
        written = self._names.distinct([token_id, *(entry.token_id for entry in entries)])
        lists = self._lists
        lists.tokens.append(written[0])
        lists.text_offset.append(self._offset)
        lists.token_logprobs.append(None if position is None else finite(position.chosen.logprob))
        lists.top_logprobs.append(None if position is None else {
            name: finite(entry.logprob) for name, entry in zip(written[1:], entries, strict=True)})
        text = self._names.text_bytes(token_id, opens=self._opens, skip_special=self._skip_special)
        self._opens = self._opens and not text
        self._offset += len(self._decoder.decode(text))

    def take(self) -> CompletionLogprobs:
        taken = self._lists
        self._reset()
        return taken


def _with_chosen(position: PositionLogprobs, top: int) -> list[TokenLogprob]:
    """The `top` most probable tokens and the chosen one, which comes last when it is not among them."""
    best = position.top[:top]
    if all(entry.token_id != position.chosen.token_id for entry in best):
        best = [*best, position.chosen]
    return best


def prompt_logprobs(names: TokenNames, positions: Sequence[PositionLogprobs | None],
                    top: int) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's prompt_logprobs: a map from token id to its log-probability, rank and text; None for the first token."""
    return [None if position is None else {
        str(entry.token_id): {"logprob": finite(entry.logprob), "rank": entry.rank,
                              "decoded_token": names.name(entry.token_id)}
        for entry in _with_chosen(position, top)} for position in positions]
