"""Right: four quarters, each a diagonal."""

import torch


def rotations(rope, positions):
    (cos, sin), (minus_sin, again) = (half.unbind(1) for half in rope.index_select(0, positions).unbind(1))
    upper = torch.cat([cos.diag_embed(), sin.diag_embed()], dim=2)
    lower = torch.cat([minus_sin.diag_embed(), again.diag_embed()], dim=2)
    return torch.cat([upper, lower], dim=1)
