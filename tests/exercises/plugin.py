"""pytest learns to grade: the marker `exercise`, where a solution comes from, and the score card at the end."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exercises.expect import Wrong
from exercises.grade import REFERENCE, Graded, gradescope, needs, opened, reason, score_card, seeded
from exercises.solution import Failed, NotStarted, Solution
from tinyengine.student import files_of

STUBS = Path(__file__).parent.parent.parent / "notebooks" / "exercises"
RESULT = "exercise"  # the key under which a report carries a Graded
OPEN = pytest.StashKey[dict[tuple[int, str], Solution]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("exercises")
    group.addoption("--impl", choices=["reference", "student"], default="reference", help="whose parts are graded")
    group.addoption("--student-dir", type=Path, default=STUBS, metavar="DIR", help="where ex01_*.py … are")
    group.addoption(
        "--gradescope", type=Path, metavar="FILE", help="also write the points as Gradescope's results.json"
    )
    group.addoption("--hidden-seed", type=int, default=0, metavar="N", help="other numbers; messages give hints only")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "exercise(number, part, points, needs, timeout, hint): a graded test of a course exercise"
    )
    config.stash[OPEN] = {}
    results = config.getoption("--gradescope")
    if results and not results.absolute().parent.is_dir():
        raise pytest.UsageError(f"--gradescope: there is no folder {results.absolute().parent}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Who grades a solution runs the graders alone, and not the tests of the graders."""
    if config.getoption("--impl") == "student":
        others = [item for item in items if not item.get_closest_marker("exercise")]
        items[:] = [item for item in items if item.get_closest_marker("exercise")]
        config.hook.pytest_deselected(items=others)


def pytest_itemcollected(item: pytest.Item) -> None:
    """What needs a GPU is marked `cuda` like any other test of it: it is skipped where there is none."""
    marker = item.get_closest_marker("exercise")
    if marker and needs(marker.kwargs) == "cuda":
        item.add_marker(pytest.mark.cuda)


def pytest_unconfigure(config: pytest.Config) -> None:
    for solution in config.stash.get(OPEN, {}).values():
        solution.close()


def file_of(config: pytest.Config, number: int) -> Path:
    """The file that holds an exercise's solution. Failed if there is none, or more than one."""
    folder = REFERENCE if config.getoption("--impl") == "reference" else config.getoption("--student-dir")
    found = files_of(folder, number)
    if len(found) != 1:
        many = f"{len(found)} files" if found else "no file"
        raise Failed(f"there must be one file ex{number:02}_*.py in {folder}, and there is {many}")
    return found[0]


@pytest.fixture
def solution(request: pytest.FixtureRequest) -> Solution:
    """The process of the exercise that the test belongs to; a new one where the last one ended."""
    marker = request.node.get_closest_marker("exercise").kwargs
    running, number = request.config.stash[OPEN], marker["number"]
    key = number, needs(marker)
    if key not in running or running[key].ended:
        running[key] = opened(number, file_of(request.config, number), marker)
    return running[key]


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """The test's own numbers, the same ones each time; torch is seeded alike."""
    return seeded(request.node.originalname, request.config.getoption("--hidden-seed"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """A wrong solution is told in words and not as the grader's traceback."""
    report = (yield).get_result()
    marker = item.get_closest_marker("exercise")
    if marker is None or (call.when != "call" and report.passed) or call.when == "teardown":
        return
    why = ""
    error = call.excinfo and call.excinfo.value
    student = item.config.getoption("--impl") == "student"  # of the engine's own part an odd error is wanted whole
    told = Exception if student else (Wrong, Failed)
    if report.failed and isinstance(error, told) and not isinstance(error, NotStarted):
        hidden = bool(item.config.getoption("--hidden-seed"))
        why = reason(error, marker.kwargs["hint"], hidden)
        running = item.config.stash[OPEN].get((marker.kwargs["number"], needs(marker.kwargs)))
        if running and running.printed and not hidden:
            why += f"\nYour file printed:\n{running.printed}"
        report.longrepr = f"Exercise {marker.kwargs['number']}, {marker.kwargs['part']}: {why}"
    graded = Graded.of(marker.kwargs, item.name, report.outcome, why)
    report.user_properties.append((RESULT, vars(graded)))


def graded_tests(reporter: Any) -> list[Graded]:
    """Every graded test of this run, in the order of the exercises."""
    reports = [report for kind in ("passed", "failed", "error", "skipped") for report in reporter.stats.get(kind, ())]
    found = [
        Graded(**value)
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == RESULT
    ]
    return sorted(found, key=lambda graded: graded.number)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The score card, and Gradescope's file."""
    tests = graded_tests(terminalreporter)
    if not tests:
        return
    terminalreporter.section(f"exercises ({config.getoption('--impl')})")
    for line in score_card(tests):
        terminalreporter.line(line)
    if path := config.getoption("--gradescope"):
        path.write_text(json.dumps(gradescope(tests), indent=1) + "\n", encoding="utf-8")
