"""Exercise 1: grouped-query causal attention. Read notebooks/01_transformer.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex01`.
"""

from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Grouped-query attention of one sequence's last t positions over its s positions (t <= s).

    The engine calls this when it reads a prompt: for a whole prompt t equals s, and for a later chunk of a long one
    the first s - t positions are context that was read before.

    q: `[t, heads, head_dim]`; k, v: `[s, kv_heads, head_dim]`, all float32; heads is a multiple of kv_heads, and query
    head h reads kv head `h // (heads // kv_heads)`. Query i stands at position `s - t + i`, and sees the keys of the
    positions 0 to `s - t + i`. Its scores are `q . k / sqrt(head_dim)`, its weights their softmax, and its result the
    weighted sum of the values. Returns `[t, heads, head_dim]`.

    Example: with t = s = 1 there is one key, whose weight is 1, so each head returns its kv head's value:

        >>> v = torch.tensor([[[1.0, 2.0]]])  # one position, one kv head, head_dim 2
        >>> causal_attention(torch.randn(1, 2, 2), torch.randn(1, 1, 2), v)
        tensor([[[1., 2.],
                 [1., 2.]]])

    Write the products and the softmax yourself: torch's own attention functions are what this exercise is about.
    """
    raise NotImplementedError("Exercise 1: write causal_attention; see notebooks/01_transformer.ipynb")
