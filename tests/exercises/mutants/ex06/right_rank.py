"""Right: all rows at once, sorted, cut and put back."""

import torch


def sampling_weights(logits, temperature, top_k, top_p, width):
    vocab = logits.shape[-1]
    scaled = (logits - logits.max(-1, keepdim=True).values) / temperature[:, None]
    ordered, order = scaled.softmax(-1).sort(-1, descending=True)
    rank = torch.arange(vocab, device=logits.device)
    k = torch.where(top_k > 0, top_k, vocab)[:, None]
    ordered = ordered * (rank < k)
    ordered = ordered / ordered.sum(-1, keepdim=True)
    before = ordered.cumsum(-1) - ordered
    p = top_p[:, None]
    ordered = ordered * ((before < p) | (rank == 0) | (p >= 1))
    return torch.zeros_like(scaled).scatter(-1, order, ordered)
