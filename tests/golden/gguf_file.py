"""Write a tiny model as GGUF the way llama.cpp's converter does: permuted q and k of a llama, a chosen type a tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny import tiny_weights

STEMS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
       "lm_head.weight": "output.weight"}
KEYS = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base", "head_dim": "attention.key_length",
}


def gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{STEMS[stem]}.{kind}"


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, config: dict[str, Any], metadata: dict[str, Any] | None = None,
               quant: Callable[[str], str] = lambda name: "F32", rope_factors: list[float] | None = None,
               extra: dict[str, np.ndarray] | None = None) -> Path:
    """quant: checkpoint name -> ggml type of that tensor (matrices only). extra: further tensors by GGUF name, float32."""
    architecture = {"llama": "llama", "qwen2": "qwen2"}[config["model_type"]]
    values: dict[str, Any] = {f"{architecture}.{key}": config[name] for name, key in KEYS.items() if name in config}
    values |= {"tokenizer.ggml.bos_token_id": config["bos_token_id"], "tokenizer.ggml.eos_token_id": config["eos_token_id"]}
    values |= metadata or {}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", architecture))
    for key, value in values.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tiny_weights(config).items():
        if architecture == "llama":
            for projection, count in heads.items():
                tensor = permute(tensor, count) if projection in name else tensor
        kind = gguf.GGMLQuantizationType[quant(name) if tensor.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
