"""The memory ladder as data: what each rung adds, the bytes that it should move, and who did it first.

Each rung differs from the one above it in one measure. Bytes are closed forms over the buckets; what the allocator
makes of them is the arena's to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

# Batch sizes that public engines capture by default.
BUCKETS: dict[str, tuple[int, ...]] = {
    # SGLang's on a GPU of more than 90 GiB, when #8579 was measured
    "sglang": (1, 2, 4, 8, *range(16, 257, 8)),
    # vLLM's cudagraph_capture_sizes, up to 512
    "vllm": (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)),
    # LightLLM's when #964 was made: every size to 32, then steps of 16
    "lightllm": (*range(1, 33), *range(48, 257, 16)),
}


@dataclass(frozen=True)
class Rung:
    """Which measures are on. They also combine freely; the ladder is the order in which they are taught."""

    name: str
    adds: str  # in words, for the table
    source: str  # the paper, pull request or API that it follows
    graphs: bool = True
    one_stream: bool = False  # all captures on one side stream
    shared_inputs: bool = False  # static inputs are views of one largest set
    shared_pool: bool = False  # one graph pool for all captures
    largest_first: bool = False  # the largest bucket is captured first
    logits: str = "own"  # own | shared: copied into one buffer | direct: the LM head writes into it
    max_graphs: int | None = None  # least recently used goes


def _ladder() -> tuple[Rung, ...]:
    """Built one measure at a time, so that it cannot be otherwise."""
    steps: tuple[tuple[str, str, str, dict[str, object]], ...] = (
        (
            "capture",
            "a graph for each bucket, with a pool, inputs, logits and a stream of its own",
            "torch.cuda.CUDAGraph; the default of torch.cuda.graph already shares one stream",
            {"graphs": True},
        ),
        ("one-stream", "all captures on one side stream", "torch.cuda.graph, its default", {"one_stream": True}),
        ("shared-inputs", "static inputs are views of one set", "SGLang #8567", {"shared_inputs": True}),
        ("shared-pool", "one graph pool for all", "torch.cuda.graph(pool=...)", {"shared_pool": True}),
        ("largest-first", "the largest bucket is captured first", "vLLM, SGLang", {"largest_first": True}),
        ("shared-logits", "one logits buffer, copied into", "SGLang #8579", {"logits": "shared"}),
        (
            "direct-logits",
            "the LM head writes into the buffer",
            "torch.mm(out_dtype=..., out=...)",
            {"logits": "direct"},
        ),
        ("lru", "at most 16 graphs, the least recently used goes", "LightLLM #964", {"max_graphs": 16}),
    )
    rungs = [Rung("eager", "no graph", "-", graphs=False)]
    for name, adds, source, measure in steps:
        rungs.append(replace(rungs[-1], name=name, adds=adds, source=source, **measure))  # type: ignore[arg-type]
    return tuple(rungs)


LADDER = _ladder()


def choose_bucket(batch: int, buckets: Sequence[int]) -> int | None:
    """The smallest bucket that holds `batch` sequences, in whatever order they stand; None if none does."""
    return min((bucket for bucket in buckets if bucket >= batch), default=None)


def logits_bytes(buckets: Sequence[int], vocab: int, itemsize: int = 4) -> int:
    """What own logits cost beyond one shared buffer: (sum of buckets - largest) x vocab x itemsize (SGLang #8579)."""
    return (sum(buckets) - max(buckets)) * vocab * itemsize


def block_table_bytes(buckets: Sequence[int], width: int) -> int:
    """What a block table for each graph costs beyond views of one: (sum - largest) x width x 4 (SGLang #8567)."""
    return (sum(buckets) - max(buckets)) * width * 4
