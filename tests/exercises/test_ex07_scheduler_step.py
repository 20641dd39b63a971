"""Exercise 7: one scheduler step, against trying every count, and a life of many steps whose books are kept here."""

from functools import partial

import pytest

from exercises.expect import equal, wrong

graded = partial(pytest.mark.exercise, number=7, part="admit and preempt", timeout=10)


def can_start(needs, num_running, num_free, max_num_seqs):
    """Whether all of these can start, one after the other."""
    taken = [sum(needs[:i]) for i in range(len(needs))]
    return all(
        num_running + i < max_num_seqs and taken[i] + need + num_running + i <= num_free for i, need in enumerate(needs)
    )


def check_admit(solution, *args):
    expected = max(count for count in range(len(args[0]) + 1) if can_start(args[0][:count], *args[1:]))
    equal(
        f"admit(needs={args[0]}, num_running={args[1]}, num_free={args[2]}, max_num_seqs={args[3]})",
        solution.call("admit", *args),
        expected,
    )


def check_preempt(solution, missing, released, num_free):
    n = len(missing)
    enough = (v for v in range(n + 1) if sum(missing[: n - v]) <= num_free + sum(released[n - v :]))
    what = f"preempt(missing={missing}, released={released}, num_free={num_free})"
    equal(what, solution.call("preempt", missing, released, num_free), next(enough))


@graded(points=2, hint="one after the other: what starts takes its blocks, and runs for those behind it")
def test_sequences_start_while_there_is_room(solution, rng):
    check_admit(solution, [], 0, 10, 8)
    check_admit(solution, [4, 3, 3], 0, 10, 8)
    check_admit(solution, [10], 0, 10, 8)
    for _ in range(40):
        needs = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 7))]
        check_admit(solution, needs, 0, rng.randrange(1, 25), 8)


@graded(points=2, hint="after it took its blocks, one must stay free for each sequence that runs already")
def test_one_block_stays_free_for_each_that_runs(solution, rng):
    running = rng.randrange(1, 6)
    for free in range(running + 2, running + 5):
        check_admit(solution, [3], running, free, 20)
    for _ in range(20):
        needs = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 5))]
        check_admit(solution, needs, rng.randrange(1, 6), rng.randrange(1, 25), 20)


@graded(points=1, hint="stop at the first that cannot start, and at max_num_seqs running ones")
def test_nobody_overtakes_and_the_most_is_the_most(solution, rng):
    for needs in ([9, 1, 1], [2, 9, 1, 1]):
        check_admit(solution, needs, 0, 8, 8)
    most = rng.randrange(2, 5)
    for running in range(most + 1):
        check_admit(solution, [1] * 6, running, 100, most)


@graded(points=3, hint="count up from 0: the youngest give way, and what they missed is not missed any more")
def test_as_few_as_can_be_give_way(solution, rng):
    check_preempt(solution, [1, 1, 1], [2, 2, 2], 0)
    check_preempt(solution, [0, 1, 0], [3, 3, 3], 1)
    check_preempt(solution, [1, 0, 1], [4, 2, 1], 1)
    check_preempt(solution, [1], [3], 0)
    for _ in range(40):
        n = rng.randrange(1, 7)
        missing, released = [rng.randrange(2) for _ in range(n)], [rng.randrange(4) for _ in range(n)]
        check_preempt(solution, missing, released, rng.randrange(3))


@graded(points=2, hint="play a few steps by hand: blocks taken never exceed those there are, and everybody ends")
def test_a_life_of_many_steps(solution, rng):
    """Blocks of 2 tokens; a sequence runs to its length, and what gave way starts again with the tokens it has."""
    blocks, size, most = 9, 2, 4
    waiting = [[rng.randrange(1, 7), rng.randrange(8, 17)] for _ in range(8)]  # tokens now, and in the end
    running, held = [], {}

    def needed(tokens):
        return -(-tokens // size)

    for step in range(400):
        free = blocks - sum(held.values())
        needs = [needed(seq[0]) for seq in waiting]
        count = solution.call("admit", needs, len(running), free, most)
        if not isinstance(count, int) or not 0 <= count <= len(waiting):
            wrong(f"step {step}: admit({needs}, {len(running)}, {free}, {most})", f"0 to {len(waiting)}", repr(count))
        for _ in range(count):
            running.append(waiting.pop(0))
            held[id(running[-1])] = needed(running[-1][0])
        free = blocks - sum(held.values())
        if free < 0:
            wrong(f"step {step}: blocks in use after admit({needs}, …)", f"at most {blocks}", blocks - free)
        missing = [needed(seq[0] + 1) - held[id(seq)] for seq in running]
        released = [held[id(seq)] for seq in running]
        victims = solution.call("preempt", missing, released, free)
        if not isinstance(victims, int) or not 0 <= victims <= len(running):
            wrong(f"step {step}: preempt({missing}, {released}, {free})", f"0 to {len(running)}", repr(victims))
        for _ in range(victims):
            waiting.insert(0, running.pop())
            del held[id(waiting[0])]
        for seq in list(running):
            seq[0] += 1
            held[id(seq)] = needed(seq[0])
            if seq[0] == seq[1]:
                running.remove(seq)
                del held[id(seq)]
        if sum(held.values()) > blocks:
            wrong(
                f"step {step}: blocks in use after preempt({missing}, {released}, {free})",
                f"at most {blocks}",
                sum(held.values()),
            )
        if not waiting and not running:
            return
    wrong("sequences that have not ended after 400 steps", 0, len(waiting) + len(running))
