"""Sentencepiece vocabularies: reading `tokenizer.model`, and turning one (or a GGUF's copy of one) into a backend.

`tokenizer.model` is a protocol buffer of which a handful of fields matter; it is read here directly, so that neither
sentencepiece nor protobuf need be installed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from zhilight.errors import ConfigError, UnsupportedModel

if TYPE_CHECKING:
    import tokenizers

SPACE = "▁"


class TokenType(IntEnum):
    """Kinds of vocabulary entries, numbered as in sentencepiece and in GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class SentencePieceModel:
    """pieces, scores, types: one entry an id. kind is "bpe" or "unigram"."""

    pieces: list[str]
    scores: list[float]
    types: list[int]
    kind: str
    byte_fallback: bool
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    """Sentencepiece's compiled normalisation rules; empty for identity."""


def build_sentencepiece(model: SentencePieceModel) -> tokenizers.Tokenizer:
    """The backend that encodes and decodes as sentencepiece does."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers

    unknown = next((i for i, kind in enumerate(model.types) if kind == TokenType.UNKNOWN), 0)
    if model.kind == "bpe":
        vocab = {piece: i for i, (piece, kind) in enumerate(zip(model.pieces, model.types, strict=True))
                 if kind != TokenType.UNUSED}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges_of(model), unk_token=model.pieces[unknown],
                                       fuse_unk=True, byte_fallback=model.byte_fallback))
    else:
        backend = Tokenizer(models.Unigram(list(zip(model.pieces, model.scores, strict=True)), unknown, model.byte_fallback))
    steps = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    decoder = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.add_dummy_prefix:
        decoder.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(decoder)
    mark_added_tokens(backend, zip(model.pieces, model.types, strict=True))
    return backend


def mark_added_tokens(backend: tokenizers.Tokenizer, vocabulary: Iterable[tuple[str, int]]) -> None:
    """Marks the control and user-defined entries of `vocabulary` (token, type) as whole in any text."""
    from tokenizers import AddedToken

    entries = list(vocabulary)
    special = [token for token, kind in entries if kind in (TokenType.CONTROL, TokenType.UNKNOWN)]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    user = [token for token, kind in entries if kind == TokenType.USER_DEFINED]
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in user])


def merges_of(model: SentencePieceModel) -> list[tuple[str, str]]:
    """The merges that sentencepiece's scores imply: every split of a piece into two pieces.

    Best score first; of one piece's splits the one with the longest left part first, which is how sentencepiece, working
    from left to right, meets them in a run of one character.
    """
    mergeable = {piece: score for piece, score, kind in zip(model.pieces, model.scores, model.types, strict=True)
                 if kind in (TokenType.NORMAL, TokenType.USER_DEFINED)}
    ranked = []
    for piece, score in mergeable.items():
        ranked += [(-score, -at, piece[:at], piece[at:]) for at in range(1, len(piece))
                   if piece[:at] in mergeable and piece[at:] in mergeable]
    ranked.sort()
    return [(left, right) for _, _, left, right in ranked]


def read_sentencepiece_model(path: Path) -> SentencePieceModel:
    """Reads a `tokenizer.model`. Raises ConfigError when it is damaged, UnsupportedModel for word and char models."""
    pieces, scores, types = [], [], []
    kind, byte_fallback, add_dummy_prefix, remove_extra, charsmap = 1, False, True, True, b""
    try:
        for field, value in _fields(path.read_bytes()):
            if field == 1:  # SentencePiece
                entry = dict(_fields(value))
                pieces.append(entry[1].decode("utf-8"))
                scores.append(struct.unpack("<f", entry[2])[0] if 2 in entry else 0.0)
                types.append(entry.get(3, TokenType.NORMAL))
            elif field == 2:  # TrainerSpec
                trainer = dict(_fields(value))
                kind, byte_fallback = trainer.get(3, 1), bool(trainer.get(35, 0))
            elif field == 3:  # NormalizerSpec
                normalizer = dict(_fields(value))
                charsmap = normalizer.get(2, b"")
                add_dummy_prefix, remove_extra = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))
    except (IndexError, KeyError, TypeError, ValueError, struct.error) as error:
        raise ConfigError(f"{path} is not a whole sentencepiece model ({error}). Fetch the file again.") from error
    if not pieces:
        raise ConfigError(f"{path} holds no vocabulary. Fetch the file again.")
    if kind not in (1, 2):
        raise UnsupportedModel(f"{path} is a sentencepiece model of type {kind}; unigram (1) and BPE (2) are built.")
    return SentencePieceModel(pieces, scores, types, "bpe" if kind == 2 else "unigram", byte_fallback, add_dummy_prefix,
                              remove_extra, charsmap)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of one protocol buffer message: (number, value), length-delimited and fixed ones as bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, position = _varint(data, position)
        else:
            if wire == 2:
                length, position = _varint(data, position)
            elif wire in (1, 5):
                length = 8 if wire == 1 else 4
            else:
                raise ValueError(f"wire type {wire} at byte {position}")
            value, position = data[position:position + length], position + length
            if position > len(data):
                raise IndexError(f"a field ends at byte {position} of {len(data)}")
        yield number, value


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
