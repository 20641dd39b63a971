"""The student's command: points, a score card, Gradescope's file, and what was not graded kept apart."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from exercises.expect import Wrong, close
from exercises.grade import Graded, earned, grade, graded_tests_of, gradescope, score_card
from exercises.plugin import STUBS
from exercises.solution import NotStarted
from tinyengine.student import EXERCISES
from tinyengine.tolerance import TOLERANCE

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@pytest.mark.parametrize("where", [ROOT, HERE], ids=["from the root", "from the graders' folder"])
def test_a_folder_of_solutions_gets_its_points(tmp_path, where):
    shutil.copy(HERE / "mutants/ex04/right_sorted_free_list.py", tmp_path / "ex04_block_allocator.py")
    shutil.copy(HERE / "mutants/ex12/right_ticks.py", wrong := tmp_path / "ex12_lru_graph_cache.py")
    wrong.write_text(wrong.read_text().replace("self.held[key] = (found[0], next(self.ticks))", "pass"))
    results = tmp_path / "results.json"
    options = ["--impl", "student", "--student-dir", str(tmp_path), "--gradescope", str(results)]
    command = [sys.executable, "-m", "pytest", *options, "-q", "-p", "no:cacheprovider", "-k", "ex01 or ex04 or ex12"]
    folder, env = os.path.relpath(HERE, where), os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, folder], cwd=where, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stdout + done.stderr
    card = done.stdout[done.stdout.index("exercises (student)") :]
    assert [line.split()[0:2] for line in card.splitlines()[1:4]] == [
        ["1", "causal_attention"],
        ["4", "BlockAllocator"],
        ["12", "GraphCache"],
    ]
    assert "0 of 8" in card and "10 of 10" in card and "there must be one file ex01_*.py" in done.stdout
    assert "Hint: a get makes its graph the most recently used" in done.stdout and "Traceback" not in done.stdout
    data = json.loads(results.read_text())
    assert data["score"] == sum(entry["score"] for entry in data["tests"]) > 10
    assert sum(entry["max_score"] for entry in data["tests"]) == 26


HOSTILE = {
    1: "while True:\n    pass\n",
    2: "def rotations(rope, positions:\n",
    3: "import sys\nsys.exit(0)\n",
    4: "import os\n\n\nclass BlockAllocator:\n    def __init__(self, n):\n        os._exit(0)\n",
    5: "def decode_attention(*args):\n    while True:\n        print('x' * 100_000)\n",
    6: "def sampling_weights(*args):\n    return bytearray(1 << 40)\n",
    7: (
        "import torch\n\ntorch.allclose = lambda *a, **k: True\ntorch.Tensor.__eq__ = lambda *a: True\n\n\n"
        "class Any(int):\n    __eq__ = lambda *a: True\n\n\n"
        "def admit(*args):\n    return Any(0)\n\n\npreempt = admit\n"
    ),
    8: "from tinyengine.graphs.rungs import choose_bucket\nfrom tinyengine.graphs.static import pad\n",
}


@pytest.mark.skipif(os.name == "nt", reason="memory has no limit there")
def test_hostile_files_earn_nothing_and_harm_no_other_exercise(tmp_path):
    """One file for each way to do harm, beside right solutions of other exercises."""
    for number, text in HOSTILE.items():
        (tmp_path / f"ex{number:02}_mine.py").write_text(text)
    for number in (10, 11, 12):
        right = next((HERE / f"mutants/ex{number}").glob("right_*.py"))
        shutil.copy(right, tmp_path / f"ex{number}_mine.py")
    results = tmp_path / "results.json"
    options = ["--impl", "student", "--student-dir", str(tmp_path), "--gradescope", str(results)]
    command = [sys.executable, "-m", "pytest", *options, "-q", "-p", "no:cacheprovider", str(HERE)]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    points = {}
    for entry in json.loads(results.read_text())["tests"]:
        points[entry["number"]] = points.get(entry["number"], 0) + entry["score"]
    assert points == {**{str(n): 0 for n in range(1, 10)}, "10": 8, "11": 6, "12": 8}


def test_gradescopes_autograder_writes_its_results(tmp_path):
    (tmp_path / "source").symlink_to(ROOT)
    for folder in ("submission", "results"):
        (tmp_path / folder).mkdir()
    shutil.copy(HERE / "mutants/ex08/right_lists.py", tmp_path / "submission/ex08_mine.py")
    env = os.environ | {"AUTOGRADER": str(tmp_path), "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    script = HERE / "gradescope" / "run_autograder"
    done = subprocess.run([script], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "results/results.json").read_text())
    assert data["score"] == 6 and sum(entry["max_score"] for entry in data["tests"]) == 100
    assert {entry["output"] for entry in data["tests"] if entry["number"] == "8"} == {""}


def test_a_results_file_that_cannot_be_written_is_told_before_anything_runs(tmp_path):
    command = [sys.executable, "-m", "pytest", "--gradescope", str(tmp_path / "no/results.json"), str(HERE)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 4 and "there is no folder" in done.stderr and "Traceback" not in done.stderr


def test_the_students_page_names_every_file_and_its_points():
    table = [line.split("|") for line in (STUBS / "README.md").read_text().splitlines() if line.startswith("| ")][1:]
    markers = {n: [marker for _, marker in graded_tests_of(n)] for n in range(1, 13)}
    for number, row in zip(markers, table, strict=True):
        (stub,) = STUBS.glob(f"ex{number:02}_*.py")
        names = ", ".join(f"`{name}`" for name in EXERCISES[number])
        points, notebook = sum(marker["points"] for marker in markers[number]), row[5].strip()
        assert [cell.strip() for cell in row[1:5]] == [str(number), f"`{stub.name}`", names, str(points)]
        assert f"notebooks/{notebook}.ipynb" in stub.read_text()


STRANGE = (
    "torch.zeros(3)",
    "np.zeros(3)",
    "[torch.zeros(3)] * 2",
    "float('nan')",
    "4.0",
    "'4'",
    "{}",
    "{1: [torch.ones(2)]}",
)


@pytest.mark.parametrize("value", STRANGE)
@pytest.mark.parametrize("number", range(1, 13))
def test_a_value_of_another_kind_is_a_wrong_answer_and_no_failure_of_the_grader(tmp_path, number, value):
    """Whatever a part gives: a function of every name that the exercise asks for, and of every method."""
    names = {*EXERCISES[number], "get", "put", "allocate", "run", "store", "view"}
    answers = "".join(f"def {name}(*args):\n    return {value}\n" for name in names if name[0].islower())
    methods = "".join(
        f"    def {name}(self, *args):\n        return {value}\n" for name in ("get", "put", "allocate", "run")
    )
    classes = "".join(
        f"class {name}:\n    def __init__(self, *args):\n        pass\n{methods}" for name in names if name[0].isupper()
    )
    path = tmp_path / f"ex{number:02}_strange.py"
    path.write_text(f"import numpy as np\nimport torch\n{answers}{classes}")
    results = grade(number, path)
    assert earned(results) == 0 and all(result.why for result in results if result.outcome == "failed")


def test_a_process_that_does_not_start_costs_nobody_points(monkeypatch):
    """It is the machine's fault: the grading stops and says so."""

    def broken(*_):
        raise NotStarted("no room")

    monkeypatch.setattr("exercises.grade.Solution", broken)
    with pytest.raises(NotStarted, match="no room"):
        grade(8, HERE / "mutants/ex08/right_lists.py")


