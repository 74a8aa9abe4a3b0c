"""The bookkeeping of one named region of a pool: where the next bytes go, who holds which, and what it adds up to.

A region is a list of segments of contiguous addresses. Where the driver maps physical memory into a reserved range there
is one segment that grows in place; where it does not, each growth is a further segment. Bytes are handed out upwards
from a cursor. Two ways give them back:

- a bump region (weights, kv, comm): allocations are released one by one, in any order; the cursor falls back over the
  released ones at the top;
- a stack region (workspace): scopes. The end of a scope gives back all that was taken inside, so equal sequences of
  requests get equal addresses.

Nothing here calls the driver: a Source brings the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from zhilight.errors import ZhiLightError

ALIGNMENT = 256
"""Bytes; enough for every load, store and copy but swizzled tiles (1024)."""


class MemoryFault(ZhiLightError, RuntimeError):
    """Memory was released twice, used after its release, or scopes ended out of order."""


@dataclass
class Segment:
    """Contiguous addresses from `base`, of which the first `mapped` bytes have memory and `limit` could have."""

    base: int
    mapped: int
    limit: int


_NOWHERE = Segment(0, -1, 0)
"""Without room, even for 0 bytes: where the cursor stands while no segment is there."""


class Source(Protocol):
    """Where a region's memory comes from."""

    def grow(self, region: Region, segment: Segment | None, nbytes: int) -> Segment | None:
        """Give `segment` (None: a new one) at least `nbytes` more. Returns it, or None where it cannot grow in place.

        Raises OutOfMemory when the memory is not to be had.
        """

    def shrink(self, region: Region, segment: Segment, keep: int) -> None:
        """Take the memory of `segment` beyond its first `keep` bytes back, as far as whole pieces allow."""


@dataclass(frozen=True)
class RegionStatistics:
    """Bytes: `used` now and at the `peak` (alignment gaps included), `mapped` to memory, `capacity` at most.
    `allocations` counts those alive (in a stack region without debug mode: always 0)."""

    name: str
    used: int
    peak: int
    mapped: int
    capacity: int
    allocations: int


class Allocation:
    """Bytes handed out, alive until released. The owner of the tensors over it."""

    __slots__ = ("address", "begin", "live", "nbytes", "region", "what")

    def __init__(self, region: Region, address: int, nbytes: int, begin: tuple[int, int], what: str):
        self.region = region
        self.address = address
        self.nbytes = nbytes
        self.begin = begin
        self.what = what
        self.live = True

    def require_live(self) -> None:
        """Raises MemoryFault when it has been released."""
        if not self.live:
            raise MemoryFault(f"use after release: {self.what} at {self.address:#x} of region {self.region.name} was given "
                              "back before.")


