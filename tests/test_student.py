"""`generate --student`: the engine runs what passes its graders, and says so."""

import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from tinyengine.generate import main
from tinyengine.parts import Parts
from tinyengine.student import EXERCISES

MUTANTS = Path(__file__).parent / "exercises" / "mutants"


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """A folder with a right solution for every exercise, each in another style than the engine's."""
    folder = tmp_path_factory.mktemp("solved")
    for number in EXERCISES:
        path = sorted((MUTANTS / f"ex{number:02}").glob("right_*.py"))[-1]
        shutil.copy(path, folder / f"ex{number:02}_{path.name}")
    return folder


@pytest.fixture
def generate(families, capsys):
    """Run the program on a tiny model; exit code, text, and what stands on stderr."""

    def run(*args):
        code = main(
            ["--model", str(families["llama"][1]), "--device", "cpu", "--max-tokens", "30", "--seed", "1", *args]
        )
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_every_part_belongs_to_one_exercise():
    names = [name for own in EXERCISES.values() for name in own]
    assert sorted(names) == sorted(field.name for field in fields(Parts)) and list(EXERCISES) == list(range(1, 13))


def test_a_whole_folder_runs_in_the_engine_with_the_same_text(generate, solved):
    code, expected, _ = generate("Once upon", "--top-p", "0.9")
    assert code == 0
    code, text, told = generate("Once upon", "--top-p", "0.9", "--student", str(solved))
    assert (code, text) == (0, expected)
    assert [line for line in told.splitlines() if line.startswith("exercise")] == [
        f"exercise {number:2}, {', '.join(names)}: yours" for number, names in EXERCISES.items()
    ]
    assert "replays" in told


def test_what_fails_its_grader_is_not_run(generate, solved, tmp_path):
    shutil.copy(solved / "ex01_right_loops.py", tmp_path / "ex01_mine.py")
    text = next(solved.glob("ex12_*")).read_text().replace("self.stats.hits += 1", "pass")
    (tmp_path / "ex12_mine.py").write_text(text)
    (tmp_path / "ex04_stub.py").write_text(
        "class BlockAllocator:\n    def __init__(self, n):\n        raise NotImplementedError\n"
    )
    code, _, told = generate("Once", "--student", str(tmp_path))
    assert code == 0
    lines = told.splitlines()
    assert "exercise  1, causal_attention: yours" in lines
    assert "exercise  4, BlockAllocator: the engine's own (yours has 0 of 10 points)" in lines
    assert "exercise 12, GraphCache: the engine's own (yours has 6 of 8 points)" in lines
    assert "exercise  2, rotations: the engine's own (0 files are named ex02_*.py)" in lines


def test_a_folder_without_solutions_is_told(generate, tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, _, told = generate("Once", "--student", str(folder))
        assert code == 2 and "name the folder with your solutions" in told and told.count("\n") == 1


BREAKS = """

plain = admit


def admit(needs, num_running, num_free, max_num_seqs):
    if max_num_seqs == 1:  # as with a single prompt
        1 / 0
    return plain(needs, num_running, num_free, max_num_seqs)
"""


def test_a_part_that_breaks_in_the_engine_is_told_with_its_line(generate, solved, tmp_path):
    text = next(solved.glob("ex07_*")).read_text()
    text += BREAKS
    (tmp_path / "ex07_mine.py").write_text(text)
    code, _, told = generate("Once", "--student", str(tmp_path))
    assert code == 2 and "ex07_mine.py, line" in told and "ZeroDivisionError" in told and "Traceback" not in told
