"""A student's file, called in a process of its own: whatever it does there, the grader gets values or one reason."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from exercises import wire

TESTS = Path(__file__).parent.parent
SHOWN = 4_000  # characters of what a file prints
START_SECONDS = 120.0  # for Python and PyTorch to load on a slow machine


class Failed(Exception):
    """Why a student's file gave no value, told to the student. error: the name of the exception, if it was one."""

    def __init__(self, message: str, error: str | None = None) -> None:
        super().__init__(message)
        self.error = error


class Solution:
    """The file at `path`. Each call may take `seconds`.

    The process may take `memory` bytes beside PyTorch's own, by default any. A process that ran out of time, or ended,
    is gone: every later call fails for the same reason.
    """

    def __init__(self, path: Path, seconds: float = 20.0, memory: int | None = None) -> None:
        self.path = path.resolve()
        self._seconds, self._broken, self._printed = seconds, "", bytearray()
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(START_SECONDS)
            command = [
                sys.executable,
                "-m",
                "exercises.child",
                str(server.getsockname()[1]),
                str(self.path),
                str(memory or 0),
            ]
            paths = [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd=self._folder.name,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            self._reader = threading.Thread(target=self._listen, daemon=True)
            self._reader.start()
            token = secrets.token_hex(16)
            self._process.stdin.write(token.encode() + b"\n")
            self._process.stdin.close()
            try:
                self._connection, _ = server.accept()
                if wire.receive(self._connection, START_SECONDS) != token:
                    raise ValueError("somebody else's connection")
            except (OSError, EOFError, ValueError) as error:
                self.close()
                raise RuntimeError(f"the process of {self.path.name} did not start: {error}\n{self.printed}") from None

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
        """Whether the process is gone, and every call fails."""
        return bool(self._broken)

    @property
    def printed(self) -> str:
        """The beginning of what the file has printed."""
        return self._printed.decode(errors="replace")

    def close(self) -> None:
        """End the process and everything that it started."""
        with contextlib.suppress(OSError, AttributeError):
            self._connection.close()
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()
        self._process.wait()
        self._reader.join(1)
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
            code = self._process.wait()
            self._break(f"the process ended by itself with exit code {code}: exercises do not end the program")
        except ValueError as error:
            self._break(f"what came back cannot be read: {error}")
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
        while part := self._process.stdout.read1(1 << 16):
            self._printed += part[: SHOWN - len(self._printed)]
