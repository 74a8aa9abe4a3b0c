"""Llama 1 to 3.3, Mistral, Qwen2 (and 2.5) and MiniCPM.

What differs between them is in the config: Qwen2's bias on q, k and v, the rope kind, the layers with a sliding window,
tied embeddings, and MiniCPM's three scales (embedding, residual branch, logits), which are 1 elsewhere.

Source  Touvron et al. 2023, arXiv:2302.13971; MiniCPM's scales: Hu et al. 2024, arXiv:2404.06395
"""

from __future__ import annotations

from zhilight.config.model import ModelConfig
from zhilight.layers.attention import Attention
from zhilight.layers.embedding import Embedding, Head
from zhilight.layers.mlp import GatedMLP
from zhilight.layers.module import Module
from zhilight.layers.norm import RMSNorm
from zhilight.layers.rotary import Rotary
from zhilight.models.model import Model
from zhilight.ops.base import Array, Step


class LlamaLayer(Module):
    def __init__(self, name: str, config: ModelConfig, layer: int, rotary: Rotary):
        norm = config.hidden_size, config.rms_norm_eps, config.residual_scale
        self.input_norm = RMSNorm(f"{name}.input_layernorm", *norm)
        self.attention = Attention(f"{name}.self_attn", config, layer, rotary)
        self.post_norm = RMSNorm(f"{name}.post_attention_layernorm", *norm)
        self.mlp = GatedMLP(f"{name}.mlp", config.hidden_size, config.intermediate_size, config.mlp_bias)

    def forward(self, step: Step, block: Array | None, residual: Array, kv_cache: Array, out: Array,
                ends: Array | None = None) -> Array | None:
        """block: what the block before gave and is not yet in residual; None when nothing is. Both [tokens, hidden_size].

        The result, if it is not in residual, goes to `out`, which may be `block` itself.
        ends [R, hidden_size]: go on with the residual of step.logit_rows alone from attention on, and leave it there.
        """
        hidden = self.input_norm(block, add_to=residual)
        if ends is not None:
            residual, out = self.ops.gather_rows(residual, step.logit_rows, out=ends), out[: ends.shape[0]]
        add_to = residual if self.input_norm.residual_scale == 1 else None
        block = self.attention(step, hidden, kv_cache, out, add_to, at_ends=ends is not None)
        return self.mlp(self.post_norm(block, add_to=residual), out, add_to)


class Llama(Model):
    layer = LlamaLayer

    def __init__(self, config: ModelConfig, max_model_len: int | None = None):
        self.config = config
        self.embed = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, config.embedding_scale)
        rotary = Rotary(config, max_model_len)
        self.layers = [self.layer(f"model.layers.{i}", config, i, rotary) for i in range(config.num_layers)]
        self.norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, config.residual_scale)
        self.head = Head("lm_head", config.vocab_size, config.hidden_size, config.logit_scale,
                         tied_to=self.embed if config.tie_word_embeddings else None)
        if config.tie_word_embeddings:  # some checkpoints store the shared table twice
            self.ignored_tensors = (*self.ignored_tensors, r"lm_head\.weight$")

    def hidden_states(self, step: Step, kv_cache: list[Array]) -> Array:
        ops, rows = self.ops, step.logit_rows
        residual = self.embed(step.token_ids)
        out, block, ends = ops.empty(residual.shape), None, None
        everyone = step.logits_at_ends and rows.shape[0] == step.num_tokens
        if step.logits_at_ends and 0 < rows.shape[0] < step.num_tokens:
            # the last layer computes K and V for all, and the rest for these few
            ends = ops.empty((rows.shape[0], residual.shape[1]))
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            with ops.scope():  # a layer's workspace serves the next one
                block = layer(step, block, residual, cache, out, ends if layer is self.layers[-1] else None)
        if ends is not None:
            residual = ends
        elif not everyone:
            residual, block = ops.gather_rows(residual, rows), None if block is None else ops.gather_rows(block, rows)
        return self.norm(block, add_to=residual)
