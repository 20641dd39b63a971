"""Ctrl-C at a bad moment: make it wait for a good one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Within it SIGINT waits, and is delivered at the end: what was begun here is finished.

    Python delivers signals to the main thread alone, so elsewhere nothing needs to be held.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    pressed: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *args: pressed.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pressed:
            previous(*pressed[0])
