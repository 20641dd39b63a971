"""Right: a sorted list of free blocks and a Counter."""

import bisect
from collections import Counter

from tinyengine.errors import BlockError


class BlockAllocator:
    def __init__(self, num_blocks):
        self._free, self._refs = list(range(1, num_blocks)), Counter()

    num_free = property(lambda self: len(self._free))

    def ref_count(self, block):
        return self._refs[block]

    def allocate(self, count):
        if count > len(self._free):
            raise BlockError("too few blocks are free")
        taken, self._free = self._free[:count], self._free[count:]
        self._refs.update(taken)
        return taken

    def share(self, blocks):
        wanted = Counter(blocks)
        if any(not self._refs[block] for block in wanted):
            raise BlockError("only a block in use can be shared")
        self._refs.update(wanted)

    def free(self, blocks):
        left = Counter(self._refs)
        left.subtract(Counter(blocks))
        if min(left.values(), default=0) < 0:
            raise BlockError("a block is freed more often than it has owners")
        for block, owners in self._refs.items():
            if owners and not left[block]:
                bisect.insort(self._free, block)
        self._refs = +left
