"""A step that the device has been given, and whose tokens the host has not read yet."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tinyengine.request import TokenLogprobs
from tinyengine.scheduler import Step
from tinyengine.sequence import Sequence


class Readback:
    """Numbers on their way to the host: the copy is queued at once, and waited for when they are read."""

    def __init__(self, numbers: Tensor) -> None:
        self._host, self._copied = numbers, None
        if numbers.is_cuda:
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> list[int]:
        """The numbers, once they are there."""
        if self._copied:
            self._copied.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers


@dataclass
class Flight:
    """seqs: the sequences of the step that get a token; tokens: int64 `[len(seqs)]` on the device, in their order."""

    step: Step
    seqs: list[Sequence]
    tokens: Tensor
    logprobs: list[TokenLogprobs | None]
    blocks: int  # in use while it runs
    readback: Readback = field(init=False)

    def __post_init__(self) -> None:
        self.readback = Readback(self.tokens)

    def take_off(self) -> None:
        """Note what will be in the cache, and that these sequences have a token coming."""
        for seq, count in self.step.chunks:
            seq.num_computed += count
        for row, seq in enumerate(self.seqs):
            seq.coming, seq.coming_row = seq.coming + 1, row
