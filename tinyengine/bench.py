"""`python -m tinyengine.bench cpu`: decoding speed beside transformers and beside the bare matrix products.

All contestants run in one process with the same weights, dtype, threads, prompts and lengths. They take turns, and
the least time of each counts: what disturbs a run only ever makes it slower.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tinyengine.cli import Parser, at_least, exit_code
from tinyengine.engine import Engine
from tinyengine.errors import ConfigError
from tinyengine.loading import EMBEDDED_MODEL, ModelSource
from tinyengine.model.transformer import Params
from tinyengine.sampling import SamplingParams


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


def transformers_generate(model: str, prompts: list[list[int]]) -> Callable[[int], object]:
    """Greedy `generate` of transformers for so many tokens, eos ignored. ConfigError if it is not installed."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ConfigError("this comparison needs transformers: install it with pip install transformers") from None
    folder = ModelSource.find(model).folder
    if folder is None:
        raise ConfigError(f"{model!r} has no folder that transformers could open: give a model folder")
    peer: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # comes in eval mode
    ids = torch.tensor(prompts)
    options: dict[str, Any] = dict(
        do_sample=False, eos_token_id=None, pad_token_id=0, attention_mask=torch.ones_like(ids)
    )
    return lambda count: peer.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)


@torch.inference_mode()
def decode_row(model: str, batch: int, prompt_len: int, new_tokens: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a decode step at one batch size: ours, transformers' and the matrix products'.

    A step's time is that of the whole run less that of a run of one token, over the tokens between.
    """
    engine = Engine(model, device="cpu", dtype="float32", max_num_seqs=batch)
    generator = torch.Generator().manual_seed(batch)
    low, high = min(300, engine.config.vocab_size // 2), engine.config.vocab_size
    prompts = torch.randint(low, high, (batch, prompt_len), generator=generator).tolist()
    peer = transformers_generate(model, prompts)

    def ours(count: int) -> object:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
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
        "model": args.model,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "prompt_len": args.prompt_len,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "processor": platform.machine(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "rows": rows,
    }


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = Parser(prog="python -m tinyengine.bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    sub = commands.add_parser("cpu", help="decode on the CPU beside transformers, float32")
    sub.set_defaults(command=cpu)
    sub.add_argument("--model", default=EMBEDDED_MODEL, metavar="DIR")
    sub.add_argument("--batch", type=at_least(1), nargs="+", default=[1, 32], metavar="N")
    sub.add_argument("--prompt-len", type=at_least(1), default=64, metavar="N")
    sub.add_argument("--new-tokens", type=at_least(2), default=64, metavar="N")
    sub.add_argument("--repeats", type=at_least(1), default=5, metavar="N")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark: a table for people, then one JSON object on the last line."""

    def program() -> int:
        args = build_parser().parse_args(argv)
        print(json.dumps(args.command(args)))
        return 0

    return exit_code(program)


if __name__ == "__main__":
    sys.exit(main())
