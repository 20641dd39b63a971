"""Parts that a student wrote, each in place of the engine's own once its graders have passed it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tinyengine.errors import ConfigError
from tinyengine.parts import Parts

# The course's exercises, and the fields of Parts that each is about.
EXERCISES: dict[int, tuple[str, ...]] = {
    1: ("causal_attention",),
    2: ("rotations",),
    3: ("slot_mapping", "pad_block_tables"),
    4: ("BlockAllocator",),
    5: ("decode_attention",),
    6: ("sampling_weights",),
    7: ("admit", "preempt"),
    8: ("choose_bucket", "pad"),
    9: ("CapturedStep",),
    10: ("round_size", "segment_size", "capture_order"),
    11: ("LogitsBuffer",),
    12: ("GraphCache",),
}
GRADERS = Path(__file__).parent.parent / "tests"  # in a clone of the repository; a wheel has none


def files_of(folder: Path, number: int) -> list[Path]:
    """The files of an exercise in a folder, of which there should be one."""
    return sorted(folder.glob(f"ex{number:02}_*.py"))


def student_parts(folder: str, tell: Callable[[str], None]) -> Parts:
    """The parts of the files exNN_*.py in a folder that pass all their graders, the engine's own for the others.

    tell: is told of each exercise what becomes of it. Files that pass are loaded into this process. ConfigError if the
    folder has no solutions, or the graders are not there.
    """
    files = {number: files_of(Path(folder).resolve(), number) for number in EXERCISES}
    if not any(files.values()):
        raise ConfigError(f"there is no file ex01_*.py to ex12_*.py in {folder!r}: name the folder with your solutions")
    grader = _grader()
    parts: dict[str, Any] = {}
    for number, found in files.items():
        what = f"exercise {number:2}, {', '.join(EXERCISES[number])}"
        if len(found) != 1:
            tell(f"{what}: the engine's own ({len(found)} files are named ex{number:02}_*.py)")
            continue
        results = grader.grade(number, found[0])
        if any(result.outcome == "failed" for result in results):
            points = f"{grader.earned(results):g} of {grader.possible(results):g} points"
            tell(f"{what}: the engine's own (yours has {points})")
            continue
        module = load(found[0])
        parts |= {name: getattr(module, name) for name in EXERCISES[number]}
        tell(f"{what}: yours")
    return Parts(**parts)


def blame(error: Exception, folder: str) -> str | None:
    """The line of a student's file that an error came through; None if it went through none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent == Path(folder).resolve()]
    if not frames:
        return None
    at = frames[-1]
    where = f"{Path(at.filename).name}, line {at.lineno}, in {at.name}"
    return f"{where}: {type(error).__name__}: {error} (the engine called it with something that the grader did not try)"


def _grader() -> Any:
    """The graders' module."""
    if not (GRADERS / "exercises").is_dir():
        raise ConfigError(
            "--student needs the graders: run it in a clone of the repository, installed with pip install -e"
        )
    if str(GRADERS) not in sys.path:
        sys.path.append(str(GRADERS))
    try:
        return importlib.import_module("exercises.grade")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--student needs the graders, and they need {error.name}: pip install -e '.[test]'"
        ) from None


def load(path: Path) -> Any:
    """A file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
