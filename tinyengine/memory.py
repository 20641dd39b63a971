"""`python -m tinyengine.memory`: the memory ladder of CUDA graphs, predicted, and measured where there is a GPU.

One row a rung (graphs/rungs.py). Each row is measured in a process of its own, since much that the driver allocates
stays until the process ends. `sglang-8579` and `lightllm-964` reproduce two public pull requests.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tinyengine.cli import Parser, at_least, exit_code, leave
from tinyengine.errors import ConfigError
from tinyengine.figures import origin, written
from tinyengine.graphs.arena import MIB
from tinyengine.graphs.cuda import CudaBackend
from tinyengine.graphs.meter import GraphMemory, Meter, Predictor
from tinyengine.graphs.rungs import (
    BUCKETS,
    LADDER,
    GraphPlan,
    Rung,
    block_table_bytes,
    find_rung,
    logits_bytes,
)
from tinyengine.graphs.runner import GraphChange, GraphRunner
from tinyengine.kv.blocks import blocks_needed
from tinyengine.kv.cache import KVCache, KVLayout
from tinyengine.loading import ModelSource, pick_dtype
from tinyengine.model.attention import Attention, FlashAttention, GatherAttention
from tinyengine.model.checkpoint import random_params
from tinyengine.model.config import ModelConfig
from tinyengine.model.inputs import DecodeInputs

BLOCK_SIZE = 256  # the engine's default on CUDA
GIB = 1 << 30


@dataclass(frozen=True)
class Setting:
    """What all rows of a table have in common."""

    config: ModelConfig
    dtype: torch.dtype
    context: int

    @property
    def layout(self) -> KVLayout:
        """Of the cache; two blocks of it are enough, since what is in it changes no byte."""
        c = self.config
        return KVLayout(c.num_layers, c.num_kv_heads, c.head_dim, BLOCK_SIZE, self.dtype)

    @property
    def attention(self) -> Attention:
        """The path of a CUDA device for this model."""
        reason = FlashAttention.reason_against(self.config, torch.device("meta"), self.dtype)
        return GatherAttention() if reason else FlashAttention(self.config)

    @property
    def width(self) -> int:
        """Block-table columns that the context needs."""
        return blocks_needed(self.context, BLOCK_SIZE)


@dataclass(frozen=True)
class Reading:
    """One row: the bytes after a warm-up, what led there, and its time."""

    memory: GraphMemory
    changes: list[GraphChange]
    seconds: float  # of all captures, each with its eager run before


def lazy_order(plan: GraphPlan) -> list[tuple[int, int]]:
    """The plan's own order; where the largest comes first, a random one after it, as when graphs come lazily."""
    first, *rest = plan.pairs
    if not plan.rung.largest_first:
        return plan.pairs
    random.Random(0).shuffle(rest)
    return [first, *rest]


LAZY_ORDER = "smallest first; where the largest comes first, the others after it in random order (seed 0)"


@torch.inference_mode()
def measure(setting: Setting, plan: GraphPlan, order: Sequence[tuple[int, int]]) -> Reading:
    """A row on the CUDA device, in this process, which should have done nothing else before."""
    device = torch.device("cuda")
    params = random_params(setting.config, device, setting.dtype, 1)
    cache, attention, backend = KVCache(setting.layout, 2, device), setting.attention, CudaBackend(device)

    def warm() -> None:
        eager = replace(plan, rung=replace(plan.rung, graphs=False))
        runner = GraphRunner(params, cache, attention, CudaBackend(device), eager)  # its own: it leaves nothing
        for pair in plan.pairs:
            runner.eager(DecodeInputs.allocate(*pair, "cpu"), runner.key(*pair))

    meter, changes = Meter(backend, warm), list[GraphChange]()
    runner = GraphRunner(params, cache, attention, backend, plan, changes.append)
    if plan.rung.graphs:
        runner.warmup([runner.key(*pair) for pair in order])
    for captured in runner.graphs.values:
        captured.step.graph.replay()
    if runner.stats["failed_captures"]:
        raise ConfigError("a capture failed, most likely for want of memory: fewer or smaller buckets may fit")
    return Reading(meter.read(runner), changes, runner.capture_seconds)


