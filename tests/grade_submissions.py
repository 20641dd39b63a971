"""Grade a folder of submissions, one subfolder a student, each with files ex01_*.py to ex12_*.py.

    python tests/grade_submissions.py submissions/ --hidden-seed 2024 --csv points.csv

Prints a line for each student with the points of each exercise, and after them what looks like the engine's own part
or like another student's (similar.py): a flag to look at, and no proof.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from exercises.grade import earned, grade
from exercises.similar import engine_source, likeness, normalised
from tinyengine.parts import Parts
from tinyengine.student import EXERCISES, files_of

ALIKE = 0.9


def points_of(folder: Path, hidden_seed: int) -> dict[int, float]:
    """A student's points in each exercise; what is missing or there twice has none."""
    files = {number: files_of(folder, number) for number in EXERCISES}
    return {n: earned(grade(n, found[0], hidden_seed)) if len(found) == 1 else 0.0 for n, found in files.items()}


def trees_of(folder: Path, points: dict[int, float]) -> dict[str, list[str]]:
    """The normalised trees of the parts that have points: others are stubs, or of use to nobody."""
    trees = {}
    for number in (number for number in EXERCISES if points[number]):
        for path in files_of(folder, number):
            source = path.read_text(encoding="utf-8", errors="replace")
            trees |= {name: normalised(source, name) for name in EXERCISES[number]}
    return trees


def flags(students: dict[str, dict[str, list[str]]]) -> Iterator[str]:
    """Parts that are alike, each pair told once."""
    own = Parts()
    for names in EXERCISES.values():
        for name in names:
            part = getattr(own, name)
            everybody = {who: trees.get(name, []) for who, trees in students.items()}
            everybody["the engine"] = normalised(engine_source(part), name)
            for (one, mine), (other, theirs) in itertools.combinations(everybody.items(), 2):
                if (share := likeness(mine, theirs)) >= ALIKE:
                    yield f"{name}: {one} and {other} are alike by {100 * share:.0f}%"


def main() -> int:
    """The exit code: 2 if there is nothing to grade."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="holds one folder for each student")
    parser.add_argument("--hidden-seed", type=int, default=0, metavar="N", help="numbers that no student has seen")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the points there, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="students graded at once")
    args = parser.parse_args()
    folders = sorted(path for path in args.folder.glob("*") if path.is_dir()) if args.folder.is_dir() else []
    if not folders:
        print(f"there is no folder of a student in {args.folder}", file=sys.stderr)
        return 2
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        graded = pool.map(points_of, folders, itertools.repeat(args.hidden_seed))
        width = max(len(path.name) for path in folders)
        print(" " * width, *(f"{n:>4}" for n in EXERCISES), "  sum")
        rows, earners = [], {}
        for path, points in zip(folders, graded, strict=True):
            earners[path.name] = trees_of(path, points)
            rows.append([path.name, *points.values(), sum(points.values())])
            print(f"{path.name:{width}}", *(f"{p:4g}" for p in points.values()), f"{rows[-1][-1]:5g}", flush=True)
    if args.csv:
        with args.csv.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([["student", *(f"ex{n:02}" for n in EXERCISES), "sum"], *rows])
    for line in flags(earners):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
