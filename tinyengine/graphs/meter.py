"""The bytes that graphs take, each kind apart: measured on a device, or predicted without one.

"Graph memory" alone misleads: static buffers lie outside the graph pool, a library's workspace may lie inside it, and
the driver keeps something for every graph that no allocator knows of. The parts here add up to the device's own figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tinyengine.graphs.arena import Arena, PoolBytes
from tinyengine.graphs.cuda import CudaBackend
from tinyengine.graphs.meta import MetaBackend, MetaGraph
from tinyengine.graphs.rungs import GraphPlan
from tinyengine.graphs.runner import STREAMS, GraphChange, GraphRunner
from tinyengine.kv.cache import KVCache, KVLayout
from tinyengine.model.attention import Attention
from tinyengine.model.checkpoint import random_params
from tinyengine.model.config import ModelConfig

# Measured on an NVIDIA H200 with torch 2.11 and driver 580, on the preset qwen3-0.6b.
WORKSPACE = 32 << 20  # of cuBLAS, for each stream that multiplies matrices (CUBLAS_WORKSPACE_CONFIG)
ROW_WORKSPACE = 1 << 20  # of cuBLASLt besides, if one row is multiplied there: a residual of one row looks like a bias
DRIVER_PER_KERNEL = 3_045  # for each kernel of an executable graph: 55 MiB for 35 graphs of 541 kernels


@dataclass(frozen=True)
class GraphMemory:
    """What so many graphs take from the device, in bytes. Nothing is counted twice."""

    graphs: int
    static: PoolBytes  # inputs and the logits buffer
    pool: PoolBytes  # the graph pools, without workspaces that lie in them
    workspace: int  # of cuBLAS, for the streams that were captured on
    driver: int  # executable graphs

    @classmethod
    def nothing(cls) -> GraphMemory:
        """What no graphs take."""
        return cls(0, PoolBytes(0, 0), PoolBytes(0, 0), 0, 0)

    @property
    def total(self) -> int:
        """The parts together."""
        return self.static.reserved + self.pool.reserved + self.workspace + self.driver


def predicted(runner: GraphRunner) -> GraphMemory:
    """The memory of a runner's graphs by arithmetic alone."""
    static = Arena()
    for tensor in runner.static_tensors:
        static.allocate(tensor.untyped_storage().nbytes())
    workspace = sum(WORKSPACE + ROW_WORKSPACE * (rows == 1) for rows in runner.streams.values())
    graphs = [captured.step.graph for captured in runner.graphs.values]
    kernels = sum(graph.kernels for graph in graphs if isinstance(graph, MetaGraph))
    return GraphMemory(len(graphs), static.bytes, runner.pool_bytes, workspace, kernels * DRIVER_PER_KERNEL)


class Predictor:
    """Predicts plans for one model on meta tensors; captures that look alike are traced once for all of them."""

    def __init__(self, config: ModelConfig, layout: KVLayout, attention: Attention) -> None:
        self._params = random_params(config, "meta", layout.dtype, 1)
        self._cache = KVCache(layout, 2, "meta")
        self._attention = attention
        self._backend = MetaBackend()

    def runner(self, plan: GraphPlan, on_change: Callable[[GraphChange], None] | None = None) -> GraphRunner:
        """A runner that captures and takes bytes, and cannot replay."""
        return GraphRunner(self._params, self._cache, self._attention, self._backend, plan, on_change)

    def predict(self, plan: GraphPlan, pairs: Sequence[tuple[int, int]] | None = None) -> GraphMemory:
        """The memory of a plan's graphs after a warm-up, or of those of some pairs of bucket and width, in order."""
        runner = self.runner(plan)
        runner.warmup(None if pairs is None else [runner.key(*pair) for pair in pairs])
        return predicted(runner)

    def estimate(self, plan: GraphPlan) -> int:
        """About what a plan's graphs will take at most, whichever of them come and go.

        Where the others fit into what the largest leave, those; with pools of their own, as many of the largest as
        are held, and one more, since the new one comes before the old one goes. The smallest has a workspace of its
        own kind. Graphs of several widths that come lazily may add a few segments in some orders.
        """
        if not plan.rung.graphs or not plan.pairs:
            return 0
        pairs = sorted(plan.largest_pairs, reverse=True)
        if not plan.rung.shared_pool:
            pairs = pairs[: plan.cap + 1]
        pairs = list(dict.fromkeys([*pairs, min(plan.pairs)]))
        memory = self.predict(replace(plan, max_graphs=len(pairs)), pairs)
        streams = 0 if plan.rung.one_stream else min(STREAMS, len(plan.pairs)) - min(STREAMS, memory.graphs)
        return memory.total + streams * WORKSPACE + memory.driver * max(0, plan.cap - memory.graphs) // memory.graphs


class Meter:
    """Reads what a runner's graphs took from a CUDA device since the meter was made.

    `warm` runs what the graphs will run, without them: what it makes the driver and the libraries allocate for the
    current stream, once a process, is no graph's.
    """

    def __init__(self, backend: CudaBackend, warm: Callable[[], object]) -> None:
        self._backend = backend
        warm()
        backend.first_graph()
        self._workspaces = self._clear_workspaces()
        warm()
        self._before = self._used()

    def read(self, runner: GraphRunner) -> GraphMemory:
        """The parts and their sum. Workspaces are found by clearing them, so nothing can be replayed afterwards."""
        total, pool = self._used() - self._before, runner.pool_bytes
        workspace = self._clear_workspaces() - self._workspaces
        inside = pool.live - runner.pool_bytes.live
        # A workspace in a pool has a segment of its own size. A small one lies among the pool's other blocks.
        whole = inside - inside % WORKSPACE
        pool = PoolBytes(pool.reserved - whole, pool.live - inside)
        static = self._backend.static_bytes
        workspace -= inside - whole
        driver = total - static.reserved - pool.reserved - workspace
        return GraphMemory(len(runner.graphs), static, pool, workspace, driver)

    def _clear_workspaces(self) -> int:
        """Free the workspaces of all streams; their bytes."""
        before = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        return before - torch.cuda.memory_allocated()

    def _used(self) -> int:
        """Bytes of the device that are taken, by anybody, once PyTorch has given back what nobody uses."""
        self._backend.release_memory()
        free, total = torch.cuda.mem_get_info()
        return total - free
