"""Values between a grader and the process of a student's file: JSON and raw numbers.

Nothing that arrives is ever unpickled or executed, and a message that is not well formed is a ValueError.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """What stays in the process of a student's file under this name, in place of a value."""

    name: str


LARGEST = 64 << 20  # bytes of a message
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}
DTYPES |= {str(d).removeprefix("torch."): d for d in (torch.int64, torch.int32, torch.uint8, torch.bool)}


def pack(value: Any) -> bytes:
    """None, numbers, text, lists, tuples, dicts, tensors, arrays and Kept as bytes. TypeError for anything else."""
    tensors: list[Tensor] = []
    tree = _to_tree(value, tensors)
    shapes = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]
    header = json.dumps([tree, shapes]).encode()
    parts = [t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]
    return b"".join([len(header).to_bytes(8, "little"), header, *parts])


def unpack(data: bytes) -> Any:
    """What `pack` made bytes of."""
    end = 8 + int.from_bytes(data[:8], "little")
    try:
        tree, shapes = json.loads(data[8:end])
        tensors = []
        for name, shape in shapes:
            dtype, count = DTYPES[name], int(np.prod([int(side) for side in shape], dtype=np.int64))
            start, end = end, end + count * dtype.itemsize
            if count < 0 or end > len(data):
                raise ValueError("fewer numbers than announced")
            raw = torch.frombuffer(bytearray(data[start:end]), dtype=dtype) if count else torch.empty(0, dtype=dtype)
            tensors.append(raw.reshape(shape))
        return _from_tree(tree, tensors)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, RuntimeError) as error:
        raise ValueError(f"a message that is not well formed: {error}") from None


def _to_tree(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Tensor | np.ndarray):
        tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        tensors.append(tensor.detach().cpu().clone(memory_format=torch.contiguous_format))
        if tensors[-1].dtype not in DTYPES.values():
            raise TypeError(f"{tensor.dtype} is no dtype of an exercise")
        return {"array" if isinstance(value, np.ndarray) else "tensor": len(tensors) - 1}
    if isinstance(value, list):
        return [_to_tree(item, tensors) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_tree(item, tensors) for item in value]}
    if isinstance(value, Kept):
        return {"kept": value.name}
    if isinstance(value, dict):
        return {"dict": [[_to_tree(key, tensors), _to_tree(item, tensors)] for key, item in value.items()]}
    raise TypeError(f"a {type(value).__name__} is none of the values of an exercise")


def _from_tree(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, list):
        return [_from_tree(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tuple":
        return tuple(_from_tree(item, tensors) for item in content)
    if kind == "dict":
        return {_from_tree(key, tensors): _from_tree(item, tensors) for key, item in content}
    if kind == "kept":
        return Kept(str(content))
    if kind in ("tensor", "array"):
        return tensors[content] if kind == "tensor" else tensors[content].numpy()
    raise ValueError(f"unknown kind {kind!r}")


def send(connection: socket.socket, value: Any) -> None:
    """One message."""
    data = pack(value)
    connection.sendall(len(data).to_bytes(8, "little") + data)


def receive(connection: socket.socket, seconds: float | None = None) -> Any:
    """The next message. TimeoutError after so many seconds, EOFError at the end, ValueError for what is none."""
    deadline = None if seconds is None else time.monotonic() + seconds
    size = int.from_bytes(_read(connection, 8, deadline), "little")
    if size > LARGEST:
        raise ValueError(f"a message of {size:,} bytes is too large")
    return unpack(_read(connection, size, deadline))


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        connection.settimeout(None if deadline is None else max(deadline - time.monotonic(), 1e-3))
        if not (part := connection.recv(min(size - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)
