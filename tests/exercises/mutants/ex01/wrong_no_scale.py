"""Wrong, found by test_a_prompt_with_as_many_kv_heads_as_heads: scores are not divided by the root of head_dim."""

import torch


def causal_attention(q, k, v):
    t, s = len(q), len(k)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, k)
    hidden = torch.ones(t, s, dtype=torch.bool).triu(s - t + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, v)
