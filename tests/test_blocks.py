"""The block allocator, block tables and slot mapping: no block lost, shared by accident, or used twice."""

import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tinyengine.errors import BlockError
from tinyengine.kv.blocks import (
    NULL_BLOCK,
    BlockAllocator,
    BlockTable,
    blocks_needed,
    pad_block_tables,
    slot_mapping,
)


def test_lowest_free_block_comes_first_and_the_null_block_never():
    allocator = BlockAllocator(6)
    assert allocator.allocate(3) == [1, 2, 3]
    allocator.free([2])
    allocator.free([1])
    assert allocator.allocate(3) == [1, 2, 4]
    assert allocator.num_free == 1
    with pytest.raises(BlockError, match="2 blocks asked for and 1 are free"):
        allocator.allocate(2)
    assert allocator.num_free == 1, "a refused allocation takes nothing"


def test_a_shared_block_lives_until_its_last_owner_frees_it():
    allocator = BlockAllocator(4)
    blocks = allocator.allocate(2)
    allocator.share(blocks)
    allocator.free(blocks)
    assert [allocator.ref_count(b) for b in blocks] == [1, 1]
    allocator.free(blocks)
    assert allocator.num_free == 3


@pytest.mark.parametrize("verb", ["free", "share"])
@pytest.mark.parametrize("blocks", [[1], [NULL_BLOCK], [99], [-1]], ids=["freed", "null", "beyond", "negative"])
def test_double_free_and_use_after_free_are_errors(verb, blocks):
    allocator = BlockAllocator(4)
    allocator.free(allocator.allocate(1))
    with pytest.raises(BlockError, match="not in use"):
        getattr(allocator, verb)(blocks)


def test_freeing_a_block_twice_in_one_call_changes_nothing():
    allocator = BlockAllocator(4)
    a, b = allocator.allocate(2)
    with pytest.raises(BlockError):
        allocator.free([a, b, a])
    assert (allocator.ref_count(a), allocator.ref_count(b)) == (1, 1)


def test_freeing_a_long_sequence_takes_time_in_proportion():
    """Four times the blocks must not take sixteen times as long, as a search for each block would."""

    def seconds(count):
        allocator = BlockAllocator(count + 1)
        blocks = allocator.allocate(count)
        start = time.perf_counter()
        allocator.free(blocks)
        return time.perf_counter() - start

    assert min(seconds(16_000) for _ in range(5)) < 10 * min(seconds(4_000) for _ in range(5))


def test_slots_by_hand():
    table = pad_block_tables([[7, 2], [5]])
    assert table.tolist() == [[7, 2], [5, NULL_BLOCK]]
    rows, positions = np.array([0, 0, 1]), np.array([3, 4, 1])
    assert slot_mapping(table, rows, positions, 4).tolist() == [31, 8, 21]


@pytest.mark.parametrize("row, position", [(1, 4), (0, 8), (0, -1)], ids=["padding", "beyond", "negative"])
def test_a_position_without_a_block_is_an_error(row, position):
    with pytest.raises(BlockError, match="grow"):
        slot_mapping(pad_block_tables([[7, 2], [5]]), np.array([row]), np.array([position]), 4)


def test_a_released_table_cannot_be_used():
    table = BlockTable(BlockAllocator(4), 4)
    table.grow(5)
    assert table.blocks == [1, 2]
    table.release()
    with pytest.raises(BlockError):
        slot_mapping(pad_block_tables([table.blocks, [3]]), np.array([0]), np.array([0]), 4)


class Owners(RuleBasedStateMachine):
    """Random owners that grow, share and release, against a plain list of who holds what."""

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(12)
        self.tables = []
        self.copies = []

    @rule()
    def begin(self):
        self.tables.append(BlockTable(self.allocator, 4))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), tokens=st.integers(0, 20))
    def grow(self, data, tokens):
        table = data.draw(st.sampled_from(self.tables))
        before = list(table.blocks)
        if table.missing(tokens) > self.allocator.num_free:
            with pytest.raises(BlockError):
                table.grow(tokens)
            assert table.blocks == before
        else:
            table.grow(tokens)
            assert len(table.blocks) == max(len(before), blocks_needed(tokens, 4))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data):
        blocks = list(data.draw(st.sampled_from(self.tables)).blocks)
        self.allocator.share(blocks)
        self.copies.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        data.draw(st.sampled_from(self.tables)).release()

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def free_copy(self, data):
        index = data.draw(st.integers(0, len(self.copies) - 1))
        self.allocator.free(self.copies.pop(index))

    @invariant()
    def every_block_has_the_owners_that_hold_it(self):
        held = [b for t in self.tables for b in t.blocks] + [b for c in self.copies for b in c]
        assert [self.allocator.ref_count(b) for b in range(1, 12)] == [held.count(b) for b in range(1, 12)]
        assert self.allocator.num_free == 11 - len(set(held))
        assert self.allocator.num_used == len(set(held))
        assert self.allocator.ref_count(NULL_BLOCK) == 0


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
