"""Exercise 4: the block allocator. Read notebooks/02_paged_kv_cache.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex04`.
"""

from collections.abc import Iterable

from tinyengine.errors import BlockError


class BlockAllocator:
    """Hands out the blocks of the KV cache, and counts who still uses each.

    Blocks are numbered from 0. Block 0 is the null block, where padding reads and writes: nobody ever gets it, so of
    `num_blocks` blocks `num_blocks - 1` can be handed out. A block may have several owners: sequences that begin with
    the same tokens share it.

    Whatever is refused raises BlockError with a message that helps, and changes nothing.

    Example:

        >>> allocator = BlockAllocator(4)
        >>> allocator.allocate(2)
        [1, 2]
        >>> allocator.share([2])  # a second owner
        >>> allocator.free([1, 2])  # block 1 is free now, block 2 has one owner left
        >>> allocator.allocate(2)
        [1, 3]
    """

    def __init__(self, num_blocks: int) -> None:
        raise NotImplementedError("Exercise 4: write BlockAllocator; see notebooks/02_paged_kv_cache.ipynb")

    @property
    def num_free(self) -> int:
        """How many blocks `allocate` can still hand out."""
        raise NotImplementedError("Exercise 4: write num_free; see notebooks/02_paged_kv_cache.ipynb")

    def ref_count(self, block: int) -> int:
        """How many owners the block has; 0 when it is free."""
        raise NotImplementedError("Exercise 4: write ref_count; see notebooks/02_paged_kv_cache.ipynb")

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one owner each, the lowest free numbers first. BlockError if too few are free."""
        raise NotImplementedError("Exercise 4: write allocate; see notebooks/02_paged_kv_cache.ipynb")

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each block. BlockError if one of them is free, or is no block to hand out."""
        raise NotImplementedError("Exercise 4: write share; see notebooks/02_paged_kv_cache.ipynb")

    def free(self, blocks: Iterable[int]) -> None:
        """One owner less for each block, twice less for one that is named twice; without owners it is free again.

        BlockError if a block has fewer owners than that (it is freed twice then), or is no block to hand out.
        """
        raise NotImplementedError("Exercise 4: write free; see notebooks/02_paged_kv_cache.ipynb")
