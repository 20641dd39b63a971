"""Blocks that are full keep their tokens' K and V, also when nobody owns them: the next prompt may begin alike.

Automatic prefix caching as in vLLM: a full block is found by a hash of its tokens and of the block before, and what
nobody has used for longest makes room first.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from tinyengine.errors import BlockError
from tinyengine.kv.blocks import BlockAllocator


def extend_digests(digests: list[bytes], token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Append the digest of each further full block of these tokens: of its tokens, and of the digest before it.

    Two chains of tokens that differ anywhere have different digests from there on (BLAKE2b, 128 bits).
    """
    for end in range((len(digests) + 1) * block_size, len(token_ids) + 1, block_size):
        tokens = np.array(token_ids[end - block_size : end], np.int64).tobytes()
        before = digests[-1] if digests else b""
        digests.append(hashlib.blake2b(before + tokens, digest_size=16).digest())
    return digests


class PrefixCache(BlockAllocator):
    """An allocator that remembers what full blocks hold. A remembered block without owners is idle: free, but whole.

    Blocks that hold nothing are handed out first, then the block that has been idle for longest.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out, idle ones among them."""
        return super().num_free + len(self._idle)

    def remember(self, block: int, digest: bytes) -> None:
        """This block, which somebody owns, now holds what the digest stands for. The first block that does is kept."""
        if not self.ref_count(block):
            raise BlockError(f"block {block} cannot be remembered: nobody owns it")
        if digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest], self._digest_of[block] = block, digest

    def forget(self, blocks: Iterable[int]) -> None:
        """What these blocks hold is not to be found any more."""
        for block in blocks:
            if block in self._digest_of:
                del self._block_of[self._digest_of.pop(block)]
            if block in self._idle:
                del self._idle[block]
                heapq.heappush(self._free, block)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """The blocks of the longest beginning of a chain that is remembered."""
        found = []
        for digest in digests:
            if digest not in self._block_of:
                break
            found.append(self._block_of[digest])
        return found

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of these have no owner: to share them takes as many from the free ones."""
        return sum(block in self._idle for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block, of idle ones the first. BlockError if one is neither owned nor remembered."""
        wanted = list(blocks)
        idle = [block for block in wanted if block in self._idle]
        super().share(block for block in wanted if block not in self._idle)
        for block in idle:
            self._idle.pop(block, None)
            self._refs[block] += 1

    def _take(self) -> int:
        if not self._free:
            self.forget([next(iter(self._idle))])
        return super()._take()

    def _give_back(self, block: int) -> None:
        if block in self._digest_of:
            self._idle[block] = None
        else:
            super()._give_back(block)
