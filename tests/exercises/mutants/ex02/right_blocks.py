"""Right: each number of a turn times the identity, laid out as a matrix."""

import torch


def rotations(rope, positions):
    turns = rope[positions]
    n, pairs = turns.shape[0], turns.shape[-1]
    spread = turns.unsqueeze(-1) * torch.eye(pairs, dtype=rope.dtype, device=rope.device)
    return spread.permute(0, 1, 3, 2, 4).reshape(n, 2 * pairs, 2 * pairs)
