"""What an exercise is worth: its graded tests, run on one file, and the score card that comes of it."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from exercises.check import check
from exercises.expect import Wrong
from exercises.solution import Failed, NotStarted, Solution

REFERENCE = Path(__file__).parent / "reference"
MEMORY = 2 << 30  # bytes that a solution may take beside PyTorch's own


@dataclass(frozen=True)
class Graded:
    """What one test is worth, and what came of it."""

    number: int
    part: str
    points: float
    outcome: str  # passed | failed | skipped
    test: str
    why: str

    @classmethod
    def of(cls, marker: dict[str, Any], test: str, outcome: str, why: str = "") -> Graded:
        """Of the keywords of a test's marker."""
        return cls(marker["number"], marker["part"], marker["points"], outcome, test, why)


def seeded(test: str, hidden_seed: int) -> random.Random:
    """A test's own numbers, the same ones each time; torch is seeded alike."""
    generator = random.Random(f"{test} {hidden_seed}")
    torch.manual_seed(generator.getrandbits(32))
    return generator


def reason(error: Exception, hint: str, hidden: bool) -> str:
    """What a student is told: of hidden numbers nothing but the hint, and of a part to be written no hint yet.

    An error that is neither Wrong nor Failed came of a value of a kind that no grader expects.
    """
    if not isinstance(error, Wrong | Failed):
        error = Wrong(f"what came back cannot be compared with what was expected ({type(error).__name__}: {error})")
    if isinstance(error, Failed) and error.error == "NotImplementedError":
        return str(error)
    return ("" if hidden else f"{error}\n") + f"Hint: {hint}"


def needs(marker: dict[str, Any]) -> str:
    """`cpu` or `cuda`."""
    return marker.get("needs", "cpu")


def opened(number: int, path: Path, marker: dict[str, Any]) -> Solution:
    """The process for an exercise's tests; Failed if the file takes what it may not (check.py).

    With a GPU its memory has no limit: CUDA maps far more than it uses.
    """
    if path.parent != REFERENCE and (found := check(number, path)):
        raise Failed(f"{path.name}, {found}")
    memory = None if needs(marker) == "cuda" else MEMORY
    return Solution(path, marker["timeout"], memory)


def graded_tests_of(number: int) -> Iterator[tuple[Callable[..., None], dict[str, Any]]]:
    """The graded tests of an exercise, with the keywords of their markers."""
    (file,) = Path(__file__).parent.glob(f"test_ex{number:02}_*.py")
    module = importlib.import_module(f"exercises.{file.stem}")
    for test in vars(module).values():
        for mark in getattr(test, "pytestmark", ()):
            if mark.name == "exercise":
                yield test, mark.kwargs


def grade(number: int, path: Path, hidden_seed: int = 0) -> list[Graded]:
    """An exercise's tests on a file, without pytest; those that need a GPU are left out where there is none."""
    results = []
    running: dict[str, Solution] = {}
    try:
        for test, marker in graded_tests_of(number):
            device = needs(marker)
            if device == "cuda" and not torch.cuda.is_available():
                results.append(Graded.of(marker, test.__name__, "skipped"))
                continue
            try:
                if device not in running or running[device].ended:
                    running[device] = opened(number, path, marker)
                test(running[device], seeded(test.__name__, hidden_seed))
                results.append(Graded.of(marker, test.__name__, "passed"))
            except NotStarted:
                raise
            except Exception as error:
                why = reason(error, marker["hint"], bool(hidden_seed))
                results.append(Graded.of(marker, test.__name__, "failed", why))
    finally:
        for solution in running.values():
            solution.close()
    return results


def score_card(tests: list[Graded]) -> list[str]:
    """A line for each exercise, and the sum. What was not graded is neither passed nor failed."""
    lines = []
    for number in dict.fromkeys(test.number for test in tests):
        mine = [test for test in tests if test.number == number]
        skipped = [test for test in mine if test.outcome == "skipped"]
        tests_of = f"{len(skipped)} test{'s' * (len(skipped) > 1)}, {possible(skipped):g} points,"
        note = f"   {tests_of} not graded (needs a GPU)" if skipped else ""
        lines.append(f"{number:2}  {mine[0].part:24} {earned(mine):5g} of {possible(mine):g}{note}")
    graded = sum(test.points for test in tests if test.outcome != "skipped")
    lines.append(f"    {earned(tests):g} points of {graded:g} graded, and of {possible(tests):g} in all")
    return lines


def earned(tests: list[Graded]) -> float:
    """Points of the tests that passed."""
    return sum(test.points for test in tests if test.outcome == "passed")


def possible(tests: list[Graded]) -> float:
    """Points of all tests."""
    return sum(test.points for test in tests)


def gradescope(tests: list[Graded]) -> dict[str, Any]:
    """Gradescope's results.json: https://gradescope-autograders.readthedocs.io/en/latest/specs/."""
    entries = [
        {
            "name": f"Exercise {test.number}, {test.part}: {test.test}",
            "number": str(test.number),
            "score": test.points if test.outcome == "passed" else 0,
            "max_score": test.points,
            "status": "passed" if test.outcome == "passed" else "failed",
            "output": test.why,
        }
        for test in tests
        if test.outcome != "skipped"
    ]
    return {"score": earned(tests), "tests": entries, "output": "\n".join(score_card(tests))}
