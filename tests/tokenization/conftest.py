"""Tokenizers of the two families: the demo model's own, and a small sentencepiece one with byte fallback."""

from __future__ import annotations

import pytest

from zhilight.tokenization.sentencepiece_model import SentencePieceModel, TokenType, build_sentencepiece
from zhilight.tokenization.tokenizer import Tokenizer, TokenizerSettings, load_tokenizer

PIECES = ["▁", "a", "b", "c", "h", "e", "l", "o", "w", "r", "d", "▁a", "▁h", "▁he", "ll", "▁hello", "▁w", "or", "▁wor",
          "ld", "▁world", "▁▁", "▁▁▁", "你", "é"]


@pytest.fixture(scope="session")
def demo_tokenizer(demo_source) -> Tokenizer:
    return load_tokenizer(demo_source.path)


@pytest.fixture(scope="session")
def sentencepiece_model() -> SentencePieceModel:
    """<unk> 0, <s> 1, </s> 2, the 256 bytes, then a few pieces, longer ones with better scores than their parts need."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    types += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * len(PIECES)
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))]
    return SentencePieceModel(pieces, scores, [int(kind) for kind in types], "bpe", byte_fallback=True)


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(sentencepiece_model) -> Tokenizer:
    settings = TokenizerSettings({"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True, add_eos=False)
    return Tokenizer(build_sentencepiece(sentencepiece_model), settings)


@pytest.fixture(params=["byte level", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue("demo_tokenizer" if request.param == "byte level" else "sentencepiece_tokenizer")
