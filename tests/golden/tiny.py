"""Tiny random models: their config.json and their weights, made from a seed with NumPy alone.

`make_golden.py` runs them in transformers and keeps the logits; the tests make the same weights again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NUM_TOKENS = 40

BASE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
}

MODELS: dict[str, dict[str, Any]] = {
    "llama": BASE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama31": BASE | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 24, "attention_bias": True,
        "mlp_bias": True, "eos_token_id": [2, 5],
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 16}},
    "qwen2": BASE | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 3, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "mistral": BASE | {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "num_key_value_heads": 1, "sliding_window": 8},
}

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn_mscale": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "beta_fast": 16,
                    "beta_slow": 2, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn_attention_factor": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                              "attention_factor": 1.5, "truncate": False},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
                 "short_factor": [1.0 + 0.05 * i for i in range(16)], "long_factor": [1.0 + 0.5 * i for i in range(16)]},
}
ROPE_HEAD_DIM = 32
ROPE_MAX_POSITIONS = {"linear": 64, "dynamic": 64}
"""max_position_embeddings of the rope cases: 256 unless named here."""


def token_ids(seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, BASE["vocab_size"], NUM_TOKENS)


def tiny_weights(config: dict[str, Any], seed: int = 1) -> dict[str, np.ndarray]:
    """Checkpoint tensors by name, float32, in an order that depends on the config alone."""
    rng = np.random.default_rng(seed)
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    qkv_bias = config.get("attention_bias") or config["model_type"] == "qwen2"
    weights = {"model.embed_tokens.weight": rng.standard_normal((vocab, hidden))}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        weights[f"{name}.weight"] = rng.standard_normal((rows, columns)) * 1.5 / np.sqrt(columns)
        if bias:
            weights[f"{name}.bias"] = rng.standard_normal(rows) * 0.5

    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}.{norm}.weight"] = 1 + 0.2 * rng.standard_normal(hidden)
        linear(f"{layer}.self_attn.q_proj", q, hidden, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv, hidden, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv, hidden, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, q, config.get("attention_bias", False))
        for name, rows, columns in (("gate", inter, hidden), ("up", inter, hidden), ("down", hidden, inter)):
            linear(f"{layer}.mlp.{name}_proj", rows, columns, config.get("mlp_bias", False))
    weights["model.norm.weight"] = 1 + 0.2 * rng.standard_normal(hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", vocab, hidden, False)
    return {name: weight.astype(np.float32) for name, weight in weights.items()}
