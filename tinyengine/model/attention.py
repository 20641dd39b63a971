"""Attention over the paged KV cache, in two ways with one signature.

`GatherAttention` copies each sequence's blocks into one dense tensor and lets SDPA do the rest: any device, and
the reference. `FlashAttention` (CUDA, sm80+, half precision) hands the blocks to PyTorch's built-in flash kernel
(Dao 2023) as many short sequences, and merges the partial results by their log-sum-exp as flash-decoding does:
no copy of K and V is made in a decode step, but for a batch of a few tokens, where a small one costs less.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyengine.device import upload
from tinyengine.errors import ConfigError
from tinyengine.kv.blocks import blocks_needed
from tinyengine.kv.cache import KVCache, KVLayout
from tinyengine.model.config import ModelConfig
from tinyengine.model.inputs import DecodeInputs, PrefillInputs
from tinyengine.tolerance import TOLERANCE, relative_error

# The flash kernel's grid has one row a sequence, and CUDA allows 65,535 there.
MAX_FLASH_SEQUENCES = 65_535
MAX_HEAD_DIM = 256  # of the flash kernel
MAX_FOLD = 4  # kv heads taken as one
FEW_TOKENS = 2_048  # a copy of so many tokens costs less time than merging blocks does


class Attention(Protocol):
    """How a step's queries meet the cache. `plan` runs once a step, the other two once a layer.

    q: `[n, heads, head_dim]`, already rotated; layer_cache: `[blocks, block_size, 2, kv_heads, head_dim]`, with
    this step's K and V already written. Both return `[n, heads, head_dim]`.
    """

    name: str

    def plan(self, inputs: DecodeInputs | PrefillInputs, cache: KVCache) -> Any:
        """What all layers share. For decode: tensors only, no value read back to the host."""

    def decode(self, q: Tensor, layer_cache: Tensor, plan: Any) -> Tensor:
        """One query for each sequence."""

    def prefill(self, q: Tensor, layer_cache: Tensor, plan: Any) -> Tensor:
        """Several queries for each sequence, each seeing its own position and those before it."""


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped-query attention of one sequence's last t positions over its s positions (t <= s).

    q: `[t, heads, head_dim]`; k, v: `[s, kv_heads, head_dim]`; heads is a multiple of kv_heads, and query head h
    reads kv head `h // (heads // kv_heads)`. The last query sees every key, the one before it all but the last.
    Returns `[t, heads, head_dim]`. SDPA's own `is_causal` aligns the first query with the first key, which is wrong
    as soon as there is context, hence the mask.
    """
    t, s = q.shape[0], k.shape[0]
    mask = None if t == s else torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out[0].transpose(0, 1)


def decode_attention(q: Tensor, layer_cache: Tensor, blocks: Tensor, mask: Tensor, gathered: Tensor) -> Tensor:
    """One query of each of n sequences over the blocks of its block table.

    q: `[n, heads, head_dim]`; layer_cache: `[blocks, block_size, 2, kv_heads, head_dim]`; blocks: int64
    `[n * width]`, the block table laid flat; mask: `[n, 1, 1, width * block_size]` in q's dtype, 0 where a position
    counts and -inf where not; gathered: where the blocks are copied to. The query heads that share a kv head become
    query rows of one head, so K and V are not repeated. Returns `[n, heads, head_dim]`.
    """
    n = q.shape[0]
    kv = torch.index_select(layer_cache, 0, blocks, out=gathered).view(n, -1, *layer_cache.shape[2:])
    k, v = kv.transpose(1, 3).unbind(2)  # each [n, kv_heads, width * block_size, head_dim]
    grouped = q.view(n, k.shape[1], -1, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask).flatten(1, 2)


@dataclass(frozen=True)
class GatherDecodePlan:
    """See `decode_attention`."""

    blocks: Tensor
    mask: Tensor
    gathered: Tensor  # [n * width, block_size, 2, kv_heads, head_dim]: room for the copies, of one layer after another


