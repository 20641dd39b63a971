"""Exercise 5: decode attention over blocks. Read notebooks/02_paged_kv_cache.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex05`.
"""

from torch import Tensor


def decode_attention(q: Tensor, layer_cache: Tensor, blocks: Tensor, mask: Tensor, gathered: Tensor) -> Tensor:
    """Grouped-query attention of one query of each of n sequences over the blocks that hold the sequence.

    q: `[n, heads, head_dim]`.
    layer_cache: `[num_blocks, block_size, 2, kv_heads, head_dim]`, one layer of the KV cache: `[b, o, 0]` are the keys
    of the token at offset o of block b, `[b, o, 1]` its values.
    blocks: int64 `[n * width]`, the block table laid flat: the first `width` are the blocks of the first sequence in
    the order of its positions, and so on. Blocks lie anywhere in the cache. Shorter sequences name some block again.
    mask: `[n, 1, 1, width * block_size]`: 0 where a position counts, -inf where it does not, since the sequence is
    shorter. It is added to the scores.
    gathered: `[n * width, block_size, 2, kv_heads, head_dim]`, room for a copy of the blocks, such as `out=` of
    `torch.index_select` fills. You need not use it.

    heads is a multiple of kv_heads, and query head h reads kv head `h // (heads // kv_heads)`. The scores are
    `q . k / sqrt(head_dim) + mask`, the weights their softmax over all positions, the result the weighted sum of the
    values. Returns `[n, heads, head_dim]`, in q's dtype.

    The engine calls this in every layer of a decode step, also while it captures one as a CUDA graph. A captured step
    must not read numbers back to the host: no `.item()`, no `.tolist()`, no loop over the values of `blocks`.

    Example: one sequence in block 2 of a cache of blocks of one token returns the values of that token:

        >>> cache = torch.randn(4, 1, 2, 1, 8)
        >>> q, room = torch.randn(1, 1, 8), torch.empty(1, 1, 2, 1, 8)
        >>> out = decode_attention(q, cache, torch.tensor([2]), torch.zeros(1, 1, 1, 1), room)
        >>> torch.equal(out[0, 0], cache[2, 0, 1, 0])
        True

    Write the products and the softmax yourself: torch's own attention functions are what this exercise is about.
    """
    raise NotImplementedError("Exercise 5: write decode_attention; see notebooks/02_paged_kv_cache.ipynb")
