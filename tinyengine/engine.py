"""The engine: requests in, tokens out, one `step()` at a time.

A step asks the scheduler which sequences run, turns them into tensors, runs the model, and samples one token for each
sequence that has none pending: that is in the air then, a `Flight`. When it lands, its tokens are read, and the
sequences that are done end.
"""

from __future__ import annotations

import numbers
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tinyengine.batch import DecodeBatch, last_rows, prefill_inputs
from tinyengine.device import pick_device, upload
from tinyengine.errors import ConfigError, RequestError
from tinyengine.flight import Flight
from tinyengine.graphs.arena import Arena
from tinyengine.graphs.backend import Backend
from tinyengine.graphs.cuda import CudaBackend
from tinyengine.graphs.meter import Predictor
from tinyengine.graphs.rungs import GraphOptions
from tinyengine.graphs.runner import GraphRunner
from tinyengine.graphs.tape import TapeBackend
from tinyengine.interrupts import held_interrupts
from tinyengine.kv.blocks import BlockTable, blocks_needed
from tinyengine.kv.cache import KVCache, KVLayout, default_kv_bytes, fit_blocks
from tinyengine.kv.prefix import PrefixCache
from tinyengine.loading import EMBEDDED_MODEL, ModelSource, pick_dtype
from tinyengine.model.attention import MAX_FLASH_SEQUENCES, MAX_FOLD, GatherAttention, choose_attention
from tinyengine.model.transformer import Params, float_logits, forward
from tinyengine.parts import Parts
from tinyengine.request import Completion, Request, TokenLogprobs
from tinyengine.sampling import (
    NO_TOKEN,
    SamplingBatch,
    SamplingParams,
    penalize_repetition,
    sample,
    top_logprobs,
)
from tinyengine.scheduler import Scheduler, Step
from tinyengine.sequence import Sequence as TokenSequence

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class StepOutput:
    """One token of one request: the text that it made readable, and the completion if it was the last.

    token_id is None where the request ended with an error instead of a token.
    """

    request_id: int
    token_id: int | None
    text: str
    completion: Completion | None


