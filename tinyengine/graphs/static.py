"""Where graphs read their inputs and leave their logits: addresses that never change, and a step captured over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyengine.graphs.backend import Backend
from tinyengine.graphs.rungs import GraphPlan
from tinyengine.model.inputs import DecodeInputs, PackedInputs
from tinyengine.model.transformer import Params, lm_head


def pad(inputs: DecodeInputs, bucket: int, width: int) -> DecodeInputs:
    """A batch filled up to `bucket` rows and `width` block-table columns.

    A padded row is token 0 at position 0, its one token of context in the null block, which no sequence ever owns.
    """
    rows = (0, bucket - len(inputs.input_ids))
    columns = (0, width - inputs.block_table.shape[1])
    return DecodeInputs(
        input_ids=F.pad(inputs.input_ids, rows),
        positions=F.pad(inputs.positions, rows),
        slot_mapping=F.pad(inputs.slot_mapping, rows),
        block_table=F.pad(inputs.block_table, columns + rows),
        context_lens=F.pad(inputs.context_lens, rows, value=1),
    )


def fill_in(input_ids: Tensor, coming: Tensor | None) -> None:
    """Put tokens of the step before where ids below 0 stand for them: -1 - i for the i-th."""
    if coming is not None and len(coming):
        told = coming[(-1 - input_ids).clamp_(min=0)].clamp_(min=0)  # a row that got none goes on with any
        input_ids.copy_(torch.where(input_ids < 0, told, input_ids))


@dataclass(frozen=True)
class Batch:
    """A decode step for a graph: host tensors of the graph's shape, of which the first `rows` rows are sequences.

    coming: see `GraphRunner.decode`.
    """

    inputs: DecodeInputs
    rows: int
    coming: Tensor | None = None

    def __len__(self) -> int:
        return self.rows


class StaticInputs:
    """A set of static inputs, which graphs read the first rows and columns of."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self._packed = PackedInputs(rows, width, device)

    @property
    def buffer(self) -> Tensor:
        """The one tensor that they all lie in."""
        return self._packed.buffer

    def view(self, bucket: int, width: int) -> DecodeInputs:
        """See `DecodeInputs.view`."""
        return self._packed.inputs.view(bucket, width)

    def load(self, batch: Batch) -> None:
        """Overwrite the first rows in place."""
        self._packed.load(batch.inputs)
        fill_in(self._packed.inputs.input_ids[: len(batch)], batch.coming)


class LogitsBuffer:
    """One float32 `[max_rows, vocab]` that all graphs leave their logits in (SGLang #8579), NaN until they do."""

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        self.tensor = torch.full((max_rows, vocab), float("nan"), device=device)

    def view(self, start: int, rows: int) -> Tensor:
        """Rows `start` to `start + rows - 1`, at the same address each time; no copy."""
        return self.tensor[start : start + rows]

    def store(self, logits: Tensor, start: int) -> Tensor:
        """Copy `[n, vocab]` to the rows from `start` on; their view."""
        return self.view(start, len(logits)).copy_(logits)


class StaticBuffers:
    """What a rung lets graphs share: one set of inputs and one logits buffer, or one of their own for each."""

    def __init__(self, plan: GraphPlan, params: Params, logits_buffer: Callable[..., LogitsBuffer]) -> None:
        self.ending = plan.rung.logits
        self._device = params.device
        self._table_width = plan.table_width or max(plan.widths)
        largest = max(plan.buckets)
        self._inputs = self._allocate(largest) if plan.rung.shared_inputs else None
        self._logits = None if self.ending == "own" else logits_buffer(largest, params.config.vocab_size, self._device)

    @property
    def shared(self) -> list[Tensor]:
        """What exists once for all graphs."""
        return ([self._inputs.buffer] if self._inputs else []) + ([self._logits.tensor] if self._logits else [])

    def inputs(self, bucket: int) -> StaticInputs:
        """The set whose first rows and columns a graph reads: the one for all, or one of its own."""
        return self._inputs or self._allocate(bucket)

    def logits(self, params: Params, hidden: Tensor, start: int) -> Tensor:
        """Float32 logits of the rows from `start` on: the graph's own, copied into the buffer, or written there."""
        if self._logits is None:
            return lm_head(params, hidden).float()
        if self.ending == "direct":
            return lm_head(params, hidden, out=self._logits.view(start, len(hidden)))
        return self._logits.store(lm_head(params, hidden), start)

    def whole(self, parts: list[Tensor]) -> Tensor:
        """The logits of all rows, from those of their parts in order."""
        return torch.cat(parts) if self._logits is None else self._logits.view(0, sum(map(len, parts)))

    def _allocate(self, rows: int) -> StaticInputs:
        return StaticInputs(rows, self._table_width, self._device)


class Loadable(Protocol):
    """Static inputs, seen from a captured step."""

    def load(self, batch: Any) -> None:
        """Overwrite the first rows in place."""


class CapturedStep:
    """A step that was captured once over static inputs, and is replayed for every batch.

    step: a function of no arguments that reads the static inputs and returns logits `[bucket, vocab]`; libraries have
    been warmed up. inputs: whose `load(batch)` overwrites what the step reads. Raises what `Backend.capture` raises.
    """

    def __init__(self, step: Callable[[], Tensor], inputs: Loadable, backend: Backend, pool: Any, stream: Any) -> None:
        self.graph, self.logits = backend.capture(step, pool, stream)
        self._inputs = inputs

    def run(self, batch: Any) -> Tensor:
        """Logits `[len(batch), vocab]` of a batch: a view, which the next replay overwrites."""
        self._inputs.load(batch)
        self.graph.replay()
        return self.logits[: len(batch)]

    def reset(self) -> None:
        """Give up the graph and what it alone held. Nothing of it may be in flight."""
        self.graph.reset()
        del self.logits, self._inputs
