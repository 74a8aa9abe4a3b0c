"""Safetensors folders, one file or several, read by memory map.

Layout of a file: header length u64, a JSON header of name -> {dtype, shape, data_offsets}, then the data. Pages
are handed back to the system once they have been copied, so host memory holds one block of 64 MB at a time.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from zhilight.errors import CheckpointError
from zhilight.weights.checkpoint import Block, Checkpoint, TensorEntry

_FLOATING = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MAX_HEADER = 100 << 20
_BLOCK_BYTES = 64 << 20


@dataclass(frozen=True)
class _Stored:
    file: Path
    start: int
    end: int


class SafetensorsCheckpoint(Checkpoint):
    """The *.safetensors files of a folder. Raises CheckpointError when there are none or one is damaged."""

    def __init__(self, folder: Path):
        self.location = str(folder)
        self.entries: dict[str, TensorEntry] = {}
        self._stored: dict[str, _Stored] = {}
        for file in _files(folder):
            self._read_header(file)

    def _read_header(self, file: Path) -> None:
        size = file.stat().st_size
        try:
            with open(file, "rb") as stream:
                length = struct.unpack("<Q", stream.read(8))[0]
                if length > min(size, _MAX_HEADER):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                header = json.loads(stream.read(length))
                header.pop("__metadata__", None)
                for name, item in header.items():
                    start, end = (8 + length + offset for offset in item["data_offsets"])
                    if end > size:
                        raise ValueError(f"{name} ends at byte {end} but the file has {size}")
                    stored, expected = end - start, _expected_bytes(item["dtype"], item["shape"])
                    if expected is not None and stored != expected:
                        raise ValueError(f"{name} has {stored} bytes but its shape {item['shape']} needs {expected}")
                    if name in self.entries:
                        raise ValueError(f"{name} is also in {self._stored[name].file.name}")
                    self.entries[name] = TensorEntry(name, tuple(item["shape"]), item["dtype"], end - start,
                                                     item["dtype"] in _FLOATING)
                    self._stored[name] = _Stored(file, start, end)
        except (ValueError, KeyError, TypeError, struct.error, OSError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}. Download it again.") from error

    def blocks(self, names: Collection[str]) -> Iterator[Block]:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._stored[name].file, []).append(name)
        for file, members in sorted(by_file.items()):
            with open(file, "rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
            for name in sorted(members, key=lambda member: self._stored[member].start):
                stored, entry = self._stored[name], self.entries[name]
                dtype = _numpy_dtype(entry.dtype)
                values = np.frombuffer(mapped, dtype, (stored.end - stored.start) // dtype.itemsize, stored.start)
                values = values.reshape(entry.shape)
                rows = max(1, _BLOCK_BYTES * len(values) // max(entry.nbytes, 1))
                position = stored.start
                for start in range(0, len(values), rows):
                    block = values[start:start + rows]
                    yield Block(name, start, block, block.nbytes)
                    _release(mapped, position, position + block.nbytes)
                    position += block.nbytes


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} cannot be read ({error}). Download it again.") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(f"{folder} lacks {len(missing)} of the {len(names)} files that {index.name} names: "
                                  f"{', '.join(missing[:8])}. Download them.")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickles = sorted(file.name for suffix in ("*.bin", "*.pt", "*.pth") for file in folder.glob(suffix))
        if pickles:
            raise CheckpointError(
                f"{folder} holds pickled weights only ({', '.join(pickles[:4])}). They can run code when opened, so they are "
                "not read. Convert them once: transformers' AutoModelForCausalLM.from_pretrained(FOLDER)"
                ".save_pretrained(NEW_FOLDER) writes safetensors.")
        raise CheckpointError(f"{folder} holds no *.safetensors file. Download the weights, or use load_format=dummy for "
                              "random ones.")
    return files


@cache
def _numpy_dtype(name: str) -> np.dtype:
    if name == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_FLOATING[name])


def _expected_bytes(dtype: str, shape: list[int]) -> int | None:
    """Bytes of a tensor, or None for a type that is not a plain floating one (the loader refuses those it does not want)."""
    if dtype not in _FLOATING:
        return None
    return int(np.prod(shape, dtype=np.int64)) * _numpy_dtype(dtype).itemsize


def _release(mapped: mmap.mmap, start: int, end: int) -> None:
    """Drop the mapped pages that lie wholly within bytes already copied (Linux; elsewhere the system does it)."""
    if hasattr(mmap, "MADV_DONTNEED"):
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if length > 0:
            mapped.madvise(mmap.MADV_DONTNEED, first, length)
