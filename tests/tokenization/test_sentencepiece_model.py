"""tokenizer.model files read without sentencepiece, and encoded as sentencepiece would."""

from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zhilight.errors import ConfigError, UnsupportedModel
from zhilight.tokenization.sentencepiece_model import (
    SentencePieceModel,
    TokenType,
    build_sentencepiece,
    read_sentencepiece_model,
)
from zhilight.tokenization.tokenizer import load_tokenizer


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes([value])


def message(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def serialised(model: SentencePieceModel, kind: int = 2) -> bytes:
    data = b""
    for piece, score, piece_type in zip(model.pieces, model.scores, model.types, strict=True):
        entry = message(1, piece.encode()) + b"\x15" + struct.pack("<f", score)
        data += message(1, entry + (b"\x18" + varint(piece_type) if piece_type != 1 else b""))
    data += message(2, b"\x18" + varint(kind) + varint(35 << 3) + b"\x01")
    return data + message(3, b"\x18\x01\x20\x00")


def by_scores(model: SentencePieceModel, text: str) -> list[int]:
    """Sentencepiece's BPE, written plainly: merge the adjacent pair whose whole scores best, the leftmost of equals."""
    score = {piece: score for piece, score, kind in zip(model.pieces, model.scores, model.types, strict=True) if kind == 1}
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [(-score[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not pairs:
            break
        _, i = min(pairs)
        symbols[i:i + 2] = [symbols[i] + symbols[i + 1]]
    ids = {piece: i for i, piece in enumerate(model.pieces)}
    return [i for symbol in symbols
            for i in ([ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()])]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("abchelowrd  你é🤗\n"), max_size=30))
def test_ids_are_those_of_the_scores(sentencepiece_model, sentencepiece_tokenizer, text):
    assert sentencepiece_tokenizer.encode(text, add_special_tokens=False) == by_scores(sentencepiece_model, text)


def test_runs_of_spaces_merge_from_the_left():
    spaces = ["▁" * n for n in range(1, 17)]
    scores = [-float(n) for n in (0, 1, 2, 9, 3, 10, 8, 11, 4, 12, 13, 14, 7, 15, 6, 16, 5)]
    types = [TokenType.UNKNOWN] + [TokenType.NORMAL] * 16
    model = SentencePieceModel(["<unk>", *spaces], scores, types, "bpe", byte_fallback=False)
    backend = build_sentencepiece(model)
    for n in range(1, 60):
        assert backend.encode(" " * n).ids == by_scores(model, " " * n)


def test_reads_a_tokenizer_model(sentencepiece_model, sentencepiece_tokenizer, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(serialised(sentencepiece_model))
    (tmp_path / "added_tokens.json").write_text(f'{{"<tool>": {len(sentencepiece_model.pieces)}}}')
    tokenizer = load_tokenizer(tmp_path)
    assert read_sentencepiece_model(tmp_path / "tokenizer.model") == sentencepiece_model
    text = "hello world 🤗"
    assert tokenizer.encode(text) == sentencepiece_tokenizer.encode(text)
    assert tokenizer.encode(text)[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("a<tool>")[-1] == len(sentencepiece_model.pieces)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_unigram_models_take_the_most_probable_split():
    model = SentencePieceModel(["<unk>", "▁", "a", "b", "ab", "▁ab"], [0, -2.0, -2.0, -2.0, -5.0, -3.0], [2, 1, 1, 1, 1, 1],
                               "unigram", byte_fallback=False)
    backend = build_sentencepiece(model)
    assert backend.encode("ab").tokens == ["▁ab"]
    assert backend.encode("bab").tokens == ["▁", "b", "a", "b"]  # -2 -2 beats the single "ab" at -5


def test_damaged_and_foreign_models_are_refused(sentencepiece_model, tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(serialised(sentencepiece_model)[:1000])
    with pytest.raises(ConfigError, match="not a whole sentencepiece model"):
        load_tokenizer(tmp_path)
    path.write_bytes(serialised(sentencepiece_model, kind=3))
    with pytest.raises(UnsupportedModel, match="type 3"):
        load_tokenizer(tmp_path)
