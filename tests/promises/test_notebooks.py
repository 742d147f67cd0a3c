"""Every notebook runs from top to bottom, without an error or a warning."""

import json
import os
from pathlib import Path

import nbformat
import pytest

from tests.commands import Command

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 400_000
BY_DAY = "03_checkpoints"  # the quickest one
# Why no kernel of Jupyter: it would import torch, Dynamo and matplotlib for seconds.
RUN = """
import json, os, warnings
from IPython.core.interactiveshell import InteractiveShell
os.chdir({folder!r})
for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):  # as Python does
    warnings.simplefilter("ignore", ignored)
shell = InteractiveShell.instance()
for cell in json.loads({cells!r}):
    shell.run_cell(cell).raise_error()
"""

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
    "05_exploring_plans": {
        "in (1, 2, 4, 5)": "in (1, 5)", "in (4096, 8192, 9216, 10240)": "in (4096, 10240)",
        '"length": 8192}': '"length": 8192, "layers": 16}', '64, "length": 4096}': '64, "length": 4096, "layers": 4}',
        "range(0, 32, 8)": "range(0, 16, 8)", "BF16, None, None)": "BF16, None, 16)",
    },
    "06_405B_on_a_laptop": {
        '"llama3-405b"': '"llama3-405b", layers=9', "126 - kept": "9 - kept", "blocks.64": "blocks.4",
        "in (0, 2, 8)": "in (0,)", "in (1, 4, 16)": "in (1, 16)",
    },
    "07_what_will_run": {
        "BLOCKS, WIDTH, WORDS = 2, 4,": "BLOCKS, WIDTH, WORDS = 2, 2,",
        "AdamW, lr=1e-2, fused=True": "SGD, lr=1e-2, fused=True",  # AdamW's first step is recorded for itself
    },
    "08_derivatives": {
        "steps=30": "steps=2", "steps=4": "steps=1", "maxiter=15": "maxiter=2", "ncv=16": "ncv=3",
        "num_repeats=2": "num_repeats=1",
    },
}  # fmt: skip


def run_cells(cells, folder):
    """Run code cells in a process of their own, as a notebook does; return exit code and standard error."""
    environment = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline", "IPYTHONDIR": str(folder)}
    program = RUN.format(folder=str(folder), cells=json.dumps(cells))
    command = Command(["-c", program], environment)
    _, complaints = command.communicate(240)
    return command.returncode, complaints


def shorten(notebook, name):
    """Change the numbers of ``SHORTER`` in the code of a notebook; each has to be there."""
    for long, short in SHORTER.get(name, {}).items():
        cells = [cell for cell in notebook.cells if cell.cell_type == "code" and long in cell.source]
        assert cells, f"{name} has no {long!r}: change SHORTER"
        for cell in cells:
            cell.source = cell.source.replace(long, short)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.nightly] * (path.stem != BY_DAY), id=path.stem) for path in NOTEBOOKS],
)
def test_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    shorten(notebook, path.stem)
    assert run_cells([cell.source for cell in notebook.cells if cell.cell_type == "code"], tmp_path) == (0, "")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_executed_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run the notebook from top to bottom before storing it"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert path.stat().st_size < MOST_BYTES


@pytest.mark.slow
def test_a_failing_cell_is_fatal(tmp_path):
    code, complaints = run_cells(["1 / 0"], tmp_path)
    assert code != 0
    assert "ZeroDivisionError" in complaints
