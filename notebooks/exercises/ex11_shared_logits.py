"""Exercise 11: the shared logits buffer (SGLang #8579). Read notebooks/08_shared_logits.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex11`.
"""

import torch
from torch import Tensor


class LogitsBuffer:
    """One buffer that all graphs leave their logits in.

    Logits are `[rows, vocab]` in float32, and a vocabulary is large. If every graph keeps its own, the pool holds the
    sum of all buckets x vocab x 4 bytes. Only one graph runs at a time, so one buffer for the largest bucket is enough:
    a smaller graph uses its first rows.

    `tensor` is that buffer: float32 `[max_rows, vocab]` on the device, NaN until something is stored, so that a graph
    that writes nothing is noticed. Its address must never change: graphs have recorded it.

    Example:

        >>> buffer = LogitsBuffer(max_rows=3, vocab=2, device=torch.device("cpu"))
        >>> buffer.store(torch.tensor([[1.0, 2.0]]), start=1)
        tensor([[1., 2.]])
        >>> buffer.tensor
        tensor([[nan, nan],
                [1., 2.],
                [nan, nan]])
    """

    tensor: Tensor

    def __init__(self, max_rows: int, vocab: int, device: torch.device) -> None:
        raise NotImplementedError("Exercise 11: write LogitsBuffer; see notebooks/08_shared_logits.ipynb")

    def view(self, start: int, rows: int) -> Tensor:
        """The rows `start` to `start + rows - 1` of the buffer: a view, and no copy."""
        raise NotImplementedError("Exercise 11: write view; see notebooks/08_shared_logits.ipynb")

    def store(self, logits: Tensor, start: int) -> Tensor:
        """Copy logits `[n, vocab]` into the rows from `start` on, and return the view of these rows.

        They may be float16 or bfloat16, and are float32 from then on. Whoever holds the result holds the buffer alone:
        the logits that came in are free again after the copy.
        """
        raise NotImplementedError("Exercise 11: write store; see notebooks/08_shared_logits.ipynb")
