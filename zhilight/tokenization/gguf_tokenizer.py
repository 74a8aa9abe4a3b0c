"""A tokenizer rebuilt from a GGUF file's metadata.

`tokenizer.ggml.model` is "gpt2" (byte-level BPE; `tokenizer.ggml.pre` names how text is split before the merges) or
"llama" (sentencepiece BPE with scores and byte fallback). Token types: 1 normal, 2 unknown, 3 control, 4 user defined,
5 unused (padding of the embedding matrix), 6 byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zhilight.errors import CheckpointError, UnsupportedModel
from zhilight.tokenization.sentencepiece_model import (
    SentencePieceModel,
    TokenType,
    build_sentencepiece,
    mark_added_tokens,
)

if TYPE_CHECKING:
    import tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_LLAMA3 = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
           r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
           r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
_DEEPSEEK3 = (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
              r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
              r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split before byte-level BPE: one regular expression after the other, then GPT-2's own when `gpt2`."""

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    """A piece that is a token as a whole becomes that token, whatever the merges say."""
    add_bos: bool = False
    """Used when the file does not say."""


_GPT2 = PreTokenizer(gpt2=True)
_SMOLLM = PreTokenizer(digits=True, gpt2=True)
_LLAMA_BPE = PreTokenizer(splits=(_LLAMA3,), ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "default": _GPT2, "gpt-2": _GPT2, "phi-2": _GPT2,
    "smollm": _SMOLLM, "codeshell": _SMOLLM, "refact": _SMOLLM, "command-r": _SMOLLM,
    "qwen2": PreTokenizer(splits=(_QWEN2,), nfc=True),
    "deepseek-r1-qwen": PreTokenizer(splits=(_QWEN2,), nfc=True),
    "llama-bpe": _LLAMA_BPE, "llama3": _LLAMA_BPE, "llama-v3": _LLAMA_BPE, "falcon3": _LLAMA_BPE,
    "tekken": PreTokenizer(splits=(_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-v3": PreTokenizer(splits=_DEEPSEEK3),
}


@dataclass(frozen=True)
class GGUFTokenizer:
    """What the metadata describes: the backend, the named special tokens' ids, and whether encode adds them."""

    backend: tokenizers.Tokenizer
    special_ids: dict[str, int]
    """bos, eos, unk, pad -> id; absent where the file has none."""
    add_bos: bool
    add_eos: bool
    chat_templates: dict[str, str]


def build_gguf_tokenizer(metadata: dict[str, Any], source: str) -> GGUFTokenizer:
    """Builds the tokenizer that `metadata` (see config.gguf) describes; `source` names the file in errors.

    Raises UnsupportedModel, naming the model kind or the pre-tokenizer, when it is not built.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        pre = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "default"), source)
        backend, add_bos = _byte_level(metadata, pre), pre.add_bos
    elif model == "llama":
        backend, add_bos = _sentencepiece(metadata), True
    else:
        raise UnsupportedModel(f"{source}: tokenizer.ggml.model is {model!r}; gpt2 and llama are built. "
                               "Use the model's Hugging Face folder with its tokenizer.json instead.")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special_ids = {short: metadata[f"tokenizer.ggml.{name}_token_id"] for short, name in names.items()
                   if f"tokenizer.ggml.{name}_token_id" in metadata}
    if model == "llama":
        special_ids = {"bos": 1, "eos": 2, "unk": 0} | special_ids
    return GGUFTokenizer(backend, special_ids, metadata.get("tokenizer.ggml.add_bos_token", add_bos),
                         metadata.get("tokenizer.ggml.add_eos_token", False), _chat_templates(metadata))


def _pre_tokenizer(name: str, source: str) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(f"{source}: tokenizer.ggml.pre is {name!r}; built are {', '.join(PRE_TOKENIZERS)}. "
                               "Use the model's Hugging Face folder with its tokenizer.json instead.")
    return PRE_TOKENIZERS[name]


def _byte_level(metadata: dict[str, Any], pre: PreTokenizer) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens, types = _vocabulary(metadata)
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != TokenType.UNUSED}
    merges = [tuple(merge.split(" ", 1)) for merge in _list(metadata, "merges")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
    if pre.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.gpt2))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    mark_added_tokens(backend, zip(tokens, types, strict=True))
    return backend


def _sentencepiece(metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    tokens, types = _vocabulary(metadata)
    scores = _list(metadata, "scores")
    if len(scores) != len(tokens):
        raise CheckpointError(f"the GGUF's vocabulary has {len(tokens)} tokens but {len(scores)} scores; it is damaged.")
    model = SentencePieceModel(
        pieces=tokens, scores=scores, types=types, kind="bpe", byte_fallback=TokenType.BYTE in types,
        add_dummy_prefix=metadata.get("tokenizer.ggml.add_space_prefix", True),
        remove_extra_whitespaces=metadata.get("tokenizer.ggml.remove_extra_whitespaces", False))
    return build_sentencepiece(model)


def _vocabulary(metadata: dict[str, Any]) -> tuple[list[str], list[int]]:
    tokens = _list(metadata, "tokens")
    types = metadata.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise CheckpointError(f"the GGUF's vocabulary has {len(tokens)} tokens but {len(types)} types; it is damaged.")
    return tokens, types


def _list(metadata: dict[str, Any], name: str) -> list[Any]:
    if not isinstance(metadata.get(f"tokenizer.ggml.{name}"), list):
        raise CheckpointError(f"the GGUF has no list tokenizer.ggml.{name}, which its tokenizer needs. Convert the model "
                              "again, or use its Hugging Face folder.")
    return metadata[f"tokenizer.ggml.{name}"]


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {key[len(prefix) + 1:]: value for key, value in metadata.items() if key.startswith(prefix + ".")}
    if prefix in metadata:
        templates["default"] = metadata[prefix]
    return templates
