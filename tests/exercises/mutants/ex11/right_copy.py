"""Right: a slice, and copy_."""

import torch


class LogitsBuffer:
    def __init__(self, max_rows, vocab, device):
        self.tensor = torch.full((max_rows, vocab), float("nan"), device=device)

    def view(self, start, rows):
        return self.tensor[start : start + rows]

    def store(self, logits, start):
        place = self.view(start, logits.shape[0])
        place.copy_(logits)
        return place
