"""What graders make inside the process of a student's file: backends, and small steps to capture there.

Whatever it returns is only what the process says; the graders compare it with what they know themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tinyengine.graphs.arena import Arena, Event
from tinyengine.graphs.backend import Backend
from tinyengine.graphs.cuda import CudaBackend
from tinyengine.graphs.meta import MetaBackend
from tinyengine.graphs.tape import TapeBackend
from tinyengine.model.inputs import DecodeInputs


def backend_of(kind: str) -> tuple[Backend, torch.device]:
    """Of the kind `tape` or `cuda`."""
    if kind == "tape":
        return TapeBackend(), torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    return CudaBackend(device), device


@torch.inference_mode()
def replayed(function: Callable[..., Tensor], first: list[Tensor], then: list[Tensor]) -> Tensor:
    """What a capture on the tape over the first arguments gives for the second ones, which are copied over them."""
    backend, static = TapeBackend(), [x.clone() for x in first]
    graph, result = backend.capture(lambda: function(*static), backend.new_pool(), backend.stream(0))
    for mine, other in zip(static, then, strict=True):
        mine.copy_(other)
    graph.replay()
    return result.clone()


def decode_inputs(*tensors: Tensor) -> DecodeInputs:
    """The five tensors of a decode step."""
    return DecodeInputs(*tensors)


class Scene:
    """A step `x @ weights * factor` of `rows` rows over a static x, and what captures it."""

    def __init__(self, kind: str, weights: Tensor, rows: int) -> None:
        self.backend, device = backend_of(kind)
        self.pool, self.stream = self.backend.new_pool(), self.backend.stream(0)
        self.factor, self.calls = 1.0, 0
        self._weights = weights.to(device)
        self._x = torch.zeros(rows, len(weights), device=device)
        self._result: Tensor | None = None
        with torch.inference_mode():
            self.backend.warm_up(lambda: self._x @ self._weights * 1.0, self.stream)

    def step(self) -> Tensor:
        """What is captured."""
        self.calls += 1
        self._result = self._x @ self._weights * self.factor
        return self._result

    def load(self, batch: Tensor) -> None:
        """Overwrite the first rows of x in place."""
        self._x[: len(batch)].copy_(batch)

    def change(self, factor: float) -> None:
        """Another factor, which a capture that was made before does not know."""
        self.factor = factor

    def poison(self) -> None:
        """NaN into what the step wrote last."""
        if self._result is not None:
            self._result.fill_(float("nan"))

    def forget(self) -> list[int]:
        """Let go of the result; what the pool then has reserved, and what is live in it."""
        self._result = None
        self.backend.release_memory()
        return list(self.backend.pool_bytes(self.pool))


def pool_with(round_size: Callable[[int], int], segment_size: Callable[[int], int], events: list[Any]) -> list[int]:
    """Reserved and live bytes of a pool with these rules after these events."""
    return list(Arena(round_size, segment_size).play(Event(*event) for event in events))


def growth(order: list[Any], columns: int) -> list[int]:
    """Bytes reserved by one pool after each of several captures of (rows, width) steps, in this order, predicted."""
    backend = MetaBackend()
    pool, graphs, reserved = backend.new_pool(), [], []
    for rows, width in order:
        x = torch.empty(rows, columns * width, device="meta")
        graph, _ = backend.capture(lambda x=x: ((x + 1) * 2).sum(-1), pool, 0)
        graphs.append(graph)
        reserved.append(backend.pool_bytes(pool).reserved)
    return reserved


@torch.inference_mode()
def live_logits(buffer: Any, kind: str, vocab: int, buckets: list[int], dim: int) -> list[Any]:
    """Bytes live in the pool after captures of LM heads that store into a LogitsBuffer, and a replay of each."""
    backend, device = backend_of(kind)
    shared = buffer(max(buckets), vocab, device)
    pool, held, live = backend.new_pool(), [], []
    weight = torch.arange(dim * vocab, dtype=torch.float32, device=device).view(dim, vocab) / vocab
    for bucket in buckets:
        x = torch.full((bucket, dim), 1.0 / bucket, device=device)
        run = lambda x=x: shared.store(x @ weight, 0)  # noqa: E731
        backend.warm_up(run, backend.stream(0))
        held.append(backend.capture(run, pool, backend.stream(0)))
        live.append(backend.pool_bytes(pool).live)
    results = []
    for graph, logits in held:
        graph.replay()
        results.append(logits.clone())
    return [live, results]
