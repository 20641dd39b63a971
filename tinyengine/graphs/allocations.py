"""What CUDA kernels allocate beside their outputs, in order: known to no meta tensor, read off an H200 (torch 2.11).

A prediction is as exact as this file. Where PyTorch's code says why, it is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten


class Free(NamedTuple):
    """What step number `step` took goes now; other scratch goes when the kernel ends."""

    step: int


Step = Tensor | int | Free  # an output, or the bytes of a scratch allocation, or the early end of one


def allocations(op: Any, args: tuple[Any, ...], outputs: Sequence[Tensor]) -> Iterator[Step]:
    """The allocations of one kernel; each output is among them once."""
    if op is aten.scaled_dot_product_attention.default:
        yield from _sdpa(args, outputs)
    elif op is aten._flash_attention_forward.default and args[5] == 1 and args[0].shape[1] > args[1].shape[1]:
        yield from _split_flash(args, outputs)
    elif op is aten.rms_norm.default:
        yield from _contiguous(args[0])
        yield from outputs
        yield args[0].numel() // math.prod(args[1]) * 4  # a float32 for each row, for a backward pass
    elif op is aten.roll.default:
        yield from _contiguous(args[0])
        yield from outputs
    else:
        yield from outputs


def _contiguous(x: Tensor) -> Iterator[int]:
    """A copy of an input that must be contiguous and is not."""
    if not x.is_contiguous():
        yield x.numel() * x.element_size()


def _sdpa(args: tuple[Any, ...], outputs: Sequence[Tensor]) -> Iterator[Step]:
    """A random seed and offset, and in half precision (cuDNN) the plan's workspace."""
    yield from (8, 8)
    yield from outputs
    if args[0].element_size() == 2:
        yield 256


def _split_flash(args: tuple[Any, ...], outputs: Sequence[Tensor]) -> Iterator[Step]:
    """One query a sequence and fewer kv heads: the kernel folds the group into rows, and splits the keys.

    ATen's flash_api.cpp, mha_varlen_fwd and set_params_splitkv. Folding copies Q before, and the output and Q after,
    unless there is one sequence; with one kv head there is nothing to reorder, and Q is only made contiguous.
    """
    out, lse, *rest = outputs
    query, key, max_k = args[0], args[1], args[6]
    sequences, heads, dim = query.shape
    copies = sequences > 1 and key.shape[1] > 1
    if copies or not query.is_contiguous():
        yield query.numel() * query.element_size()
    yield out.numel() * out.element_size() if copies else out
    yield lse
    tile = 256 if dim <= 64 else 128 if dim <= 128 else 64
    splits = _splits(sequences * key.shape[1] * -(-heads // key.shape[1] // 64), -(-max_k // tile))
    if splits > 1:
        rows = splits * sequences * heads
        yield rows * 4  # float32 log-sum-exps and outputs of the splits
        yield rows * 4 * (-(-dim // 32) * 32 if dim <= 192 else 256)
    yield from rest
    if copies:
        yield out
        yield Free(1)
        yield query.numel() * query.element_size()


def _splits(tiles: int, key_tiles: int, room: int = 2 * 132) -> int:
    """Into how many parts the keys go (ATen's num_splits_heuristic): the fewest that fill the device almost as well.

    tiles: of queries, which all splits repeat; room: tiles at once, two for each of an H200's 132 multiprocessors.
    """
    if tiles >= 0.8 * room:
        return 1
    shares = {}
    for splits in range(1, min(128, room, key_tiles) + 1):
        if splits == 1 or -(-key_tiles // splits) != -(-key_tiles // (splits - 1)):
            waves = tiles * splits / room
            shares[splits] = waves / math.ceil(waves)
    return next(splits for splits, share in shares.items() if share >= 0.85 * max(shares.values()))
