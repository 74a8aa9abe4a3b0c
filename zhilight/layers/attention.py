"""Grouped-query attention over the paged cache: fused q, k, v product, rotation and cache write, output product."""

from __future__ import annotations

from zhilight.config.model import ModelConfig
from zhilight.layers.linear import Linear
from zhilight.layers.module import Module, Shard
from zhilight.layers.rotary import Rotary
from zhilight.ops.base import Array, Step


class Attention(Module):
    """One layer's attention. `rotary` is shared by all layers of a model."""

    def __init__(self, name: str, config: ModelConfig, layer: int, rotary: Rotary):
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.scale = config.head_dim ** -0.5
        self.window = config.layer_window(layer)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.qkv = Linear({f"{name}.q_proj": q_size, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size},
                          config.hidden_size, config.qkv_bias, Shard.ROWS)
        self.output = Linear({f"{name}.o_proj": config.hidden_size}, q_size, config.output_bias, Shard.COLUMNS)
        self.rotary = rotary

    def forward(self, step: Step, hidden: Array, kv_cache: Array, out: Array | None = None, add_to: Array | None = None,
                at_ends: bool = False) -> Array | None:
        """hidden [tokens, hidden_size] -> the same shape; writes this step's K and V into kv_cache.

        at_ends: K and V of all tokens, but the result of step.logit_rows alone. out and add_to as in `Linear`.
        """
        ops, heads, kv_heads = self.ops, self.num_heads, self.num_kv_heads
        qkv = self.qkv.to_heads(hidden, step, self.rotary.cos_sin.array, kv_cache, heads, kv_heads)
        if at_ends:
            qkv = ops.gather_rows(qkv, step.logit_rows)
            context = ops.attention_at_ends(qkv, step, kv_cache, heads, kv_heads, self.scale, self.window)
        else:
            context = ops.attention(qkv, step, kv_cache, heads, kv_heads, self.scale, self.window)
        return self.output(context, out, add_to)
