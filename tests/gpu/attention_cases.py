"""Inputs and reference of the attention tests: a paged cache in shuffled blocks, and float32 attention with torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from zhilight.driver.dtype import bfloat16, float16, int32  # noqa: E402
from zhilight.driver.tensor import Tensor  # noqa: E402


@dataclass
class Case:
    """Sequences with their contexts and queries, in a cache of one layer whose blocks are in random order."""

    contexts: list[int]
    queries: list[int]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 64
    dtype: Any = bfloat16
    window: int | None = None
    soft_cap: float | None = None
    extra_columns: int = 0
    """Values between the rows of qkv beyond q, k and v, so that rows are strided."""
    seed: int = 0

    def __post_init__(self) -> None:
        kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype.name]
        generator = torch.Generator("cuda").manual_seed(self.seed)
        rng = np.random.default_rng(self.seed)

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, device="cuda", generator=generator)

        self.scale = self.head_dim ** -0.5
        rows = sum(self.queries)
        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim + self.extra_columns
        self.qkv = (normal(rows, width) * 2).to(kind)
        counts = [-(-c // self.block_size) for c in self.contexts]
        blocks = sum(counts) + 2
        # blocks of no sequence, and rows past each context, hold NaN: reading them shows
        nan = {"fill_value": torch.nan, "dtype": kind, "device": "cuda"}
        self.kv_cache = torch.full((blocks, 2, self.num_kv_heads, self.block_size, self.head_dim), **nan)
        order = rng.permutation(blocks)
        self.tables = np.full((len(self.contexts), max(counts, default=0) + 3), blocks - 1, np.int32)
        self.keys, self.values = [], []
        used = 0
        for index, context in enumerate(self.contexts):
            mine = order[used:used + counts[index]]
            used += counts[index]
            self.tables[index, :counts[index]] = mine
            for which, kept in ((0, self.keys), (1, self.values)):
                data = normal(context, self.num_kv_heads, self.head_dim).to(kind)
                kept.append(data)
                padded = torch.full((counts[index] * self.block_size, self.num_kv_heads, self.head_dim), **nan)
                padded[:context] = data
                paged = padded.view(counts[index], self.block_size, self.num_kv_heads, self.head_dim).transpose(1, 2)
                if counts[index]:
                    self.kv_cache[torch.from_numpy(mine).cuda().long(), which] = paged
        self.query_start = np.concatenate([[0], np.cumsum(self.queries)]).astype(np.int32)
        self.out = torch.full((rows, self.num_heads * self.head_dim + self.extra_columns), **nan)
        self._device = [torch.from_numpy(a).cuda() for a in
                        (self.tables, np.asarray(self.contexts, np.int32), self.query_start)]

    def tensor(self, array: Any, dtype: Any = None) -> Tensor:
        return Tensor(array.data_ptr(), tuple(array.shape), dtype or self.dtype, 0, array, tuple(array.stride()))

    def arguments(self) -> dict[str, Any]:
        """What both host functions take; query_start is separate."""
        torch.cuda.synchronize()
        return {"qkv": self.tensor(self.qkv), "kv_cache": self.tensor(self.kv_cache), "out": self.tensor(self.out),
                "block_tables": self.tensor(self._device[0], int32), "context_lens": self.tensor(self._device[1], int32),
                "num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "scale": self.scale,
                "window": self.window, "soft_cap": self.soft_cap}

    @property
    def device_query_start(self) -> Tensor:
        return self.tensor(self._device[2], int32)

    def reference(self) -> Any:
        """[T, Hq * D] float32, by the formula, from the rounded inputs. Padding sequences give zeros."""
        group = self.num_heads // self.num_kv_heads
        results = []
        for index, (context, count) in enumerate(zip(self.contexts, self.queries, strict=True)):
            first = self.query_start[index]
            q = self.qkv[first:first + count, :self.num_heads * self.head_dim].float()
            q = q.view(count, self.num_heads, self.head_dim).transpose(0, 1)
            if context == 0:
                results.append(torch.zeros(count, self.num_heads * self.head_dim, device="cuda"))
                continue
            k = self.keys[index].float().transpose(0, 1).repeat_interleave(group, 0)
            v = self.values[index].float().transpose(0, 1).repeat_interleave(group, 0)
            scores = q @ k.transpose(1, 2) * self.scale
            if self.soft_cap:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            position = torch.arange(context - count, context, device="cuda")[:, None]
            key = torch.arange(context, device="cuda")
            hidden = key > position
            if self.window:
                hidden |= key <= position - self.window
            scores = scores.masked_fill(hidden, float("-inf"))
            results.append((scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1))
        return torch.cat(results)

    def check(self) -> None:
        """Compare `out` with the reference; the columns past the heads must be untouched."""
        torch.cuda.synchronize()
        width = self.num_heads * self.head_dim
        want, got = self.reference(), self.out[:, :width].float()
        assert not got.isnan().any(), f"{int(got.isnan().any(1).sum())} of {len(got)} rows have NaN: {self}"
        error = (got - want).norm() / want.norm().clamp(min=1e-9)
        limit = 8e-3 if self.dtype is bfloat16 else 2e-3
        worst = (got - want).abs().max()
        assert error < limit, f"relative error {error:.2e}, worst {worst:.3g} at {_worst(got, want)}: {self}"
        assert worst < 12 * limit * want.abs().max(), f"worst error {worst:.3g} at {_worst(got, want)}: {self}"
        if self.extra_columns:
            assert self.out[:, width:].isnan().all()


def _worst(got: Any, want: Any) -> tuple[int, int]:
    """(row, column) of the largest difference."""
    return divmod(int((got - want).abs().argmax()), got.shape[1])


__all__ = ["Case", "bfloat16", "float16", "torch"]
