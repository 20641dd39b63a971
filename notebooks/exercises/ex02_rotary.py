"""Exercise 2: the rotary embedding. Read notebooks/01_transformer.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex02`.
"""

from torch import Tensor


def rotations(rope: Tensor, positions: Tensor) -> Tensor:
    """The rotary embedding of each token as one matrix, so that `x @ matrix` turns a head's x `[head_dim]`.

    Dimensions i and i + head_dim / 2 make pair i, a point in a plane. At position p it is turned by an angle that grows
    with p: `(a, b)` becomes `(a cos - b sin, a sin + b cos)`. So a score of two turned heads depends on how far apart
    they are, and not on where.

    rope: float `[max_len, 2, 2, pairs]`, the turn of each pair at each position, `rope[p, :, :, i]` being
    `[[cos, sin], [-sin, cos]]`; positions: int64 `[n]`, in any order, some of them perhaps equal. Returns
    `[n, head_dim, head_dim]` in rope's dtype and on its device, where head_dim is 2 * pairs: entry `[t, r, c]` is what
    dimension r of token t's x adds to dimension c of the result. It is 0 but for four diagonals, one for each of the
    four numbers of a turn.

    The engine calls this once a step, also while it captures one as a CUDA graph. A captured step must not read numbers
    back to the host: no `.item()`, no `.tolist()`, no loop over the values of `positions`.

    Example, with one pair (head_dim 2), which position 1 turns by a quarter:

        >>> rope = torch.tensor([[[[1.0], [0.0]], [[0.0], [1.0]]], [[[0.0], [1.0]], [[-1.0], [0.0]]]])
        >>> rotations(rope, torch.tensor([1, 0]))
        tensor([[[ 0.,  1.],
                 [-1.,  0.]],
                [[ 1.,  0.],
                 [ 0.,  1.]]])
    """
    raise NotImplementedError("Exercise 2: write rotations; see notebooks/01_transformer.ipynb")
