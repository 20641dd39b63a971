"""`python -m tinyengine.bench decode|throughput|cpu`: speed, beside the floor that memory bandwidth sets.

`decode` times a decode step at one context, `throughput` the public workload of nano-vllm, `cpu` a decode step beside
transformers and beside the bare matrix products, all in one process that lets them take turns: the least time of each
counts, since what disturbs a run only ever makes it slower.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tinyengine.cli import Parser, at_least, exit_code, leave
from tinyengine.engine import Engine, EngineStats
from tinyengine.errors import ConfigError
from tinyengine.figures import origin, written
from tinyengine.kv.blocks import blocks_needed
from tinyengine.loading import EMBEDDED_MODEL
from tinyengine.model.inputs import DecodeInputs
from tinyengine.model.transformer import Params
from tinyengine.peers import continuous_batching, load_peer, peer_generate, static_step
from tinyengine.request import Completion
from tinyengine.sampling import SamplingParams
from tinyengine.scheduler import Step


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def fastest(contestants: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Least wall time of each contestant over `repeats` rounds in which they take turns, after one warm-up round."""
    for run in contestants.values():
        run()
    rounds = [{name: seconds(run) for name, run in contestants.items()} for _ in range(repeats)]
    return {name: min(times[name] for times in rounds) for name in contestants}


def matrix_products(params: Params, batch: int) -> Callable[[], object]:
    """One decode step's matrix products and nothing else: no implementation on these weights can be faster."""
    matrices = [m for layer in params.layers for m in (layer.qkv, layer.o_proj, layer.gate_up, layer.down)]
    pairs = [(torch.randn(batch, len(m), dtype=m.dtype), m) for m in [*matrices, params.lm_head.t()]]

    def run() -> Tensor:
        for x, matrix in pairs:
            product = torch.mm(x, matrix)
        return product

    return run


