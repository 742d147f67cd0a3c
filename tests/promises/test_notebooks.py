"""Every notebook runs from top to bottom, without an error or a warning."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest
from jupyter_client.provisioning import local_provisioner

from tests.kernels import launch_kernel

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 400_000


def execute(notebook, folder, monkeypatch):
    """Run a notebook's cells in a new kernel, in ``folder``, and raise the first error."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setattr(local_provisioner, "launch_kernel", launch_kernel)
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", allow_errors=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()


def complaints(notebook):
    """Return the text that the cells wrote to stderr."""
    return "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.output_type == "stream" and output.name == "stderr"
    )


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    execute(notebook, tmp_path, monkeypatch)
    assert complaints(notebook) == ""


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_executed_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run the notebook from top to bottom before storing it"
    assert complaints(notebook) == ""
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.slow
def test_a_failing_cell_is_fatal(tmp_path, monkeypatch):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute(notebook, tmp_path, monkeypatch)
