"""The host side of a step: from sequences to the tensors that the model reads."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from tinyengine.device import upload
from tinyengine.kv.blocks import pad_block_tables, slot_mapping
from tinyengine.model.inputs import DecodeInputs, PrefillInputs
from tinyengine.scheduler import Step


def decode_inputs(step: Step) -> DecodeInputs:
    """A decode step as host tensors, one row a sequence. A token that is still coming is -1 - its row in its step."""
    seqs = [seq for seq, _ in step.chunks]
    table = pad_block_tables([seq.table.blocks for seq in seqs])
    positions = np.array([seq.num_computed for seq in seqs], np.int64)
    slots = slot_mapping(table, np.arange(len(seqs)), positions, seqs[0].table.block_size)
    return DecodeInputs(
        input_ids=torch.tensor(
            [seq.token_ids[-1] if not seq.coming else -1 - seq.coming_row for seq in seqs], dtype=torch.int64
        ),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(slots),
        block_table=torch.from_numpy(table),
        context_lens=torch.from_numpy((positions + 1).astype(np.int32)),
    )


def prefill_inputs(step: Step, device: torch.device) -> PrefillInputs:
    """The pending tokens of each chunk, laid end to end."""
    seqs = [seq for seq, _ in step.chunks]
    counts = [count for _, count in step.chunks]
    table = pad_block_tables([seq.table.blocks for seq in seqs])
    spans = [(seq.num_computed, seq.num_computed + count) for seq, count in step.chunks]
    rows = np.repeat(np.arange(len(seqs)), counts)
    positions = np.concatenate([np.arange(start, stop) for start, stop in spans])
    tokens = [token for seq, span in zip(seqs, spans, strict=True) for token in seq.token_ids[slice(*span)]]
    return PrefillInputs(
        input_ids=upload(torch.tensor(tokens), device),
        positions=upload(torch.from_numpy(positions), device),
        slot_mapping=upload(torch.from_numpy(slot_mapping(table, rows, positions, seqs[0].table.block_size)), device),
        block_table=upload(torch.from_numpy(table), device),
        query_lens=tuple(counts),
        context_lens=tuple(stop for _, stop in spans),
    )


def last_rows(step: Step) -> torch.Tensor:
    """Of a prefill step's flat batch the rows that end a sequence's pending tokens: only they predict, int64 `[m]`."""
    ends = itertools.accumulate(count for _, count in step.chunks)
    return torch.tensor([end - 1 for end, done in zip(ends, step.completes, strict=True) if done], dtype=torch.int64)
