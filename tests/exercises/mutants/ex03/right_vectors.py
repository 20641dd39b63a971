"""Right: all tokens at once."""

import itertools

import numpy as np

from tinyengine.errors import BlockError


def pad_block_tables(tables):
    columns = list(itertools.zip_longest(*tables, fillvalue=0))
    return np.ascontiguousarray(np.array(columns, np.int32).T)


def slot_mapping(block_table, rows, positions, block_size):
    end = block_table.shape[1] * block_size
    inside = (positions >= 0) & (positions < end)
    if not inside.all():
        raise BlockError(f"positions go from 0 to {end - 1} in this table")
    slots = block_table.astype(np.int64)[:, :, None] * block_size + np.arange(block_size)
    found = slots.reshape(len(block_table), end)[rows, positions]
    if (found < block_size).any():
        raise BlockError("a position lies in the null block")
    return found
