"""Linear layers over one or several stacked checkpoint tensors.

A Linear owns its parameters and its forward pass: a quantised one is another class with the same methods'
signatures, and a model does not see the difference.
"""

from __future__ import annotations

from zhilight.layers.module import Module, Parameter, Part, Shard
from zhilight.ops.base import Array, Step


class Linear(Module):
    """y = x @ weight.T + bias.

    outputs: checkpoint name -> rows, stacked in that order ({"...q_proj": 576, "...k_proj": 192, ...}).
    shard: ROWS splits the outputs over ranks, COLUMNS the inputs (the results are then to be summed).
    """

    def __init__(self, outputs: dict[str, int], in_features: int, bias: bool = False, shard: Shard = Shard.NONE):
        rows = _stacked(outputs)
        total = sum(outputs.values())
        self.weight = Parameter((total, in_features), [Part(f"{name}.weight", rows[name]) for name in outputs],
                                shard=shard)
        self.bias = None
        if bias:
            bias_shard = Shard.ROWS if shard is Shard.ROWS else Shard.NONE
            self.bias = Parameter((total,), [Part(f"{name}.bias", rows[name]) for name in outputs], shard=bias_shard)

    def forward(self, x: Array, out: Array | None = None, add_to: Array | None = None) -> Array | None:
        """x [tokens, in_features] -> [tokens, out_features]; or, with add_to of that shape, None once it is added there.

        What is not None is yet to be added: not every kernel can (`Ops.linear_add`).
        """
        bias = self.bias.array if self.bias else None
        if add_to is not None:
            return self.ops.linear_add(x, self.weight.array, add_to, bias, out=out)
        return self.ops.linear(x, self.weight.array, bias, out=out)

    def to_heads(self, x: Array, step: Step, cos_sin: Array, kv_cache: Array, num_heads: int, num_kv_heads: int) -> Array:
        """x [tokens, in_features] -> [tokens, q, k and v heads], of which q is rotated; k, rotated, and v are in kv_cache then
        (`Ops.linear_to_heads`)."""
        return self.ops.linear_to_heads(x, self.weight.array, self.bias.array if self.bias else None, step, cos_sin, kv_cache,
                                        num_heads, num_kv_heads)


class GatedLinear(Module):
    """silu(x @ gate.T) * (x @ up.T): one product whose rows are gate and up in turn, as `Ops.linear_silu_mul` wants."""

    def __init__(self, gate: str, up: str, in_features: int, out_features: int, bias: bool = False):
        rows = {gate: slice(0, None, 2), up: slice(1, None, 2)}
        self.weight = Parameter((2 * out_features, in_features),
                                [Part(f"{name}.weight", rows[name]) for name in rows], shard=Shard.ROWS)
        self.bias = None
        if bias:
            self.bias = Parameter((2 * out_features,), [Part(f"{name}.bias", rows[name]) for name in rows],
                                  shard=Shard.ROWS)

    def forward(self, x: Array, out: Array | None = None) -> Array:
        """x [tokens, in_features] -> [tokens, out_features]."""
        return self.ops.linear_silu_mul(x, self.weight.array, self.bias.array if self.bias else None, out=out)


def _stacked(outputs: dict[str, int]) -> dict[str, slice]:
    if len(outputs) == 1:
        return dict.fromkeys(outputs, slice(None))
    rows, start = {}, 0
    for name, count in outputs.items():
        rows[name] = slice(start, start + count)
        start += count
    return rows
