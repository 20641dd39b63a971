"""What a grader expects, and how it says that something else came: where first, what was expected, what was got."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from exercises.solution import Failed, Solution
from tinyengine.tolerance import TOLERANCE, relative_error


class Wrong(AssertionError):
    """An answer that is not the right one; the message is for the student."""


def wrong(what: str, expected: object, got: object) -> NoReturn:
    """Say so."""
    raise Wrong(f"{what}: expected {expected}, got {got}")


def close(what: str, got: Any, expected: Tensor) -> None:
    """A tensor of this shape and dtype, and of these numbers within the tolerance table."""
    if not isinstance(got, Tensor):
        wrong(what, f"a tensor {list(expected.shape)}", f"a {type(got).__name__}")
    if got.shape != expected.shape:
        wrong(f"{what}, shape", list(expected.shape), list(got.shape))
    if got.dtype != expected.dtype:
        wrong(f"{what}, dtype", expected.dtype, got.dtype)
    allowed = TOLERANCE[expected.dtype]
    if relative_error(got, expected) <= allowed:
        return
    off = ~((got - expected).abs() <= allowed * expected.abs().max())
    at = off.nonzero()[0].tolist() if off.any() else [0] * got.dim()
    wrong(f"{what} first differs at {at}", f"{expected[tuple(at)]:.6g}", f"{got[tuple(at)]:.6g}")


def equal(what: str, got: Any, expected: Any) -> None:
    """The same value; of sequences the first index that differs is told."""
    if torch.is_tensor(expected):
        if not torch.is_tensor(got) or got.shape != expected.shape:
            shape = list(got.shape) if torch.is_tensor(got) else f"a {type(got).__name__}"
            wrong(f"{what}, shape", list(expected.shape), shape)
        got, expected = got.tolist(), expected.tolist()
    if isinstance(expected, list | tuple) and isinstance(got, list | tuple) and list(got) != list(expected):
        pairs = enumerate(zip(got, expected, strict=False))
        at = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(got), len(expected)))
        values = [
            f"{seq[at]!r} (of {list(seq)})" if at < len(seq) else f"nothing (of {list(seq)})" for seq in (expected, got)
        ]
        wrong(f"{what} first differs at index {at}", *values)
    if type(got) is not type(expected) and not (isinstance(expected, list | tuple) and isinstance(got, list | tuple)):
        wrong(what, repr(expected), f"{got!r}, a {type(got).__name__}")
    if not isinstance(expected, list | tuple) and got != expected:
        wrong(what, repr(expected), repr(got))


def refused(what: str, error: str, solution: Solution, name: str, *args: Any, of: str = "file") -> None:
    """A call that must raise this error."""
    try:
        got = solution.call(name, *args, of=of)
    except Failed as failed:
        if failed.error == error:
            return
        raise
    wrong(what, f"a {error}", repr(got))
