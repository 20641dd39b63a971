"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "largest_always": (
        "test_the_smallest_bucket_that_holds_the_batch",
        "the largest bucket always",
        [("in sorted(buckets):", "in sorted(buckets, reverse=True):")],
    ),
    "strictly_above": (
        "test_the_smallest_bucket_that_holds_the_batch",
        "a batch that fills a bucket goes to the next",
        [("if bucket >= batch", "if bucket > batch")],
    ),
    "first_that_fits": (
        "test_the_smallest_bucket_that_holds_the_batch",
        "the first that fits, in the order in which they come",
        [("in sorted(buckets):", "in buckets:")],
    ),
    "largest_where_none_fits": (
        "test_the_smallest_bucket_that_holds_the_batch",
        "the largest bucket where none holds the batch",
        [("    return None\n", "    return max(buckets)\n")],
    ),
    "columns_in_front": (
        "test_the_rows_of_the_batch_stay",
        "new columns come before the blocks",
        [
            (
                "[inputs.block_table, inputs.block_table.new_zeros(n, width - columns)]",
                "[inputs.block_table.new_zeros(n, width - columns), inputs.block_table]",
            )
        ],
    ),
    "rows_in_front": (
        "test_the_rows_of_the_batch_stay",
        "padding comes before the batch",
        [
            (
                "[inputs.input_ids, inputs.input_ids.new_zeros(more)]",
                "[inputs.input_ids.new_zeros(more), inputs.input_ids]",
            )
        ],
    ),
    "int64_lengths": (
        "test_the_rows_of_the_batch_stay",
        "context lengths become int64",
        [("inputs.context_lens.new_ones(more)]", "torch.ones(more, dtype=torch.int64)]")],
    ),
    "columns_forgotten": (
        "test_the_rows_of_the_batch_stay",
        "the block table gets no new columns",
        [("n, width - columns", "n, 0"), ("table.new_zeros(more, width)", "table.new_zeros(more, columns)")],
    ),
    "in_place": (
        "test_the_rows_of_the_batch_stay",
        "the context lengths that came in are overwritten",
        [
            (
                "torch.cat([inputs.context_lens, inputs.context_lens.new_ones(more)])",
                "torch.cat([inputs.context_lens.clone(), inputs.context_lens.fill_(1).new_ones(more)])",
            )
        ],
    ),
    "no_context": (
        "test_padded_rows_touch_the_null_block_alone",
        "a context of no token: the softmax over nothing is NaN",
        [("inputs.context_lens.new_ones(more)", "inputs.context_lens.new_zeros(more)")],
    ),
    "live_slot": (
        "test_padded_rows_touch_the_null_block_alone",
        "padded rows write to the slot of the last sequence",
        [("inputs.slot_mapping.new_zeros(more)", "inputs.slot_mapping[-1:].expand(more)")],
    ),
    "live_block": (
        "test_padded_rows_touch_the_null_block_alone",
        "padded rows read the blocks of the last sequence",
        [("table.new_zeros(more, width)", "table[-1:].expand(more, width)")],
    ),
    "last_position": (
        "test_padded_rows_touch_the_null_block_alone",
        "padded rows stand where the last sequence stands",
        [("inputs.positions.new_zeros(more)", "inputs.positions[-1:].expand(more)")],
    ),
}
