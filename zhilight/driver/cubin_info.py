"""What a cubin says of its kernel: registers, shared memory and stack, as the linker's own report would.

The linker reports while it assembles. Where it finds the same program assembled already, in the driver's cache and for all its
option -no-cache, it says nothing, and the figures must come out of what it gave.

Source  the ELF-64 layout; attributes of section .nv.info as `cuobjdump -elf` names them
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<BBH")
_PAIR = struct.Struct("<II")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SIZED, _FRAME_SIZE, _REGISTERS = 0x04, 0x11, 0x2F


def kernel_resources(cubin: bytes) -> tuple[int, int, int]:
    """(registers a thread, bytes of static shared memory, bytes of stack) of a cubin's kernel.

    Raises ValueError when it is not a cubin of the known layout.
    """
    registers, shared, stack = 0, 0, 0
    try:
        for name, start, size in _sections(cubin):
            if name == ".nv.info":
                for attribute, value in _attributes(cubin, start, start + size):
                    if attribute == _REGISTERS:
                        registers = max(registers, value)
                    elif attribute == _FRAME_SIZE:
                        stack = max(stack, value)
            elif name.startswith(".nv.shared."):
                shared = max(shared, size)
    except (struct.error, ValueError, IndexError, OverflowError) as error:
        raise ValueError(f"the cubin's sections cannot be read: {error}") from error
    if not registers:
        raise ValueError("the cubin names no registers")
    return registers, shared, stack


def _sections(cubin: bytes) -> Iterator[tuple[str, int, int]]:
    """(name, offset, bytes) of each."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [_SECTION.unpack_from(cubin, table + i * entry) for i in range(count)]
    for section in sections:
        start = sections[names][4] + section[0]
        yield cubin[start : cubin.index(b"\0", start)].decode(), section[4], section[5]


def _attributes(cubin: bytes, at: int, end: int) -> Iterator[tuple[int, int]]:
    """(attribute, value) of those that give a symbol a number."""
    while at < end:
        form, attribute, size = _HEADER.unpack_from(cubin, at)
        at += _HEADER.size
        if form == _SIZED:
            if size == _PAIR.size:
                yield attribute, _PAIR.unpack_from(cubin, at)[1]
            at += size