@dataclass
class EngineStats:
    """Totals since the engine was made. Seconds are those spent inside `step`, some of them waiting for the device."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_steps: int = 0
    decode_seconds: float = 0.0
    waited_seconds: float = 0.0
    peak_blocks: int = 0

    def count(self, step: Step, seconds: float, blocks: int) -> None:
        """Add one step that took `seconds`, after which `blocks` blocks were in use."""
        if step.is_decode:
            self.decode_tokens += step.num_tokens
            self.decode_steps += 1
            self.decode_seconds += seconds
        else:
            self.prefill_tokens += step.num_tokens
            self.prefill_seconds += seconds
        self.peak_blocks = max(self.peak_blocks, blocks)


class Engine:
    """A language model that serves many requests at once from one paged KV cache.

    model: a folder in Hugging Face layout, a preset's name (random weights), or by default the embedded story
    model. device, dtype: see `pick_device`, `pick_dtype`. max_num_seqs: most sequences in one step. max_model_len:
    most tokens of one sequence, prompt and output; by default what the model and the cache allow. block_size:
    tokens in a KV block, by default 16, or 256 on CUDA, where small blocks starve the flash kernel. kv_bytes:
    size of the KV cache; see `default_kv_bytes`. max_num_batched_tokens: most tokens of one prefill step; longer
    prompts run in chunks. attention: `auto`, `gather` or `flash`. graphs: `off`, `on` or a rung of the memory ladder
    (graphs/rungs.py) for decode steps; on the CPU they are a stand-in that costs time, so `auto` is `on` on CUDA
    alone. max_graphs: at most so many at once; by default all that can be asked for. microbatches: 2 captures each
    step as two halves on two streams. parts: what to run in place of the engine's own.

    Raises ConfigError or CheckpointError if the model cannot be run as asked.
    """

    def __init__(
        self,
        model: str | Path = EMBEDDED_MODEL,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        block_size: int | None = None,
        kv_bytes: int | None = None,
        max_num_batched_tokens: int = 2048,
        attention: str = "auto",
        graphs: str = "auto",
        max_graphs: int | None = None,
        microbatches: int = 1,
        parts: Parts | None = None,
    ) -> None:
        _require_positive(
            max_num_seqs=max_num_seqs,
            max_graphs=max_graphs,
            microbatches=microbatches,
            max_model_len=max_model_len,
            block_size=block_size,
            kv_bytes=kv_bytes,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        self.parts = parts = parts or Parts()
        source = ModelSource.find(model)
        self.config, self.tokenizer = source.config, source.tokenizer
        if max_model_len is not None and max_model_len > self.config.max_position:
            raise ConfigError(f"max_model_len {max_model_len} is above the model's own {self.config.max_position}")
        self.device = pick_device(device)
        self.dtype = pick_dtype(dtype, self.device, self.config)
        length = max_model_len or self.config.max_position
        options = GraphOptions.choose(graphs, self.device.type, max_graphs, microbatches)
        params = source.load(self.device, self.dtype, length)
        size = block_size or (256 if self.device.type == "cuda" else 16)
        self.attention = choose_attention(
            attention,
            self.config,
            size,
            self.device,
            self.dtype,
            GatherAttention(parts.causal_attention, parts.decode_attention),
        )

        layout = KVLayout(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, size, self.dtype)
        if kv_bytes is None:
            reserve = self._step_bytes(max_num_seqs, max_num_batched_tokens, length, size)
            kv_bytes = default_kv_bytes(self.device, reserve)
            if self.device.type == "cuda":  # graphs come later, but their bytes are known now
                blocks = fit_blocks(layout, kv_bytes, max_num_seqs, length)
                plan = options.plan(max_num_seqs, blocks_needed(length, size), blocks, parts.capture_order)
                kv_bytes -= Predictor(self.config, layout, self.attention).estimate(plan)
        num_blocks = fit_blocks(layout, kv_bytes, max_num_seqs, length)
        self.max_model_len = _fitting_length(layout, num_blocks, length, max_model_len)
        cache = KVCache(layout, num_blocks, self.device)
        max_num_seqs = min(max_num_seqs, num_blocks - 1)  # a running sequence holds at least one block
        allocator = PrefixCache(parts.BlockAllocator(num_blocks))
        self.scheduler = Scheduler(
            allocator, max_num_seqs, max_num_batched_tokens, admit=parts.admit, preempt=parts.preempt
        )
        plan = options.plan(max_num_seqs, blocks_needed(self.max_model_len, size), num_blocks, parts.capture_order)
        arena = partial(Arena, parts.round_size, parts.segment_size)
        backend: Backend = CudaBackend(self.device) if self.device.type == "cuda" else TapeBackend(arena)
        self.runner = GraphRunner(params, cache, self.attention, backend, plan, parts=parts)
        self.stats = EngineStats()
        self._decode_batch = DecodeBatch(parts)
        self._flights: deque[Flight] = deque()
        self._runs_ahead = self.device.type == "cuda"  # elsewhere the host itself computes
        self._broke_off = False  # the last step, while the model ran
        self._left = self._accounted = 0.0  # when `step` was last left; up to when its time belongs to a step
        self._sampling: tuple[list[int], list[int], SamplingBatch] | None = None  # for whom, how long they were, what
        self._requests: dict[int, Request] = {}
        self._held: list[StepOutput] = []  # not handed out yet
        self._claimed: set[int] = set()  # requests whose outputs go to a `generate` or a `stream`
        self._next_id = 0

    @property
    def params(self) -> Params:
        """The weights; change them in place, since graphs hold their addresses, and call `reset_prefix_cache` then."""
        return self.runner.params

    @property
    def cache(self) -> KVCache:
        """The KV cache."""
        return self.runner.cache

    def warmup(self, progress: bool = True) -> None:
        """Capture all graphs now instead of when they are first needed, behind a bar on stderr that shows bytes."""
        self.runner.warmup(progress=progress)

    def reset_prefix_cache(self) -> None:
        """Forget what full blocks hold: with other weights it would be something else. Sequences keep their blocks."""
        self.scheduler.forget_all()

    # ---- requests ----

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None, in_pieces: bool = True) -> int:
        """Queue a prompt, text or token ids; returns the request's id. RequestError, and nothing queued, if it is bad.

        in_pieces: whether its step outputs show the text as it comes; else the last one shows it all, for less work.

        Text is encoded with the tokenizer's special tokens (a BOS, say); token ids are taken as they are.
        """
        ids, params = self._checked(prompt, sampling_params)
        table = BlockTable(self.scheduler.allocator, self.cache.block_size)
        request_id, self._next_id = self._next_id, self._next_id + 1
        seq = TokenSequence(request_id, ids, params, table, self.max_model_len)
        text = prompt if isinstance(prompt, str) else self.tokenizer.decode(ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        self._requests[request_id] = Request(text, seq, seed, self.tokenizer, in_pieces)
        self.scheduler.add(seq)
        return request_id

    def abort(self, request_id: int) -> Completion:
        """End a request now; what it has so far comes back with finish_reason `abort`."""
        if request_id not in self._requests:
            raise RequestError(f"there is no unfinished request {request_id}")
        self._take(lambda held: held == request_id)
        return self._end(self._requests[request_id], "abort")

    @property
    def has_unfinished(self) -> bool:
        """Whether another `step()` would do or return anything."""
        return not self.scheduler.is_idle or any(output.request_id not in self._claimed for output in self._held)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Serve all prompts together; completions in the order of the prompts.

        sampling_params: one for all, or one for each prompt. progress: a bar on stderr, by default for several prompts.
        RequestError if a prompt is bad, before any of them has run.
        """
        many = _as_list(prompts)
        each = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params] * len(many)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts and {len(each)} sampling params: give one for all or one for each")
        ids = self._add_all(many, each)
        bar = tqdm(
            total=len(ids),
            desc="generating",
            unit="seq",
            disable=not (len(ids) > 1 if progress is None else progress),
        )
        done: dict[int, Completion] = {}
        try:
            with bar:
                for output in self._outputs(ids):
                    if output.completion:
                        done[output.request_id] = output.completion
                        bar.update()
        finally:
            self._abort_unfinished(ids)
        return [done[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece as it becomes readable: never half a character.

        The request begins with the first piece that is asked for. Closing the iterator early aborts it.
        """
        self._checked(prompt, sampling_params)  # a bad prompt is told now, not with the first piece

        def pieces() -> Iterator[str]:
            request_id = self.add_request(prompt, sampling_params)
            try:
                for output in self._outputs([request_id]):
                    if output.completion and output.completion.error:
                        raise RequestError(output.completion.error)
                    if output.text:
                        yield output.text
            finally:
                self._abort_unfinished([request_id])

        return pieces()

    # ---- one step ----

    def step(self) -> list[StepOutput]:
        """Run one prefill or decode step; an output for each sequence whose token is there.

        What a `generate` or a `stream` waits for is computed too, and goes to it.

        On CUDA the device is given a step before the tokens of the one before are read, so that it need not wait for
        the host: those tokens go from step to step on the device, and an output comes one call later. A sequence that
        turns out to have ended then has one token too many in the making, which is dropped.

        A step that an error or Ctrl-C breaks off while the model runs is run again by the next call; before and after,
        Ctrl-C waits.
        """
        self._advance()
        return self._take(lambda request_id: request_id not in self._claimed)

    def _take(self, wanted: Callable[[int], bool]) -> list[StepOutput]:
        """Hand out what is held for these requests."""
        taken = [output for output in self._held if wanted(output.request_id)]
        self._held = [output for output in self._held if not wanted(output.request_id)]
        return taken

    def _advance(self) -> None:
        """Run a step, whose outputs are held; what the caller did since the last one is no step's time."""
        self._accounted += time.perf_counter() - self._left
        try:
            self._run_step()
        finally:
            self._left = time.perf_counter()

    @torch.inference_mode()
    def _run_step(self) -> None:
        ahead = (
            self._runs_ahead
            and not self._broke_off
            and all(seq.params.repetition_penalty == 1 for seq in self.scheduler.running)
        )
        with held_interrupts() as interrupts:
            if not ahead:
                self._land()  # a penalty wants to know every token, and so does what the step that broke off preempted
            step = self.scheduler.schedule()
            if step:
                self._broke_off = True
                with interrupts.delivered():
                    seqs, tokens, logprobs = self._next_tokens(step)
                self._broke_off = False
                flight = Flight(step, seqs, tokens, logprobs, self.scheduler.allocator.num_used)
                flight.take_off()
                self._flights.append(flight)
                for seq, _ in step.chunks:
                    self.scheduler.remember(seq)
            self._land(but=1 if step and ahead else 0)

    def _next_tokens(self, step: Step) -> tuple[list[TokenSequence], Tensor, list[TokenLogprobs | None]]:
        """Run the model over the step's tokens; the sequences that have none left, and a token for each of them."""
        seqs = [seq for (seq, _), done in zip(step.chunks, step.completes, strict=True) if done]
        if step.is_decode:
            coming = self._flights[-1].tokens if self._flights else None
            return seqs, *self._choose(self.runner.decode(self._decode_batch.inputs(step), coming), seqs)
        inputs = prefill_inputs(step, self.device, self.parts)
        hidden = forward(self.params, inputs, self.attention, self.cache, self.parts.rotations)
        if not seqs:
            return [], torch.empty(0, dtype=torch.int64), []
        rows = upload(last_rows(step), self.device)
        return seqs, *self._choose(float_logits(self.params, hidden[rows]), seqs)

    def _choose(self, logits: Tensor, seqs: list[TokenSequence]) -> tuple[Tensor, list[TokenLogprobs | None]]:
        """A token for each row, and its log-probabilities where they were asked for."""
        params = [seq.params for seq in seqs]
        penalized = penalize_repetition(logits, params, [seq.token_ids for seq in seqs])
        chosen = sample(penalized, self._sampling_batch(seqs), self.parts.sampling_weights)
        return chosen, _logprobs(logits, chosen.clamp(min=0), params)

    def _sampling_batch(self, seqs: list[TokenSequence]) -> SamplingBatch:
        """What these sequences ask of the sampler. It is made when they change: most steps have those of the last."""
        ids, lengths = [seq.request_id for seq in seqs], [len(seq) for seq in seqs]
        made_for, first, batch = self._sampling or ([], [], None)
        tokens = lengths[0] - first[0] if ids == made_for else 0
        if batch is None or ids != made_for or any(a - b != tokens for a, b in zip(lengths, first, strict=True)):
            seeds = [self._requests[request_id].seed for request_id in ids]
            batch, tokens = SamplingBatch.build([seq.params for seq in seqs], seeds, lengths, self.device), 0
            self._sampling = ids, lengths, batch
        return batch.later(tokens) if tokens else batch

    def _land(self, but: int = 0) -> None:
        """Read the tokens of the oldest steps, all but so many, and give them to the sequences that are still there."""
        while len(self._flights) > but:
            flight, waits = self._flights[0], time.perf_counter()
            tokens = flight.readback.read()
            self.stats.waited_seconds += time.perf_counter() - waits
            self._flights.popleft()
            for seq, token, logprobs in zip(flight.seqs, tokens, flight.logprobs, strict=True):
                seq.coming -= 1
                if seq.request_id in self._requests:
                    self._held.append(self._append(self._requests[seq.request_id], token, logprobs))
            accounted, self._accounted = self._accounted, time.perf_counter()
            self.stats.count(flight.step, self._accounted - accounted, flight.blocks)

    def _append(self, request: Request, token: int, logprobs: TokenLogprobs | None) -> StepOutput:
        """One more token of a request, and its end if this is it."""
        request_id = request.seq.request_id
        if token == NO_TOKEN:
            error = f"the model's numbers overflowed in {self.dtype}: use bfloat16 or float32, or check the weights"
            return StepOutput(request_id, None, "", self._end(request, "abort", error))
        shown = len(request.text)
        reason = request.append(token, logprobs, self.config.eos_token_ids)
        completion = self._end(request, reason) if reason else None
        return StepOutput(request_id, token, request.text[shown:], completion)

    def _end(self, request: Request, reason: str, error: str | None = None) -> Completion:
        """Take a request out, free its blocks, and say what became of it."""
        if reason == "abort":  # perhaps over numbers that are none, which the blocks' next owner must not find
            allocator = self.scheduler.allocator
            own = [block for block in request.seq.table.blocks if allocator.ref_count(block) == 1]
            allocator.forget(own)
            self.cache.erase(own)
        elif request.seq.coming:  # one token too many, with numbers that nobody will look at; it is in the last block
            self.cache.erase(request.seq.table.blocks[-1:])
        del self._requests[request.seq.request_id]
        self.scheduler.remove(request.seq)
        if self.scheduler.is_idle:
            self._flights.clear()  # nobody is left who could get their tokens
        return request.complete(reason, error)

    # ---- small helpers ----

    def _outputs(self, ids: Iterable[int]) -> Iterator[StepOutput]:
        """Step until these requests have ended, whose outputs go nowhere else; others' are held."""
        mine = set(ids)
        self._claimed |= mine
        while True:
            if outputs := self._take(mine.__contains__):
                yield from outputs
            elif mine.isdisjoint(self._requests):
                return
            else:
                self._advance()

    def _add_all(self, prompts: list[Prompt], params: Sequence[SamplingParams | None]) -> list[int]:
        """Queue all prompts, or none if one is bad."""
        ids: list[int] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(self.add_request(prompt, one, in_pieces=False))
        except RequestError as error:
            self._abort_unfinished(ids)
            raise RequestError(f"prompt {len(ids)}: {error}") from None
        return ids

    def _abort_unfinished(self, ids: list[int]) -> None:
        """Nobody waits for these requests any more: end them, and drop what is held for them."""
        for request_id in ids:
            if request_id in self._requests:
                self.abort(request_id)
        self._take(ids.__contains__)
        self._claimed.difference_update(ids)

    def _checked(self, prompt: Prompt, sampling_params: SamplingParams | None) -> tuple[list[int], SamplingParams]:
        """The prompt as token ids that this engine can serve, and its parameters, or RequestError."""
        if not isinstance(sampling_params, SamplingParams | None):
            raise RequestError(f"sampling params must be SamplingParams; got {sampling_params!r}")
        if prompt == "":
            raise RequestError("the prompt is empty: give it some text")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        if not ids:
            raise RequestError("the prompt has no tokens: give at least one token id")
        wrong = [token for token in ids if not 0 <= token < self.config.vocab_size]
        if wrong:
            why = "; tokenizer.json and config.json do not belong together" if isinstance(prompt, str) else ""
            raise RequestError(f"token id {wrong[0]} is not from 0 to {self.config.vocab_size - 1}{why}")
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, and prompt and answer together may have {self.max_model_len}: "
                "shorten the prompt, or raise max_model_len or kv_bytes if the model allows more"
            )
        return ids, sampling_params or SamplingParams()

    def _step_bytes(self, max_seqs: int, max_tokens: int, max_len: int, block_size: int) -> int:
        """An upper estimate of a step's intermediates: the widest layer of either kind, and the sampler's copies."""
        config, size = self.config, self.dtype.itemsize
        kv_row, q_row = 2 * config.num_kv_heads * config.head_dim, config.num_heads * config.head_dim
        # x, its norm, what attention adds and what the MLP adds; Q, Q rotated and what was attended; gate, up, product
        row = 4 * config.hidden_size + 3 * q_row + kv_row + 3 * config.intermediate_size + config.head_dim**2
        prefill = max_tokens * row + (max_tokens + max_len) * kv_row  # and K and V gathered for the flash kernel
        # Queries and results of each block with kv heads folded, and their shares of the softmax.
        blocks = min(max_seqs * blocks_needed(max_len, block_size), MAX_FLASH_SEQUENCES)
        decode = blocks * (2 * MAX_FOLD * q_row + 4 * MAX_FOLD * config.num_heads) + max_seqs * row
        # Logits, scaled, sorted, their int64 order (two), probabilities, their sums, and one to spare.
        return max(prefill, decode) * size + 8 * max_seqs * config.vocab_size * 4


def _fitting_length(layout: KVLayout, num_blocks: int, length: int, asked: int | None) -> int:
    """The most tokens of a sequence that the cache holds. ConfigError if that is less than what was asked for."""
    fitting = min(length, (num_blocks - 1) * layout.block_size)  # one block is the null block
    if asked is not None and fitting < asked:
        needed = (blocks_needed(asked, layout.block_size) + 1) * layout.bytes_per_block
        raise ConfigError(
            f"the KV cache holds {fitting} tokens, fewer than max_model_len {asked}: "
            f"kv_bytes must be at least {needed:,}, or max_model_len smaller"
        )
    return fitting


def _require_positive(**options: int | None) -> None:
    """ConfigError that names the first option that is given and not a whole number of 1 or more."""
    for name, value in options.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} must be a whole number of 1 or more; got {value!r}")


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Several prompts as a list; a lone string or a lone list of token ids is one prompt."""
    listed: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # an array or a tensor
    if isinstance(listed, str):
        return [listed]
    if not isinstance(listed, Iterable) or isinstance(listed, Mapping | AbstractSet | bytes | bytearray):
        raise RequestError(f"prompts must be text, token ids, or a list of these; got {type(prompts).__name__}")
    listed = list(listed)
    return [listed] if listed and isinstance(listed[0], numbers.Integral) else listed


def _token_ids(prompt: object) -> list[int]:
    """A prompt that is not text as a list of Python integers; RequestError if it is no such list."""
    listed = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise RequestError(f"a prompt must be text or a list of token ids; got {type(prompt).__name__}")
    for token in listed:
        if not isinstance(token, numbers.Integral) or isinstance(token, bool):
            raise RequestError(f"token id {token!r} is not a whole number")
    return [int(token) for token in listed]


def _logprobs(logits: Tensor, chosen: Tensor, params: list[SamplingParams]) -> list[TokenLogprobs | None]:
    """For each row what it asked for; one pass over the batch, for the largest number asked."""
    counts = [p.logprobs for p in params]
    most = max((count for count in counts if count is not None), default=None)
    if most is None:
        return [None] * len(params)
    picked, ids, values = (t.tolist() for t in top_logprobs(logits, chosen, most))
    rows = zip(counts, chosen.tolist(), picked, ids, values, strict=True)
    return [
        None if count is None else TokenLogprobs(token, logprob, dict(zip(top[:count], value[:count], strict=True)))
        for count, token, logprob, top, value in rows
    ]
