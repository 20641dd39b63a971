"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "padded_in_front": (
        "test_tables_are_filled_up_with_the_null_block",
        "filled up on the left",
        [("list(table) + [0] * (width - len(table))", "[0] * (width - len(table)) + list(table)")],
    ),
    "padded_with_minus_one": (
        "test_tables_are_filled_up_with_the_null_block",
        "filled up with -1",
        [("[0] * (width", "[-1] * (width")],
    ),
    "cut_to_the_shortest": (
        "test_tables_are_filled_up_with_the_null_block",
        "as wide as the shortest table",
        [
            ("max(len(table) for table in tables)", "min(len(table) for table in tables)"),
            ("list(table) + [0] * (width - len(table))", "list(table)[:width]"),
        ],
    ),
    "int64_table": (
        "test_tables_are_filled_up_with_the_null_block",
        "int64, twice the bytes",
        [("dtype=np.int32", "dtype=np.int64")],
    ),
    "off_by_one": (
        "test_each_position_has_the_slot_of_its_block",
        "positions counted from 1",
        [("divmod(int(position), block_size)", "divmod(int(position) + 1, block_size)")],
    ),
    "positions_as_slots": (
        "test_each_position_has_the_slot_of_its_block",
        "the table is not used",
        [("block * block_size + offset", "int(position)")],
    ),
    "offset_forgotten": (
        "test_each_position_has_the_slot_of_its_block",
        "every token at the start of its block",
        [("block * block_size + offset", "block * block_size")],
    ),
    "first_row": (
        "test_each_position_has_the_slot_of_its_block",
        "the table of the first sequence for all",
        [("block_table[row, number]", "block_table[0, number]")],
    ),
    "null_block_written": (
        "test_a_position_without_a_block_is_refused",
        "a token is written to the null block",
        [("if block == 0:", "if block < 0:")],
    ),
    "negative_from_the_end": (
        "test_a_position_without_a_block_is_refused",
        "a negative position counts from the end",
        [("if not 0 <= number < block_table.shape[1]:", "if number >= block_table.shape[1]:")],
    ),
    "index_error": (
        "test_a_position_without_a_block_is_refused",
        "NumPy's own error where the table ends",
        [("if not 0 <= number < block_table.shape[1]:", "if number < 0:")],
    ),
}