def test_points_sum_to_100_without_a_gpu():
    markers = [marker for number in range(1, 13) for _, marker in graded_tests_of(number)]
    assert sum(marker["points"] for marker in markers) == 100
    assert sum(marker["points"] for marker in markers if marker.get("needs", "cpu") == "cpu") == 100


def test_a_grader_is_no_looser_than_the_tolerance_table():
    """So loose a tolerance that garbage passed (mlir-air #1427)."""
    expected = torch.randn(4, 4)
    close("x", expected * (1 + TOLERANCE[torch.float32] / 10), expected)
    for garbage in (expected * (1 + 10 * TOLERANCE[torch.float32]), expected * float("nan"), expected.double()):
        with pytest.raises(Wrong):
            close("x", garbage, expected)


def test_what_was_not_graded_is_neither_passed_nor_failed():
    tests = [
        Graded(9, "capture", 4, "passed", "a", ""),
        Graded(9, "capture", 3, "failed", "b", "why"),
        Graded(9, "capture", 2, "skipped", "c", ""),
    ]
    line, total = score_card(tests)
    assert " ".join(line.split()) == "9 capture 4 of 9 1 test, 2 points, not graded (needs a GPU)"
    assert total.strip() == "4 points of 7 graded, and of 9 in all"
    told = gradescope(tests)
    assert told["score"] == 4 and [entry["status"] for entry in told["tests"]] == ["passed", "failed"]
