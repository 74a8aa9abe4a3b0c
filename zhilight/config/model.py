"""What a checkpoint says about itself: typed reads of config.json (or of GGUF metadata turned into the same keys)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: `kind` is default, linear, dynamic, llama3, yarn or longrope; `parameters` are the kind's own."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)
    rotary_dim: int | None = None
    """Leading values of a head that rotate; None means all."""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's architecture, whatever file it came from.

    Shapes: q is [tokens, num_heads * head_dim], k and v [tokens, num_kv_heads * head_dim].
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Keys a query sees, itself included, in the layers that `layer_window` names; None is full attention."""
    sliding_window_layers: tuple[int, ...] | None = None
    """Layers with the window; None means all of them when `sliding_window` is set."""
    embedding_scale: float = 1.0
    """MiniCPM's scale_emb: embeddings are multiplied by it."""
    residual_scale: float = 1.0
    """MiniCPM's scale_depth / sqrt(layers): what each block adds is multiplied by it."""
    logit_scale: float = 1.0
    """MiniCPM's dim_model_base / hidden_size: the head's input is multiplied by it."""
    dtype: str = "bfloat16"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    """temperature, top_k, top_p, repetition_penalty ... of generation_config.json."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False)
    """The whole config, for keys that only one architecture reads."""

    @property
    def max_context_len(self) -> int:
        """Positions the model reaches with its rope scaling: the default and the upper limit of max_model_len.

        linear, dynamic and yarn stretch the original length by `factor`; llama3 and longrope checkpoints state the
        stretched length as max_position_embeddings.
        """
        if self.rope.kind not in ("linear", "dynamic", "yarn"):
            return self.max_position_embeddings
        original = self.rope.parameters.get("original_max_position_embeddings") or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * (self.rope.parameters.get("factor") or 1)))

    def layer_window(self, layer: int) -> int | None:
        """The sliding window of layer `layer`, or None for full attention."""
        if self.sliding_window is None:
            return None
        if self.sliding_window_layers is None or layer in self.sliding_window_layers:
            return self.sliding_window
        return None
