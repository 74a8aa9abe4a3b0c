"""What every decoder offers the engine."""

from __future__ import annotations

from zhilight.config.model import ModelConfig
from zhilight.layers.embedding import Head
from zhilight.layers.module import Module
from zhilight.ops.base import Array, Step


class Model(Module):
    """A decoder: subclasses build the layers and give `hidden_states`.

    ignored_tensors: patterns (regular expressions, matched from the start) of checkpoint tensors that are known and not
    needed, such as tables an old version of transformers stored.
    """

    config: ModelConfig
    head: Head
    ignored_tensors: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq$", r".*\.attention\.masked_bias$")

    def hidden_states(self, step: Step, kv_cache: list[Array]) -> Array:
        """Of the rows that want logits, after the final norm: [R, hidden_size]. kv_cache: one array a layer, which this step's
        K and V go to."""
        raise TypeError(f"{type(self).__name__} does not give hidden states.")

    def forward(self, step: Step, kv_cache: list[Array]) -> Array:
        """Logits of the rows that want them, [R, vocab_size] float32."""
        return self.head(self.hidden_states(step, kv_cache))