@dataclass(frozen=True)
class GatherPrefillPlan:
    """For each sequence its rows in the batch, the blocks that hold it, and its number of cached tokens."""

    sequences: tuple[tuple[slice, Tensor, int], ...]


class GatherAttention:
    """Dense copies of the blocks, then SDPA."""

    name = "gather"

    def __init__(
        self,
        causal_attention: Callable[..., Tensor] = causal_attention,
        decode_attention: Callable[..., Tensor] = decode_attention,
    ) -> None:
        self._causal_attention, self._decode_attention = causal_attention, decode_attention

    def plan(self, inputs: DecodeInputs | PrefillInputs, cache: KVCache) -> GatherDecodePlan | GatherPrefillPlan:
        """Flatten the block table and mask what lies beyond each context; for prefill, cut the batch by sequence."""
        if isinstance(inputs, DecodeInputs):
            table, lens = inputs.block_table, inputs.context_lens.unsqueeze(1)
            positions = torch.arange(table.shape[1] * cache.block_size, device=table.device)
            beyond = positions >= lens
            # What is masked is read all the same, and a NaN stays one: so no column shows the null block to a
            # sequence, since padded rows write there, but its own first block.
            table = torch.where(beyond[:, :: cache.block_size], table[:, :1], table)
            mask = torch.zeros(beyond.shape, dtype=cache.data.dtype, device=beyond.device)
            mask.masked_fill_(beyond, float("-inf"))  # SDPA would turn a bool mask into this in every layer
            gathered = cache.data.new_empty(table.numel(), *cache.data.shape[2:])
            return GatherDecodePlan(table.flatten().long(), mask[:, None, None], gathered)
        ends = itertools.accumulate(inputs.query_lens)
        rows = [slice(end - length, end) for end, length in zip(ends, inputs.query_lens, strict=True)]
        widths = [blocks_needed(context, cache.block_size) for context in inputs.context_lens]
        tables = [table[:width] for table, width in zip(inputs.block_table.long(), widths, strict=True)]
        return GatherPrefillPlan(tuple(zip(rows, tables, inputs.context_lens, strict=True)))

    def decode(self, q: Tensor, layer_cache: Tensor, plan: GatherDecodePlan) -> Tensor:
        """See `Attention.decode`."""
        return self._decode_attention(q, layer_cache, plan.blocks, plan.mask, plan.gathered)

    def prefill(self, q: Tensor, layer_cache: Tensor, plan: GatherPrefillPlan) -> Tensor:
        """One SDPA call a sequence: measured faster than one padded batch, and nothing is padded."""
        out = torch.empty_like(q)
        for rows, blocks, context in plan.sequences:
            k, v = layer_cache.index_select(0, blocks).flatten(0, 1)[:context].unbind(1)
            out[rows] = self._causal_attention(q[rows], k, v)
        return out


@dataclass(frozen=True)
class FlashBlocksPlan:
    """Every block of every sequence as one short sequence of the flash kernel, several kv heads folded into one."""

    queries: Tensor  # [n, width, fold, group, kv_heads / fold, fold, head_dim], zeros where the two folds differ
    cu_q: Tensor  # int32 [n * width + 1]: where each block's query rows begin
    cu_k: Tensor  # int32 [n * width + 1]: the first slot of each block, in any order
    used: Tensor  # int32 [n * width]: how many slots of the block count
    empty: Tensor  # bool [1, n, width, 1, 1]: blocks with none


@dataclass(frozen=True)
class FlashGatheredPlan:
    """A small batch: its blocks are copied, and the kernel splits each sequence by itself."""

    blocks: Tensor  # int64 [n * width], the block table laid flat
    cu_q: Tensor  # int32 [n + 1]
    cu_k: Tensor  # int32 [n + 1]
    used: Tensor  # int32 [n]
    max_k: int


