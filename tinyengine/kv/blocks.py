"""Which blocks of the KV cache belong to whom: the allocator, each sequence's block table, and the slot mapping.

After vLLM's PagedAttention (Kwon et al. 2023). Block 0 is the null block: padding points at it, and the
allocator never hands it out. Everything here is plain host arithmetic; no tensor is touched.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tinyengine.errors import BlockError

NULL_BLOCK = 0
IntArray = npt.NDArray[np.int64]


def blocks_needed(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens; the last may be partly filled."""
    return -(-num_tokens // block_size)


def pad_block_tables(tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """The block tables of n sequences as one matrix, int32 `[n, width]`, padded with the null block."""
    padded = np.full((len(tables), max(map(len, tables))), NULL_BLOCK, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded


def slot_mapping(
    block_table: npt.NDArray[np.int32], rows: IntArray, positions: IntArray, block_size: int
) -> npt.NDArray[np.int64]:
    """The slot of each token, int64 `[m]`: token i is at `positions[i]` of the sequence in row `rows[i]`.

    Position p lives in its sequence's block number `p // block_size`, at offset `p % block_size`; its slot is
    `block * block_size + offset`. With block_size 4 and a row [7, 2], positions 3 and 4 have slots 31 and 8.
    BlockError where a position has no block: a token written to the null block would be lost in silence.
    """
    index = positions // block_size
    if index.size and (index.min() < 0 or index.max() >= block_table.shape[1]):
        raise BlockError(f"a position is outside the {block_table.shape[1]} blocks of its table: grow the table first")
    blocks = block_table[rows, index].astype(np.int64)
    if (blocks == NULL_BLOCK).any():
        raise BlockError("a position has no block: grow the sequence's table first, and do not use it after release")
    return blocks * block_size + positions % block_size


class BlockAllocator:
    """Hands out blocks 1 to num_blocks - 1, the lowest free one first, and counts who still uses each."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise BlockError(
                f"{num_blocks} blocks are too few: one is the null block, and at least one must hold tokens"
            )
        self.num_blocks = num_blocks
        self._free = list(range(1, num_blocks))  # sorted, so already a heap
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that at least one owner holds."""
        return self.num_blocks - 1 - self.num_free

    def ref_count(self, block: int) -> int:
        """How many owners the block has; 0 when it is free."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one owner each, or BlockError and none taken."""
        if count > self.num_free:
            raise BlockError(f"{count} blocks asked for and {self.num_free} are free: preempt a sequence first")
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block. BlockError if one of them is free."""
        for block in self._require_used(blocks, "shared"):
            self._refs[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each block; without owners it can be handed out again. BlockError on a double free."""
        for block in self._require_used(blocks, "freed"):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                heapq.heappush(self._free, block)

    def _require_used(self, blocks: Iterable[int], verb: str) -> list[int]:
        """The blocks as a list, once it is sure that each has as many owners as the list names it."""
        wanted = list(blocks)
        for block, times in Counter(wanted).items():
            owners = self._refs[block] if 0 < block < self.num_blocks else 0
            if owners < (times if verb == "freed" else 1):
                raise BlockError(f"block {block} cannot be {verb}: it is not in use (double free, or use after free)")
        return wanted


class Allocator(Protocol):
    """What a block table asks for blocks: see BlockAllocator."""

    def allocate(self, count: int) -> list[int]:
        """Blocks with one owner each."""

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block."""

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each block."""


class BlockTable:
    """The blocks of one sequence, in the order of its positions."""

    def __init__(self, allocator: Allocator, block_size: int) -> None:
        self._allocator = allocator
        self.block_size = block_size
        self.blocks: list[int] = []

    def share(self, blocks: Sequence[int]) -> None:
        """Begin with blocks that others have filled with the same tokens."""
        self._allocator.share(blocks)
        self.blocks = [*blocks]

    def missing(self, num_tokens: int) -> int:
        """How many more blocks the sequence needs to hold `num_tokens` tokens."""
        return max(0, blocks_needed(num_tokens, self.block_size) - len(self.blocks))

    def grow(self, num_tokens: int) -> None:
        """Take the blocks that `num_tokens` tokens need; BlockError, and no change, if too few are free."""
        self.blocks += self._allocator.allocate(self.missing(num_tokens))

    def release(self) -> None:
        """Give every block back, the last one first; the table is then empty and may grow again."""
        self._allocator.free(reversed(self.blocks))
        self.blocks = []
