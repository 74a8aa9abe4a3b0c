"""Token embedding and the head that turns hidden states into logits."""

from __future__ import annotations

from zhilight.layers.module import Module, Parameter, Shard
from zhilight.ops.base import Array


class Embedding(Module):
    """Rows of a table [vocab_size, hidden_size], multiplied by `scale`."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0):
        self.weight = Parameter((vocab_size, hidden_size), f"{name}.weight", shard=Shard.ROWS)
        self.scale = scale

    def forward(self, token_ids: Array, out: Array | None = None) -> Array:
        """token_ids [tokens] int32 -> [tokens, hidden_size]."""
        return self.ops.embedding(token_ids, self.weight.array, self.scale, out=out)


class Head(Module):
    """Logits, multiplied by `scale`. `tied_to` shares the embedding's table."""

    def __init__(self, name: str, vocab_size: int, hidden_size: int, scale: float = 1.0,
                 tied_to: Embedding | None = None):
        self.weight = tied_to.weight if tied_to else Parameter((vocab_size, hidden_size), f"{name}.weight",
                                                               shard=Shard.ROWS)
        self.scale = scale

    def forward(self, hidden: Array) -> Array:
        """hidden [rows, hidden_size] -> [rows, vocab_size] float32."""
        return self.ops.logits(hidden, self.weight.array, self.scale)
