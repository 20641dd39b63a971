"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "mask_shifted": (
        "test_a_prompt_with_as_many_kv_heads_as_heads",
        "each query sees the one after it, too",
        [("triu(s - t + 1)", "triu(s - t + 2)")],
    ),
    "not_itself": (
        "test_tokens_after_a_context",
        "a query does not see its own position",
        [("triu(s - t + 1)", "triu(s - t).logical_and(torch.arange(s) > 0)")],
    ),
    "no_mask": (
        "test_a_prompt_with_as_many_kv_heads_as_heads",
        "no mask at all",
        [('scores.masked_fill(hidden, float("-inf"))', "scores")],
    ),
    "mask_from_the_start": (
        "test_tokens_after_a_context",
        "the mask forgets the context",
        [("triu(s - t + 1)", "triu(1)")],
    ),
    "no_scale": (
        "test_a_prompt_with_as_many_kv_heads_as_heads",
        "scores are not divided by the root of head_dim",
        [(" / q.shape[-1] ** 0.5", "")],
    ),
    "heads_in_turn": (
        "test_query_heads_share_kv_heads",
        "query heads take the kv heads in turn",
        [
            (
                "k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)",
                "k, v = k.repeat(1, group, 1), v.repeat(1, group, 1)",
            )
        ],
    ),
    "naive_exp": (
        "test_large_scores_do_not_overflow",
        "exp without the maximum subtracted",
        [
            (
                'weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)',
                'weights = scores.masked_fill(hidden, float("-inf")).exp()\n'
                "    weights = weights / weights.sum(-1, keepdim=True)",
            )
        ],
    ),
    "softmax_over_queries": (
        "test_a_prompt_with_as_many_kv_heads_as_heads",
        "the softmax runs over the queries",
        [(".softmax(-1)", ".softmax(-2)")],
    ),
}