class Region:
    """One region; see the module. Not for two threads at once."""

    def __init__(self, name: str, source: Source, capacity: int, *, stack: bool = False, track: bool = True,
                 segments: list[Segment] | None = None, on_change: Callable[[int, int], None] | None = None):
        """track: keep an Allocation for each (always in a bump region). on_change(address, nbytes) is called when bytes
        are handed out and when they are given back (debug mode poisons them)."""
        self.name = name
        self.source = source
        self.capacity = capacity
        self.stack = stack
        self.track = track or not stack
        self.segments = segments if segments is not None else []
        self.on_change = on_change
        self.closed = False
        self.cursor = (0, 0)
        """(segment's index, offset) of the next byte. In a stack region without tracking it may be set to where it has been
        since the last `trim`: what lies below is then taken again."""
        self._peak = 0
        self._live: list[Allocation] = []
        self._scopes: list[Scope] = []

    # ---- taking -----------------------------------------------------------------------------------------------

    def take(self, nbytes: int, alignment: int, what: str) -> tuple[int, Allocation | None]:
        """(address, allocation or None when not tracked) of `nbytes` fresh bytes."""
        if alignment < 1 or alignment & (alignment - 1):
            raise MemoryFault(f"alignment is {alignment}; it must be a power of two.")
        begin_cursor = index, offset = self.cursor
        segment = self.segments[index] if index < len(self.segments) else _NOWHERE
        address = (segment.base + offset + alignment - 1) & -alignment
        if address + nbytes - segment.base > segment.mapped:
            index, address = self._make_room(nbytes, alignment, what)
            segment = self.segments[index]
        self.cursor = index, address + nbytes - segment.base
        if self.on_change is not None:
            self.on_change(address, nbytes)
        if not self.track:
            return address, None
        allocation = Allocation(self, address, nbytes, begin_cursor, what)
        self._live.append(allocation)
        return address, allocation

    def _make_room(self, nbytes: int, alignment: int, what: str) -> tuple[int, int]:
        """(segment's index, address) of the first place from the cursor on that can have memory, which it then has."""
        if self.closed:
            raise MemoryFault(f"region {self.name} is closed; {what} cannot be allocated.")
        index, offset = self.cursor
        while True:
            if index == len(self.segments):
                self.segments.append(self.source.grow(self, None, nbytes + (alignment if alignment > ALIGNMENT else 0)))
                offset = 0
            segment = self.segments[index]
            address = (segment.base + offset + alignment - 1) & -alignment
            missing = address + nbytes - segment.base - segment.mapped
            if missing <= 0 or self.source.grow(self, segment, missing) is not None:
                return index, address
            index, offset = index + 1, 0

    def reserve(self, nbytes: int) -> None:
        """Map memory ahead, so that the next `nbytes` need no driver call (which graph capture would refuse)."""
        if self.closed:
            raise MemoryFault(f"region {self.name} is closed.")
        index, offset = self.cursor
        while index < len(self.segments):
            segment = self.segments[index]
            missing = offset + nbytes - segment.mapped
            if missing <= 0 or self.source.grow(self, segment, missing) is not None:
                return
            index, offset = index + 1, 0
        self.segments.append(self.source.grow(self, None, nbytes))

    # ---- giving back ------------------------------------------------------------------------------------------

    def release(self, allocation: Allocation) -> None:
        """Give one allocation of a bump region back. Raises MemoryFault the second time."""
        if self.stack:
            raise MemoryFault(f"region {self.name} is a stack: its memory is given back by the end of a scope.")
        if allocation.region is not self:
            raise MemoryFault(f"{allocation.what} belongs to region {allocation.region.name}, not to {self.name}.")
        if not allocation.live:
            raise MemoryFault(f"double free: {allocation.what} at {allocation.address:#x} of region {self.name} was given "
                              "back before.")
        self._end(allocation)
        self._note_peak()
        while self._live and not self._live[-1].live:
            self.cursor = self._live.pop().begin

    def _end(self, allocation: Allocation) -> None:
        allocation.live = False
        if self.on_change is not None:
            self.on_change(allocation.address, allocation.nbytes)

    def scope(self) -> Scope:
        """A context manager: what is taken inside is given back at its end. Scopes nest."""
        if not self.stack:
            raise MemoryFault(f"region {self.name} has no scopes; release its allocations.")
        return Scope(self)

    def trim(self) -> None:
        """Give memory above the cursor back to the source, for other regions."""
        index, offset = self.cursor
        for position in range(len(self.segments) - 1, index - 1, -1):
            segment = self.segments[position]
            self.source.shrink(self, segment, offset if position == index else 0)
            if segment.limit == 0:
                self.segments.pop(position)

    def close(self) -> None:
        """Mark every allocation released. The source frees the memory."""
        for allocation in self._live:
            allocation.live = False
        self._live.clear()
        self._note_peak()
        self.segments.clear()
        self.cursor = (0, 0)
        self.closed = True

    # ---- figures ----------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes below the cursor, gaps included."""
        index, offset = self.cursor
        return offset if index == 0 else offset + sum(segment.mapped for segment in self.segments[:index])

    @property
    def peak(self) -> int:
        """The most that was in use."""
        self._note_peak()
        return self._peak

    def _note_peak(self) -> None:
        """Called before the cursor falls, which is rarer than that it rises."""
        index, offset = self.cursor
        if index or offset > self._peak:
            self._peak = max(self._peak, self.used)

    @property
    def mapped(self) -> int:
        return sum(segment.mapped for segment in self.segments)

    def statistics(self) -> RegionStatistics:
        alive = sum(allocation.live for allocation in self._live)
        return RegionStatistics(self.name, self.used, self.peak, self.mapped, self.capacity, alive)


class Scope:
    """Memory taken from a stack region inside `with` is given back at its end."""

    __slots__ = ("_cursor", "_region", "_tracked")

    def __init__(self, region: Region):
        self._region = region

    def __enter__(self) -> None:
        region = self._region
        self._cursor = region.cursor
        self._tracked = len(region._live)
        region._scopes.append(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        region = self._region
        if region.closed:
            return
        if not region._scopes or region._scopes[-1] is not self:
            raise MemoryFault(f"a scope of region {region.name} ended while an inner one was open, or twice.")
        region._scopes.pop()
        while len(region._live) > self._tracked:
            region._end(region._live.pop())
        region._note_peak()
        region.cursor = self._cursor
