"""Ctrl-C at a bad moment: make it wait for a good one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupts:
    """Whether SIGINT waits just now; what came while it waited is delivered when it may."""

    def __init__(self, previous: Any) -> None:
        self._previous, self._waits = previous, True
        self._pressed: list[tuple[Any, ...]] = []

    def handle(self, *args: Any) -> None:
        """The signal's handler."""
        if self._waits:
            self._pressed.append(args)
        else:
            self._previous(*args)

    @contextlib.contextmanager
    def delivered(self) -> Iterator[None]:
        """Within it SIGINT is delivered at once."""
        self.deliver()
        self._waits = False
        try:
            yield
        finally:
            self._waits = True

    def deliver(self) -> None:
        """Deliver what has come, if anything has."""
        if self._pressed:
            args, self._pressed = self._pressed[0], []
            self._previous(*args)


@contextlib.contextmanager
def held_interrupts() -> Iterator[Interrupts]:
    """Within it SIGINT waits, and is delivered at the end: what was begun here is finished.

    Python delivers signals to the main thread alone, so elsewhere nothing needs to be held.
    """
    previous = signal.getsignal(signal.SIGINT)
    interrupts = Interrupts(previous)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield interrupts
        return
    signal.signal(signal.SIGINT, interrupts.handle)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)
        interrupts.deliver()
