"""The memory ladder as data: what each rung adds, the bytes that it should move, and who did it first.

Each rung differs from the one above it in one measure. Bytes are closed forms over the buckets; what the allocator
makes of them is the arena's to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tinyengine.errors import ConfigError

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


def choose_bucket(batch: int, buckets: Iterable[int]) -> int | None:
    """The smallest bucket that holds `batch` sequences, in whatever order they stand; None if none does."""
    return min((bucket for bucket in buckets if bucket >= batch), default=None)


def capture_order(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Pairs of (bucket, block-table width), the largest bucket first, and of equal ones the widest.

    What the first capture leaves free in the pool is then room for all that come after it (vLLM, SGLang).
    """
    return sorted(pairs, reverse=True)


def logits_bytes(buckets: Sequence[int], vocab: int, itemsize: int = 4) -> int:
    """What own logits cost beyond one shared buffer: (sum of buckets - largest) x vocab x itemsize (SGLang #8579)."""
    return (sum(buckets) - max(buckets)) * vocab * itemsize


def block_table_bytes(buckets: Sequence[int], width: int) -> int:
    """What a block table for each graph costs beyond views of one: (sum - largest) x width x 4 (SGLang #8567)."""
    return (sum(buckets) - max(buckets)) * width * 4


def clamp_buckets(buckets: Iterable[int], max_batch: int) -> tuple[int, ...]:
    """The buckets that batches of up to `max_batch` can need; the largest is no larger than that."""
    return tuple(sorted({min(bucket, max_batch) for bucket in buckets}))


def width_buckets(max_width: int) -> tuple[int, ...]:
    """Block-table widths to capture: powers of two below `max_width`, and that itself."""
    return (*(1 << i for i in range((max_width - 1).bit_length())), max_width)


@dataclass(frozen=True)
class GraphPlan:
    """Which graphs there are to be: the measures of a rung over a set of batch sizes and block-table widths.

    max_blocks: a pair of bucket and width whose product is above it is left out. table_width: columns of the static
    block tables, by default the largest width. max_graphs: at most so many at once, by default the rung's own cap, or
    all. microbatches: 2 captures a step as two halves on two streams. order: see `capture_order`.
    """

    rung: Rung
    buckets: tuple[int, ...]
    widths: tuple[int, ...]
    max_blocks: int | None = None
    table_width: int | None = None
    max_graphs: int | None = None
    microbatches: int = 1
    order: Callable[..., list[tuple[int, int]]] = capture_order

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Every bucket with every width, in the order of capture.

        What the largest leaves free in the pool is room for all that come after it: that is `largest_first`.
        """
        limit = max(self.buckets) * max(self.widths) if self.max_blocks is None else self.max_blocks
        pairs = {(bucket, width) for bucket in self.buckets for width in self.widths if bucket * width <= limit}
        return self.order(pairs) if self.rung.largest_first else sorted(pairs)

    @property
    def largest_pairs(self) -> list[tuple[int, int]]:
        """Of each width the pair with the largest bucket, if the others fit into what these leave; else all pairs."""
        if not (self.rung.largest_first and self.rung.shared_pool and self.rung.logits != "own"):
            return self.pairs
        largest = {width: bucket for bucket, width in sorted(self.pairs)}
        return [pair for pair in self.pairs if largest[pair[1]] == pair[0]]

    @property
    def cap(self) -> int:
        """The most graphs that are held at once."""
        return self.max_graphs or self.rung.max_graphs or max(1, len(self.pairs))


def find_rung(name: str) -> Rung:
    """The rung of that name; `off` is the first and `on` the last. ConfigError that lists them if there is none."""
    for rung in LADDER:
        if name == rung.name:
            return rung
    if name in ("off", "on"):
        return LADDER[0 if name == "off" else -1]
    raise ConfigError(f"there is no rung {name!r}: choose off, on or one of {', '.join(rung.name for rung in LADDER)}")


@dataclass(frozen=True)
class GraphOptions:
    """What the user of an engine asks of graphs. Its plans hold every graph that can be needed, unless capped."""

    rung: Rung
    max_graphs: int | None
    microbatches: int

    @classmethod
    def choose(cls, graphs: str, device_type: str, max_graphs: int | None, microbatches: int) -> GraphOptions:
        """graphs: `off`, `on`, a rung's name, or `auto`: on with CUDA alone. ConfigError if that cannot be."""
        if microbatches not in (1, 2):
            raise ConfigError(f"microbatches must be 1 or 2; got {microbatches}")
        if graphs == "auto":
            graphs = "on" if device_type == "cuda" else "off"
        rung = find_rung(graphs)
        if rung.graphs and device_type not in ("cpu", "cuda"):
            raise ConfigError(f"there are no graphs on {device_type}: leave them off")
        if graphs == "on" and max_graphs is None:
            rung = replace(rung, max_graphs=None)
        return cls(rung, max_graphs, microbatches)

    def plan(
        self,
        max_batch: int,
        max_width: int,
        num_blocks: int,
        order: Callable[..., list[tuple[int, int]]] = capture_order,
    ) -> GraphPlan:
        """For an engine with so many sequences, block-table columns and blocks: vLLM's batch sizes, doubling widths.

        A graph's rows times its width stay within twice the cache, so that its intermediates do: rounding up both may
        double a batch that fills the cache. A batch that is more ragged than that runs eagerly.
        """
        buckets, widths = clamp_buckets(BUCKETS["vllm"], max_batch), width_buckets(max_width)
        most = 2 * num_blocks
        return GraphPlan(
            self.rung,
            buckets,
            widths,
            max_blocks=most,
            max_graphs=self.max_graphs,
            microbatches=self.microbatches,
            order=order,
        )
