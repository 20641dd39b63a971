"""The host side of a step: from sequences to the tensors that the model reads."""

from __future__ import annotations

import itertools
import operator

import numpy as np
import torch

from tinyengine.device import upload
from tinyengine.kv.blocks import IntArray
from tinyengine.model.inputs import DecodeInputs, PrefillInputs
from tinyengine.parts import Parts
from tinyengine.scheduler import Step


class DecodeBatch:
    """The decode steps of one set of sequences as host tensors, one row a sequence.

    From one step to the next each sequence is a token longer, and perhaps a block: the block table is not made anew as
    long as the same sequences run in the same blocks. It is given out, and changed by the next call.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._blocks: list[list[int]] = []  # the sequences' own lists, which grow in place
        self._table = np.zeros((0, 0), np.int32)

    def inputs(self, step: Step) -> DecodeInputs:
        """The next step. A token that is still coming is -1 - its row in its step."""
        seqs = [seq for seq, _ in step.chunks]
        size = seqs[0].table.block_size
        positions = np.array([seq.num_computed for seq in seqs], np.int64)
        self._advance([seq.table.blocks for seq in seqs], positions, size)
        slots = self._parts.slot_mapping(self._table, np.arange(len(seqs)), positions, size)
        ids = [-1 - seq.coming_row if seq.coming else seq.token_ids[-1] for seq in seqs]
        return DecodeInputs(
            input_ids=torch.tensor(ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            block_table=torch.from_numpy(self._table),
            context_lens=torch.from_numpy((positions + 1).astype(np.int32)),
        )

    def _advance(self, blocks: list[list[int]], positions: IntArray, size: int) -> None:
        """Bring the block table up to date: the rows that got a block, or all of it."""
        same = len(blocks) == len(self._blocks) and all(map(operator.is_, blocks, self._blocks))
        begun = np.flatnonzero(positions % size == 0) if same else ()
        if not same or any(len(blocks[row]) > self._table.shape[1] for row in begun):
            self._blocks, self._table = blocks, self._parts.pad_block_tables(blocks)
            return
        for row in begun:
            self._table[row, len(blocks[row]) - 1] = blocks[row][-1]


def prefill_inputs(step: Step, device: torch.device, parts: Parts) -> PrefillInputs:
    """The pending tokens of each chunk, laid end to end."""
    seqs = [seq for seq, _ in step.chunks]
    counts = [count for _, count in step.chunks]
    table = parts.pad_block_tables([seq.table.blocks for seq in seqs])
    spans = [(seq.num_computed, seq.num_computed + count) for seq, count in step.chunks]
    rows = np.repeat(np.arange(len(seqs)), counts)
    positions = np.concatenate([np.arange(start, stop) for start, stop in spans])
    slots = parts.slot_mapping(table, rows, positions, seqs[0].table.block_size)
    tokens = [token for seq, span in zip(seqs, spans, strict=True) for token in seq.token_ids[slice(*span)]]
    return PrefillInputs(
        input_ids=upload(torch.tensor(tokens), device),
        positions=upload(torch.from_numpy(positions), device),
        slot_mapping=upload(torch.from_numpy(slots), device),
        block_table=upload(torch.from_numpy(table), device),
        query_lens=tuple(counts),
        context_lens=tuple(stop for _, stop in spans),
    )


def last_rows(step: Step) -> torch.Tensor:
    """Of a prefill step's flat batch the rows that end a sequence's pending tokens: only they predict, int64 `[m]`."""
    ends = itertools.accumulate(count for _, count in step.chunks)
    return torch.tensor([end - 1 for end, done in zip(ends, step.completes, strict=True) if done], dtype=torch.int64)
