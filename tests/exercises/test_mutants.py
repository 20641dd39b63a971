"""The graders are graded: wrong solutions lose points where they should, right ones in any style get all of them."""

import re
from pathlib import Path

import pytest

from exercises.grade import grade, graded_tests_of, possible
from exercises.plugin import STUBS

MUTANTS = sorted((Path(__file__).parent / "mutants").glob("ex*/*.py"))
NUMBERS = sorted({int(path.parent.name.removeprefix("ex")) for path in MUTANTS})


@pytest.mark.parametrize("path", MUTANTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_mutant_loses_where_it_says_and_another_style_loses_nothing(path):
    results = grade(number := int(path.parent.name.removeprefix("ex")), path)
    failed = {result.test: result.why for result in results if result.outcome != "passed"}
    verdict = path.read_text(encoding="utf-8").splitlines()[0]
    if path.stem.startswith("right_"):
        assert verdict.startswith('"""Right: ') and not failed
        return
    found_by = re.match(r'"""Wrong, found by (\w+): ', verdict).group(1)
    assert found_by in failed, failed
    (hint,) = [marker["hint"] for test, marker in graded_tests_of(number) if test.__name__ == found_by]
    assert failed[found_by].endswith(f"Hint: {hint}")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_stub_earns_nothing_and_says_what_to_do(number):
    (stub,) = STUBS.glob(f"ex{number:02}_*.py")
    results = grade(number, stub)
    assert results and all(result.outcome == "failed" for result in results)
    for result in results:
        assert re.search(
            rf"NotImplementedError: Exercise {number}: write \w+; see notebooks/\d\d_\w+\.ipynb$", result.why
        )


@pytest.mark.parametrize("number", NUMBERS)
def test_there_are_enough_mutants(number):
    kinds = [path.stem.split("_")[0] for path in MUTANTS if path.parent.name == f"ex{number:02}"]
    assert kinds.count("wrong") >= 6 and kinds.count("right") >= 2


@pytest.mark.parametrize("number", NUMBERS)
def test_other_numbers_find_the_same(number):
    """With a hidden seed a right solution keeps its points, and a wrong one is told the hint alone."""
    folder = Path(__file__).parent / "mutants" / f"ex{number:02}"
    right = grade(number, min(folder.glob("right_*.py")), hidden_seed=7)
    assert possible(right) > 0 and all(result.outcome == "passed" for result in right)
    wrong = [result for result in grade(number, min(folder.glob("wrong_*.py")), hidden_seed=7) if result.why]
    assert wrong and all(result.why.startswith("Hint: ") for result in wrong)
