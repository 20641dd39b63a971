"""The parts of the captured decode step that may be exchanged, one by one: a course has students write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tinyengine.graphs.lru import GraphCache
from tinyengine.graphs.rungs import choose_bucket
from tinyengine.graphs.static import CapturedStep, LogitsBuffer, pad
from tinyengine.model.transformer import rotations


@dataclass(frozen=True)
class GraphParts:
    """Functions and classes as values, each documented where it is written."""

    rotations: Callable[..., Any] = rotations
    choose_bucket: Callable[..., Any] = choose_bucket
    pad: Callable[..., Any] = pad
    CapturedStep: Callable[..., Any] = CapturedStep
    LogitsBuffer: Callable[..., Any] = LogitsBuffer
    GraphCache: Callable[..., Any] = GraphCache
