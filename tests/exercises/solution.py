"""A student's file, called in a process of its own: whatever it does there, the grader gets values or one reason."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exercises import child, wire

SHOWN = 4_000  # characters of what a file prints
START_SECONDS = 120.0  # for Python and PyTorch to load on a slow machine
# On Linux a process is forked off one that has loaded PyTorch and nothing of anybody's; elsewhere each loads it anew.
PROCESSES = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    # The second is what PyTorch loads with the first dispatch mode, and so with the first tape.
    PROCESSES.set_forkserver_preload([child.__name__, "torch._dynamo"])


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What a process finds when it starts: one thread, and where these modules are."""
    before = dict(os.environ)
    paths = [str(Path(__file__).parent.parent), str(Path(__file__).parent.parent.parent), before.get("PYTHONPATH", "")]
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Failed(Exception):
    """Why a student's file gave no value, told to the student. error: the name of the exception, if it was one."""

    def __init__(self, message: str, error: str | None = None) -> None:
        super().__init__(message)
        self.error = error


class NotStarted(RuntimeError):
    """No process for a file could be started: the machine's fault, and no answer of a student's."""


class Solution:
    """The file at `path`. Each call may take `seconds`.

    The process may take `memory` bytes beside PyTorch's own, by default any. A process that ran out of time, or ended,
    is gone: every later call fails for the same reason.
    """

    def __init__(self, path: Path, seconds: float = 20.0, memory: int | None = None) -> None:
        self.path = path.resolve()
        self._seconds, self._broken, self._answered, self._printed = seconds, "", False, bytearray()
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        token = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(START_SECONDS)
            port = server.getsockname()[1]
            self._process = PROCESSES.Process(
                target=child.main, args=(port, token, str(self.path), memory, self._folder.name), daemon=True
            )
            with _environment():
                self._process.start()
            try:
                self._connection, self._output = (self._accepted(server, token) for _ in range(2))
            except (OSError, EOFError, ValueError) as error:
                self._process.kill()
                raise NotStarted(f"the process of {self.path.name} did not start: {error}") from None
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    @staticmethod
    def _accepted(server: socket.socket, token: str) -> socket.socket:
        """The next connection, which must be the process's own."""
        connection, _ = server.accept()
        if wire.receive(connection, START_SECONDS) != token:
            raise ValueError("somebody else's connection")
        return connection

    def call(self, name: str, *args: Any, of: str = "file", keep: str | None = None) -> Any:
        """A function of the file, or a method of what an earlier call kept under the name `of`. Failed if it fails.

        keep: what comes out stays there, under this name, and may be an argument later: Kept(name). `support` is
        always there (support.py).
        """
        return self._ask({"of": of, "name": name, "args": list(args), "keep": keep})

    def read(self, name: str, of: str = "file", keep: str | None = None) -> Any:
        """An attribute; see `call`."""
        return self._ask({"of": of, "name": name, "args": None, "keep": keep})

    @property
    def ended(self) -> bool:
        """Whether the process is gone and a new one might do better: not if it never gave one answer."""
        return bool(self._broken) and self._answered

    @property
    def printed(self) -> str:
        """The beginning of what the file has printed."""
        with contextlib.suppress(OSError, ValueError):  # closed: then all has been read
            for _ in range(50):
                if not select.select([self._output], [], [], 0.02)[0]:
                    break
        return self._printed.decode(errors="replace")

    def close(self) -> None:
        """End the process and everything that it started."""
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._connection.close()
        self._reader.join(1)
        self._output.close()
        self._folder.cleanup()

    def __enter__(self) -> Solution:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        if self._broken:
            raise Failed(self._broken)
        try:
            wire.send(self._connection, request)
            reply = wire.receive(self._connection, self._seconds)
            if not isinstance(reply, dict) or not reply.keys() & {"value", "error"}:
                raise ValueError("an answer that is none")
        except TimeoutError:
            self._break(f"no answer within {self._seconds:.0f} s: is there a loop that does not end?")
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            self._break(f"the process ended by itself with exit code {code}: exercises do not end the program")
        except ValueError as error:
            self._break(f"what came back cannot be read: {error}")
        self._answered = True
        if "value" in reply:
            return reply["value"]
        where = f"{self.path.name}, line {reply.get('line')}: " if reply.get("line") else ""
        raise Failed(f"{where}{reply.get('error')}: {reply.get('message')}", reply.get("error"))

    def _break(self, reason: str) -> None:
        self._broken = reason
        self.close()
        raise Failed(reason) from None

    def _listen(self) -> None:
        """Take what the file prints, so that it never waits, and keep the beginning."""
        with contextlib.suppress(OSError):
            while part := self._output.recv(1 << 16):
                self._printed += part[: SHOWN - len(self._printed)]
