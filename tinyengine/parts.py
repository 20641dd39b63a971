"""The parts of the engine that may be exchanged, one by one: a course has students write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinyengine.graphs.arena import round_size, segment_size
from tinyengine.graphs.parts import GraphParts
from tinyengine.graphs.rungs import capture_order
from tinyengine.kv.blocks import BlockAllocator, pad_block_tables, slot_mapping
from tinyengine.model.attention import causal_attention, decode_attention
from tinyengine.sampling import sampling_weights
from tinyengine.scheduler import admit, preempt


@dataclass(frozen=True)
class Parts(GraphParts):
    """Functions and classes as values, by the names under which they are documented; see also GraphParts."""

    causal_attention: Callable[..., Any] = causal_attention
    decode_attention: Callable[..., Any] = decode_attention
    slot_mapping: Callable[..., Any] = slot_mapping
    pad_block_tables: Callable[..., Any] = pad_block_tables
    BlockAllocator: Callable[..., Any] = BlockAllocator
    sampling_weights: Callable[..., Any] = sampling_weights
    admit: Callable[..., int] = admit
    preempt: Callable[..., int] = preempt
    round_size: Callable[..., int] = round_size
    segment_size: Callable[..., int] = segment_size
    capture_order: Callable[..., Any] = capture_order
