"""Models along named axes, as docs/axes.md writes them, equal their unsharded selves."""

import ast
import functools
import re
from pathlib import Path

import pytest
import torch

import funcshard as fs
from tests.ranks import run_ranks, run_simulated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "axes.md"
AXIS_OF = {
    "tensor_parallel": "tensor",
    "sequence_parallel": "tensor",
    "vocabulary_parallel": "tensor",
    "expert_parallel": "expert",
    "context_parallel": "context",
    "pipeline": "stage",
}


@functools.cache
def page():
    """Return the names that the page defines before its last block, without running its comparisons."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    namespace = {"__name__": "__page__"}
    for block in blocks[:-1]:
        defining = (ast.Import, ast.FunctionDef, ast.ClassDef, ast.Assign)
        kept = [statement for statement in ast.parse(block).body if isinstance(statement, defining)]
        exec(compile(ast.Module(kept, []), str(PAGE), "exec"), namespace)
    return namespace


def check(mesh, recipe):
    page()[f"check_{recipe}"](mesh)


def test_the_page_has_these_recipes():
    found = {name.removeprefix("check_") for name in page() if name.startswith("check_")}
    assert found == {*AXIS_OF, "context_and_tensor"}


@pytest.mark.nightly(one_in=3)  # on other meshes the page itself compares them
@pytest.mark.parametrize("recipe", AXIS_OF)
def test_a_recipe_equals_the_unsharded_model(recipe):
    run_simulated(check, 8, recipe, shape={"replicate": 2, "shard": 2, AXIS_OF[recipe]: 2})


def check_all(mesh):
    for recipe, axis in AXIS_OF.items():
        check(mesh.reshaped({"shard": 2, axis: 2}), recipe)
    check(mesh.reshaped({"context": 2, "tensor": 2}), "context_and_tensor")


@pytest.mark.nightly
def test_every_recipe_runs_on_processes():
    run_ranks(check_all, 4, shape={"shard": 2, "tensor": 2}, timeout=120)


def bytes_of_collectives(mesh):
    x, ring = torch.zeros(12, dtype=torch.float32), [(0, 1), (1, 2), (2, 3), (3, 0)]
    calls = {
        "psum": lambda: fs.psum(x, mesh, axis="tensor"),
        "pmean": lambda: fs.pmean(x, mesh, axis="tensor"),
        "pmax": lambda: fs.pmax(x, mesh, axis="tensor"),
        "all_gather": lambda: fs.all_gather(x, mesh, axis="tensor"),
        "psum_scatter": lambda: fs.psum_scatter(x, mesh, axis="tensor", tiled=True),
        "all_to_all": lambda: fs.all_to_all(x, mesh, axis="tensor", tiled=True),
        "ppermute": lambda: fs.ppermute(x, mesh, ring, axis="tensor"),
    }
    found = {}
    for name, call in calls.items():
        with fs.record_events() as events:
            call()
        found[name] = [(event.axis, event.traffic) for event in events]
    return found


def test_the_page_says_what_each_collective_sends():
    rows = re.findall(r"^\| `fs\.(\w+)[^|]*\|[^|]*\|[^|]*\| (b|2 b)(.*?) \|$", PAGE.read_text(), re.MULTILINE)
    b, n = 48, 4
    shares = {"": 1, " (n-1)": n - 1, " (n-1)/n": (n - 1) / n}
    said = {name: [("tensor", (2 * b if size == "2 b" else b) * shares[share])] for name, size, share in rows}
    assert len(said) == 7
    assert run_simulated(bytes_of_collectives, 4, shape={"tensor": 4}) == [said] * 4
