"""Right: narrow, and an assignment to a slice."""

import math

import torch


class LogitsBuffer:
    def __init__(self, max_rows, vocab, device):
        self.tensor = torch.empty(max_rows, vocab, dtype=torch.float32, device=device)
        self.tensor[:] = math.nan

    def view(self, start, rows):
        return self.tensor.narrow(0, start, rows)

    def store(self, logits, start):
        end = start + len(logits)
        self.tensor[start:end] = logits
        return self.tensor[start:end]
