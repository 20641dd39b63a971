"""What the runner asks of whoever captures graphs: CUDA (cuda.py), the tape (tape.py), or arithmetic (meta.py)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from tinyengine.errors import CaptureError
from tinyengine.graphs.arena import Arena, Event, PoolBytes
from tinyengine.graphs.recorder import Home, Kernel, Recorder, recording

Result = TypeVar("Result")


class Graph(Protocol):
    """A captured function."""

    def replay(self) -> None:
        """Run it again over the same addresses."""

    def reset(self) -> None:
        """Give up the graph and its hold on its pool. It must not be in flight, nor be replayed again."""


class Backend(Protocol):
    """Pools and streams are the backend's own kind of value: the runner only hands them back."""

    def new_pool(self) -> Any:
        """A private memory pool for captures. It may be shared by graphs while at least one of them lives."""

    def stream(self, i: int) -> Any:
        """The i-th capture stream, the same one each time."""

    def fork(self, n: int) -> list[AbstractContextManager[None]]:
        """n branches, each to be entered once: what is done within runs on a stream of its own, beside the others."""

    def join(self) -> None:
        """What follows waits for the branches of the last fork."""

    def warm_up(self, fn: Callable[[], object], stream: Any | None) -> None:
        """Run fn once before its capture, on that stream or on the current one: libraries allocate at their first use.

        Without a device there is nothing to warm, and fn does not run.
        """

    def capture(self, fn: Callable[[], Result], pool: Any, stream: Any) -> tuple[Graph, Result]:
        """Record fn; the graph, and what fn returned, in which nothing is yet.

        Raises CaptureError where fn does what a capture cannot, naming operator and line; nothing is left behind.
        """

    def statics(self) -> AbstractContextManager[None]:
        """Static buffers are allocated within: outside the graph pools, where the meter can tell them apart."""

    def pool_bytes(self, pool: Any) -> PoolBytes:
        """What a pool has from the device, and how much of it is live."""

    def release_memory(self) -> None:
        """Wait until no graph is in flight, and give back to the device what nobody uses."""


class HostPool(Protocol):
    """A pool without a device: the allocator's rules, and how many graphs it serves."""

    arena: Arena
    graphs: int


class HostBackend:
    """What both backends without a device share: streams are numbers, and only a recording keeps them apart."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None

    def stream(self, i: int) -> int:
        """See `Backend.stream`."""
        return i

    def fork(self, n: int) -> list[AbstractContextManager[None]]:
        """See `Backend.fork`. Outside a capture the branches run in the order in which they are entered."""
        return self._recorder.fork(n) if self._recorder else [nullcontext() for _ in range(n)]

    def join(self) -> None:
        """See `Backend.join`."""
        if self._recorder:
            self._recorder.join()

    def warm_up(self, fn: Callable[[], object], stream: int | None) -> None:
        """There is nothing to warm."""

    def record(
        self, fn: Callable[[], Result], home: Home, on_kernel: Callable[[Kernel], None], stream: int
    ) -> tuple[Result, list[Event]]:
        """Run fn under a recorder, to which fork and join now speak; what fn returned, and the allocator's events."""
        if self._recorder:
            raise CaptureError("a capture cannot begin within another one: end the first before")
        with recording(home, on_kernel, stream) as recorder:
            self._recorder = recorder
            try:
                result = fn()
            finally:
                self._recorder = None
        return result, recorder.events

    def statics(self) -> AbstractContextManager[None]:
        """Static buffers are host memory like any other."""
        return nullcontext()

    def pool_bytes(self, pool: HostPool) -> PoolBytes:
        """See `Backend.pool_bytes`. As on the device a pool ends with its last graph, if no tensor of it lives."""
        pool_bytes = pool.arena.bytes
        return pool_bytes if pool.graphs or pool_bytes.live else PoolBytes(0, 0)

    def release_memory(self) -> None:
        """The host takes back what nobody holds by itself."""
