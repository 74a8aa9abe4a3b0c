"""A random Llama of two layers in a folder: config, safetensors, a byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD = 48, 64, 2, 4, 2, 12
VOCAB = 260
EOS = 257
MAX_LEN = 512

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
    "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD, "max_position_embeddings": MAX_LEN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "bos_token_id": 256, "eos_token_id": EOS, "torch_dtype": "float32"}
TEMPLATE = ("{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}")


def write_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Write the model and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_k": 40}))
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return rng.normal(0, 2.0 / np.sqrt(shape[-1]), shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": weight(VOCAB, HIDDEN) * 4, "lm_head.weight": weight(VOCAB, HIDDEN),
               "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {"self_attn.q_proj": (HEADS * HEAD, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
                  "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
                  "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER)}
        tensors |= {f"{prefix}{name}.weight": weight(*shape) for name, shape in shapes.items()}
        tensors |= {f"{prefix}{name}.weight": np.ones(HIDDEN, np.float32)
                    for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors")
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATE}))
