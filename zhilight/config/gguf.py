"""GGUF files: metadata and the table of tensors, read in one pass over the header.

The `gguf` package's own reader makes a NumPy view of every string, 3 s for a vocabulary of 50,000; this one takes
0.1 s. Tensor data is mapped, not read, until `GGUFFile.rows` asks for some.

Layout (GGUF versions 2 and 3, little-endian): magic "GGUF", version u32, tensor count u64, metadata count u64; the
metadata as key, type, value; the tensors as name, rank u32, dimensions u64 (fastest first), type u32, offset u64; then,
from the next multiple of `general.alignment`, the data. Specification: the ggml project's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from zhilight.errors import CheckpointError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """One entry of the tensor table. `shape` is row-major, as NumPy has it; `type` is the ggml type's number."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's header. `metadata` values are int, float, bool, str or lists of those."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start .. stop of a tensor, dequantised to float32; a one-dimensional tensor is one row.

        Raises CheckpointError when the gguf package cannot dequantise the type, or the file is cut short.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        try:
            kind = GGMLQuantizationType(tensor.type)
            block, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise CheckpointError(f"{self.path}: tensor {name} has the unknown ggml type {tensor.type}. "
                                  "A newer gguf package may know it.") from None
        columns, count = tensor.shape[-1], int(np.prod(tensor.shape[:-1], dtype=np.int64))
        stop = count if stop is None else min(stop, count)
        row_bytes = columns // block * block_bytes
        size, end = self.path.stat().st_size, tensor.offset + count * row_bytes
        if end > size:
            raise CheckpointError(f"{self.path}: tensor {name} ends at byte {end} but the file has {size}: "
                                  "it is cut short. Download it again.")
        data = np.memmap(self.path, np.uint8, "r", tensor.offset + start * row_bytes, (stop - start, row_bytes))
        try:
            values = dequantize(data, kind)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: tensor {name} has type {kind.name}, which the gguf package cannot "
                                  "dequantise. Take the file in another quantisation, such as Q4_K_M.") from error
        return values.reshape((columns,) if len(tensor.shape) == 1 else (stop - start, columns))


def read_gguf(path: str | Path) -> GGUFFile:
    """Read a GGUF header. The result is shared by later calls while the file does not change.

    Raises CheckpointError when the file is not GGUF, of an unknown version, or cut short.
    """
    path = Path(path).resolve()
    try:
        stat = path.stat()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}.") from error
    return _read(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)
def _read(path: Path, size: int, mtime_ns: int) -> GGUFFile:
    if size < 24:
        raise CheckpointError(f"{path} has {size} bytes: not a GGUF file.")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != b"GGUF":
            raise CheckpointError(f"{path} does not start with the GGUF magic: it starts with {data[:4]!r}.")
        version = _U32.unpack_from(data, 4)[0]
        if version not in (2, 3):
            raise CheckpointError(f"{path} is GGUF version {version}; versions 2 and 3 are read. Convert it again.")
        try:
            return _Header(path, data).read()
        except (struct.error, IndexError, UnicodeDecodeError, MemoryError, OverflowError) as error:
            raise CheckpointError(f"{path}: the GGUF header is damaged or cut short ({error}). "
                                  "Download it again.") from error


class _Header:
    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 8

    def read(self) -> GGUFFile:
        tensor_count, metadata_count = self.u64(), self.u64()
        metadata = {}
        for _ in range(metadata_count):
            key = self.string()
            metadata[key] = self.value(self.u32())
        entries = []
        for _ in range(tensor_count):
            name = self.string()
            shape = tuple(self.u64() for _ in range(self.u32()))[::-1]
            entries.append((name, shape, self.u32(), self.u64()))
        alignment = metadata.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        tensors = {name: GGUFTensor(name, shape, kind, start + offset) for name, shape, kind, offset in entries}
        return GGUFFile(self.path, metadata, tensors)

    def u32(self) -> int:
        self.at += 4
        return _U32.unpack_from(self.data, self.at - 4)[0]

    def u64(self) -> int:
        self.at += 8
        return _U64.unpack_from(self.data, self.at - 8)[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise CheckpointError(f"{self.path}: unknown GGUF value type {kind}.")
        code = struct.Struct("<" + _SCALARS[kind])
        self.at += code.size
        return code.unpack_from(self.data, self.at - code.size)[0]

    def array(self) -> list:
        kind, count = self.u32(), self.u64()
        if count > len(self.data):
            raise IndexError(f"an array of {count} values")
        if kind in _SCALARS:
            code = struct.Struct(f"<{count}{_SCALARS[kind]}")
            self.at += code.size
            return list(code.unpack_from(self.data, self.at - code.size))
        return self.strings(count) if kind == _STRING else [self.value(kind) for _ in range(count)]

    def strings(self, count: int) -> list[str]:
        """One after the other; a vocabulary's 100,000 in a loop without calls."""
        data, at, end, found = self.data, self.at, len(self.data), []
        for _ in range(count):
            start = at + 8
            at = start + _U64.unpack_from(data, at)[0]
            if at > end:
                raise IndexError(f"a string ends at byte {at}")
            found.append(data[start:at].decode("utf-8", errors="replace"))
        self.at = at
        return found
