"""Exercise 9: capture and replay over static buffers, on the tape, and on a GPU where there is one."""

from functools import partial

import pytest
import torch

from exercises.expect import close, equal
from exercises.wire import Kept

graded = partial(pytest.mark.exercise, number=9, part="CapturedStep", timeout=60)


class Captured:
    """A step `x @ weights * factor` in the student's process, captured there; what it must give is known here."""

    def __init__(self, solution, rng, kind="tape"):
        self.solution, self.factor = solution, 1.0
        self.bucket, self.weights = rng.randrange(4, 9), torch.randn(3, rng.randrange(5, 9))
        solution.call("Scene", kind, self.weights, self.bucket, of="support", keep="scene")
        for name in ("step", "backend", "pool", "stream"):
            solution.read(name, of="scene", keep=name)
        given = [Kept(name) for name in ("step", "scene", "backend", "pool", "stream")]
        solution.call("CapturedStep", *given, keep="captured")

    def run(self, rows):
        """A batch of so many rows, and the result; what the step wrote before is NaN."""
        batch = torch.randn(rows, 3)
        self.solution.call("poison", of="scene")
        return batch, self.solution.call("run", batch, of="captured")

    def check(self, rows):
        """The result is the step's."""
        batch, got = self.run(rows)
        close(f"run of {rows} rows in a bucket of {self.bucket}", got, batch @ self.weights * self.factor)


def check_results(solution, rng, kind):
    captured = Captured(solution, rng, kind)
    for _ in range(4):
        captured.check(captured.bucket)


def check_smaller_batches(solution, rng, kind):
    captured = Captured(solution, rng, kind)
    for rows in (captured.bucket, 1, captured.bucket - 1, 2):
        captured.check(rows)


def check_that_it_replays(solution, rng, kind):
    captured = Captured(solution, rng, kind)
    equal("how often the step was called to capture it", solution.read("calls", of="scene"), 1)
    solution.call("change", 100.0, of="scene")
    for _ in range(3):
        captured.check(captured.bucket)
    equal("how often the step was called after three replays", solution.read("calls", of="scene"), 1)


def check_that_results_are_views(solution, rng, kind):
    captured = Captured(solution, rng, kind)
    solution.call("run", torch.randn(2, 3), of="captured", keep="first")
    batch, _ = captured.run(2)
    what = "what the first run returned, read after the second run, which overwrites it"
    close(what, solution.call("clone", of="first"), batch @ captured.weights)


def check_that_reset_gives_memory_back(solution, rng, kind):
    captured = Captured(solution, rng, kind)
    captured.check(2)
    solution.call("reset", of="captured")
    for name in ("first", "step"):
        solution.call("backend_of", "tape", of="support", keep=name)  # let go of what the grader kept
    equal("bytes that the pool has reserved, and live ones, after reset", solution.call("forget", of="scene"), [0, 0])


@graded(points=3, hint="load the batch into the static inputs, then replay, then return where the step left its result")
def test_a_replay_gives_the_results_of_the_batch(solution, rng):
    check_results(solution, rng, "tape")


@graded(points=2, hint="return the first len(batch) rows: the others belong to padding")
def test_a_smaller_batch_gets_its_own_rows(solution, rng):
    check_smaller_batches(solution, rng, "tape")


@graded(points=3, hint="the step is called once, by backend.capture; after that graph.replay() runs what was recorded")
def test_the_step_is_captured_once_and_replayed_from_then_on(solution, rng):
    check_that_it_replays(solution, rng, "tape")


@graded(points=1, hint="return a view of the logits: no clone")
def test_the_next_replay_overwrites_the_result(solution, rng):
    check_that_results_are_views(solution, rng, "tape")


@graded(points=1, hint="reset the graph, and delete the logits that you kept: a tensor that is held keeps its memory")
def test_reset_gives_the_memory_back(solution, rng):
    check_that_reset_gives_memory_back(solution, rng, "tape")


@graded(points=0, needs="cuda", hint="the same as on the tape")
def test_all_of_it_on_a_gpu(solution, rng):
    for check in (
        check_results,
        check_smaller_batches,
        check_that_it_replays,
        check_that_results_are_views,
        check_that_reset_gives_memory_back,
    ):
        check(solution, rng, "cuda")
