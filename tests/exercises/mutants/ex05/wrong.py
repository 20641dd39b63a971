"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "blocks_in_order": (
        "test_full_blocks_anywhere_in_the_cache",
        "the first blocks of the cache, whatever the table says",
        [("layer_cache[blocks]", "layer_cache[: len(blocks)]")],
    ),
    "keys_as_values": (
        "test_full_blocks_anywhere_in_the_cache",
        "keys and values exchanged",
        [("kv[:, :, 0], kv[:, :, 1]", "kv[:, :, 1], kv[:, :, 0]")],
    ),
    "no_scale": (
        "test_full_blocks_anywhere_in_the_cache",
        "scores are not divided by the root of head_dim",
        [(" / dim**0.5", "")],
    ),
    "softmax_over_heads": (
        "test_full_blocks_anywhere_in_the_cache",
        "the softmax runs over the heads",
        [("softmax(-1)", "softmax(1)")],
    ),
    "no_mask": (
        "test_sequences_of_different_lengths",
        "positions beyond a sequence count, too",
        [(" + mask[:, 0]", "")],
    ),
    "mask_times": (
        "test_sequences_of_different_lengths",
        "scores are multiplied by the mask",
        [(" + mask[:, 0]", " * (mask[:, 0] == 0)")],
    ),
    "first_mask_for_all": (
        "test_sequences_of_different_lengths",
        "the first sequence's mask for all",
        [("mask[:, 0]", "mask[:1, 0]")],
    ),
    "naive_exp": (
        "test_sequences_of_different_lengths",
        "exp without the maximum subtracted",
        [("scores.softmax(-1)", "scores.exp() / scores.exp().sum(-1, keepdim=True)")],
    ),
    "heads_in_turn": (
        "test_query_heads_share_kv_heads",
        "query heads take the kv heads in turn",
        [
            (
                "keys.repeat_interleave(group, 2), values.repeat_interleave(group, 2)",
                "keys.repeat(1, 1, group, 1), values.repeat(1, 1, group, 1)",
            )
        ],
    ),
    "table_on_the_host": (
        "test_it_can_be_captured",
        "the table is read back, and a capture bakes it in",
        [("layer_cache[blocks]", "torch.stack([layer_cache[b] for b in blocks.tolist()])")],
    ),
}
