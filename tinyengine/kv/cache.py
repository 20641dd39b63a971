"""The tensors of the paged KV cache, and how many blocks fit.

One tensor `[layers, blocks, block_size, 2, kv_heads, head_dim]`: K and V of a token lie side by side, so a step
writes both with one `index_copy_` and reads both with one gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinyengine.device import free_bytes
from tinyengine.errors import ConfigError
from tinyengine.kv.blocks import blocks_needed


@dataclass(frozen=True)
class KVLayout:
    """What one block holds: block_size tokens, in every layer K and V of `kv_heads` heads of `head_dim` numbers."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers."""
        return self.num_layers * self.block_size * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """K and V of every block of every layer; a layer's part is `[blocks, block_size, 2, kv_heads, head_dim]`."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device | str) -> None:
        shape = (layout.num_layers, num_blocks, layout.block_size, 2, layout.kv_heads, layout.head_dim)
        size = num_blocks * layout.bytes_per_block
        try:
            self.data = _zeros(size, torch.device(device)).view(layout.dtype).view(shape)
        except (RuntimeError, MemoryError, ValueError) as error:  # as torch and NumPy say that it is too much
            raise ConfigError(f"no room on {device} for a KV cache of {size:,} bytes: make kv_bytes smaller") from error
        self.layers: tuple[Tensor, ...] = self.data.unbind(0)
        self.num_blocks = num_blocks
        self.block_size = layout.block_size

    @staticmethod
    def write(layer_cache: Tensor, slot_mapping: Tensor, kv: Tensor) -> None:
        """Store K and V of n tokens, kv `[n, 2 * kv_heads, head_dim]` (all K heads, then all V), at their slots."""
        layer_cache.view(-1, *kv.shape[1:]).index_copy_(0, slot_mapping, kv)

    def erase(self, blocks: Sequence[int]) -> None:
        """Fill blocks with zeros in every layer."""
        for block in blocks:
            self.data[:, block] = 0  # one by one: a list of them would be copied to the device, and waited for


def _zeros(size: int, device: torch.device) -> Tensor:
    """Zeros, not garbage: a masked position still enters a product, where a NaN would not stay masked.

    On the host NumPy asks the system for zeroed pages, which take no memory until they are first written.
    """
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(size, np.uint8))
    return torch.zeros(size, dtype=torch.uint8, device=device)


def default_kv_bytes(device: torch.device, reserve: int) -> int:
    """Bytes for the cache where the caller names none.

    On CUDA 90% of what is free now, with the weights loaded, less `reserve` for a step's intermediates. Elsewhere
    a quarter of the host's available memory: the laptop is doing other things too.
    """
    free = free_bytes(device)
    return int(0.9 * free) - reserve if device.type == "cuda" else free // 4


def fit_blocks(layout: KVLayout, kv_bytes: int, max_seqs: int, max_tokens: int) -> int:
    """How many blocks to allocate, the null block included: what `kv_bytes` holds, and no more than can be used.

    `max_seqs` sequences of `max_tokens` tokens are the most that can ever live at once, and the last one is admitted
    if each of the others could have another block. ConfigError if not even one
    block beside the null block fits.
    """
    usable = max_seqs * (blocks_needed(max_tokens, layout.block_size) + 1)
    fitting = min(kv_bytes // layout.bytes_per_block, usable)
    if fitting < 2:
        raise ConfigError(
            f"the KV cache has {max(kv_bytes, 0):,} bytes, and two blocks of {layout.block_size} tokens need "
            f"{2 * layout.bytes_per_block:,}: give it more with kv_bytes, or make block_size smaller"
        )
    return fitting