def in_a_fresh_process(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns when it is called in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


# ---- the ladder ----


def ladder(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table of rungs; the same as data."""
    setting = setting_of(args)
    names = "all" if args.rungs is None else args.rungs
    rungs = LADDER if names == "all" else tuple(find_rung(name) for name in names.split(","))
    buckets = parse_buckets("sglang" if args.buckets is None else args.buckets)
    plans = [GraphPlan(cap_rung(rung, args.max_graphs), buckets, (setting.width,)) for rung in rungs]
    rows = table(setting, [(plan, lazy_order(plan)) for plan in plans], args.predict)
    return {
        **origin(None if args.predict else "cuda"),
        **description(args, setting, buckets),
        "order": LAZY_ORDER,
        "rungs": rows,
    }


def cap_rung(rung: Rung, max_graphs: int | None) -> Rung:
    """A rung whose cap, if it has one, is the user's."""
    return replace(rung, max_graphs=max_graphs) if rung.max_graphs and max_graphs else rung


def table(
    setting: Setting, plans: Sequence[tuple[GraphPlan, Sequence[tuple[int, int]]]], only_predict: bool
) -> list[dict[str, Any]]:
    """Predict and measure plans, each with its order of capture, and print each row as soon as it is known."""
    predictor = Predictor(setting.config, setting.layout, setting.attention)
    print(HEADER)
    rows: list[dict[str, Any]] = []
    for plan, order in plans:
        prediction = predictor.predict(plan, order) if plan.rung.graphs else GraphMemory.nothing()
        reading = None if only_predict else in_a_fresh_process(measure, setting, plan, order)
        rows.append(as_row(plan.rung, prediction, reading))
        print(as_line(rows[-1], rows[-2] if len(rows) > 1 else None), flush=True)
    print(
        "MiB. Driver: what it keeps for executable graphs; workspace: cuBLAS's, for each stream. Drop: against the row"
    )
    print("above, of measured totals where there are some, else of predicted ones.")
    return rows


HEADER = (
    "rung            graphs   static  pool reserved  pool live  workspace   driver    total  predicted     drop"
    "  seconds"
)


def as_row(rung: Rung, prediction: GraphMemory, reading: Reading | None) -> dict[str, Any]:
    """A row as data; what was not measured is null."""
    predicted = bytes_of(prediction)
    return {
        "rung": rung.name,
        "adds": rung.adds,
        "graphs": prediction.graphs,
        **(bytes_of(reading.memory) if reading else dict.fromkeys(predicted)),
        "capture_seconds": reading.seconds if reading else None,
        "captures": [[c.key.bucket, c.after.reserved, c.after.live] for c in reading.changes] if reading else None,
        "predicted": predicted,
    }


def bytes_of(memory: GraphMemory) -> dict[str, int]:
    """The parts of a row by name."""
    return {
        "static_bytes": memory.static.reserved,
        "pool_reserved_bytes": memory.pool.reserved,
        "pool_live_bytes": memory.pool.live,
        "workspace_bytes": memory.workspace,
        "driver_bytes": memory.driver,
        "total_bytes": memory.total,
    }


def as_line(row: dict[str, Any], above: dict[str, Any] | None) -> str:
    """A row of the printed table, in MiB."""
    shown = row if row["total_bytes"] is not None else row["predicted"]

    def mib(value: int | None, width: int) -> str:
        return f"{'-' if value is None else f'{value / MIB:,.1f}':>{width}}"

    drop = None
    if above is not None:
        drop = (above if row["total_bytes"] is not None else above["predicted"])["total_bytes"] - shown["total_bytes"]
    seconds = row["capture_seconds"]
    return (
        f"{row['rung']:<15} {row['graphs']:>6} {mib(shown['static_bytes'], 8)} {mib(shown['pool_reserved_bytes'], 14)} "
        f"{mib(shown['pool_live_bytes'], 10)} {mib(shown['workspace_bytes'], 10)} {mib(shown['driver_bytes'], 8)} "
        f"{mib(row['total_bytes'], 8)} {mib(row['predicted']['total_bytes'], 10)} {mib(drop, 8)} "
        f"{'-' if seconds is None else f'{seconds:.1f}':>8}"
    )


# ---- SGLang #8579 and #8567 ----

SGLANG_RUNGS = (
    Rung(
        "baseline",
        "one stream, one pool, largest first; logits and a copied block table for each graph",
        "SGLang before #8579",
        one_stream=True,
        shared_pool=True,
        largest_first=True,
    ),
    Rung(
        "#8579",
        "one logits buffer",
        "SGLang #8579",
        one_stream=True,
        shared_pool=True,
        largest_first=True,
        logits="shared",
    ),
    Rung(
        "#8567",
        "block tables are views of one",
        "SGLang #8567",
        one_stream=True,
        shared_pool=True,
        largest_first=True,
        logits="shared",
        shared_inputs=True,
    ),
)
SGLANG_TABLE_WIDTH = 131_072  # columns: its page size was 1, so one for each token of the context
SGLANG_GB = (5.16, 2.89, 0.95)  # as published


def sglang_8579(args: argparse.Namespace) -> dict[str, Any]:
    """The two drops of the pull requests, beside their closed forms and what was published."""
    refuse_options(args, "model", "rungs", "buckets", "max_graphs")
    args.model = "glm-4.5-air-vocab"
    setting = setting_of(args)
    config = setting.config
    buckets, width = BUCKETS["sglang"], SGLANG_TABLE_WIDTH
    plans = [GraphPlan(rung, buckets, (setting.width,), table_width=width) for rung in SGLANG_RUNGS]
    rows = table(setting, [(plan, plan.pairs) for plan in plans], args.predict)
    kept = [memory_of(row, "static_bytes") + memory_of(row, "pool_reserved_bytes") for row in rows]
    drops = []
    for i, closed in enumerate((logits_bytes(buckets, config.vocab_size), block_table_bytes(buckets, width)), 1):
        drop = kept[i - 1] - kept[i]
        drops.append({"rung": rows[i]["rung"], "bytes": drop, "closed_form_bytes": closed})
        published = SGLANG_GB[i - 1] - SGLANG_GB[i]
        print(
            f"{rows[i]['rung']}: {drop / GIB:.2f} GiB less; (sum - max of the buckets) x "
            f"{'vocabulary' if i == 1 else 'table width'} x 4 B = {closed / GIB:.2f} GiB; published {published:.2f} GB"
        )
    print(
        f"Published on GLM-4.5-Air, tensor parallel 4: {', '.join(map(str, SGLANG_GB))} GB. The drops depend on the\n"
        "buckets, the vocabulary and the table's width alone, which are the same here. What remains depends on the\n"
        f"model: intermediates and driver, both small here. The table has {width:,} columns; attention reads the\n"
        f"first {setting.width}, for a context of {setting.context:,} in blocks of {BLOCK_SIZE}."
    )
    order = "largest first, down to the smallest"
    shared = {"table_width": width, "published_gb": SGLANG_GB, "order": order, "rungs": rows, "drops": drops}
    return {**origin(None if args.predict else "cuda"), **description(args, setting, buckets), **shared}


def memory_of(row: dict[str, Any], name: str) -> int:
    """A part of a row: measured if it was, else predicted."""
    value: int = row["predicted"][name] if row[name] is None else row[name]
    return value


# ---- LightLLM #964 ----


def lightllm_964(args: argparse.Namespace) -> dict[str, Any]:
    """A cap of 16 graphs on 46 batch sizes: two ways to warm up and two kinds of pool, serving the same batches."""
    refuse_options(args, "rungs", "buckets")
    setting, buckets = setting_of(args), BUCKETS["lightllm"]
    args.max_graphs = cap = args.max_graphs or 16
    batches = serving_trace(max(buckets), 300)
    base = replace(find_rung("largest-first"), max_graphs=cap)
    predictor = Predictor(setting.config, setting.layout, setting.attention)
    rows = []
    print(
        "MiB  pool       warm-up              captures  again  evictions  after warm-up     peak  at the end"
        "  given back"
    )
    for pool in ("shared", "per graph"):
        for warmup in ("captures all", "captures what stays"):
            plan = GraphPlan(replace(base, shared_pool=pool == "shared"), buckets, (setting.width,))
            task = (plan, warmup == "captures all", batches)
            row = serve(predictor.runner, *task) if args.predict else in_a_fresh_process(serve_on_cuda, setting, *task)
            rows.append({"pool": pool, "warmup": warmup, **row})
            print(lightllm_line(rows[-1]), flush=True)
    print(
        "Given back: what evictions returned to the device. From a shared pool it is nothing while a graph lives in it."
    )
    return {
        **origin(None if args.predict else "cuda"),
        **description(args, setting, buckets),
        "batches": batches,
        "runs": rows,
    }


def lightllm_line(row: dict[str, Any]) -> str:
    """A row of the printed table, in MiB."""
    numbers = [row[name] / MIB for name in ("after_warmup_bytes", "peak_bytes", "end_bytes", "given_back_bytes")]
    counts = (row["stats"]["captures"], row["stats"]["recaptures"], row["stats"]["evictions"])
    return (
        f"     {row['pool']:<10} {row['warmup']:<20} {counts[0]:>8.0f} {counts[1]:>6.0f} {counts[2]:>10.0f} "
        f"{numbers[0]:>14,.0f} {numbers[1]:>8,.0f} {numbers[2]:>11,.0f} {numbers[3]:>11,.0f}"
    )


def serving_trace(largest: int, steps: int) -> list[int]:
    """Batch sizes of a service whose load wanders: each step a few sequences come or go."""
    generator, size, sizes = random.Random(964), largest // 8, list[int]()
    for _ in range(steps):
        size = min(largest, max(1, size + generator.randint(-largest // 10, largest // 10)))
        sizes.append(size)
    return sizes


def serve_on_cuda(setting: Setting, *task: Any) -> dict[str, Any]:
    """`serve` on the CUDA device."""
    device = torch.device("cuda")
    params, cache = random_params(setting.config, device, setting.dtype, 1), KVCache(setting.layout, 2, device)
    return serve(partial(GraphRunner, params, cache, setting.attention, CudaBackend(device)), *task)


def serve(
    make_runner: Callable[..., GraphRunner], plan: GraphPlan, capture_all: bool, batches: list[int]
) -> dict[str, Any]:
    """Warm up, then ask for the graph of each batch; what was captured and evicted, and the pools' bytes."""
    changes: list[GraphChange] = []
    runner = make_runner(plan, changes.append)
    logging.disable(logging.WARNING)  # the cap is too small on purpose
    try:
        if capture_all:
            for each in runner.keys:
                runner.find(each)
        else:
            runner.warmup()
        after_warmup = runner.pool_bytes.reserved
        for batch in batches:
            key = runner.key_for(batch, max(plan.widths))
            assert key is not None
            runner.find(key)
    finally:
        logging.disable(logging.NOTSET)
    evictions = [change for change in changes if change.what == "evicted"]
    return {
        "after_warmup_bytes": after_warmup,
        "peak_bytes": max(change.after.reserved for change in changes),
        "end_bytes": runner.pool_bytes.reserved,
        "given_back_bytes": sum(change.before.reserved - change.after.reserved for change in evictions),
        "stats": runner.stats,
        "events": [[c.what, c.key.bucket, c.before.reserved, c.after.reserved] for c in changes],
    }


# ---- the program ----


def setting_of(args: argparse.Namespace) -> Setting:
    """The model's shape and the context, or ConfigError."""
    args.model = "qwen3-0.6b" if args.model is None else args.model
    config = ModelSource.find(args.model).config
    context = min(1024, config.max_position) if args.context is None else args.context
    if context > config.max_position:
        raise ConfigError(f"context {context} is above the model's own {config.max_position}")
    device = torch.device("cpu" if args.predict else "cuda")
    return Setting(config, pick_dtype(config.dtype if args.predict else "auto", device, config), context)


def refuse_options(args: argparse.Namespace, *names: str) -> None:
    """ConfigError if an option is given that this lesson has its own value for."""
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"{args.lesson} has a fixed --{name.replace('_', '-')}: leave it out")


def parse_buckets(text: str) -> tuple[int, ...]:
    """A named set, or a list like `1,2,4,8`. ConfigError if it is neither."""
    if text in BUCKETS:
        return BUCKETS[text]
    words = text.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 6 and 1 <= int(word) <= 65_535 for word in words):
        raise ConfigError(f"buckets must be {', '.join(BUCKETS)}, or batch sizes like 1,2,4,8; got {text!r}")
    return tuple(sorted({int(word) for word in words}))


def description(args: argparse.Namespace, setting: Setting, buckets: Sequence[int]) -> dict[str, Any]:
    """What was asked."""
    return {
        "preset": str(args.model),
        "context": setting.context,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "block_size": BLOCK_SIZE,
        "attention": setting.attention.name,
        "max_graphs": args.max_graphs or find_rung("lru").max_graphs,
        "buckets": list(buckets),
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line; its help is the manual."""
    parser = Parser(prog="python -m tinyengine.memory", description=__doc__)
    add = parser.add_argument
    lessons = {"ladder": ladder, "sglang-8579": sglang_8579, "lightllm-964": lightllm_964}
    add("lesson", nargs="?", default="ladder", choices=lessons, help="what to show (default: the ladder)")
    add("--model", metavar="DIR|PRESET", help="whose shape (default: qwen3-0.6b)")
    add("--rungs", metavar="all|A,B", help="which rungs (default: all)")
    add("--buckets", metavar=f"LIST|{'|'.join(BUCKETS)}", help="batch sizes (default: sglang)")
    add("--context", type=at_least(1), metavar="N", help="tokens of each sequence (default: 1024)")
    add("--max-graphs", type=at_least(1), metavar="N", help="the cap of the rung lru (default: 16)")
    add("--predict", action="store_true", help="no GPU: the prediction alone (the default where there is none)")
    add("--json", metavar="FILE", help="write the figures there too")
    parser.set_defaults(lessons=lessons)
    return parser


def run(argv: Sequence[str] | None) -> int:
    """Parse, show, write; the exit code."""
    args = build_parser().parse_args(argv)
    args.predict = args.predict or not torch.cuda.is_available()
    written(lambda: args.lessons[args.lesson](args), args.json)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The program: `run`, with the user's mistakes told in one line each."""
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    leave(main())
