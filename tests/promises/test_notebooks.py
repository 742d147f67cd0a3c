"""Every notebook runs from top to bottom, without an error or a warning."""

import os
import tempfile
from pathlib import Path

import nbclient
import nbformat
import pytest
from traitlets.config import Config

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 400_000

# Numbers of steps, and of blocks, that make a curve or a picture and take most of a notebook's time:
# the tests run the same code with fewer of them.
SHORTER = {
    "01_quickstart": {"steps, adamw = 60,": "steps, adamw = 4,"},
    "02_transforms": {"steps=75": "steps=6", "steps=12": "steps=3", "steps=45": "steps=3", "steps=50": "steps=3"},
    "03_checkpoints": {
        '["*"], 60)': '["*"], 4)', "120, folder": "8, folder", '["*"], 120)': '["*"], 8)', "range(1, 121)": "range(1, 9)",
        "range(1, 61)": "range(1, 5)", "range(61, 121)": "range(5, 9)", "whole[60:]": "whole[4:]",
    },
    "04_axes": {"steps=40": "steps=3"},
    "05_exploring_plans": {"in (1, 2, 4, 5)": "in (1, 5)", "in (4096, 8192, 9216, 10240)": "in (4096, 10240)"},
    "07_what_will_run": {
        "BLOCKS, WIDTH, WORDS = 2, 4,": "BLOCKS, WIDTH, WORDS = 2, 2,",
        "AdamW, lr=1e-2, fused=True": "SGD, lr=1e-2, fused=True",  # AdamW's first step is recorded for itself
    },
}  # fmt: skip


def execute(notebook, folder, monkeypatch):
    """Run a notebook's cells in a new kernel, in ``folder``, and raise the first error."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))

    with tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True) as sockets:
        # Why files: Jupyter chooses ports, and the kernel listens at them seconds later, when others may have taken one.
        config = Config({"KernelManager": {"transport": "ipc", "ip": str(Path(sockets) / "socket")}})
        client = nbclient.NotebookClient(
            notebook, timeout=240, startup_timeout=240, kernel_name="python3", allow_errors=False, config=config,
            resources={"metadata": {"path": str(folder)}},
        )  # fmt: skip
        client.execute()


def shorten(notebook, name):
    """Change the numbers of ``SHORTER`` in the code of a notebook; each has to be there."""
    for long, short in SHORTER.get(name, {}).items():
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and long in cell.source]
        assert cells, f"{name} has no {long!r}: change SHORTER"
        for cell in cells:
            cell.source = cell.source.replace(long, short)


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
    shorten(notebook, path.stem)
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
