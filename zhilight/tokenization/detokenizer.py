"""Token ids of one running choice to text, piece by piece.

A piece never splits a character and never shows what may yet turn out to be a stop string. Both are decided with state
that is carried along, so that a token costs the length of its own text and no more.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from zhilight.config.sampling import SamplingParams
from zhilight.tokenization.stop_strings import StopStrings
from zhilight.tokenization.token_bytes import LeadingSpace
from zhilight.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """New text of a choice.

    stop: the stop string that ended it, None while there is none.
    num_tokens: how many of the pushed ids belong to the output: all, or those up to the one that completed the stop.
    """

    text: str
    stop: str | None
    num_tokens: int


class Detokenizer:
    """Text of one choice. `prompt_token_ids` decide whether its first token opens a text (a leading space is dropped)."""

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams):
        """tokenizer: may be None when params.detokenize is off."""
        self._tokenizer = tokenizer
        self._params = params
        self._stopped = False
        if not params.detokenize:
            return
        self._hidden = tokenizer.all_special_ids if params.skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._tokens = 0
        self._at_start = not any(i not in self._hidden for i in prompt_token_ids)
        self._strip_space = tokenizer.leading_space is LeadingSpace.STRIP_ONE and self._at_start
        self._prime(prompt_token_ids)

    def push(self, new_ids: Sequence[int], finished: bool = False, stopped_by_token: bool = False) -> TextDelta:
        """Takes the next ids. `finished` flushes what is held back.

        With `stopped_by_token` the last id is the end-of-sequence or stop token that ended the choice: it adds no text,
        unless include_stop_str_in_output is set (and then only what skip_special_tokens leaves of it).
        After a stop string has been found every further call returns no text.
        """
        if self._stopped or not self._params.detokenize:
            return TextDelta("", None, 0 if self._stopped else len(new_ids))
        texts = []
        last = len(new_ids) - 1
        for i, token_id in enumerate(new_ids):
            self._tokens += 1
            silent = stopped_by_token and i == last and not self._params.include_stop_str_in_output
            text = "" if silent else self._decoder.decode(self._bytes_of(token_id))
            if text and self._take(text, texts):
                return TextDelta("".join(texts), self._stops.found, i + 1)
        if finished:
            rest = self._decoder.decode(b"", final=True)
            if not self._take(rest, texts):
                texts.append(self._stops.flush())
            self._stopped = True
        return TextDelta("".join(texts), self._stops.found, len(new_ids))

    def _take(self, text: str, texts: list[str]) -> bool:
        """Passes new text through the stop strings; True when one was completed."""
        texts.append(self._stops.feed(text, may_match=self._tokens > self._params.min_tokens))
        self._stopped = self._stops.found is not None
        return self._stopped

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        if not self._at_start and not self._strip_space:
            return self._tokenizer.token_bytes(token_id)
        data = self._tokenizer.first_token_bytes(token_id) if self._at_start else self._tokenizer.token_bytes(token_id)
        self._at_start = False
        if data and self._strip_space:
            self._strip_space = False
            data = data.removeprefix(b" ")
        return data

    def _prime(self, prompt_token_ids: Sequence[int]) -> None:
        """Starts from the prompt's last bytes, where it ends inside a character that the output may complete."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._hidden:
                tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 3:
                break
        self._decoder.decode(tail)
