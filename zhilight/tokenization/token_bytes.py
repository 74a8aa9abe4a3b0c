"""The exact bytes that each token of a vocabulary contributes to the text.

Two families cover the models served here, told apart by the `decoder` of tokenizer.json:

byte level      a character of the vocabulary stands for one byte (GPT-2's table); anything else is literal
sentencepiece   "▁" stands for a space, "<0xE4>" for one byte; the text's first space may be dropped

The text of a sequence is its bytes joined and decoded as UTF-8, each broken part as U+FFFD. That equals the decoder of
the `tokenizers` package, but for runs of broken byte tokens in the second family, where it would also replace the
whole characters of the run.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Any

from zhilight.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class LeadingSpace(Enum):
    """What happens to spaces at the start of a sentencepiece text: the encoder put one there."""

    KEEP = "keep"
    STRIP_ONE = "strip one"
    """The text's first character is dropped when it is a space."""
    DROP_FIRST_TOKEN = "drop from the first token"
    """Every "▁" of the first token is dropped (the Metaspace decoder)."""


class ByteLevelRule:
    """GPT-2's byte-level vocabulary."""

    leading = LeadingSpace.KEEP

    def __init__(self) -> None:
        self._byte_of = {ord(char): byte for byte, char in byte_level_alphabet().items()}

    def __call__(self, token: str) -> bytes:
        try:
            return bytes([self._byte_of[ord(char)] for char in token])
        except KeyError:  # an added token with a character outside the table is literal
            return token.encode("utf-8")


class SentencePieceRule:
    """Sentencepiece vocabularies, with or without byte fallback."""

    def __init__(self, marker: str, byte_fallback: bool, leading: LeadingSpace):
        self._marker, self._byte_fallback, self.leading = marker, byte_fallback, leading

    def __call__(self, token: str) -> bytes:
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(self._marker, " ").encode("utf-8")


def byte_rule(decoder: dict[str, Any] | None) -> ByteLevelRule | SentencePieceRule:
    """The rule for the `decoder` entry of a tokenizer.json. Raises UnsupportedModel for any other kind of decoder."""
    marker, byte_fallback, leading = None, False, LeadingSpace.KEEP
    steps = _flatten(decoder)
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if len(steps) == 1:
                return ByteLevelRule()
            case {"type": "Replace", "pattern": {"String": pattern}, "content": " "}:
                marker = pattern
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                leading = LeadingSpace.STRIP_ONE
            case {"type": "Metaspace", "replacement": marker, **options}:
                if options.get("prepend_scheme", "always" if options.get("add_prefix_space", True) else "never") != "never":
                    leading = LeadingSpace.DROP_FIRST_TOKEN
            case _:
                raise UnsupportedModel(f"the tokenizer's decoder step {step.get('type')!r} ({step}) is not built; byte-level "
                                       "BPE and sentencepiece decoders (Replace, ByteFallback, Fuse, Strip, Metaspace) are.")
    if marker is None:
        raise UnsupportedModel(f"the tokenizer's decoder is {decoder}; byte-level BPE and sentencepiece decoders are built.")
    return SentencePieceRule(marker, byte_fallback, leading)


def byte_level_alphabet() -> dict[int, str]:
    """GPT-2's table: byte -> the printable character that stands for it in the vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in table]
    table.update({byte: chr(256 + i) for i, byte in enumerate(rest)})
    return table


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]
