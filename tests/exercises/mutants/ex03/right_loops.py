"""Right: token by token."""

import numpy as np

from tinyengine.errors import BlockError


def pad_block_tables(tables):
    width = max(len(table) for table in tables)
    return np.array([list(table) + [0] * (width - len(table)) for table in tables], dtype=np.int32)


def slot_mapping(block_table, rows, positions, block_size):
    slots = []
    for row, position in zip(rows, positions, strict=True):
        number, offset = divmod(int(position), block_size)
        if not 0 <= number < block_table.shape[1]:
            raise BlockError(f"position {position} is outside the table: grow it first")
        block = int(block_table[row, number])
        if block == 0:
            raise BlockError(f"position {position} of row {row} has no block: grow its table first")
        slots.append(block * block_size + offset)
    return np.array(slots, dtype=np.int64)
