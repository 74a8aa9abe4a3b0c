"""Element types of device and host arrays. No CUDA and no numba here: the CPU backend uses them too."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, eq=False)
class DType:
    """One element type: `bits` an element in memory, and the NumPy type that holds it on the host.

    There is one object a type, the ones below: they are told apart by identity, which makes them cheap as keys, and pickles
    name them. Sub-byte types (int4) are packed, two a byte, low nibble first; their arrays count elements, not bytes.
    """

    name: str
    bits: int
    numpy_name: str

    @property
    def itemsize(self) -> int:
        """Bytes an element. Raises ValueError for a sub-byte type: ask `nbytes` for the size of an array of those."""
        if self.bits % 8:
            raise ValueError(f"{self.name} elements are {self.bits} bits; use nbytes(count)")
        return self.bits // 8

    def nbytes(self, count: int) -> int:
        """Bytes of `count` packed elements, rounded up."""
        return (count * self.bits + 7) // 8

    @cached_property
    def numpy(self) -> np.dtype:
        """The NumPy dtype; bfloat16 and float8 come from ml_dtypes."""
        if self.numpy_name in ("bfloat16", "float8_e4m3fn"):
            import ml_dtypes

            return np.dtype(getattr(ml_dtypes, self.numpy_name))
        return np.dtype(self.numpy_name)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> str:
        return self.name  # pickle and copy read it as the name of this module's object


bfloat16 = DType("bfloat16", 16, "bfloat16")
float16 = DType("float16", 16, "float16")
float32 = DType("float32", 32, "float32")
fp8_e4m3 = DType("fp8_e4m3", 8, "float8_e4m3fn")
int4 = DType("int4", 4, "uint8")
int8 = DType("int8", 8, "int8")
uint8 = DType("uint8", 8, "uint8")
int32 = DType("int32", 32, "int32")
uint32 = DType("uint32", 32, "uint32")
int64 = DType("int64", 64, "int64")
uint64 = DType("uint64", 64, "uint64")

BY_NAME = {t.name: t for t in (bfloat16, float16, float32, fp8_e4m3, int4, int8, uint8, int32, uint32, int64, uint64)}


def from_numpy(dtype: np.dtype) -> DType:
    """The DType of a NumPy dtype. Raises ValueError for one that no kernel knows."""
    for candidate in BY_NAME.values():
        if candidate.bits >= 8 and candidate.numpy == dtype:
            return candidate
    raise ValueError(f"no device type for NumPy {dtype}")
