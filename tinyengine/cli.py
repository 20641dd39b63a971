"""What the command lines share: a user's mistake ends in one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from tinyengine.errors import RequestError, TinyEngineError

INTERRUPTED = 130
USER_ERROR = 2


class Parser(argparse.ArgumentParser):
    """argparse prints its usage before an error; one line that says what is wrong reads better."""

    def error(self, message: str) -> NoReturn:
        """RequestError with argparse's message."""
        dash = "explicit argument" in message or "unrecognized" in message
        hint = "; text that begins with a dash goes after --" if dash else ""
        raise RequestError(f"{message} (see --help{hint})")


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: a whole number of `low` or more."""

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) < low:
            raise argparse.ArgumentTypeError(f"must be a whole number of {low} or more; got {text!r}")
        return int(text)

    return number


def exit_code(program: Callable[[], int]) -> int:
    """Run a program; its own exit code, or that of the user's mistake, of Ctrl-C, or of a closed pipe."""
    if sys.stderr is None:  # closed by the caller: there is nobody to tell
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character must not end the program
    try:
        if sys.stdout is None:
            raise RequestError("standard output is closed: there is nowhere to write")
        code = program()
        sys.stdout.flush()
        return code
    except TinyEngineError as error:
        return _fail(one_line(error))
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        # Typically a closed pipe. Python would try to flush both streams once more at exit, and complain.
        code = _fail(f"cannot write the output: {error.strerror}")
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        return code


def leave(code: int) -> NoReturn:
    """End the process, all being written: Ctrl-C while Python takes itself down would kill it, and changes nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def one_line(error: Exception) -> str:
    """An error's message; a file name or a chat template may have put a line break into it."""
    return " ".join(str(error).split())


def _fail(message: str) -> int:
    """Tell a mistake in one line, if anybody listens; the exit code."""
    with contextlib.suppress(OSError):
        print(f"tinyengine: {message}", file=sys.stderr, flush=True)
    return USER_ERROR
