"""Right: all sequences at once, kv heads repeated."""

import torch


def decode_attention(q, layer_cache, blocks, mask, gathered):
    n, heads, dim = q.shape
    kv = layer_cache[blocks].reshape(n, -1, *layer_cache.shape[2:])
    keys, values = kv[:, :, 0], kv[:, :, 1]
    group = heads // keys.shape[2]
    keys, values = keys.repeat_interleave(group, 2), values.repeat_interleave(group, 2)
    scores = torch.einsum("nhd,nshd->nhs", q, keys) / dim**0.5 + mask[:, 0]
    return torch.einsum("nhs,nshd->nhd", scores.softmax(-1), values)
