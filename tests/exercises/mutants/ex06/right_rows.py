"""Right: row by row, the most likely token first, until there is enough."""

import torch


def sampling_weights(logits, temperature, top_k, top_p, width):
    weights = torch.zeros_like(logits)
    for i, row in enumerate(logits):
        odds = ((row - row.max()) / temperature[i]).exp()
        k = int(top_k[i]) or len(row)
        likely = odds.argsort(descending=True)[:k].tolist()
        enough, reached = float(top_p[i] * odds[likely].sum()), 0.0
        for token in likely:
            weights[i, token] = odds[token]
            reached += float(odds[token])
            if reached >= enough and top_p[i] < 1:
                break
    return weights
