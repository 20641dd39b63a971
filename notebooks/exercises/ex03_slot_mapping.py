"""Exercise 3: block tables and the slot mapping. Read notebooks/02_paged_kv_cache.ipynb first.

Grade it with `pytest tests/exercises --impl student -k ex03`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tinyengine.errors import BlockError


def pad_block_tables(tables: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """The block tables of n sequences as one matrix, int32 `[n, width]`.

    The width is the length of the longest table; shorter ones are filled up with 0, the null block. There is at least
    one table, and the longest has at least one block.

    Example: `pad_block_tables([[7, 2], [5]])` is `[[7, 2], [5, 0]]`.
    """
    raise NotImplementedError("Exercise 3: write pad_block_tables; see notebooks/02_paged_kv_cache.ipynb")


def slot_mapping(
    block_table: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    block_size: int,
) -> npt.NDArray[np.int64]:
    """Where in the KV cache each of m new tokens goes, int64 `[m]`: its slot.

    block_table: int32 `[n, width]`, from `pad_block_tables`; rows, positions: int64 `[m]`: token i stands at position
    `positions[i]` of the sequence whose blocks are `block_table[rows[i]]`. Position p lies in the sequence's block
    number `p // block_size`, at offset `p % block_size`, and its slot is `block * block_size + offset`.

    A token that was written to the null block would be lost in silence. So where a position's block is 0, and where a
    position is below 0 or beyond the width of the table, raise BlockError with a message that helps. There may be no
    token at all: the result is then empty.

    Example: with block_size 4 and the table `[[7, 2], [5, 0]]`, position 3 of row 0 has slot 31, position 4 has slot 8,
    and position 1 of row 1 has slot 21. Position 4 of row 1 has no block.
    """
    raise NotImplementedError("Exercise 3: write slot_mapping; see notebooks/02_paged_kv_cache.ipynb")