@dataclass(frozen=True)
class FlashPrefillPlan:
    """The slots of every sequence's whole context, end to end, and where each begins."""

    slots: Tensor  # int64 [sum of context_lens]
    cu_q: Tensor  # int32 [s + 1]
    cu_k: Tensor  # int32 [s + 1]
    max_q: int
    max_k: int


class FlashAttention:
    """PyTorch's flash kernel over the blocks where they lie. `reason_against` says whether it can run.

    The kernel computes a tile of 64 or more query rows, and one token of one sequence fills only as many as query
    heads share a kv head. So kv heads are folded: several become one of up to 256 dimensions, which in the cache is a
    view, and each query is zero in the dimensions that are not its own head's. The bytes read are the same, the tiles
    are smaller and fewer. Measured on an H200, 256 sequences of 1,024 tokens, heads 16/8 of 128 dimensions: 0.29 ms
    instead of 0.49, where the bytes alone take 0.26.
    """

    name = "flash"

    def __init__(self, config: ModelConfig) -> None:
        self._group = config.num_heads // config.num_kv_heads
        self._kv_heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._fold = max(
            f for f in range(1, MAX_FOLD + 1) if config.num_kv_heads % f == 0 and f * config.head_dim <= MAX_HEAD_DIM
        )
        self._gather = GatherAttention()

    @staticmethod
    def reason_against(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this path cannot run here, or None if it can. On `meta`: on no device at all."""
        if device.type not in ("cuda", "meta"):
            return "it needs a CUDA device"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
            return "the flash kernel needs compute capability 8.0 or more"
        if dtype not in (torch.float16, torch.bfloat16):
            return f"the flash kernel takes float16 and bfloat16, not {dtype}"
        if config.head_dim % 8 or config.head_dim > MAX_HEAD_DIM:
            return f"head_dim {config.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
        return None

    def plan(self, inputs: DecodeInputs | PrefillInputs, cache: KVCache) -> Any:
        """Describe the blocks as sequences of the kernel. A batch too large for its grid is planned for `gather`."""
        if isinstance(inputs, PrefillInputs):
            return self._plan_prefill(inputs, cache)
        n, width = inputs.block_table.shape
        if n * width > MAX_FLASH_SEQUENCES:
            return self._gather.plan(inputs, cache)
        if self._group > 1 and n * width * cache.block_size <= FEW_TOKENS:
            return self._plan_gathered(inputs, cache)
        return self._plan_blocks(inputs, cache)

    def _plan_blocks(self, inputs: DecodeInputs, cache: KVCache) -> FlashBlocksPlan:
        n, width = inputs.block_table.shape
        size, device, fold = cache.block_size, inputs.block_table.device, self._fold
        queries = (n, width, fold, self._group, self._kv_heads // fold, fold, self._head_dim)
        rows = fold * self._group
        starts = (inputs.block_table * size).flatten()
        first = torch.arange(0, width * size, size, device=device, dtype=torch.int32)
        used = (inputs.context_lens.unsqueeze(1) - first).clamp(0, size)
        return FlashBlocksPlan(
            queries=torch.zeros(queries, dtype=cache.data.dtype, device=device),
            cu_q=torch.arange(0, (n * width + 1) * rows, rows, device=device, dtype=torch.int32),
            cu_k=torch.cat([starts, starts[-1:] + size]),
            used=used.flatten(),
            empty=(used == 0)[None, :, :, None, None],
        )

    def _plan_gathered(self, inputs: DecodeInputs, cache: KVCache) -> FlashGatheredPlan:
        n, width = inputs.block_table.shape
        device, max_k = inputs.block_table.device, width * cache.block_size
        return FlashGatheredPlan(
            blocks=inputs.block_table.flatten().long(),
            cu_q=torch.arange(n + 1, device=device, dtype=torch.int32),
            cu_k=torch.arange(0, (n + 1) * max_k, max_k, device=device, dtype=torch.int32),
            used=inputs.context_lens,
            max_k=max_k,
        )

    def decode(
        self, q: Tensor, layer_cache: Tensor, plan: FlashBlocksPlan | FlashGatheredPlan | GatherDecodePlan
    ) -> Tensor:
        """See `Attention.decode`."""
        if isinstance(plan, GatherDecodePlan):
            return self._gather.decode(q, layer_cache, plan)
        if isinstance(plan, FlashBlocksPlan):
            return self._decode_blocks(q, layer_cache, plan)
        k, v = layer_cache[plan.blocks].flatten(0, 1).unbind(1)
        return self._flash(q, k, v, plan.cu_q, plan.cu_k, 1, plan.max_k, used=plan.used)[0]

    def _decode_blocks(self, q: Tensor, layer_cache: Tensor, plan: FlashBlocksPlan) -> Tensor:
        """Partial attention over each block, then the average weighted by each block's share of the softmax."""
        n, width, fold, group, folded_heads, _, dim = plan.queries.shape
        own = q.view(n, 1, folded_heads, fold, group, dim).permute(0, 1, 4, 2, 5, 3)  # [n, 1, group, heads, dim, fold]
        plan.queries.diagonal(0, 2, 5).copy_(own)
        rows = plan.queries.view(-1, folded_heads, fold * dim)
        k, v = layer_cache.view(-1, 2, folded_heads, fold * dim).unbind(1)
        block_size = layer_cache.shape[1]
        out, lse = self._flash(rows, k, v, plan.cu_q, plan.cu_k, fold * group, block_size, used=plan.used)
        parts = out.view(plan.queries.shape).diagonal(0, 2, 5)  # [n, width, group, heads, dim, fold]
        # An empty block's output is 0, but its log-sum-exp is not -inf: say so before it weighs anything.
        share = lse.view(folded_heads, n, width, fold, group).masked_fill_(plan.empty, float("-inf")).softmax(2)
        parts.mul_(share.permute(1, 2, 4, 0, 3).unsqueeze(-2))
        merged = torch.empty(n, folded_heads, fold, group, dim, dtype=q.dtype, device=q.device)
        torch.sum(parts, 1, out=merged.permute(0, 3, 1, 4, 2))
        return merged.view(n, -1, dim)

    def _plan_prefill(self, inputs: PrefillInputs, cache: KVCache) -> FlashPrefillPlan:
        """Where each context's slots are. Host arithmetic is allowed here: prefill is never captured."""
        device, size = inputs.block_table.device, cache.block_size
        contexts = torch.tensor(inputs.context_lens)
        position = upload(torch.cat([torch.arange(length) for length in inputs.context_lens]), device)
        sequence = upload(torch.repeat_interleave(torch.arange(len(contexts)), contexts), device)
        slots = inputs.block_table[sequence, position // size].long() * size + position % size
        offsets = [list(itertools.accumulate(x, initial=0)) for x in (inputs.query_lens, inputs.context_lens)]
        cu_q, cu_k = upload(torch.tensor(offsets, dtype=torch.int32), device)
        return FlashPrefillPlan(slots, cu_q, cu_k, max(inputs.query_lens), max(inputs.context_lens))

    def prefill(self, q: Tensor, layer_cache: Tensor, plan: FlashPrefillPlan) -> Tensor:
        """One ragged call over all sequences, causal from the last key back, K and V gathered into one row each."""
        k, v = layer_cache.flatten(0, 1).index_select(0, plan.slots).unbind(1)
        return self._flash(q, k, v, plan.cu_q, plan.cu_k, plan.max_q, plan.max_k, causal=True)[0]

    def _flash(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        causal: bool = False,
        used: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The built-in kernel on ragged sequences: output like q, and the log-sum-exp `[heads, rows of q]`.

        With `used` given, `cu_k[i]` is only where sequence i's keys start and `used[i]` how many there are, so the
        sequences need not touch nor be in order (torch: `seqused_k`).
        """
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=self._head_dim**-0.5, seqused_k=used
        )
        return out, lse


def choose_attention(
    name: str,
    config: ModelConfig,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    gather: GatherAttention | None = None,
) -> Attention:
    """The attention path called `name`, or for `auto` the flash path where it runs and agrees with gather.

    gather: the gather path to take, by default one of the engine's own parts.

    A flash path that cannot run or disagrees is an error where it was asked for by name. Under `auto`, one that
    should run but fails its check gives one warning, and gather serves.
    """
    if name not in ("auto", "gather", "flash"):
        raise ConfigError(f"there is no attention path {name!r}: choose auto, gather or flash")
    reason = FlashAttention.reason_against(config, device, dtype)
    if name == "flash" and reason:
        raise ConfigError(f"attention 'flash' cannot run: {reason}; use attention='gather'")
    gather = gather or GatherAttention()
    if name == "gather" or reason:
        return gather
    failure = _flash_failure(config, block_size, device, dtype)
    if failure is None:
        return FlashAttention(config)
    if name == "flash":
        raise ConfigError(f"attention 'flash' failed its check against gather: {failure}")
    warnings.warn(f"the flash attention path failed its check and gather is used: {failure}", stacklevel=2)
    return gather


@torch.inference_mode()
def _flash_failure(config: ModelConfig, block_size: int, device: torch.device, dtype: torch.dtype) -> str | None:
    """Run both paths on a small shuffled ragged batch; what is wrong with flash, or None."""
    try:
        for inputs, cache, q in _check_batches(config, block_size, device, dtype):
            outputs = []
            paths: tuple[Attention, ...] = (GatherAttention(), FlashAttention(config))
            for attention in paths:
                attend = attention.decode if isinstance(inputs, DecodeInputs) else attention.prefill
                outputs.append(attend(q, cache.layers[0], attention.plan(inputs, cache)))
            error = relative_error(outputs[1], outputs[0])
            if not error <= TOLERANCE[dtype]:
                return f"{type(inputs).__name__}: relative error {error:.2e}, at most {TOLERANCE[dtype]:.0e} allowed"
    except (RuntimeError, TypeError) as error:
        return str(error).splitlines()[0]
    return None


def _check_batches(
    config: ModelConfig, block_size: int, device: torch.device, dtype: torch.dtype
) -> list[tuple[DecodeInputs | PrefillInputs, KVCache, Tensor]]:
    """Three sequences over shuffled blocks of random K and V: a decode step, a wider one, and a prefill step."""
    lens, width = (1, min(block_size + 3, 2 * block_size), 2 * block_size), 2
    layout = KVLayout(1, config.num_kv_heads, config.head_dim, block_size, dtype)
    cache = KVCache(layout, len(lens) * width + 1, device)
    generator = torch.Generator(device).manual_seed(0)
    cache.data.normal_(generator=generator)
    table = torch.tensor([[3, 5], [6, 1], [2, 4]], dtype=torch.int32, device=device)
    wide = F.pad(table, (0, FEW_TOKENS // block_size))  # too wide to be gathered
    unused = torch.zeros(0, dtype=torch.int64, device=device)  # attention looks at neither ids, positions nor slots
    context = torch.tensor(lens, dtype=torch.int32, device=device)
    chunks = (1, 2, 2)
    batches = (
        (DecodeInputs(unused, unused, unused, table, context), len(lens)),
        (DecodeInputs(unused, unused, unused, wide, context), len(lens)),
        (PrefillInputs(unused, unused, unused, table, chunks, lens), sum(chunks)),
    )
    shape = (config.num_heads, config.head_dim)
    return [
        (inputs, cache, torch.randn(n, *shape, generator=generator, device=device, dtype=dtype))
        for inputs, n in batches
    ]
