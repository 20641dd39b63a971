"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "multiplied": (
        "test_temperature",
        "logits times the temperature",
        [(".values) / temperature[:, None]", ".values) * temperature[:, None]")],
    ),
    "temperature_of_the_first": (
        "test_temperature",
        "the first row's temperature for all",
        [("temperature[:, None]", "temperature[0]")],
    ),
    "top_p_before_temperature": (
        "test_temperature",
        "top_p measures probabilities at temperature 1",
        [
            (
                "    p = top_p[:, None]\n",
                "    plain = logits.softmax(-1).gather(-1, order) * (rank < k)\n"
                "    plain = plain / plain.sum(-1, keepdim=True)\n"
                "    before = plain.cumsum(-1) - plain\n"
                "    p = top_p[:, None]\n",
            )
        ],
    ),
    "logits_overwritten": (
        "test_temperature",
        "logits are divided where they lie",
        [
            (
                "scaled = (logits - logits.max(-1, keepdim=True).values) / temperature[:, None]",
                "scaled = logits.sub_(logits.max(-1, keepdim=True).values).div_(temperature[:, None])",
            )
        ],
    ),
    "k_above_vocab": (
        "test_top_k",
        "torch.topk asked for more tokens than there are",
        [("    rank = ", "    scaled.topk(int(top_k.max()))\n    rank = ")],
    ),
    "one_more": (
        "test_top_k",
        "k + 1 tokens stay",
        [("(rank < k)", "(rank <= k)")],
    ),
    "largest_k_for_all": (
        "test_top_k",
        "the largest k of the batch for all rows",
        [("vocab)[:, None]\n", "vocab).max()\n")],
    ),
    "zero_keeps_one": (
        "test_top_k",
        "0 taken for 1",
        [("torch.where(top_k > 0, top_k, vocab)", "top_k.clamp(min=1)")],
    ),
    "crossing_token_dropped": (
        "test_top_p",
        "the token that makes the sum reach p is dropped",
        [("before = ordered.cumsum(-1) - ordered", "before = ordered.cumsum(-1)")],
    ),
    "top_p_without_the_first": (
        "test_top_p",
        "a tiny p keeps nothing",
        [
            ("before = ordered.cumsum(-1) - ordered", "before = ordered.cumsum(-1)"),
            ("(before < p) | (rank == 0) | (p >= 1)", "(before <= p) | (p >= 1)"),
        ],
    ),
    "not_put_back": (
        "test_top_p",
        "weights in the order of likelihood, and not of tokens",
        [("torch.zeros_like(scaled).scatter(-1, order, ordered)", "ordered")],
    ),
    "top_p_of_the_whole": (
        "test_top_p_of_what_top_k_left",
        "top_p measures the whole vocabulary",
        [("    ordered = ordered / ordered.sum(-1, keepdim=True)\n", "")],
    ),
    "top_p_first": (
        "test_top_p_of_what_top_k_left",
        "top_p looks before top_k has cut",
        [
            ("    ordered = ordered * (rank < k)\n", ""),
            ("return torch.zeros", "ordered = ordered * (rank < k)\n    return torch.zeros"),
        ],
    ),
    "no_maximum_subtracted": (
        "test_extremes_do_not_overflow",
        "a tiny temperature overflows",
        [("(logits - logits.max(-1, keepdim=True).values)", "logits")],
    ),
}
