"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "null_block_given_out": (
        "test_blocks_are_handed_out_lowest_first",
        "block 0 is handed out",
        [
            ("range(1, len(self.owners))", "range(len(self.owners))"),
            ("self.owners[1:].count(0)", "self.owners.count(0)"),
        ],
    ),
    "highest_first": (
        "test_blocks_are_handed_out_lowest_first",
        "the highest free block goes first",
        [("if self.owners[b] == 0][:count]", "if self.owners[b] == 0][::-1][:count]")],
    ),
    "reference_count_forgotten": (
        "test_a_shared_block_is_free_when_its_last_owner_gives_it_back",
        "share counts nothing",
        [("self.owners[block] += 1", "pass")],
    ),
    "freed_by_the_first_owner": (
        "test_a_shared_block_is_free_when_its_last_owner_gives_it_back",
        "the first to give it back frees it",
        [("self.owners[block] -= 1", "self.owners[block] = 0")],
    ),
    "double_free": (
        "test_what_cannot_be_is_refused_and_changes_nothing",
        "a double free within one call is not seen",
        [("(least or blocks.count(block))", "1")],
    ),
    "half_done": (
        "test_what_cannot_be_is_refused_and_changes_nothing",
        "blocks before the bad one are freed",
        [
            (
                "        self.check(blocks, None)\n        for block in blocks:\n",
                "        for block in blocks:\n            self.check([block], None)\n",
            )
        ],
    ),
    "takes_what_there_is": (
        "test_what_cannot_be_is_refused_and_changes_nothing",
        "too large a request gets what there is",
        [
            (
                '            raise BlockError(f"{count} blocks asked for, {self.num_free} free")',
                "            count = self.num_free",
            )
        ],
    ),
    "assertion": (
        "test_what_cannot_be_is_refused_and_changes_nothing",
        "another error than the one that was asked for",
        [
            (
                'raise BlockError(f"block {block} has too few owners")',
                'raise AssertionError(f"block {block} has too few owners")',
            )
        ],
    ),
}
