"""The gated feed-forward block of Llama and its relatives."""

from __future__ import annotations

from zhilight.layers.linear import GatedLinear, Linear
from zhilight.layers.module import Module, Shard
from zhilight.ops.base import Array


class GatedMLP(Module):
    """down(silu(gate(x)) * up(x)), Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, name: str, hidden_size: int, intermediate_size: int, bias: bool = False):
        self.gate_up = GatedLinear(f"{name}.gate_proj", f"{name}.up_proj", hidden_size, intermediate_size, bias)
        self.down = Linear({f"{name}.down_proj": hidden_size}, intermediate_size, bias, Shard.COLUMNS)

    def forward(self, x: Array, out: Array | None = None, add_to: Array | None = None) -> Array | None:
        """x [tokens, hidden_size] -> [tokens, hidden_size]; out and add_to as in `Linear`."""
        return self.down(self.gate_up(x), out, add_to)
