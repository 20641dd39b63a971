"""Exercise 4: the block allocator, against plain bookkeeping."""

from functools import partial

import pytest

from exercises.expect import equal, refused

graded = partial(pytest.mark.exercise, number=4, part="BlockAllocator", timeout=10)


def made(solution, num_blocks):
    solution.call("BlockAllocator", num_blocks, keep="a")
    return partial(solution.call, of="a")


@graded(points=2, hint="block 0 is the null block, which nobody gets; the lowest free block goes first")
def test_blocks_are_handed_out_lowest_first(solution, rng):
    n = rng.randrange(5, 9)
    call = made(solution, n)
    equal("free at the start", solution.read("num_free", of="a"), n - 1)
    equal("the first two", call("allocate", 2), [1, 2])
    equal("the rest", call("allocate", n - 3), list(range(3, n)))
    call("free", [3])
    call("free", [1])
    equal("what was given back", call("allocate", 2), [1, 3])


@graded(points=3, hint="a block has as many owners as allocate and share gave it, and is free only without any")
def test_a_shared_block_is_free_when_its_last_owner_gives_it_back(solution, rng):
    call = made(solution, 6)
    call("allocate", 3)
    for _ in range(owners := rng.randrange(1, 4)):
        call("share", [2])
    equal("owners of block 2", call("ref_count", 2), owners + 1)
    for left in range(owners, -1, -1):
        equal("free before", solution.read("num_free", of="a"), 2)
        call("free", [2])
        equal("owners of block 2", call("ref_count", 2), left)
    equal("free in the end", solution.read("num_free", of="a"), 3)


@graded(points=2, hint="check before you change anything: a refused call must leave everything as it was")
def test_what_cannot_be_is_refused_and_changes_nothing(solution, rng):
    call = made(solution, rng.randrange(4, 8))
    call("allocate", 2)
    free = solution.read("num_free", of="a")
    refused("more blocks than there are", "BlockError", solution, "allocate", free + 1, of="a")
    for blocks in ([3], [0], [1, 1], [2, 3], [-1]):
        refused(f"free({blocks}) of blocks 1 and 2", "BlockError", solution, "free", blocks, of="a")
    refused("share([3]) of blocks 1 and 2", "BlockError", solution, "share", [3], of="a")
    equal("free", solution.read("num_free", of="a"), free)
    equal("owners of blocks 1 and 2", [call("ref_count", 1), call("ref_count", 2)], [1, 1])


@graded(points=3, hint="compare ref_count and num_free with a list of owners that you keep by hand")
def test_a_long_random_life(solution, rng):
    n = 8
    call, owners = made(solution, n), {block: 0 for block in range(1, n)}
    for step in range(120):
        used = [block for block, count in owners.items() if count]
        what = rng.choice(["allocate", "share", "free", "free"])
        if what == "allocate" or not used:
            free = [block for block, count in owners.items() if not count]
            count = rng.randrange(len(free) + 1)
            equal(f"step {step}: allocate({count})", call("allocate", count), free[:count])
            owners |= dict.fromkeys(free[:count], 1)
        else:
            blocks = rng.sample(used, rng.randrange(1, len(used) + 1))
            call(what, blocks)
            owners |= {block: owners[block] + (1 if what == "share" else -1) for block in blocks}
        equal(f"step {step}: num_free", solution.read("num_free", of="a"), sum(not count for count in owners.values()))
