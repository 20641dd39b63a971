"""Captures as arithmetic: a pool is an arena, a graph is what a capture leaves live in it, and nothing can be replayed.

With the model on meta tensors the runner then takes exactly the bytes that it would take on a CUDA device, and needs
neither the device nor the memory. Captures that look alike to the allocator are traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from tinyengine.errors import CaptureError
from tinyengine.graphs.arena import Address, Arena, Event
from tinyengine.graphs.backend import HostBackend, Result
from tinyengine.graphs.recorder import MetaHome


class Trace(NamedTuple):
    """A capture seen once: its events, in which what the result holds stays allocated, and its kernels."""

    events: list[Event]
    kernels: int
    result: Any


class MetaPool:
    """An arena, and how many graphs it serves."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.graphs = 0


class MetaGraph:
    """The allocations that outlive a capture."""

    def __init__(self, pool: MetaPool, live: list[Address], kernels: int) -> None:
        self.kernels = kernels
        self._pool = pool
        self._live = live

    def replay(self) -> None:
        """Nothing was recorded but bytes."""
        raise CaptureError("a predicted graph cannot be replayed: it holds no kernels, only their bytes")

    def reset(self) -> None:
        """Free what the result held."""
        while self._live:
            self._pool.arena.free(self._live.pop())
        self._pool.graphs -= 1


class MetaBackend(HostBackend):
    """See `graphs.backend.Backend`. A function that has a `signature` is traced once for each value of it."""

    def __init__(self) -> None:
        super().__init__()
        self._traces: dict[Hashable, Trace] = {}

    def new_pool(self) -> MetaPool:
        """An empty pool."""
        return MetaPool()

    def capture(self, fn: Callable[[], Result], pool: MetaPool, stream: int) -> tuple[MetaGraph, Result]:
        """Play the allocations of fn in the pool."""
        signature = getattr(fn, "signature", fn)
        if signature not in self._traces:
            self._traces[signature] = self._trace(fn)
        events, kernels, result = self._traces[signature]
        moved = [event if event.stream else event._replace(stream=stream) for event in events]
        pool.graphs += 1
        return MetaGraph(pool, pool.arena.place(moved), kernels), result

    def _trace(self, fn: Callable[[], object]) -> Trace:
        """Run fn on meta tensors and write down what a capture of it allocates and launches."""
        launches: list[str] = []  # not the kernels: they hold tensors, which would then never be freed
        result, events = self.record(fn, MetaHome(), lambda kernel: launches.append(str(kernel.op)), 0)
        return Trace(events, len(launches), result)
