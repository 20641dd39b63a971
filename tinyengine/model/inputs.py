"""The tensors of one step: what a batch of sequences looks like to the model.

Names follow vLLM: `slot_mapping` says where each new token's K and V go, `block_table` and `context_lens`
where each sequence's earlier ones are. A slot is `block * block_size + offset`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class DecodeInputs:
    """One new token for each of `n` sequences.

    input_ids, positions, slot_mapping: int64 `[n]`; block_table: int32 `[n, width]`; context_lens: int32 `[n]`,
    the number of tokens of each sequence, the new one included.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    context_lens: Tensor

    @classmethod
    def allocate(cls, max_seqs: int, width: int, device: torch.device | str) -> DecodeInputs:
        """Inputs in which every row is padding: token 0 at position 0 of the null block."""
        return PackedInputs(max_seqs, width, device).inputs

    def view(self, bucket: int, width: int) -> DecodeInputs:
        """The first `bucket` rows and `width` block columns, as views of the same storages."""
        rows = self.rows(0, bucket)
        return replace(rows, block_table=rows.block_table[:, :width])

    def rows(self, start: int, stop: int) -> DecodeInputs:
        """Some of the rows, as views."""
        return DecodeInputs(*(tensor[start:stop] for tensor in self.tensors))

    @property
    def tensors(self) -> list[Tensor]:
        """All five, in the order of the fields."""
        return [getattr(self, field.name) for field in fields(self)]

    def to(self, device: torch.device | str) -> DecodeInputs:
        """The same on a device: these themselves, or a copy in one piece that nobody waits for."""
        if torch.device(device) == self.input_ids.device:
            return self
        rows, width = self.block_table.shape
        packed = PackedInputs(rows, width, device)
        packed.load(self)
        return packed.inputs

    def copy_(self, other: DecodeInputs) -> None:
        """Overwrite these tensors in place with others of the same shapes, wherever they are."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)


class PackedInputs:
    """Decode inputs that lie in one buffer, so that one copy moves them all.

    capacity: the rows that the layout has room for, of which the buffer holds the first `rows`, by default all. The
    block table comes last, so that fewer rows are the beginning of more.
    """

    def __init__(
        self, capacity: int, width: int, device: torch.device | str, rows: int | None = None, pin_memory: bool = False
    ) -> None:
        rows = capacity if rows is None else rows
        self.capacity, self.width = capacity, width
        words = 3 * capacity + -(-(capacity + rows * width) // 2)  # of 8 bytes; the int32 ones lie in pairs
        self.buffer = torch.zeros(words, dtype=torch.int64, device=device, pin_memory=pin_memory)
        ids, positions, slots = self.buffer[: 3 * capacity].view(3, capacity)[:, :rows]
        small = self.buffer[3 * capacity :].view(torch.int32)
        table = small[capacity : capacity + rows * width].view(rows, width)
        self.inputs = DecodeInputs(ids, positions, slots, table, small[:rows])
        self.inputs.context_lens.fill_(1)

    def load(self, inputs: DecodeInputs) -> None:
        """Overwrite the first rows with a batch of host tensors. The copy to a device is queued, and not waited for.

        It comes from pinned memory, which PyTorch's allocator does not hand out again before it was read.
        """
        rows, width = inputs.block_table.shape
        staged = PackedInputs(self.capacity, self.width, "cpu", rows, pin_memory=self.buffer.is_cuda)
        staged.inputs.view(rows, width).copy_(inputs)
        self.buffer[: len(staged.buffer)].copy_(staged.buffer, non_blocking=True)


@dataclass(frozen=True)
class PrefillInputs:
    """A ragged batch of prompts, or chunks of prompts, laid end to end: `n` new tokens of `s` sequences.

    input_ids, positions, slot_mapping: int64 `[n]`; block_table: int32 `[s, width]`.
    query_lens: new tokens of each sequence; context_lens: its tokens in the cache after this step, new ones
    included. Both are host integers: prefill is never captured, so it may look at them.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_table: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
