"""Blocks that are full keep their tokens' K and V, also when nobody owns them: the next prompt may begin alike.

Automatic prefix caching as in vLLM: a full block is found by a hash of its tokens and of the block before, and what
nobody has used for longest makes room first.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
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


class PrefixCache:
    """Remembers what full blocks hold, in front of an allocator that knows nothing of it.

    A remembered block that nobody else owns is idle: this cache is its one owner, so it keeps what it holds, and
    gives it back as soon as blocks run out, the one that has been idle for longest first.
    """

    def __init__(self, allocator: BlockAllocator) -> None:
        self.num_blocks = allocator.num_free + 1  # the null block included; nobody has taken any yet
        self._allocator = allocator
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # longest first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can still hand out, idle ones among them."""
        return self._allocator.num_free + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns, idle ones not among them."""
        return self.num_blocks - 1 - self.num_free

    def ref_count(self, block: int) -> int:
        """How many owners the block has beside this cache."""
        return 0 if block in self._idle else self._allocator.ref_count(block)

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
                self._allocator.free([block])

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

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one owner each, or BlockError and none taken. Blocks that hold nothing go first."""
        if count <= self.num_free:
            self.forget(list(self._idle)[: max(0, count - self._allocator.num_free)])
        return self._allocator.allocate(count)

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block, of idle ones the first. BlockError if one is neither owned nor remembered."""
        wanted = list(blocks)
        idle = {block for block in wanted if block in self._idle}
        self._allocator.share((Counter(wanted) - Counter(idle)).elements())  # an idle block has an owner already
        for block in idle:
            del self._idle[block]

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each block; the last owner of a remembered one is this cache. BlockError on a double free.

        What comes first has been idle for longest.
        """
        wanted = Counter(blocks)
        stay = [b for b, times in wanted.items() if b in self._digest_of and self.ref_count(b) == times]
        again = [b for b in wanted if b in self._idle]  # which the allocator finds freed twice, and refuses
        self._allocator.free([*(wanted - Counter(stay)).elements(), *again])
        self._idle.update(dict.fromkeys(stay))