@torch.inference_mode()
def decode_row(model: str, batch: int, prompt_len: int, new_tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a decode step at one batch size: ours, transformers' and the matrix products'.

    A step's time is that of the whole run less that of a run of one token, over the tokens between.
    """
    engine = engine_for(model, batch, prompt_len + new_tokens, device="cpu", dtype="float32")
    prompts = random_prompts(engine, [prompt_len] * batch, batch)
    peer = peer_generate(load_peer(model, engine.device, engine.dtype), prompts)

    def ours(count: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        engine.reset_prefix_cache()  # the peer computes the prompts each time, too
        return engine.generate(prompts, params, progress=False)

    products = matrix_products(engine.params, batch)
    least = fastest(
        {
            "ours": lambda: ours(new_tokens),
            "ours, one token": lambda: ours(1),
            "peer": lambda: peer(new_tokens),
            "peer, one token": lambda: peer(1),
            "products": lambda: [products() for _ in range(new_tokens)],
        },
        repeats,
    )
    steps = new_tokens - 1
    return {
        "batch": batch,
        "tinyengine_ms": 1e3 * (least["ours"] - least["ours, one token"]) / steps,
        "transformers_ms": 1e3 * (least["peer"] - least["peer, one token"]) / steps,
        "products_ms": 1e3 * least["products"] / new_tokens,
    }


def cpu(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table of `decode_row` for each batch size; the same as data."""
    rows = [decode_row(args.model, b, args.prompt_len, args.new_tokens, args.repeats) for b in args.batch]
    print("| batch | tinyengine ms/step | transformers ms/step | ratio | matrix products alone ms/step |")
    print("|---|---|---|---|---|")
    for row in rows:
        ratio = row["transformers_ms"] / row["tinyengine_ms"]
        times = f"{row['tinyengine_ms']:.2f} | {row['transformers_ms']:.2f} | {ratio:.2f} x | {row['products_ms']:.2f}"
        print(f"| {row['batch']} | {times} |")
    return {
        "command": "cpu",
        "model": args.model,
        **origin("cpu"),
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "prompt_len": args.prompt_len,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        **peer_version(),
        "rows": rows,
    }


# ---- against the floor ----


@dataclass(frozen=True)
class Floor:
    """The least time that reading the weights and the cache once can take, by this device's own bandwidth."""

    bandwidth: float  # bytes a second
    weights: int  # bytes that a step reads: of the embedding only where it is the LM head
    kv: int  # bytes of one token in the cache

    @classmethod
    def measure(cls, engine: Engine) -> Floor:
        """The best of five: on CUDA 1 GiB copied, read and written; on a CPU 64 MiB multiplied by a vector.

        A CPU reads a line before it writes it, which a copy would not count.
        """
        config, cache, device = engine.config, engine.cache, engine.device
        if device.type == "cuda":
            source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
            run, moved = partial(torch.empty_like(source).copy_, source), 2 * source.nbytes
        else:
            matrix = torch.ones(4096, 4096)
            run, moved = partial(torch.mm, torch.ones(1, 4096), matrix), matrix.nbytes
        best = min(timed(run, device, 4) for _ in range(5))
        embedding = 0 if config.tie_embeddings else config.vocab_size * config.hidden_size
        kv = cache.data.nbytes // (cache.num_blocks * cache.block_size)
        return cls(moved / best, (config.num_params - embedding) * engine.dtype.itemsize, kv)

    def seconds(self, tokens: int, steps: int = 1) -> float:
        """So many steps over so many tokens of context together."""
        return (steps * self.weights + tokens * self.kv) / self.bandwidth


def timed(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of one call when several are queued one behind the other."""
    if device.type != "cuda":
        return seconds(lambda: [run() for _ in range(repeats)]) / repeats
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats


def engine_for(model: str, batch: int, context: int, **options: Any) -> Engine:
    """An engine that holds so many sequences of `context` tokens at once. ConfigError if it cannot."""
    engine = Engine(model, max_num_seqs=batch, max_model_len=context, **options)
    fitting = (engine.cache.num_blocks - 1) // blocks_needed(context, engine.cache.block_size)
    if fitting < batch:
        raise ConfigError(f"memory holds {fitting} sequences of {context} tokens at once, not {batch}: ask for less")
    return engine


def random_prompts(engine: Engine, lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Token ids at random, of none that could be special."""
    rng = random.Random(seed)
    high = min(engine.config.vocab_size, 10_000)
    return [[rng.randrange(min(300, high // 2), high) for _ in range(length)] for length in lengths]


def setup(engine: Engine) -> dict[str, Any]:
    """Where figures come from."""
    return {
        **origin(engine.device.type),
        "dtype": str(engine.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "attention": engine.attention.name,
        "block_size": engine.cache.block_size,
    }


def memory_bytes(engine: Engine) -> dict[str, int]:
    """Weights, cache, and what graphs took."""
    return {
        "weights_bytes": sum(t.nbytes for t in engine.params.tensors),
        "cache_bytes": engine.cache.data.nbytes,
        "graph_pool_bytes": engine.runner.pool_bytes.reserved,
    }


def peer_version() -> dict[str, str]:
    """Whose figures the peer's are."""
    return {"transformers": importlib.metadata.version("transformers")}


def peer_times(model: str, engine: Engine, batch: int, context: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of a decode step of transformers there: compiled alone, and two kinds of `generate`."""
    peer = load_peer(model, engine.device, engine.dtype)
    step = static_step(peer, batch, context)
    for _ in range(4):
        step()  # compiles, and captures
    figures = {"peer_compiled_ms": 1000 * statistics.median(timed(step, engine.device, 10) for _ in range(repeats))}
    tokens = min(16, context // 2)
    prompts = random_prompts(engine, [context - tokens] * batch, batch)
    for name in ("static", "dynamic"):
        run = peer_generate(peer, prompts, name == "static")
        least = fastest({"all": partial(run, tokens), "one": partial(run, 1)}, repeats)
        figures[f"peer_{name}_ms"] = 1000 * (least["all"] - least["one"]) / (tokens - 1)
    return figures | peer_version()


def decode_at(
    model: str, batch: int, context: int, new_tokens: int, repeats: int, beside: bool = False
) -> dict[str, Any]:
    """A row of `decode`: a batch that reaches `context` tokens, then its last step again and again; peers `beside`."""
    if context < new_tokens + 2:
        raise ConfigError(f"--context must be at least {new_tokens + 2}, for a prompt of 2 tokens before the new ones")
    engine = engine_for(model, batch, context)
    prompts = random_prompts(engine, [context - new_tokens] * batch, batch)
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    engine.generate(prompts, params, progress=False)  # captures, and loads every kernel
    runs = []
    for _ in range(repeats):
        engine.stats = EngineStats()
        engine.reset_prefix_cache()  # the prompts are the same ones
        done = engine.generate(prompts, params, progress=False)
        stats = engine.stats
        runs.append(
            {
                "ttft_ms": 1000 * statistics.median(c.time_to_first_token for c in done),
                "tpot_ms": 1000 * stats.decode_seconds / stats.decode_steps,
                "host_ms": 1000 * (stats.decode_seconds - stats.waited_seconds) / stats.decode_steps,
                "prefill_tokens_per_second": stats.prefill_tokens / stats.prefill_seconds,
                "decode_tokens_per_second": stats.decode_tokens / stats.decode_seconds,
            }
        )
    row: dict[str, Any] = {"batch": batch, "context": context}
    row |= {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    runner, width = engine.runner, blocks_needed(context, engine.cache.block_size)
    inputs = full_inputs(batch, width, context)
    with torch.inference_mode():
        row["eager_ms"] = 1000 * timed(lambda: runner.eager(inputs), engine.device, 5)
        key = runner.key_for(batch, width) if runner.rung.graphs else None
        captured = runner.find(key) if key and engine.device.type == "cuda" else None
        if captured:
            runner.decode(inputs)
            times = [timed(captured.step.graph.replay, engine.device, 20) for _ in range(repeats)]
            row["replay_ms"] = 1000 * statistics.median(times)
    floor = Floor.measure(engine)
    row["floor_ms"] = 1000 * floor.seconds(batch * context)
    row["share_of_floor"] = row["floor_ms"] / row.get("replay_ms", row["tpot_ms"])
    if beside:
        row |= peer_times(model, engine, batch, context, repeats)
    return row | {"bandwidth": floor.bandwidth} | memory_bytes(engine) | setup(engine)


def full_inputs(batch: int, width: int, context: int) -> DecodeInputs:
    """A decode step in which each sequence has `context` tokens in blocks of its own."""
    inputs = DecodeInputs.allocate(batch, width, "cpu")
    inputs.block_table.copy_(1 + torch.arange(batch * width).view(batch, width))
    inputs.context_lens.fill_(context)
    inputs.positions.fill_(context - 1)
    return inputs


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Print the table of `decode_at`; the same as data."""
    rows = []
    names = " compiled  static dynamic" if args.peers else ""
    print(f"batch   replay   eager    step    host    TTFT   floor   share   prefill/s    decode/s{names}")
    for batch in args.batch:
        row = decode_at(args.model, batch, args.context, args.new_tokens, args.repeats, args.peers)
        rows.append(row)
        replay = f"{row['replay_ms']:8.3f}" if "replay_ms" in row else "       -"
        times = "".join(f"{row[name]:8.2f}" for name in ("eager_ms", "tpot_ms", "host_ms", "ttft_ms", "floor_ms"))
        rates = f"{row['prefill_tokens_per_second']:12,.0f}{row['decode_tokens_per_second']:12,.0f}"
        peers = [row[f"peer_{name}_ms"] for name in ("compiled", "static", "dynamic")] if args.peers else []
        theirs = " " * bool(peers) + "".join(f"{time:8.2f}" for time in peers)
        print(f"{batch:5}{replay}{times}{row['share_of_floor']:8.0%}{rates}{theirs}", flush=True)
    print("Milliseconds. Replay: a graph alone; step: as the engine makes it, of which the host is busy for `host`.")
    if args.peers:
        print(
            "transformers beside: its forward pass over a static cache (compiled on CUDA) alone, as `replay` is ours;"
        )
        print("`generate` with that cache, as `step` is ours; and `generate` with the cache that grows.")
    return {"command": "decode", "model": args.model, "rows": rows}


# ---- nano-vllm's workload ----


def nano_vllm_workload(requests: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """nano-vllm's bench.py, number for number: 256 requests are 142,827 prompt tokens and 133,966 output tokens."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10_000) for _ in range(rng.randint(100, 1024))] for _ in range(requests)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(100, 1024)) for _ in range(requests)
    ]
    return prompts, params


class _Watched(Engine):
    """An engine that notes, for each decode step, its context and how long the device worked on it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.contexts: list[int] = []
        self.spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        decode = self.runner.decode

        def watched(inputs: DecodeInputs, coming: Tensor | None = None) -> Tensor:
            self.contexts.append(int(inputs.context_lens.sum()))
            self._mark()
            return decode(inputs, coming)

        self.runner.decode = watched  # type: ignore[method-assign]

    def _mark(self) -> None:
        if self.device.type == "cuda":
            self.spans.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self.spans[-1][0].record()

    def _next_tokens(self, step: Step) -> Any:
        result = super()._next_tokens(step)
        if step.is_decode and self.spans:
            self.spans[-1][1].record()
        return result

    @property
    def device_seconds(self) -> float:
        """In decode steps, from the first kernel of each to its last."""
        return sum(float(begin.elapsed_time(end)) for begin, end in self.spans) / 1000


def peer_throughput(
    model: str, engine: Engine, prompts: list[list[int]], params: list[SamplingParams]
) -> dict[str, Any]:
    """Output tokens a second of transformers' continuous batching on the same requests, without graphs and with."""
    peer = load_peer(model, engine.device, engine.dtype, "paged|sdpa")
    lengths = [p.max_tokens or 0 for p in params]
    figures = {}
    for name, graphs in (("peer_tokens_per_second", False), ("peer_graphs_tokens_per_second", True)):
        took, tokens = continuous_batching(peer, prompts, lengths, params[0].temperature, graphs)
        figures[name] = tokens / took
    return figures | peer_version()


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Serve the workload once, after a warm-up; a table and data."""
    prompts, params = nano_vllm_workload(args.requests)
    longest = max(len(prompt) + (p.max_tokens or 0) for prompt, p in zip(prompts, params, strict=True))
    engine = _Watched(args.model, max_num_seqs=args.requests, max_model_len=longest)
    prompts = [[token % engine.config.vocab_size for token in prompt] for prompt in prompts]
    warm = seconds(lambda: engine.warmup(progress=False))
    engine.generate(prompts[:8], [replace(p, max_tokens=4) for p in params[:8]], progress=False)
    floor = Floor.measure(engine)
    engine.reset_prefix_cache()
    engine.stats, engine.contexts, engine.spans = EngineStats(), [], []
    done: list[Completion] = []
    wall = seconds(lambda: done.extend(engine.generate(prompts, params, progress=False)))
    stats, output = engine.stats, sum(len(c.token_ids) for c in done)
    row: dict[str, Any] = {
        "requests": len(done),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": output,
        "seconds": wall,
        "output_tokens_per_second": output / wall,
        "prefill_seconds": stats.prefill_seconds,
        "prefill_tokens_per_second": stats.prefill_tokens / stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "decode_tokens_per_second": stats.decode_tokens / stats.decode_seconds,
        "decode_steps": stats.decode_steps,
        "ttft_ms": 1000 * statistics.median(c.time_to_first_token for c in done),
        "tpot_ms": 1000 * stats.decode_seconds / stats.decode_steps,
        "host_ms": 1000 * (wall - stats.waited_seconds) / (stats.decode_steps or 1),
        "device_decode_seconds": engine.device_seconds or None,
        "preemptions": engine.scheduler.num_preemptions,
        "floor_seconds": floor.seconds(sum(engine.contexts), stats.decode_steps),
        "bandwidth": floor.bandwidth,
        "warmup_seconds": warm,
        **{f"graph_{name}": value for name, value in engine.runner.stats.items()},
    }
    row["share_of_floor"] = row["floor_seconds"] / wall
    if args.peers:
        row |= peer_throughput(args.model, engine, prompts, params)
    for name, value in row.items():
        number = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"{name:28} {number or '-'}")
    return {"command": "throughput", "model": args.model, **row, **memory_bytes(engine), **setup(engine)}


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m tinyengine.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("cpu", help="decode on the CPU beside transformers, float32")
    sub.set_defaults(command=cpu)
    sub.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 32], metavar="N")
    sub.add_argument("--prompt-len", type=at_least(1), default=64, metavar="N")
    sub.add_argument("--new-tokens", type=at_least(2), default=64, metavar="N")
    sub.add_argument("--repeats", type=at_least(1), default=5, metavar="N")
    sub = commands.add_parser("decode", help="a decode step at one context: graph, engine and bandwidth floor")
    sub.set_defaults(command=decode)
    sub.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 64, 256], metavar="N")
    sub.add_argument("--context", type=at_least(4), default=1024, metavar="N")
    sub.add_argument("--new-tokens", type=at_least(2), default=64, metavar="N")
    sub.add_argument("--repeats", type=at_least(1), default=3, metavar="N")
    sub = commands.add_parser("throughput", help="nano-vllm's workload: 256 requests, 133,966 output tokens")
    sub.set_defaults(command=throughput)
    sub.add_argument("--requests", type=at_least(1), default=256, metavar="N")
    for name, sub in commands.choices.items():
        default = None if name == "throughput" else EMBEDDED_MODEL  # whose length is too short for the workload
        model = "a folder, or a preset: qwen3-0.6b is the workload's own shape"
        sub.add_argument("--model", default=default, required=default is None, metavar="DIR|PRESET", help=model)
        if name != "cpu":
            sub.add_argument("--peers", action="store_true", help="transformers beside (takes minutes)")
        sub.add_argument("--json", metavar="FILE", help="also write the JSON object there")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark: a table for people, then one JSON object on the last line."""

    def program() -> int:
        args = build_parser().parse_args(argv)
        print(json.dumps(written(lambda: args.command(args), args.json)))
        return 0

    return exit_code(program)


if __name__ == "__main__":
    leave(main())
