"""`python -m tinyengine.generate`: tell a story on the terminal, or serve a batch of prompts as text or JSON lines.

Text goes to stdout, everything else to stderr. Exit code 0; 2 after a mistake of the user's, told in one line; 130
after Ctrl-C, which keeps the text so far.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from tinyengine.cli import INTERRUPTED, USER_ERROR, Parser, at_least, exit_code, leave, one_line

if __name__ == "__main__":  # what follows imports PyTorch, which takes seconds in which nothing can be lost
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))

from tqdm import tqdm

from tinyengine.engine import Engine, StepOutput
from tinyengine.errors import RequestError
from tinyengine.loading import EMBEDDED_MODEL
from tinyengine.model.config import DTYPES, PRESETS
from tinyengine.request import Completion
from tinyengine.sampling import SamplingParams
from tinyengine.student import blame, student_parts

GRAPHS_HELP = (
    "decode through CUDA graphs, on the CPU through a slow stand-in; RUNG is a step of the memory ladder, see "
    "python -m tinyengine.memory (default: on with CUDA, else off)"
)


def build_parser() -> argparse.ArgumentParser:
    """The command line; its help is the manual."""
    parser = Parser(
        prog="python -m tinyengine.generate",
        description="Continue a prompt, or answer it with --chat. With several prompts, serve them as one batch.",
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    add("--file", metavar="F", help="read further prompts from a file, one a line; - for standard input")
    add(
        "--model",
        default=EMBEDDED_MODEL,
        metavar="DIR|PRESET",
        help=f"a folder in Hugging Face layout, or random weights in the shape of {', '.join(PRESETS)} "
        "(default: the embedded model, %(default)s)",
    )
    add(
        "--max-tokens",
        type=int,
        default=512,
        metavar="N",
        help="most tokens to generate (default: %(default)s)",
    )
    add("--temperature", type=float, default=0.8, metavar="T", help="0 is greedy (default: %(default)s)")
    add(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K likeliest tokens; 0 for all (the default)",
    )
    add(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the likeliest tokens that make up P",
    )
    add("--seed", type=int, metavar="S", help="make the output repeatable")
    add(
        "--device",
        default="auto",
        metavar="auto|cpu|cuda|mps",
        help="where to run (default: CUDA if there is one)",
    )
    add("--dtype", default="auto", metavar=f"auto|{'|'.join(DTYPES)}", help="default: float32 on the CPU")
    add("--graphs", default="auto", metavar="off|on|RUNG", help=GRAPHS_HELP)
    add("--max-graphs", type=at_least(1), metavar="N", help="keep at most N graphs (default: all that are needed)")
    add("--microbatches", type=int, choices=(1, 2), default=1, help="2: each graph as two halves on two streams")
    add("--student", metavar="DIR", help="run the parts ex01_*.py … in DIR that pass their graders, graphs on")
    add("--chat", action="store_true", help="wrap each prompt as a user's turn in the model's chat template")
    add("--json", action="store_true", help="print one JSON object a line for each prompt")
    add("--quiet", action="store_true", help="no progress bar and no line of statistics")
    return parser


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, then those of the file; blank lines of the file are passed over."""
    prompts = list(args.prompts)
    if args.file is not None:
        prompts += [line for line in _read_text(args.file).split("\n") if line.strip()]
    if not prompts:
        raise RequestError("there is no prompt: give some text, or --file with one prompt a line (see --help)")
    return prompts


