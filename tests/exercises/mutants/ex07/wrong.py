"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "blocks_not_taken": (
        "test_sequences_start_while_there_is_room",
        "each finds all the blocks that were free before",
        [("        num_free -= need\n", "")],
    ),
    "started_do_not_run": (
        "test_sequences_start_while_there_is_room",
        "what starts is not counted as running",
        [("        num_running += 1\n", "")],
    ),
    "one_at_a_time": (
        "test_sequences_start_while_there_is_room",
        "no more than one starts",
        [("        started += 1\n", "        return 1\n")],
    ),
    "no_reserve": (
        "test_one_block_stays_free_for_each_that_runs",
        "every block is taken",
        [("num_free - need < num_running", "num_free < need")],
    ),
    "one_for_all": (
        "test_one_block_stays_free_for_each_that_runs",
        "one block stays free for all together",
        [("num_free - need < num_running", "num_free - need < min(num_running, 1)")],
    ),
    "reserve_for_itself": (
        "test_sequences_start_while_there_is_room",
        "a block is kept for the one that starts, too",
        [("num_free - need < num_running", "num_free - need <= num_running")],
    ),
    "overtaking": (
        "test_nobody_overtakes_and_the_most_is_the_most",
        "small ones overtake a large one",
        [("            return started\n        num_free", "            continue\n        num_free")],
    ),
    "no_cap": (
        "test_nobody_overtakes_and_the_most_is_the_most",
        "max_num_seqs is ignored",
        [("num_running == max_num_seqs or ", "")],
    ),
    "oldest_give_way": (
        "test_as_few_as_can_be_give_way",
        "the oldest give way",
        [
            (
                "sum(missing[:left]) <= num_free + sum(released[left:])",
                "sum(missing[victims:]) <= num_free + sum(released[:victims])",
            )
        ],
    ),
    "one_too_many": (
        "test_as_few_as_can_be_give_way",
        "one more than it takes",
        [("            return victims\n", "            return victims + (victims > 0)\n")],
    ),
    "still_missed": (
        "test_as_few_as_can_be_give_way",
        "what gives way still counts as missing blocks",
        [("sum(missing[:left])", "sum(missing)")],
    ),
    "everybody": (
        "test_as_few_as_can_be_give_way",
        "all give way as soon as blocks run out",
        [("    for victims in range(n):\n", "    for victims in range(min(n, 1)):\n")],
    ),
    "never": (
        "test_a_life_of_many_steps",
        "nobody gives way",
        [("    return n\n", "    return 0\n"), ("    for victims in range(n):\n", "    for victims in range(0):\n")],
    ),
}
