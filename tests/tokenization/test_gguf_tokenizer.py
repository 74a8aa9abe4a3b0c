"""Tokenizers rebuilt from GGUF metadata: each pre-tokenizer's splits, the sentencepiece kind, what is refused."""

from __future__ import annotations

import pytest

from zhilight.errors import CheckpointError, UnsupportedModel
from zhilight.tokenization.gguf_tokenizer import build_gguf_tokenizer
from zhilight.tokenization.token_bytes import byte_level_alphabet

BYTES = [char for _, char in sorted(byte_level_alphabet().items())]


def metadata(pre: str | None, tokens=(), merges=(), types=None, **more):
    tokens = [*BYTES, *tokens]
    data = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": list(merges),
            "tokenizer.ggml.token_type": types or [1] * len(tokens)}
    if pre is not None:
        data["tokenizer.ggml.pre"] = pre
    return data | {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def splits(pre: str | None, text: str) -> list[str]:
    backend = build_gguf_tokenizer(metadata(pre), "test").backend
    byte_of = {char: byte for byte, char in byte_level_alphabet().items()}
    return [bytes(byte_of[c] for c in piece).decode() for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(("pre", "expected"), [
    ("smollm", ["I", "'ve", " ", "1", "2", "3", "4", " cats", "!!", "\n", "\n", "naïve"]),
    ("gpt-2", ["I", "'ve", " 1234", " cats", "!!", "\n", "\n", "naïve"]),
    (None, ["I", "'ve", " 1234", " cats", "!!", "\n", "\n", "naïve"]),
    ("qwen2", ["I", "'ve", " ", "1", "2", "3", "4", " cats", "!!\n\n", "naïve"]),
    ("llama-bpe", ["I", "'ve", " ", "123", "4", " cats", "!!\n\n", "naïve"]),
    ("tekken", ["I", "'ve", " ", "1", "2", "3", "4", " cats", "!!\n\n", "naïve"]),
    ("deepseek-v3", ["I", "'ve", " ", "123", "4", " cats", "!!\n\n", "naïve"]),
])
def test_text_is_split_as_the_models_own_tokenizer_does(pre, expected):
    assert splits(pre, "I've 1234 cats!!\n\nnaïve") == expected


def test_deepseek_splits_chinese_from_latin():
    assert splits("deepseek-v3", "abc你好def") == ["abc", "你好", "def"]


def test_qwen2_composes_characters():
    backend = build_gguf_tokenizer(metadata("qwen2"), "test").backend
    assert backend.encode("e\u0301").ids == backend.encode("é").ids


def test_llama_bpe_takes_whole_words_before_merges():
    data = metadata("llama-bpe", tokens=["hi"], merges=[])
    assert build_gguf_tokenizer(data, "test").backend.encode("hi").ids == [256]
    assert build_gguf_tokenizer(data | {"tokenizer.ggml.pre": "gpt-2"}, "test").backend.encode("hi").ids != [256]


@pytest.mark.parametrize(("pre", "more", "expected"), [("llama-bpe", {}, True), ("qwen2", {}, False),
                                                       ("llama-bpe", {"add_bos_token": False}, False)])
def test_whether_bos_is_added(pre, more, expected):
    assert build_gguf_tokenizer(metadata(pre, **more), "test").add_bos is expected


def test_control_user_defined_and_unused_tokens():
    data = metadata("gpt-2", tokens=["<ctl>", "<usr>", "[PAD0]"], types=[1] * 256 + [3, 4, 5], eos_token_id=256)
    built = build_gguf_tokenizer(data, "test")
    assert built.backend.encode("<ctl><usr>").ids == [256, 257]
    assert [t.special for _, t in sorted(built.backend.get_added_tokens_decoder().items())] == [True, False]
    assert built.backend.id_to_token(258) is None
    assert built.special_ids == {"eos": 256}


def test_sentencepiece_kind(sentencepiece_model, sentencepiece_tokenizer):
    built = build_gguf_tokenizer({"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": sentencepiece_model.pieces,
                                  "tokenizer.ggml.scores": sentencepiece_model.scores,
                                  "tokenizer.ggml.token_type": sentencepiece_model.types}, "test")
    text = "hello  world 🤗"
    assert built.backend.encode(text).ids == sentencepiece_tokenizer.encode(text, add_special_tokens=False)
    assert (built.add_bos, built.special_ids["bos"], built.special_ids["eos"]) == (True, 1, 2)


def test_chat_templates_by_name():
    data = metadata("gpt-2") | {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B"}
    assert build_gguf_tokenizer(data, "test").chat_templates == {"default": "A", "tool_use": "B"}


def test_unknown_kinds_are_named():
    with pytest.raises(UnsupportedModel, match="'chatglm-bpe'"):
        build_gguf_tokenizer(metadata("chatglm-bpe"), "test")
    with pytest.raises(UnsupportedModel, match="'bert'"):
        build_gguf_tokenizer(metadata("gpt-2") | {"tokenizer.ggml.model": "bert"}, "test")


def test_damaged_metadata_is_named():
    with pytest.raises(CheckpointError, match="257 tokens but 256 types"):
        build_gguf_tokenizer(metadata("gpt-2", tokens=["x"], types=[1] * 256), "test")
    data = metadata("gpt-2")
    del data["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.merges"):
        build_gguf_tokenizer(data, "test")
