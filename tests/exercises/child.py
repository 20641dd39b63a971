"""The process of one student's file: it loads the file, calls what it is asked to, and sends back what came out."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from exercises import support
from exercises.wire import Kept, receive, send
from tinyengine.student import load


def limit_memory(more: int) -> None:
    """So many bytes beside what Python and PyTorch take already, where the system can be asked to see to that."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + more,) * 2)
    except (ImportError, OSError, ValueError):
        pass  # not on Windows, and macOS does not tell: there the timeout is what remains


def told(error: BaseException, path: str) -> dict[str, Any]:
    """An exception as its type, its message, and the last line of the student's file that it went through."""
    name, message, line = type(error).__name__, str(error)[:2000], None
    if isinstance(error, SyntaxError) and error.filename == path:
        line = error.lineno
    for frame in traceback.extract_tb(error.__traceback__):
        line = frame.lineno if frame.filename == path else line
    return {"error": name, "message": message, "line": line}


def answer(objects: dict[str, Any], request: dict[str, Any]) -> Any:
    """Call a function of the file, or a method of an object that was made before; `keep` names the result."""
    target = objects[request["of"]]
    result = getattr(target, request["name"])
    if request["args"] is not None:
        result = result(*(objects[arg.name] if isinstance(arg, Kept) else arg for arg in request["args"]))
    if request["keep"] is None:
        return result
    objects[request["keep"]] = result
    return None


@torch.inference_mode()  # as in the engine
def serve(connection: socket.socket, path: str) -> None:
    """Do what the grader asks, until it hangs up."""
    objects: dict[str, Any] = {}
    while True:
        try:
            request = receive(connection)
        except (EOFError, OSError):
            return
        try:
            if not objects:
                objects |= {"file": load(Path(path)), "support": support}
            reply = {"value": answer(objects, request)}
        except BaseException as error:  # SystemExit, too
            reply = told(error, path)
        sys.stdout.flush()
        try:
            send(connection, reply)
        except (TypeError, RecursionError) as error:  # what came out is no value
            send(connection, told(error, path))


def redirect(output: socket.socket) -> None:
    """What is printed goes there, also what other programs print that are started here, and nobody types anything."""
    sys.stdin = open(os.devnull)  # noqa: SIM115 - as long as the process
    sys.stdout = sys.stderr = output.makefile("w", buffering=1, encoding="utf-8", errors="replace")
    if os.name == "posix":
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)


def main(port: int, token: str, path: str, memory: int | None, folder: str) -> None:
    """Serve a grader, who listens at the port, in an empty folder and a process group of its own."""
    if hasattr(os, "setsid"):
        os.setsid()
    os.chdir(folder)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        send(connection, token)
        with socket.create_connection(("127.0.0.1", port)) as output:
            send(output, token)
            redirect(output)
            if memory:
                limit_memory(memory)
            serve(connection, path)
