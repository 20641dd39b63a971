"""Submissions that are the engine's own part, or each other's, under other names; and a folder of them graded."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

from exercises.similar import engine_source, likeness, normalised
from tinyengine.kv.blocks import BlockAllocator

HERE = Path(__file__).parent
RENAMED = {"_free": "spare", "_refs": "owners", "wanted": "asked", "blocks": "numbers", "self": "me"}


def disguised(source):
    """The same code with other names and comments, and without annotations of its own."""
    for old, new in RENAMED.items():
        source = source.replace(old, new)
    return source.replace('"""Blocks that', '"""All that').replace(" -> int:", ":")


def test_the_engines_part_is_known_under_other_names():
    own = engine_source(BlockAllocator)
    tree = normalised(own, "BlockAllocator")
    assert likeness(normalised(disguised(own), "BlockAllocator"), tree) > 0.95
    for path in (HERE / "mutants/ex04").glob("right_*.py"):
        assert 0 < likeness(normalised(path.read_text(), "BlockAllocator"), tree) < 0.8


def test_what_is_missing_or_no_python_is_like_nothing():
    for source in ("", "def f(:", "x = 1", "def BlockAllocator():\n    return 1"):
        assert normalised(source, "BlockAllocator") == []
    assert likeness([], []) == 0


def test_a_folder_of_submissions_is_graded_and_what_is_alike_is_told(tmp_path):
    mutants, allocator = HERE / "mutants", Path(sys.modules[BlockAllocator.__module__].__file__)
    files = {
        "ada": (mutants / "ex12/right_ticks.py", mutants / "ex04/right_list_of_owners.py"),
        "bo": (mutants / "ex12/right_ticks.py", HERE / "../../notebooks/exercises/ex01_attention.py"),
        "cy": (allocator,),
        "dee": (),
    }
    for student, paths in files.items():
        (tmp_path / "all" / student).mkdir(parents=True)
        for path in paths:
            number = "ex04" if path is allocator else path.name[:4] if path.name[:2] == "ex" else path.parent.name
            shutil.copy(path, tmp_path / "all" / student / f"{number}_mine.py")
    command = [sys.executable, str(HERE.parent / "grade_submissions.py"), "all", "--csv", "points.csv", "--jobs", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "points.csv").open()))
    assert [(row["student"], float(row["sum"])) for row in rows] == [("ada", 18), ("bo", 8), ("cy", 10), ("dee", 0)]
    assert [float(row["ex12"]) for row in rows] == [8, 8, 0, 0]
    flags = [line for line in done.stdout.splitlines() if "alike" in line]
    assert flags == ["BlockAllocator: cy and the engine are alike by 100%", "GraphCache: ada and bo are alike by 100%"]


def test_an_empty_folder_is_told(tmp_path):
    command = [sys.executable, str(HERE.parent / "grade_submissions.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and "no folder of a student" in done.stderr and "Traceback" not in done.stderr
