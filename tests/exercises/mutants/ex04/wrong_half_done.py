"""Wrong, found by test_what_cannot_be_is_refused_and_changes_nothing: blocks before the bad one are freed."""

from tinyengine.errors import BlockError


class BlockAllocator:
    def __init__(self, num_blocks):
        self.owners = [0] * num_blocks

    @property
    def num_free(self):
        return self.owners[1:].count(0)

    def ref_count(self, block):
        return self.owners[block]

    def allocate(self, count):
        if count > self.num_free:
            raise BlockError(f"{count} blocks asked for, {self.num_free} free")
        blocks = [b for b in range(1, len(self.owners)) if self.owners[b] == 0][:count]
        for block in blocks:
            self.owners[block] = 1
        return blocks

    def share(self, blocks):
        blocks = list(blocks)
        self.check(blocks, 1)
        for block in blocks:
            self.owners[block] += 1

    def free(self, blocks):
        blocks = list(blocks)
        for block in blocks:
            self.check([block], None)
            self.owners[block] -= 1

    def check(self, blocks, least):
        for block in blocks:
            if not 0 < block < len(self.owners) or self.owners[block] < (least or blocks.count(block)):
                raise BlockError(f"block {block} has too few owners")
