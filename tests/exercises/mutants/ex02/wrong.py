"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "neighbours_are_a_pair": (
        "test_each_pair_is_turned_by_its_angle",
        "dimensions 2i and 2i + 1 taken as pair i",
        [("permute(0, 1, 3, 2, 4)", "permute(0, 3, 1, 4, 2)")],
    ),
    "turned_the_other_way": (
        "test_each_pair_is_turned_by_its_angle",
        "by minus the angle",
        [("permute(0, 1, 3, 2, 4)", "permute(0, 2, 3, 1, 4)")],
    ),
    "one_turn_for_all_pairs": (
        "test_each_pair_is_turned_by_its_angle",
        "every pair is turned by the first one's angle",
        [("turns.unsqueeze(-1)", "turns[..., :1].unsqueeze(-1)")],
    ),
    "not_diagonal": (
        "test_each_pair_is_turned_by_its_angle",
        "each pair flows into all others",
        [("torch.eye(pairs,", "torch.ones(pairs, pairs,")],
    ),
    "positions_counted": (
        "test_positions_come_in_any_order",
        "token i taken to stand at position i",
        [("rope[positions]", "rope[: len(positions)]")],
    ),
    "one_late": (
        "test_positions_come_in_any_order",
        "the position before",
        [("rope[positions]", "rope[(positions - 1).clamp(min=0)]")],
    ),
    "always_float32": (
        "test_positions_come_in_any_order",
        "another dtype than rope's",
        [("dtype=rope.dtype, ", "dtype=torch.float32, ")],
    ),
    "no_sign": (
        "test_scores_depend_on_the_distance_alone",
        "minus sin is sin",
        [("turns = rope[positions]", "turns = rope[positions].clone()\n    turns[:, 1, 0] *= -1")],
    ),
    "loop_on_the_host": (
        "test_it_can_be_captured",
        "positions are read back, and a capture bakes them in",
        [("rope[positions]", "torch.stack([rope[p] for p in positions.tolist()])")],
    ),
}
