"""Exercise 10: the allocator's sizes, the bytes of a pool, and the order of capture, against closed forms."""

from functools import partial

import pytest

from exercises.expect import equal
from exercises.wire import Kept

graded = partial(pytest.mark.exercise, number=10, part="pool bytes and order", timeout=10)
MIB = 1 << 20


@graded(points=1, hint="round up to a multiple of 512, and never below 512")
def test_sizes_are_rounded_up(solution, rng):
    for nbytes in (0, 1, 511, 512, 513, 1024, 1025, rng.randrange(2, 10**4), rng.randrange(10**4, 10**8)):
        expected = next(n for n in range(max(nbytes, 512), max(nbytes, 512) + 512) if n % 512 == 0)
        equal(f"round_size({nbytes})", solution.call("round_size", nbytes), expected)


@graded(points=2, hint="three cases: up to 1 MiB, below 10 MiB, and from 10 MiB on")
def test_a_segment_is_of_one_of_three_kinds(solution, rng):
    small, middle, large = rng.randrange(2048), rng.randrange(2049, 20 * 1024), rng.randrange(20 * 1024, 10**6)
    for size in (512, 512 * small + 512, MIB):
        equal(f"segment_size({size})", solution.call("segment_size", size), 2 * MIB)
    for size in (MIB + 512, 512 * middle, 10 * MIB - 512):
        equal(f"segment_size({size})", solution.call("segment_size", size), 20 * MIB)
    for size in (10 * MIB, 10 * MIB + 512, 12 * MIB, 512 * large):
        twos = size // (2 * MIB) + (size % (2 * MIB) > 0)
        equal(f"segment_size({size})", solution.call("segment_size", size), twos * 2 * MIB)


@graded(points=2, hint="the pool is made of your two functions: look at the sizes near 1 MiB and 10 MiB once more")
def test_the_pool_has_the_bytes_that_were_predicted(solution, rng):
    """Requests that all stay live, so that the bytes have a closed form."""
    for name in ("round_size", "segment_size"):
        solution.read(name, keep=name)
    count = rng.randrange(3, 40)
    cases = {
        f"{count} logits of 1,000 floats": ([4000] * count, 2 * MIB, 4096 * count),
        "three of 1 MiB": ([MIB] * 3, 4 * MIB, 3 * MIB),
        "two of 9 MiB and one byte": ([9 * MIB + 1] * 2, 20 * MIB, 18 * MIB + 1024),
        "three of 9 MiB": ([9 * MIB] * 3, 40 * MIB, 27 * MIB),
        "two of 10 MiB": ([10 * MIB] * 2, 20 * MIB, 20 * MIB),
        "32 rows of a vocabulary of 151,936": ([32 * 151_936 * 4], 20 * MIB, 32 * 151_936 * 4),
    }
    for what, (sizes, reserved, live) in cases.items():
        events = [[i, size, 0] for i, size in enumerate(sizes)]
        got = solution.call("pool_with", Kept("round_size"), Kept("segment_size"), events, of="support")
        equal(f"[reserved, live] bytes of a pool with {what}", got, [reserved, live])


@graded(points=3, hint="sort by bucket, then by width, both from large to small")
def test_after_the_first_capture_the_pool_does_not_grow(solution, rng):
    pairs = [(bucket, width) for bucket in (1, 2, rng.randrange(3, 6)) for width in (1, 2)]
    rng.shuffle(pairs)
    got = solution.call("capture_order", pairs)
    equal(f"capture_order({pairs})", got, [pair for b in range(9, 0, -1) for w in (2, 1) if (pair := (b, w)) in pairs])
    reserved = solution.call("growth", got, 700_000, of="support")
    equal("bytes reserved by the pool after each capture", reserved, reserved[:1] * len(pairs))
