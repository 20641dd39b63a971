"""Measured figures as data: where they come from, and the file that they go to."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tinyengine.errors import ConfigError


def origin(device_type: str | None) -> dict[str, Any]:
    """Where and when: device, PyTorch, driver, commit, date. `device_type` is None for what was not measured."""
    on_cuda = device_type == "cuda"
    name = torch.cuda.get_device_name() if on_cuda else platform.processor() or platform.machine()
    return {
        "device": name if device_type else None,
        "torch": torch.__version__,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") if on_cuda else None,
        "commit": output_of("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"),
        "date": datetime.date.today().isoformat(),
    }


def output_of(*command: str) -> str | None:
    """The first line that a program prints, or None if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip() or None


def written(figures: Callable[[], dict[str, Any]], path: str | None) -> dict[str, Any]:
    """The figures, also as JSON in a file if one is named. ConfigError, before any work, if it cannot be written."""
    if path is not None:
        _check_writable(path)
    data = figures()
    if path is not None:
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return data


def _check_writable(path: str) -> None:
    try:
        existed = Path(path).exists()
        open(path, "a", encoding="utf-8").close()
        if not existed:
            os.unlink(os.path.realpath(path))  # of a link to nowhere what is new is the other end
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ConfigError(f"cannot write {path!r}: {getattr(error, 'strerror', error)}") from None
