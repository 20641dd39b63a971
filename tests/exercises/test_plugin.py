"""The student's command: points, a score card, Gradescope's file, and what was not graded kept apart."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from exercises.grade import Graded, gradescope, score_card

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
