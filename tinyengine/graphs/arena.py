"""A graph pool without a GPU: the rules by which PyTorch's CUDA caching allocator hands out memory, as arithmetic.

After `c10/cuda/CUDACachingAllocator.cpp`. Fed with the allocations and frees of a capture, in order, an arena has the
segments that the device would have. It is a stand-in for bytes and addresses; it holds no memory itself.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

MIB = 1 << 20
ROUND = 512  # every size is rounded up to a multiple of this
SMALL = 1 * MIB  # up to here a request is served from small segments
SMALL_SEGMENT = 2 * MIB
LARGE_REQUEST, LARGE_SEGMENT = 10 * MIB, 20 * MIB  # below the first a large request opens a segment of the second
LARGE_ROUND = 2 * MIB  # from there on a segment is the request, rounded up to a multiple of this


class Event(NamedTuple):
    """An allocation of `nbytes` on `stream`, or the free of what was allocated under this id (nbytes 0)."""

    id: int
    nbytes: int
    stream: int = 0


class Address(NamedTuple):
    """Where a block lies: in which segment, and how many bytes from its start."""

    segment: int
    offset: int


class PoolBytes(NamedTuple):
    """What a pool takes from the device, and how much of that is in use."""

    reserved: int
    live: int


class Segment(NamedTuple):
    """One piece of device memory. It serves one stream, and either small requests or large ones."""

    nbytes: int
    stream: int
    is_small: bool


def round_size(nbytes: int) -> int:
    """The least size of the block that a request of `nbytes` gets."""
    return max(ROUND, -(-nbytes // ROUND) * ROUND)


def segment_size(size: int) -> int:
    """The size of the segment that is asked of the device when no free block holds `size` bytes."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE_REQUEST else -(-size // LARGE_ROUND) * LARGE_ROUND


class Arena:
    """One private pool: its segments, and in them the free blocks and the live ones."""

    def __init__(
        self, round_size: Callable[[int], int] = round_size, segment_size: Callable[[int], int] = segment_size
    ) -> None:
        self._round_size, self._segment_size = round_size, segment_size
        self.segments: list[Segment] = []
        self._live: dict[Address, int] = {}
        self._free_sizes: dict[Address, int] = {}
        self._free_starts: dict[Address, Address] = {}  # by the end of a free block: finds a neighbour's start
        # By (stream, is_small), sorted by size and then by address: best fit is one bisection.
        self._free_lists: dict[tuple[int, bool], list[tuple[int, Address]]] = {}

    @property
    def bytes(self) -> PoolBytes:
        """Reserved and live bytes; live counts whole blocks, as the device's own snapshot does."""
        return PoolBytes(sum(segment.nbytes for segment in self.segments), sum(self._live.values()))

    @property
    def live(self) -> dict[Address, int]:
        """The bytes of each live block, by where it lies."""
        return dict(self._live)

    def allocate(self, nbytes: int, stream: int = 0) -> Address:
        """The smallest free block of this stream that is large enough, else a new segment; split if enough remains.

        "Enough" is 512 bytes in a small segment and more than 1 MiB in a large one: the rest of a large block that
        is barely larger than asked for stays with it, unused.
        """
        size = self._round_size(nbytes)
        is_small = size <= SMALL
        free = self._free_lists.setdefault((stream, is_small), [])
        fit = bisect.bisect_left(free, (size, Address(0, 0)))
        if fit < len(free):
            found, address = free[fit]
            self._take(address)
        else:
            found, address = self._segment_size(size), Address(len(self.segments), 0)
            self.segments.append(Segment(found, stream, is_small))
        rest = found - size
        if rest >= ROUND if is_small else rest > SMALL:
            self._give(Address(address.segment, address.offset + size), rest)
            found = size
        self._live[address] = found
        return address

    def free(self, address: Address) -> None:
        """Return a live block; it joins the free neighbours in its segment. KeyError if it is not live."""
        size = self._live.pop(address)
        after = Address(address.segment, address.offset + size)
        if after in self._free_sizes:
            size += self._take(after)
        if address in self._free_starts:
            address = self._free_starts[address]
            size += self._take(address)
        self._give(address, size)

    def play(self, events: Iterable[Event]) -> PoolBytes:
        """Allocate and free in the order of the events; what is not freed stays live. Returns the bytes after it."""
        self.place(events)
        return self.bytes

    def place(self, events: Iterable[Event]) -> list[Address]:
        """Like `play`; returns where that lies which stays live."""
        homes: dict[int, Address] = {}
        for event in events:
            if event.nbytes:
                homes[event.id] = self.allocate(event.nbytes, event.stream)
            else:
                self.free(homes.pop(event.id))
        return list(homes.values())

    def _give(self, address: Address, size: int) -> None:
        """Add a free block."""
        bisect.insort(self._free_list(address), (size, address))
        self._free_sizes[address] = size
        self._free_starts[Address(address.segment, address.offset + size)] = address

    def _take(self, address: Address) -> int:
        """Remove a free block; its size."""
        size, free = self._free_sizes.pop(address), self._free_list(address)
        del free[bisect.bisect_left(free, (size, address))]
        del self._free_starts[Address(address.segment, address.offset + size)]
        return size

    def _free_list(self, address: Address) -> list[tuple[int, Address]]:
        segment = self.segments[address.segment]
        return self._free_lists.setdefault((segment.stream, segment.is_small), [])


def small_segments(events: Sequence[Event], scales: Iterable[float]) -> int:
    """The most small segments that the events open when every size is multiplied by one of the scales.

    A smaller batch can need more of them than a larger one: what was large becomes small.
    """
    counts = [0]
    for scale in scales:
        arena = Arena()
        arena.place(event._replace(nbytes=math.ceil(event.nbytes * scale)) for event in events)
        counts.append(sum(segment.is_small for segment in arena.segments))
    return max(counts)
