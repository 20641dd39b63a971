"""The decode step with graphs: choose a bucket, pad, replay; capture what is missing, and run eagerly what cannot be.

After vLLM's and SGLang's CUDA graph runners. Every measure of the ladder (rungs.py) is decided at one place here:
search for `rung.`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from tinyengine.errors import CaptureError
from tinyengine.graphs.arena import MIB, SMALL, SMALL_SEGMENT, PoolBytes, small_segments
from tinyengine.graphs.backend import Backend
from tinyengine.graphs.lru import GraphCache
from tinyengine.graphs.parts import GraphParts
from tinyengine.graphs.recorder import branch_stream, trace
from tinyengine.graphs.rungs import GraphPlan
from tinyengine.graphs.static import Batch, CapturedStep, StaticBuffers, StaticInputs, fill_in
from tinyengine.kv.cache import KVCache
from tinyengine.model.attention import Attention
from tinyengine.model.inputs import DecodeInputs
from tinyengine.model.transformer import Params, float_logits, forward, lm_head

log = logging.getLogger(__name__)
EAGERLY = "such steps run eagerly"
STREAMS = 32  # PyTorch has so many of each priority, and hands them out in turn


class GraphKey(NamedTuple):
    """Every Python value that a capture of the decode step bakes in."""

    bucket: int  # rows
    width: int  # columns of the block table that attention reads
    path: str  # of attention
    microbatches: int


def microbatches(bucket: int, count: int) -> list[range]:
    """The rows of each of `count` microbatches, as equal as can be."""
    size = -(-bucket // count)
    return [range(start, min(start + size, bucket)) for start in range(0, bucket, size)]


@dataclass(frozen=True)
class DecodeStep:
    """The function that is captured: one decode step over static inputs, in one piece or in two halves.

    The halves are LightLLM's microbatch overlap: two streams that fork and join within the one graph.
    """

    forward: Callable[..., Tensor]  # of inputs, to hidden states
    params: Params
    attention: str
    inputs: DecodeInputs
    buffers: StaticBuffers
    backend: Backend
    microbatches: int

    @property
    def signature(self) -> Hashable:
        """What the allocations of a capture depend on."""
        shapes = tuple((t.shape, t.stride()) for t in self.inputs.tensors)
        return self.attention, self.microbatches, self.buffers.ending, shapes

    def __call__(self) -> Tensor:
        """Logits `[bucket, vocab]`, float32."""
        parts = microbatches(len(self.inputs.input_ids), self.microbatches)
        if len(parts) == 1:
            return self._logits(*parts)
        logits = []
        for branch, rows in zip(self.backend.fork(len(parts)), parts, strict=True):
            with branch:
                logits.append(self._logits(rows))
        self.backend.join()
        return self.buffers.whole(logits)

    def _logits(self, rows: range) -> Tensor:
        hidden = self.forward(self.inputs.rows(rows.start, rows.stop))
        return self.buffers.logits(self.params, hidden, rows.start)


@dataclass(frozen=True)
class FirstStep:
    """The step that is captured first, with room for the others: blocks that are taken and given back before it.

    What is large in the largest batch may be small in another, and small blocks have segments of their own
    (arena.py), of which the largest batch needs fewer. This is exact for one width; each further one may add a segment.
    """

    step: DecodeStep
    small_segments: int

    @property
    def signature(self) -> Hashable:
        """See `DecodeStep.signature`."""
        return self.step.signature, self.small_segments

    def __call__(self) -> Tensor:
        """See `DecodeStep`."""
        count = self.small_segments * (SMALL_SEGMENT // SMALL)
        blocks = [torch.empty(SMALL, dtype=torch.uint8, device=self.step.params.device) for _ in range(count)]
        del blocks
        return self.step()


@dataclass
class Captured:
    """A graph, and what belongs to it."""

    step: CapturedStep
    inputs: StaticInputs
    pool: Any

    def reset(self) -> None:
        """Give up the graph and what it alone held. Nothing of it may be in flight."""
        self.step.reset()
        del self.inputs


@dataclass(frozen=True)
class GraphChange:
    """A graph that was captured or evicted, and the bytes of all graph pools before and after."""

    what: str  # captured | evicted
    key: GraphKey
    before: PoolBytes
    after: PoolBytes
    seconds: float

    def __str__(self) -> str:
        before, after = self.before.reserved / MIB, self.after.reserved / MIB
        return f"{self.what} graph {tuple(self.key)}: graph pools {before:.1f} -> {after:.1f} MiB reserved"


class GraphRunner:
    """Runs decode steps through the graphs of a plan, and those that it has none for eagerly.

    on_change is told of each capture and eviction.
    """

    def __init__(
        self,
        params: Params,
        cache: KVCache,
        attention: Attention,
        backend: Backend,
        plan: GraphPlan,
        on_change: Callable[[GraphChange], None] | None = None,
        parts: GraphParts | None = None,
    ) -> None:
        self.params, self.cache = params, cache
        self.rung = plan.rung
        self.streams: dict[int, int] = {}  # those with captured products, and the fewest rows of one there
        self.replays = self.eager_steps = 0
        self.capture_seconds = 0.0
        self.recaptures = 0  # of the captures, those of a key that had been evicted
        self._parts = parts = parts or GraphParts()
        self._attention = attention
        self._backend = backend
        self._microbatches = plan.microbatches
        self._on_change = on_change
        self._widths: dict[int, list[int]] = {}
        for bucket, width in plan.pairs:
            self._widths.setdefault(bucket, []).append(width)
        self.keys = tuple(self.key(bucket, width) for bucket, width in plan.pairs) if plan.rung.graphs else ()
        self.graphs: GraphCache[GraphKey, Captured] = parts.GraphCache(plan.cap)
        self._cap = plan.cap
        self._seen: set[GraphKey] = set()
        self._evicted: set[GraphKey] = set()
        with backend.statics():
            self._buffers = StaticBuffers(plan, params, parts.LogitsBuffer)
        self._bound = self._read_addresses()
        self._pool: Any = None
        self._failed: set[GraphKey] = set()
        self._warned: set[str] = set()

    # ---- a step ----

    @torch.inference_mode()
    def decode(self, inputs: DecodeInputs, coming: Tensor | None = None) -> Tensor:
        """One decode step of a batch given as host tensors: logits `[n, vocab]`, float32.

        coming: tokens that the host has not read yet, int64 `[m]` on the device; an input id of -1 - i stands for the
        i-th of them. The logits are a view that is valid until the next step: whoever keeps them clones them. What no
        graph serves runs eagerly. Raises CaptureError if weights or cache are no longer where the graphs were captured
        to find them.
        """
        key = self.key_for(*inputs.block_table.shape) if self.rung.graphs else None
        captured = self.find(key) if key else None
        if key is None or captured is None:
            self.eager_steps += 1
            return self.eager(inputs, coming=coming)
        self.replays += 1
        padded = self._parts.pad(inputs, key.bucket, key.width)
        return captured.step.run(Batch(padded, len(inputs.input_ids), coming))

    @torch.inference_mode()
    def eager(self, inputs: DecodeInputs, key: GraphKey | None = None, coming: Tensor | None = None) -> Tensor:
        """The same step without a graph; with a key, the padded rows, the parts and the LM head of this key's graph.

        Half-precision logits of the rungs before `direct-logits` are rounded, as in the engines that they follow.
        """
        n = len(inputs.input_ids)
        if key is not None:
            inputs = self._parts.pad(inputs, key.bucket, key.width)
        inputs = inputs.to(self.params.device)
        fill_in(inputs.input_ids[:n], coming)
        if key is None or key.microbatches == 1:
            hidden = self._forward(inputs)
        else:
            parts = [inputs.rows(r.start, r.stop) for r in microbatches(key.bucket, key.microbatches)]
            hidden = torch.cat([self._forward(part) for part in parts])
        if key is None or self._buffers.ending == "direct":
            return float_logits(self.params, hidden)[:n]
        return lm_head(self.params, hidden)[:n].float()

    def key_for(self, batch: int, width: int) -> GraphKey | None:
        """The key of the smallest graph that holds a batch; None, and one warning for each reason, if none does."""
        bucket = self._parts.choose_bucket(batch, self._widths)
        if bucket is None:
            largest = max(self._widths, default=0)
            self._warn("batch", f"a batch of {batch} is above the largest bucket, {largest}: {EAGERLY}")
            return None
        columns = self._parts.choose_bucket(width, self._widths[bucket])
        if columns is None:
            tokens = max(self._widths[bucket]) * self.cache.block_size
            self._warn("width", f"a batch of {batch} has a context beyond the {tokens} tokens of its graphs: {EAGERLY}")
            return None
        return self.key(bucket, columns)

    def key(self, bucket: int, width: int) -> GraphKey:
        """The key of a bucket and a width."""
        return GraphKey(bucket, width, self._attention.name, min(self._microbatches, bucket))

    def _forward(self, inputs: DecodeInputs) -> Tensor:
        """Hidden states `[n, hidden]`."""
        return forward(self.params, inputs, self._attention, self.cache, self._parts.rotations)

    def _warn(self, kind: str, message: str) -> None:
        """Say it once for each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message)

    def _check_addresses(self) -> None:
        """Graphs hold addresses: where the first one was captured to find weights and cache, there they must be."""
        if not len(self.graphs):
            self._bound = self._read_addresses()
        elif self._bound != self._read_addresses():
            raise CaptureError(
                "a weight or the KV cache has moved, and the captured graphs would read its old address: "
                "change tensors in place with copy_(), or drop the graphs first (GraphRunner.drop)"
            )

    def _read_addresses(self) -> list[int]:
        """Where every weight and the cache is."""
        return [tensor.data_ptr() for tensor in (*self.params.tensors, self.cache.data, *self.cache.layers)]

    # ---- graphs ----

    def find(self, key: GraphKey) -> Captured | None:
        """The graph of a key, captured now if it is missing; None if that failed, now or before."""
        self._check_addresses()
        found = self.graphs.get(key)
        if found is None and self.rung.largest_first and not len(self.graphs):
            found = self._capture(self.keys[0])  # first, whichever is asked for: see rungs.py
        if found is None or key not in self.graphs:
            found = self._capture(key)
        return found

    def warmup(self, keys: Sequence[GraphKey] | None = None, progress: bool = False) -> None:
        """Capture now what would be captured later, in the order of `keys`, and nothing that another would evict."""
        first = self.keys[:1] if self.rung.largest_first and not len(self.graphs) else ()  # see `find`
        wanted = [key for key in dict.fromkeys((*first, *(keys or self.keys))) if key not in self.graphs]
        room = self._cap - len(self.graphs)
        with tqdm(wanted[:room], "capturing", unit="graph", disable=not progress) as bar:
            for key in bar:
                self.find(key)
                pool = self.pool_bytes
                bar.set_postfix_str(f"pools {pool.reserved / MIB:.1f} MiB, live {pool.live / MIB:.1f} MiB")

    def drop(self) -> None:
        """Give up every graph and its memory; later steps capture again, where weights and cache are then."""
        self._backend.release_memory()
        for captured in self.graphs.clear():
            captured.reset()
        self._pool = None
        self._failed.clear()
        self._backend.release_memory()

    @property
    def pool_bytes(self) -> PoolBytes:
        """Bytes of all graph pools together."""
        return self._bytes(captured.pool for captured in self.graphs.values)

    @property
    def static_tensors(self) -> list[Tensor]:
        """Everything that graphs read or write outside their pools, but weights and cache."""
        own = [] if self.rung.shared_inputs else [captured.inputs.buffer for captured in self.graphs.values]
        return self._buffers.shared + own

    @property
    def stats(self) -> dict[str, float]:
        """Counters since the start, and what is held now."""
        return vars(self.graphs.stats) | {
            "replays": self.replays,
            "eager_steps": self.eager_steps,
            "failed_captures": len(self._failed),
            "capture_seconds": self.capture_seconds,
            "recaptures": self.recaptures,
            "graphs": len(self.graphs),
            "max_graphs": self._cap,
            "working_set": len(self._seen),  # the cap that would have held every graph that was ever captured
            "pool_reserved_bytes": self.pool_bytes.reserved,
        }

    def _capture(self, key: GraphKey) -> Captured | None:
        """Capture a graph and hold it; None, and a warning, if it cannot be. It is not tried again then."""
        if key in self._failed:
            return None
        started, before = time.perf_counter(), self.pool_bytes
        try:
            captured = self._record(key)
        except Exception as error:
            self._failed.add(key)
            self._backend.release_memory()
            self._warn("capture", f"the capture of graph {tuple(key)} failed ({error}): {EAGERLY}")
            return None
        self.recaptures += key in self._evicted
        self._evicted.discard(key)
        self._seen.add(key)
        gone = self.graphs.put(key, captured)
        seconds = time.perf_counter() - started
        self.capture_seconds += seconds
        self._tell(GraphChange("captured", key, before, self.pool_bytes, seconds))
        for old_key, old in gone:
            self._evict(old_key, old)
        if self.recaptures:
            used, cap = len(self._seen), self._cap
            self._warn(
                "cap",
                f"{used} different graphs are in use and max_graphs is {cap}: graphs are captured again and again; "
                f"max_graphs={used} would hold them so far",
            )
        return captured

    @torch.inference_mode()
    def _record(self, key: GraphKey) -> Captured:
        """Here the rung decides about inputs, stream and pool; about logits and order, see StaticBuffers and `find`."""
        with self._backend.statics():
            inputs = self._buffers.inputs(key.bucket)
        padding = DecodeInputs.allocate(key.bucket, key.width, "cpu")  # no block of anybody is touched
        inputs.load(Batch(padding, key.bucket))
        view = inputs.view(key.bucket, key.width)
        step = DecodeStep(self._forward, self.params, key.path, view, self._buffers, self._backend, key.microbatches)
        number = 0 if self.rung.one_stream else self.graphs.stats.captures % STREAMS
        stream = self._backend.stream(number)
        first = not len(self.graphs)
        if first or not self.rung.shared_pool:  # a pool ends with its last graph
            self._pool = self._backend.new_pool()
        self._backend.warm_up(step, stream if self.rung.one_stream else None)
        fn = self._with_room(step, key) if first and self.rung.largest_first and key.microbatches == 1 else step
        captured = self._parts.CapturedStep(fn, inputs, self._backend, self._pool, stream)
        for i, rows in enumerate(microbatches(key.bucket, key.microbatches)):
            used = number if key.microbatches == 1 else branch_stream(i)
            self.streams[used] = min(len(rows), self.streams.get(used, len(rows)))
        return Captured(captured, inputs, self._pool)

    def _with_room(self, step: DecodeStep, key: GraphKey) -> FirstStep:
        """The first step of a pool, and the small segments that the smaller buckets will need."""
        events = trace(step)
        return FirstStep(step, small_segments(events, {bucket / key.bucket for bucket in self._widths}))

    def _evict(self, key: GraphKey, captured: Captured) -> None:
        """Reset a graph that is no longer held, once nothing of it is in flight."""
        started, pools = time.perf_counter(), [c.pool for c in (*self.graphs.values, captured)]
        before = self._bytes(pools)
        self._evicted.add(key)
        self._backend.release_memory()
        captured.reset()
        self._backend.release_memory()
        self._tell(GraphChange("evicted", key, before, self._bytes(pools), time.perf_counter() - started))

    def _bytes(self, pools: Iterable[Any]) -> PoolBytes:
        """Bytes of some pools together, of which several graphs may name the same one."""
        each = [self._backend.pool_bytes(pool) for pool in {id(pool): pool for pool in pools}.values()]
        return PoolBytes(sum(b.reserved for b in each), sum(b.live for b in each))

    def _tell(self, change: GraphChange) -> None:
        log.info("%s", change)
        if self._on_change:
            self._on_change(change)
