"""Whatever a student's file does, it does to itself: the grader gets a value, or one reason."""

import contextlib
import multiprocessing
import os
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exercises import wire
from exercises.solution import Failed, Solution


@pytest.fixture
def solution(tmp_path):
    """Make a file of a text, and a Solution of that."""
    made = []

    def make(text, **options):
        path = tmp_path / f"ex{len(made)}.py"
        path.write_text(text)
        made.append(Solution(path, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A file that does nothing wrong, in a process that lives as long as these tests."""
    path = tmp_path_factory.mktemp("good") / "good.py"
    path.write_text("def double(x):\n    return 2 * x\n")
    with Solution(path) as one:
        yield one


def test_values_go_there_and_back(solution):
    echo = solution("def same(*args):\n    return args\n")
    values = (
        None,
        True,
        3,
        0.5,
        "é",
        [1, (2, 3)],
        {1: "a", "b": [2]},
        torch.arange(6).view(2, 3),
        np.eye(2, dtype=np.float32),
    )
    *got, half = echo.call("same", *values, torch.tensor(1.5, dtype=torch.bfloat16))
    assert got[:-2] == list(values[:-2]) and torch.equal(got[-2], values[-2]) and np.array_equal(got[-1], values[-1])
    assert isinstance(got[-1], np.ndarray) and half.dtype == torch.bfloat16 and half.shape == ()


COUNTER = """
class Counter:
    n = 0
    def add(self, k):
        self.n += k
        return self.n
def total(counter, more):
    return counter.n + more
"""


def test_objects_stay_where_they_are_made(solution):
    counter = solution(COUNTER)
    counter.call("Counter", keep="c")
    assert [counter.call("add", 2, of="c"), counter.call("add", 3, of="c"), counter.read("n", of="c")] == [2, 5, 5]
    assert counter.call("total", wire.Kept("c"), 4) == 9


HOSTILE = {
    "an endless loop": ("while True: pass", "no answer within"),
    "a loop in a call": ("def double(x):\n    while True: pass", "no answer within"),
    "a syntax error": ("x = 1\ndef double(x) return", "line 2: SyntaxError"),
    "sys.exit": ("import sys\nsys.exit(0)", "line 2: SystemExit"),
    "os._exit": ("import os\ndef double(x):\n    os._exit(0)", "ended by itself with exit code 0"),
    "a print flood": ("def double(x):\n    while True: print('x' * 100000)", "no answer within"),
    "a huge allocation": ("def double(x):\n    return len(bytearray(1 << 40))", "line 2: MemoryError"),
    "slow growth": ("def double(x):\n    a = []\n    while True: a.append(bytearray(1 << 24))", "MemoryError"),
    "no such function": ("def triple(x): return x", "AttributeError"),
    "a generator": ("def double(x):\n    while True: yield x", "a generator is none of the values"),
    "a mistake": ("def double(x):\n    return x + undefined", "line 2: NameError"),
    "a strange value": ("def double(x):\n    return open", "none of the values"),
    "a class of its own": ("class I(int):\n    pass\ndef double(x):\n    return I(2 * x)", "a I is none of the values"),
    "an interrupt": ("def double(x):\n    raise KeyboardInterrupt", "KeyboardInterrupt"),
    "killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)", "ended by itself"),
    "deep nesting": ("def double(x):\n    v = []\n    for _ in range(10**5): v = [v]\n    return v", "RecursionError"),
}


@pytest.mark.skipif(os.name == "nt", reason="no SIGTERM, and memory has no limit there")
@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_earns_one_reason_and_harms_nobody(solution, good, text, reason):
    hostile = solution(text, seconds=2.0, memory=256 << 20)
    begun = time.monotonic()
    with pytest.raises(Failed, match=reason):
        hostile.call("double", 3)
    assert time.monotonic() - begun < 15
    assert good.call("double", 3) == 6
    assert len(hostile.printed) <= 4000


def test_where_no_process_is_forked_it_is_spawned(solution, monkeypatch):
    """As on Windows and macOS."""
    monkeypatch.setattr("exercises.solution.PROCESSES", multiprocessing.get_context("spawn"))
    spawned = solution("print('hello')\ndef double(x):\n    return 2 * x")
    assert spawned.call("double", 3) == 6 and spawned.printed == "hello\n"
    broken = solution("def double(x):\n    while True: pass", seconds=2.0)
    with pytest.raises(Failed, match="no answer within"):
        broken.call("double", 3)


def test_what_is_patched_there_stays_there(solution):
    patched = solution(
        "import torch\ntorch.allclose = lambda *a, **k: True\ntorch.Tensor.__eq__ = None\ndef double(x): return x"
    )
    assert patched.call("double", 3) == 3 and not torch.allclose(torch.zeros(1), torch.ones(1))


def test_after_the_end_every_call_fails_for_the_same_reason(solution):
    gone = solution("import os\ndef double(x):\n    os._exit(3)\ndef one():\n    return 1")
    assert gone.call("one") == 1
    for name in ("double", "one"):
        with pytest.raises(Failed, match="exit code 3"):
            gone.call(name, *(() if name == "one" else (1,)))


LEAVES_ONE_BEHIND = """
import subprocess, sys
WRITES = '''
import pathlib, time
while True:
    pathlib.Path({note!r}).write_text(str(time.time()))
    time.sleep(0.05)
'''
subprocess.Popen([sys.executable, "-c", WRITES])
def one():
    return 1
"""


def test_a_process_that_was_left_behind_ends_too(solution, tmp_path):
    note = tmp_path / "alive"
    text = LEAVES_ONE_BEHIND.format(note=str(note))
    parent = solution(text)
    assert parent.call("one") == 1
    while not note.exists():
        time.sleep(0.05)
    parent.close()
    time.sleep(0.3)
    last = note.read_text()
    time.sleep(0.4)
    assert note.read_text() == last


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.data())
def test_no_bytes_are_worse_than_a_value_error(noise, data):
    good = bytearray(wire.pack([1, {"a": torch.arange(3)}, (2.5, "x")]))
    at = data.draw(st.integers(0, len(good) - 1))
    good[at : at + 4] = noise[:4]
    for message in (bytes(good), noise):
        with contextlib.suppress(ValueError):
            wire.unpack(message)
