"""Right: query by query."""

import math

import torch


def causal_attention(q, k, v):
    out = []
    for i, row in enumerate(q):
        last = len(k) - len(q) + i + 1
        heads = []
        for h, query in enumerate(row):
            kv = h * k.shape[1] // q.shape[1]
            scores = (k[:last, kv] * query).sum(-1) / math.sqrt(q.shape[-1])
            weights = (scores - scores.max()).exp()
            heads.append((weights / weights.sum()) @ v[:last, kv])
        out.append(torch.stack(heads))
    return torch.stack(out)
