"""Root-mean-square normalisation, with the residual stream it may add to first."""

from __future__ import annotations

from zhilight.layers.module import Module, Parameter
from zhilight.ops.base import Array


class RMSNorm(Module):
    """Zhang and Sennrich 2019, arXiv:1910.07467. `residual_scale` multiplies what is added to the residual."""

    def __init__(self, name: str, size: int, eps: float, residual_scale: float = 1.0):
        self.weight = Parameter((size,), f"{name}.weight")
        self.eps = eps
        self.residual_scale = residual_scale

    def forward(self, x: Array | None, add_to: Array | None = None, out: Array | None = None) -> Array:
        """Normalise x [tokens, size]; or, with `add_to`, add x to it in place (None adds nothing) and normalise that."""
        if add_to is None or x is None:
            return self.ops.rms_norm(x if add_to is None else add_to, self.weight.array, self.eps, out=out)
        return self.ops.add_rms_norm(x, add_to, self.weight.array, self.eps, self.residual_scale, out=out)
