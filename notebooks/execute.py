"""Run notebooks from top to bottom, keep their outputs, and stamp where and of what code these were made.

    python notebooks/execute.py                 # all of them
    python notebooks/execute.py 05_first_graph  # one

The stamp has a hash of the code cells and one of the engine: a test fails when the cells have changed since, and warns
when the engine has.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat

from tinyengine.device import pick_device
from tinyengine.figures import origin

HERE = Path(__file__).parent
STAMP = "tinyengine"  # the key in a notebook's metadata
SECONDS = 600  # for one cell


def code_hash(notebook: Any) -> str:
    """Of the code cells, in order."""
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\f\n".join(cells).encode()).hexdigest()[:16]


def engine_hash() -> str:
    """Of every source file of the engine."""
    digest = hashlib.sha256()
    for path in sorted((HERE.parent / "tinyengine").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def run(path: Path) -> Any:
    """The notebook with the outputs of a run in its own folder. CellExecutionError if a cell fails."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.pop("execution_count", None)
    nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day: they change with every run
    return notebook


def main() -> None:
    """Execute the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 01_transformer (default: all)")
    names = parser.parse_args().names or sorted(path.stem for path in HERE.glob("[0-9][0-9]_*.ipynb"))
    place, engine = origin(pick_device("auto").type), engine_hash()  # before anything is written
    for name in names:
        path, started = HERE / f"{Path(name).stem}.ipynb", time.perf_counter()
        notebook = run(path)
        notebook.metadata[STAMP] = place | {"code": code_hash(notebook), "engine": engine}
        nbformat.write(notebook, path)
        print(f"{path.name}: {time.perf_counter() - started:.0f} s on {place['device']}, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
