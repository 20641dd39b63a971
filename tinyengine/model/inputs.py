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

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            input_ids=zeros(max_seqs, dtype=torch.int64),
            positions=zeros(max_seqs, dtype=torch.int64),
            slot_mapping=zeros(max_seqs, dtype=torch.int64),
            block_table=zeros(max_seqs, width, dtype=torch.int32),
            context_lens=torch.ones(max_seqs, dtype=torch.int32, device=device),
        )

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
        """The same on another device."""
        return DecodeInputs(*(tensor.to(device) for tensor in self.tensors))

    def copy_(self, other: DecodeInputs) -> None:
        """Overwrite these tensors in place with others of the same shapes, wherever they are."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine.copy_(theirs)


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
