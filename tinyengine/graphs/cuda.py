"""Graphs on the device: `torch.cuda.CUDAGraph`, with pools, streams and failures handled in the open.

`torch.cuda.graph` does the same for one graph at a time. Here a capture that goes wrong names the operator and the
line, leaves nothing behind, and no finalizer runs within one (a finalizer that touches the device would break it).
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyengine.errors import CaptureError
from tinyengine.graphs.arena import PoolBytes
from tinyengine.graphs.backend import Result
from tinyengine.graphs.recorder import RefuseHostReads, branch_stream, refuse, user_line


class CudaBackend:
    """See `graphs.backend.Backend`. A pool is a handle of `torch.cuda.graph_pool_handle`."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._static_pool: torch.cuda.MemPool | None = None
        self._forked: list[torch.cuda.Stream] = []

    def new_pool(self) -> Any:
        """A handle; the pool itself begins with its first capture and ends with its last graph."""
        return torch.cuda.graph_pool_handle()

    def stream(self, i: int) -> torch.cuda.Stream:
        """The i-th capture stream, made when first asked for."""
        if i not in self._streams:
            self._streams[i] = torch.cuda.Stream(self._device)
        return self._streams[i]

    def fork(self, n: int) -> list[contextlib.AbstractContextManager[None]]:
        """n branches on streams of their own, which wait for the current one."""
        self._forked = [self.stream(branch_stream(i)) for i in range(n)]
        for stream in self._forked:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        return [torch.cuda.stream(stream) for stream in self._forked]

    def join(self) -> None:
        """The current stream waits for the branches."""
        for stream in self._forked:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._forked = []

    @torch.inference_mode()
    def warm_up(self, fn: Callable[[], object], stream: torch.cuda.Stream | None) -> None:
        """Run fn; cuBLAS then has its workspace for this stream, and every kernel is loaded."""
        with torch.cuda.stream(stream):
            torch.cuda.synchronize(self._device)
            fn()
            torch.cuda.synchronize(self._device)

    def capture(
        self, fn: Callable[[], Result], pool: Any, stream: torch.cuda.Stream
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Record fn on the stream, its memory in the pool."""
        graph = torch.cuda.CUDAGraph()
        self.release_memory()  # the driver cannot take from PyTorch's cache what a capture asks of it
        watch = _LastOperator()
        with _no_garbage_collection(), torch.inference_mode(), torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                with RefuseHostReads(), watch:
                    result = fn()
                graph.capture_end()
            except RuntimeError as error:
                self._abandon(graph, pool)
                raise _capture_error(error, watch.name) from error
            except BaseException:
                self._abandon(graph, pool)
                raise
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture that went wrong. PyTorch before 2.14 leaves the pool open where CUDA itself broke it off."""
        for stream in self._forked:  # a capture cannot end before its branches come together
            torch.cuda.current_stream(self._device).wait_stream(stream)
        self._forked = []
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index, pool)
                torch._C._cuda_releasePool(self._device.index, pool)
        with contextlib.suppress(RuntimeError):
            graph.reset()

    @contextlib.contextmanager
    def statics(self) -> Iterator[None]:
        """What is allocated within comes from a pool of its own."""
        self._static_pool = self._static_pool or torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._static_pool, self._device):
            yield

    @property
    def static_bytes(self) -> PoolBytes:
        """What the static buffers have from the device."""
        return self.pool_bytes(self._static_pool.id) if self._static_pool else PoolBytes(0, 0)

    def first_graph(self) -> None:
        """Capture, replay and drop a graph of one kernel: what the driver allocates for the first one stays."""
        x = torch.ones(1, device=self._device)
        graph, _ = self.capture(lambda: x + 1, self.new_pool(), self.stream(0))
        graph.replay()
        self.release_memory()
        graph.reset()

    def pool_bytes(self, pool: Any) -> PoolBytes:
        """Sums over the segments of the allocator's snapshot that carry the pool's id."""
        segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
        return PoolBytes(sum(s["total_size"] for s in segments), sum(s["allocated_size"] for s in segments))

    def release_memory(self) -> None:
        """Wait for the device, then return PyTorch's unused memory to it."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


class _LastOperator(TorchDispatchMode):
    """Refuses what the recorder refuses, before CUDA does, and remembers the operator that CUDA may refuse."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name = "the capture"

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.name = str(op)
        refuse(op, args)
        return op(*args, **(kwargs or {}))


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Not within: a collected cycle may own a graph, whose end would break the capture under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _capture_error(error: RuntimeError, operator: str) -> CaptureError:
    """What CUDA said, with the operator and the line that asked for it."""
    line = user_line(traceback.extract_tb(error.__traceback__))
    return CaptureError(f"{operator} cannot be captured ({line}): {str(error).splitlines()[0]}")
