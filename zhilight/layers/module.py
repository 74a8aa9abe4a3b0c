"""Modules without torch: what a layer keeps, where it stands in the checkpoint, and which backend runs it.

A layer declares `Parameter`s in its constructor; no memory is taken there, so a model of any size is described at
once. `materialize(ops)` binds the backend and takes the memory; the loader then fills it part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from zhilight.driver.dtype import DType, from_numpy
from zhilight.ops.base import Array, Ops


class Shard(Enum):
    """How tensor parallelism splits a parameter: not at all, by its rows (outputs), or by its columns (inputs)."""

    NONE = "none"
    ROWS = "rows"
    COLUMNS = "columns"


@dataclass(frozen=True)
class Part:
    """The checkpoint tensor `name` fills the rows `rows` of a parameter."""

    name: str
    rows: slice = field(default_factory=lambda: slice(None))


class Parameter:
    """One weight: its shape, the checkpoint tensors that fill it, its dtype and its shard rule.

    parts: one Part for a plain weight; several where checkpoint tensors are stacked (q, k, v) or interleaved (gate, up).
    dtype: None is the backend's activation dtype.
    """

    array: Array

    def __init__(self, shape: tuple[int, ...], parts: str | list[Part], dtype: DType | None = None,
                 shard: Shard = Shard.NONE):
        self.shape = shape
        self.parts = [Part(parts)] if isinstance(parts, str) else parts
        self.dtype = dtype
        self.shard = shard

    def part_shape(self, part: Part) -> tuple[int, ...]:
        """The shape that the checkpoint tensor of `part` must have."""
        return (len(range(*part.rows.indices(self.shape[0]))), *self.shape[1:])

    def view(self, part: Part) -> Array:
        """The memory that `part` fills: a view of `array`, strided where parts are interleaved."""
        return self.array if part.rows == slice(None) else self.array[part.rows]

    def materialize(self, ops: Ops) -> None:
        self.array = ops.parameter(self.shape, self.dtype)

    def __repr__(self) -> str:
        return f"Parameter({self.shape}, {', '.join(part.name for part in self.parts)})"


class Constant:
    """An array that is computed, not loaded: `make` gives it on the host."""

    array: Array

    def __init__(self, make: Callable[[], np.ndarray]):
        self.make = make

    def materialize(self, ops: Ops) -> None:
        values = self.make()
        self.array = ops.parameter(values.shape, from_numpy(values.dtype))
        ops.upload(self.array, values)


class Module:
    """A layer or a model. Sub-modules, parameters and constants are its attributes, or stand in lists that are."""

    ops: Ops

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__call__ = cls.forward  # the same function: a call that hands its arguments on costs a step 0.1 ms

    def forward(self, *args: Any, **kwargs: Any) -> Array:
        """What calling the module does."""
        raise TypeError(f"{type(self).__name__} has no forward pass.")

    __call__ = forward

    def modules(self) -> Iterator[Module]:
        """This module and all below it, each once, in the order of the attributes."""
        return (member for member in _members(self, set()) if isinstance(member, Module))

    def parameters(self) -> Iterator[Parameter]:
        """All parameters, each once: a head tied to the embedding has none of its own."""
        return (member for member in _members(self, set()) if isinstance(member, Parameter))

    def materialize(self, ops: Ops) -> None:
        """Bind the backend to every module and take memory for every parameter. Contents are undefined until loaded."""
        for member in _members(self, set()):
            if isinstance(member, Module):
                member.ops = ops
            else:
                member.materialize(ops)


def _members(value: Any, seen: set[int]) -> Iterator[Module | Parameter | Constant]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _members(item, seen)
    elif isinstance(value, (Module, Parameter, Constant)) and id(value) not in seen:
        seen.add(id(value))
        yield value
        if isinstance(value, Module):
            for attribute in vars(value).values():
                yield from _members(attribute, seen)
