"""Right: sequence by sequence and kv head by kv head, into the room that is given."""

import math

import torch


def decode_attention(q, layer_cache, blocks, mask, gathered):
    torch.index_select(layer_cache, 0, blocks, out=gathered)
    n, kv_heads = len(q), layer_cache.shape[3]
    out = []
    for sequence, kv, hidden in zip(q, gathered.chunk(n), mask, strict=True):
        keys, values = kv.flatten(0, 1).unbind(1)
        heads = []
        for queries, i in zip(sequence.chunk(kv_heads), range(kv_heads), strict=True):
            scores = queries @ keys[:, i].t() / math.sqrt(q.shape[-1]) + hidden[0]
            weights = (scores - scores.max(-1, keepdim=True).values).exp()
            heads.append(weights @ values[:, i] / weights.sum(-1, keepdim=True))
        out.append(torch.cat(heads))
    return torch.stack(out)
