"""What the notebooks share: where they run, what was recorded on the H200, and a look at the engine's own code."""

from __future__ import annotations

import html
import inspect
import json
import subprocess
import sys
import tempfile
import textwrap
import warnings
from pathlib import Path
from typing import Any

import torch
from IPython.display import HTML

import tinyengine
from tinyengine.device import pick_device
from tinyengine.figures import origin
from tinyengine.graphs.backend import Backend
from tinyengine.graphs.cuda import CudaBackend
from tinyengine.graphs.tape import TapeBackend

warnings.filterwarnings("ignore", message="IProgress not found")  # a library's wish for a prettier progress bar
HERE = Path(__file__).parent
DEVICE = pick_device("auto")
HAS_GPU = DEVICE.type == "cuda"


def where() -> None:
    """Say where this runs, as every measured figure must."""
    place = origin(DEVICE.type)
    driver = f", driver {place['driver']}" if place["driver"] else ""
    print(
        f"{place['date']} on {place['device']}, torch {place['torch']}{driver}, {torch.get_num_threads()} CPU threads"
    )


def new_backend() -> Backend:
    """What captures graphs here: CUDA, or on a CPU the tape, which means the same and takes the same bytes."""
    return CudaBackend(DEVICE) if HAS_GPU else TapeBackend()


def memory(*args: str) -> dict[str, Any]:
    """What `python -m tinyengine.memory ARGS --json` says: predicted, and where there is a GPU measured, too."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "memory.json"
        command = [sys.executable, "-m", "tinyengine.memory", *args, "--json", str(file)]
        subprocess.run(command if HAS_GPU else [*command, "--predict"], check=True, capture_output=True)
        return json.loads(file.read_text(encoding="utf-8"))


def recorded(name: str) -> dict[str, Any]:
    """A run recorded on the H200: `recorded/NAME.h200.json`, with the device, commit and date that it carries."""
    return json.loads((HERE / "recorded" / f"{name}.h200.json").read_text(encoding="utf-8"))


def engine_code(*parts: Any) -> HTML:
    """The engine's own code for what was built here, collapsed."""
    package = Path(tinyengine.__file__).parent.parent
    blocks = []
    for part in parts:
        lines, first = inspect.getsourcelines(part)
        file = Path(inspect.getsourcefile(part)).relative_to(package).as_posix()
        name = f"{part.__qualname__} in {file}, line {first}"
        text = html.escape(textwrap.dedent("".join(lines)))
        blocks.append(f"<details><summary><code>{name}</code></summary><pre>{text}</pre></details>")
    return HTML("\n".join(blocks))
