"""What the loader asks of a checkpoint, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TensorEntry:
    """One tensor by its Hugging Face name. `floating`: whether its values are plain floating-point numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    floating: bool = True


@dataclass(frozen=True)
class Block:
    """Rows of a tensor, starting at `start`, in the order and the type that the parameter takes.

    nbytes: bytes of the file that it stands for (progress is counted in those).
    """

    name: str
    start: int
    values: np.ndarray
    nbytes: int


class Checkpoint(ABC):
    """An opened checkpoint: the table of tensors at once, their values a block at a time."""

    location: str
    entries: dict[str, TensorEntry]

    @abstractmethod
    def blocks(self, names: Collection[str]) -> Iterator[Block]:
        """All rows of the named tensors, in the order of the files. A block's values are valid until the next one."""
