"""GGUF metadata into a ModelConfig, by way of the keys of config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from zhilight.config.checkpoint import config_from_dict
from zhilight.config.gguf import GGUFFile, read_gguf
from zhilight.config.model import ModelConfig
from zhilight.errors import ConfigError, UnsupportedModel

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""general.architecture -> architecture."""
_SAMPLED_ROWS = 64


def read_gguf_config(path: Path) -> ModelConfig:
    """See `checkpoint.read_model_config`. Weights of every quantisation become bfloat16."""
    file = read_gguf(path)
    metadata = file.metadata
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModel(f"GGUF architecture {name!r} is not built; built are {', '.join(ARCHITECTURES)}.")
    if metadata.get("split.count", 1) > 1:
        raise ConfigError(f"{path} is one of {metadata['split.count']} parts. Join them with llama.cpp's "
                          "`llama-gguf-split --merge` and give the joined file.")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{name}.{key}", default)

    if get("expert_count"):
        raise UnsupportedModel(f"GGUF {name} with {get('expert_count')} experts (mixture of experts) is not built.")
    if not isinstance(get("attention.head_count", 1), int):
        raise UnsupportedModel(f"GGUF {name} with another number of heads in each layer is not built.")
    head_dim = get("attention.key_length") or get("embedding_length", 0) // get("attention.head_count", 1)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel(f"GGUF {name} that rotates {get('rope.dimension_count')} of {head_dim} values of a head is not "
                               "built; built is rotation of all.")
    if "token_embd.weight" not in file.tensors:
        raise ConfigError(f"{path} holds no tensor token_embd.weight: it is not a language model's file.")
    return config_from_dict({
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        # float32 in the file: the shortest decimal that rounds to it is the number that was meant
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, get),
        "attention_bias": name == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "tie_word_embeddings": is_tied(file),
        "dtype": "bfloat16",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(metadata, name),
    })


def is_tied(file: GGUFFile) -> bool:
    """Whether head and embedding are one table.

    They are when the file has no output.weight. Some files hold a tied table twice, in two quantisations: then sampled
    rows agree up to the quantisation's error (cosine over 0.95), which the rows of two trained tables never do.
    """
    if "output.weight" not in file.tensors:
        return True
    rows = file.tensors["output.weight"].shape[0]
    cosines = []
    for row in np.linspace(0, rows - 1, _SAMPLED_ROWS).astype(int):
        a, b = (file.rows(name, row, row + 1)[0] for name in ("output.weight", "token_embd.weight"))
        norm = np.linalg.norm(a) * np.linalg.norm(b)
        if norm > 0:
            cosines.append(float(a @ b) / norm)
    return bool(cosines) and float(np.median(cosines)) > 0.95


def _rope_scaling(file: GGUFFile, get: Any) -> dict[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        # Llama 3.1's scaling, already worked out as a divisor for each frequency: longrope's form, with one table
        factors = file.rows("rope_freqs.weight").tolist()
        return {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(f"GGUF rope scaling {kind!r} is not built; built are none, linear and yarn.")
    scaling = {"rope_type": kind, "factor": get("rope.scaling.factor")}
    if original := get("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _eos(metadata: dict[str, Any], name: str) -> list[int]:
    ids = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if name == "qwen2" and "<|endoftext|>" in tokens:  # as in the generation_config.json of the original
        ids.append(tokens.index("<|endoftext|>"))
    return [token for token in dict.fromkeys(ids) if token is not None]


def _shortest(value: float) -> float:
    return float(np.format_float_positional(np.float32(value), unique=True, trim="-"))
