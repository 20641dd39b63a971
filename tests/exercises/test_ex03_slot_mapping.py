"""Exercise 3: block tables and the slot mapping, against a walk through the cache."""

from functools import partial

import numpy as np
import pytest

from exercises.expect import equal, refused, wrong

graded = partial(pytest.mark.exercise, number=3, part="slot_mapping", timeout=10)


def array(what, got, dtype, expected):
    """An array of this dtype, shape and content."""
    if not isinstance(got, np.ndarray):
        wrong(what, f"a NumPy array of {dtype}", f"a {type(got).__name__}")
    expected = np.array(expected, dtype)
    equal(f"{what}: dtype and shape", [str(got.dtype), list(got.shape)], [dtype, list(expected.shape)])
    equal(what, got.tolist(), expected.tolist())


def some_tables(rng, lengths):
    """Tables over shuffled blocks."""
    blocks = rng.sample(range(1, 100), sum(lengths))
    return [[blocks.pop() for _ in range(length)] for length in lengths]


def padded(tables):
    width = max(map(len, tables))
    return np.array([table + [0] * (width - len(table)) for table in tables], np.int32)


@graded(points=2, hint="as wide as the longest table, int32, filled up with 0 on the right")
def test_tables_are_filled_up_with_the_null_block(solution, rng):
    for lengths in ((1,), (2, 1), (rng.randrange(1, 4), 5, rng.randrange(1, 5)), (3, 3)):
        tables = some_tables(rng, lengths)
        array(f"pad_block_tables({tables})", solution.call("pad_block_tables", tables), "int32", padded(tables))


@graded(points=2, hint="slot = table[row, position // block_size] * block_size + position % block_size")
def test_each_position_has_the_slot_of_its_block(solution, rng):
    for size in (1, 4, rng.randrange(2, 20)):
        tables = some_tables(rng, (2, 4, 1))
        slots = [[block * size + offset for block in table for offset in range(size)] for table in tables]
        tokens = [(row, position) for row in range(3) for position in range(len(slots[row]))]
        tokens = rng.sample(tokens, min(len(tokens), 12))
        rows, positions = (np.array(x, np.int64) for x in zip(*tokens, strict=True))
        got = solution.call("slot_mapping", padded(tables), rows, positions, size)
        what = f"slots of (row, position) {tokens} with block_size {size} and tables {tables}"
        array(what, got, "int64", [slots[row][position] for row, position in tokens])
    none = np.zeros(0, np.int64)
    array("slots of no tokens", solution.call("slot_mapping", padded([[3]]), none, none, 4), "int64", none)


@graded(points=2, hint="look at each block before you use it: 0 is no block, and negative indices count from the end")
def test_a_position_without_a_block_is_refused(solution, rng):
    size = rng.randrange(2, 9)
    table = padded(some_tables(rng, (2, 1)))
    cases = {"in the null block": (1, size), "beyond the table": (0, 2 * size), "below 0": (0, -1)}
    for what, (row, position) in cases.items():
        for others in ([], [0]):
            rows, positions = np.array([*others, row], np.int64), np.array([*others, position], np.int64)
            name = f"position {position} of row {row} in {table.tolist()} with block_size {size}, {what},"
            refused(name, "BlockError", solution, "slot_mapping", table, rows, positions, size)
