"""The graders are graded: wrong solutions lose points where they should, right ones in any style get all of them."""

import ast
import doctest
import importlib
import re
import runpy
from pathlib import Path

import pytest
import torch

from exercises.grade import REFERENCE, earned, grade, graded_tests_of
from exercises.plugin import STUBS
from tinyengine.graphs.tape import TapeBackend

FOLDERS = {int(path.name.removeprefix("ex")): path for path in sorted((Path(__file__).parent / "mutants").glob("ex*"))}
RIGHT = [(number, path) for number, folder in FOLDERS.items() for path in sorted(folder.glob("right_*.py"))]
WRONG = {
    (number, name): mutant
    for number, folder in FOLDERS.items()
    for name, mutant in runpy.run_path(str(folder / "wrong.py"))["WRONG"].items()
}


def lost(results):
    """Each test that failed, and why."""
    return {result.test: result.why for result in results if result.outcome == "failed"}


@pytest.fixture
def wrong_file(tmp_path):
    """A file that is right but for a mutant's replacements."""

    def make(number, name):
        text = next(path for n, path in RIGHT if n == number).read_text(encoding="utf-8")
        for old, new in WRONG[number, name][2]:
            assert text.count(old) == 1, f"{old!r} is not once in the right solution"
            text = text.replace(old, new)
        path = tmp_path / f"ex{number:02}_{name}.py"
        path.write_text(text, encoding="utf-8")
        return path

    return make


@pytest.mark.parametrize(("number", "name"), WRONG, ids=str)
def test_a_wrong_solution_loses_points_where_it_should(wrong_file, number, name):
    failed = lost(grade(number, wrong_file(number, name)))
    found_by = WRONG[number, name][0]
    (hint,) = [marker["hint"] for test, marker in graded_tests_of(number) if test.__name__ == found_by]
    assert found_by in failed and failed[found_by].endswith(f"Hint: {hint}"), failed


@pytest.mark.parametrize(("number", "path"), RIGHT, ids=lambda value: getattr(value, "stem", value))
def test_a_right_solution_in_another_style_loses_nothing(number, path):
    assert lost(grade(number, path)) == {}


@pytest.mark.parametrize("number", FOLDERS)
def test_a_stub_earns_nothing_and_says_what_to_do(number):
    (stub,) = STUBS.glob(f"ex{number:02}_*.py")
    results = grade(number, stub)
    assert results and earned(results) == 0 and not any(result.outcome == "passed" for result in results)
    for why in lost(results).values():
        assert re.search(rf"NotImplementedError: Exercise {number}: write \w+; see notebooks/\d\d_\w+\.ipynb$", why)


@pytest.mark.parametrize("number", FOLDERS)
def test_what_a_stub_shows_is_what_comes_out(number):
    """The examples of its docstrings, with the engine's own part in place of what is to be written."""
    (stub,), (own,) = (folder.glob(f"ex{number:02}_*.py") for folder in (STUBS, REFERENCE))
    written = importlib.import_module(f"exercises.reference.{own.stem}")
    names = {"torch": torch, "TapeBackend": TapeBackend, **vars(written)}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for node in ast.walk(ast.parse(stub.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
            runner.run(doctest.DocTestParser().get_doctest(text, dict(names), node.name, str(stub), node.lineno))
    assert runner.failures == 0 and "Example" in stub.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", FOLDERS)
def test_there_are_enough_of_both(number):
    assert sum(n == number for n, _ in WRONG) >= 6 and sum(n == number for n, _ in RIGHT) >= 2


@pytest.mark.parametrize("number", FOLDERS)
def test_other_numbers_find_the_same(wrong_file, number):
    """With a hidden seed a right solution keeps its points, and a wrong one is told the hint alone."""
    right = grade(number, next(path for n, path in RIGHT if n == number), hidden_seed=7)
    assert lost(right) == {} and earned(right) > 0
    name = next(name for n, name in WRONG if n == number)
    wrong = lost(grade(number, wrong_file(number, name), hidden_seed=7))
    assert wrong and all(why.startswith("Hint: ") for why in wrong.values())
