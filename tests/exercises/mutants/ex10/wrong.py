"""Wrong solutions: the first right one with texts replaced. Which test finds each, and what is wrong with it."""

WRONG = {
    "rounds_down": (
        "test_sizes_are_rounded_up",
        "rounded to the multiple below",
        [("(nbytes + 511) // 512 * 512", "nbytes // 512 * 512")],
    ),
    "one_too_many": (
        "test_sizes_are_rounded_up",
        "a size that is a multiple already gets another 512",
        [("(nbytes + 511) // 512 * 512", "(nbytes // 512 + 1) * 512")],
    ),
    "nothing_for_nothing": (
        "test_sizes_are_rounded_up",
        "a block of no bytes",
        [("max(512, (nbytes + 511) // 512 * 512)", "(nbytes + 511) // 512 * 512")],
    ),
    "one_mib_is_large": (
        "test_a_segment_is_of_one_of_three_kinds",
        "1 MiB itself taken as large",
        [("if size <= MIB", "if size < MIB")],
    ),
    "ten_mib_is_middle": (
        "test_a_segment_is_of_one_of_three_kinds",
        "10 MiB itself taken for one of 20 MiB",
        [("if size < 10 * MIB", "if size <= 10 * MIB")],
    ),
    "decimal": (
        "test_a_segment_is_of_one_of_three_kinds",
        "a megabyte of ten to the sixth",
        [("MIB = 1024 * 1024", "MIB = 1000 * 1000")],
    ),
    "segment_is_the_request": (
        "test_the_pool_has_the_bytes_that_were_predicted",
        "a segment as large as the block",
        [("        return 20 * MIB\n", "        return size\n")],
    ),
    "smallest_first": (
        "test_after_the_first_capture_the_pool_does_not_grow",
        "the smallest bucket first",
        [("(-pair[0], -pair[1])", "pair")],
    ),
    "by_width": (
        "test_after_the_first_capture_the_pool_does_not_grow",
        "the widest first",
        [("(-pair[0], -pair[1])", "(-pair[1], -pair[0])")],
    ),
    "narrow_first": (
        "test_after_the_first_capture_the_pool_does_not_grow",
        "of equal buckets the narrowest first",
        [("(-pair[0], -pair[1])", "(-pair[0], pair[1])")],
    ),
}