def _read_text(path: str) -> str:
    """A file's text, or that of standard input for `-`; its line ends all become newlines."""
    try:
        if path != "-":
            with open(path, encoding="utf-8-sig") as file:
                return file.read()
        if sys.stdin is None:
            raise RequestError("cannot read prompts from '-': standard input is closed")
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig").read()
    except UnicodeDecodeError:
        raise RequestError(f"cannot read prompts from {path!r}: it is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise RequestError(f"cannot read prompts from {path!r}: {getattr(error, 'strerror', error)}") from None


@dataclass
class _Row:
    """A prompt and what became of it: still open, a completion, or an error."""

    prompt: str
    request_id: int | None = None
    completion: Completion | None = None
    error: str | None = None

    def as_json(self) -> str:
        """One line of `--json`."""
        done = self.completion
        if done is None or self.error:
            return json.dumps({"prompt": self.prompt, "error": self.error})
        return json.dumps(
            {
                "prompt": self.prompt,
                "text": done.text,
                "token_ids": done.token_ids,
                "finish_reason": done.finish_reason,
                "prompt_tokens": len(done.prompt_token_ids),
                "completion_tokens": len(done.token_ids),
            }
        )


class _Session:
    """One run of the program: an engine, its prompts, and whether Ctrl-C was pressed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.interrupted = False
        params = SamplingParams(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            max_tokens=args.max_tokens,
        )
        self.rows = [_Row(prompt) for prompt in read_prompts(args)]
        graphs, attention, parts = args.graphs, "auto", None
        if args.student is not None:  # the gather path calls both attention parts, on a GPU too
            graphs, attention = "on" if graphs == "auto" else graphs, "gather"
            parts = student_parts(args.student, self._tell)
        self.engine = Engine(
            args.model,
            device=args.device,
            dtype=args.dtype,
            max_num_seqs=min(256, len(self.rows)),
            graphs=graphs,
            max_graphs=args.max_graphs,
            microbatches=args.microbatches,
            attention=attention,
            parts=parts,
        )
        for row in self.rows:
            try:
                alone = len(self.rows) == 1 and not args.json
                row.request_id = self.engine.add_request(self._encoded(row.prompt), params, in_pieces=alone)
            except RequestError as error:
                row.error = one_line(error)

    def _tell(self, line: str) -> None:
        """A line on stderr, unless it shall be quiet."""
        if not self.args.quiet:
            print(line, file=sys.stderr, flush=True)

    def _encoded(self, prompt: str) -> str | list[int]:
        """The prompt as the engine takes it."""
        if not self.args.chat or not prompt:
            return prompt
        return self.engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])

    def interrupt(self, _signal: int, _frame: FrameType | None) -> None:
        """Ctrl-C: end after this step, so that nothing is torn; a second one ends at once."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.interrupted = True

    def outputs(self) -> Iterator[StepOutput]:
        """Step until all is done or Ctrl-C came; every row then has a completion or an error."""
        open_rows = {row.request_id: row for row in self.rows if row.request_id is not None}
        while open_rows and not self.interrupted:
            for output in self.engine.step():
                if output.completion:
                    row = open_rows.pop(output.request_id)
                    row.completion, row.error = output.completion, output.completion.error
                yield output
        for request_id, row in open_rows.items():
            assert request_id is not None
            row.completion = self.engine.abort(request_id)

    def stream(self) -> None:
        """A lone prompt: text as it becomes readable. The prompt comes first, since the text continues it."""
        (row,) = self.rows
        if row.request_id is not None and not self.args.chat:
            print(row.prompt, end="", flush=True)
        for output in self.outputs():
            print(output.text, end="", flush=True)
        if row.completion:
            print(flush=True)

    def batch(self) -> None:
        """All prompts together, behind a progress bar; results in the order of the prompts."""
        disable = self.args.quiet or len(self.rows) < 2
        with tqdm(total=len(self.rows), desc="generating", unit="prompt", disable=disable) as bar:
            bar.update(sum(row.error is not None for row in self.rows))
            for output in self.outputs():
                bar.update(output.completion is not None)
        for number, row in enumerate(self.rows, 1):
            if self.args.json:
                print(row.as_json())
            elif row.completion:
                print(f"[{number}] {'' if self.args.chat else row.prompt}{row.completion.text}\n")
        sys.stdout.flush()

    def report(self) -> None:
        """The failed prompts in text mode, one line each, and one line of statistics, on stderr."""
        if not self.args.json:
            for number, row in enumerate(self.rows, 1):
                if row.error:
                    where = f"prompt {number}: " if len(self.rows) > 1 else ""
                    print(f"tinyengine: {where}{row.error}", file=sys.stderr)
        if not self.args.quiet and any(row.completion for row in self.rows):
            print(self.statistics(), file=sys.stderr)

    def statistics(self) -> str:
        """TTFT, tokens a second of prefill and decode, and the most KV blocks that were in use at once."""
        stats = self.engine.stats
        firsts = [row.completion.time_to_first_token for row in self.rows if row.completion]
        seen = [first for first in firsts if first == first]
        parts = [f"TTFT {1000 * sum(seen) / len(seen):.0f} ms"] if seen else []
        for name, tokens, seconds in (
            ("prefill", stats.prefill_tokens, stats.prefill_seconds),
            ("decode", stats.decode_tokens, stats.decode_seconds),
        ):
            if tokens:
                parts.append(f"{name} {tokens} tokens at {tokens / seconds:,.0f}/s")
        if cached := self.engine.scheduler.num_cached_tokens:
            parts.append(f"{cached} tokens found in the cache")
        graphs = self.engine.runner.stats
        if graphs["captures"]:
            parts.append(f"graphs {graphs['captures']:.0f} captured, {graphs['replays']:.0f} replays")
        parts.append(f"KV blocks {stats.peak_blocks} of {self.engine.cache.num_blocks - 1}")
        return " | ".join(parts)


def run(argv: Sequence[str] | None) -> int:
    """Parse, generate, report; the exit code."""
    session = _Session(build_parser().parse_args(argv))
    previous = signal.signal(signal.SIGINT, session.interrupt)
    try:
        if len(session.rows) == 1 and not session.args.json:
            session.stream()
        else:
            session.batch()
    except Exception as error:
        if session.args.student and (told := blame(error, session.args.student)):
            raise RequestError(told) from error
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
    session.report()
    if session.interrupted:
        return INTERRUPTED
    return USER_ERROR if any(row.error for row in session.rows) else 0


def main(argv: Sequence[str] | None = None) -> int:
    """The program: `run`, with the user's mistakes told in one line each."""
    return exit_code(lambda: run(argv))


if __name__ == "__main__":
    leave(main())
