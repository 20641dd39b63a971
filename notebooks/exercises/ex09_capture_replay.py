"""Exercise 9: capture and replay over static buffers. Read notebooks/05_first_graph.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex09`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class CapturedStep:
    """A step that is captured once over static inputs, and replayed for every batch.

    A graph records kernels with the addresses that they read and write. So what changes from batch to batch must be
    copied into the tensors that the capture read, and the result is where the capture put it.

    The engine makes one for each batch size, once its libraries are warmed up, and then calls `run` in every decode
    step. What it gives to you:

    step: a function of no arguments, which reads the static inputs and returns logits `[bucket, vocab]`. Call it never
    yourself: the backend does, during the capture.
    inputs: has a method `load(batch)`, which copies a batch over the first `len(batch)` rows of the static inputs.
    backend: has a method `capture(step, pool, stream)`, which returns two things: a graph, with methods `replay()` and
    `reset()`, and the tensor that the step returned. After the capture that tensor has an address and no numbers yet:
    a capture computes nothing.
    pool, stream: pass them on to `capture`.

    Example, on the CPU, where the tape stands in for CUDA graphs:

        >>> class Inputs:
        ...     x = torch.zeros(4, 2)
        ...
        ...     def load(self, batch):
        ...         self.x[: len(batch)].copy_(batch)
        >>> inputs, backend = Inputs(), TapeBackend()  # from tinyengine.graphs.tape
        >>> captured = CapturedStep(lambda: inputs.x * 10, inputs, backend, backend.new_pool(), backend.stream(0))
        >>> captured.run(torch.tensor([[1.0, 2.0]]))
        tensor([[10., 20.]])
    """

    def __init__(self, step: Callable[[], Tensor], inputs: Any, backend: Any, pool: Any, stream: Any) -> None:
        """Capture the step, once."""
        raise NotImplementedError("Exercise 9: write CapturedStep; see notebooks/05_first_graph.ipynb")

    def run(self, batch: Any) -> Tensor:
        """Load a batch, replay, and return the logits of its rows: `[len(batch), vocab]`, the first of the bucket's.

        They are a view of what the graph writes, and the next replay overwrites it: a copy would cost memory and time
        in every step, and the caller uses them at once.
        """
        raise NotImplementedError("Exercise 9: write run; see notebooks/05_first_graph.ipynb")

    def reset(self) -> None:
        """Give up the graph, and what it alone held: reset it, and keep neither its logits nor a view of them.

        A tensor that is still held keeps its memory in the pool. Nobody calls `run` after this.
        """
        raise NotImplementedError("Exercise 9: write reset; see notebooks/05_first_graph.ipynb")
