"""Every notebook runs from top to bottom on a CPU; what it shows was made by the cells that it has."""

import os
import re
import sys
import time
import warnings
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9][0-9]_*.ipynb"))
sys.path.insert(0, str(FOLDER))

import execute  # noqa: E402 - beside the notebooks

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path, kind):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


@pytest.mark.slow
@every_notebook
def test_it_runs_on_a_cpu_and_warns_of_nothing(path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started = time.perf_counter()
    cells = execute.run(path).cells
    assert time.perf_counter() - started < 90
    outputs = [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert [output.text for output in outputs if output.get("name") == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2


@every_notebook
def test_its_outputs_are_those_of_its_cells(path):
    notebook = nbformat.read(path, as_version=4)
    stamp = notebook.metadata[execute.STAMP]
    assert stamp["code"] == execute.code_hash(notebook), f"run python notebooks/execute.py {path.stem} again"
    assert {"device", "driver", "torch", "commit", "date"} <= set(stamp)
    if stamp["engine"] != execute.engine_hash():
        warnings.warn(f"{path.name} was executed with another state of the engine", stacklevel=1)


@every_notebook
def test_it_is_small_and_its_links_lead_somewhere(path):
    assert path.stat().st_size < 1_000_000
    text = "\n".join(cell.source for cell in cells_of(path, "markdown"))
    for link in re.findall(r"\]\(([^)#]+)\)", text):
        assert link.startswith("https://") or (FOLDER / link).exists(), link
    for heading in ("What to remember", "Questions"):
        assert heading in text
    assert "**Predict" in text


def test_a_changed_cell_is_noticed():
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    before = execute.code_hash(notebook)
    next(cell for cell in notebook.cells if cell.cell_type == "markdown").source += "more words"
    assert execute.code_hash(notebook) == before
    next(cell for cell in notebook.cells if cell.cell_type == "code").source += "\n1 + 1"
    assert execute.code_hash(notebook) != before
