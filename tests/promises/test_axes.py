"""Models along named axes, as docs/axes.md writes them, equal their unsharded selves."""

import ast
import functools
import math
import re
from pathlib import Path

import pytest
import torch

import funcshard as fs
from tests.ranks import run_ranks, run_simulated

PAGE = Path(__file__).resolve().parents[2] / "docs" / "axes.md"
EXACT = {"rtol": 1e-10, "atol": 1e-10}
AXIS_OF = {
    "tensor_parallel": "tensor",
    "sequence_parallel": "tensor",
    "vocabulary_parallel": "tensor",
    "expert_parallel": "expert",
    "context_parallel": "context",
    "pipeline": "stage",
}


@functools.cache
def page(modules=False):
    """Return the names that the page defines, without running its comparisons.

    ``modules`` adds those of its last block, which imports transformers.
    """
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    namespace = {"__name__": "__page__"}
    for block in blocks if modules else blocks[:-1]:
        defining = (ast.Import, ast.FunctionDef, ast.ClassDef, ast.Assign)
        kept = [statement for statement in ast.parse(block).body if isinstance(statement, defining)]
        exec(compile(ast.Module(kept, []), str(PAGE), "exec"), namespace)
    return namespace


def check(mesh, recipe):
    page()[f"check_{recipe}"](mesh)


def test_the_page_has_these_recipes():
    found = {name.removeprefix("check_") for name in page() if name.startswith("check_")}
    assert found == {*AXIS_OF, "context_and_tensor"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "data", [{}, {"shard": 2}, {"replicate": 2}, {"replicate": 2, "shard": 2}], ids=lambda data: "x".join(data) or "alone"
)
@pytest.mark.parametrize("recipe", AXIS_OF)
def test_a_recipe_equals_the_unsharded_model(recipe, data):
    run_simulated(check, 2 * math.prod(data.values()), recipe, shape={**data, AXIS_OF[recipe]: 2})


@pytest.mark.parametrize(
    "shape",
    [{"context": 2, "tensor": 2}, {"tensor": 2, "context": 2, "shard": 2}, {"replicate": 2, "context": 2, "tensor": 2}],
    ids=lambda shape: "x".join(shape),
)
def test_two_model_axes_combine(shape):
    run_simulated(check, math.prod(shape.values()), "context_and_tensor", shape=shape)


def check_all(mesh):
    for recipe, axis in AXIS_OF.items():
        check(mesh.reshaped({"shard": 2, axis: 2}), recipe)
    check(mesh.reshaped({"context": 2, "tensor": 2}), "context_and_tensor")


@pytest.mark.slow
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


# --- Mixtral --------------------------------------------------------------------------------------


def train_mixtral(mesh):
    """Return the loss, this rank's part of the gradient, and the state dict after one step."""
    names = page(modules=True)
    net = names["with_groups"](names["mixtral"](), mesh)
    apply, params, buffers = fs.make_functional(net)
    local = {"model.layers.*.mlp.experts": {"expert": 0}}
    plan = fs.make_plan(params, mesh, units=["model.layers.*"], local=local)
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards, buffers, ids):
        return names["mixtral_loss"](lambda **inputs: sharded(shards, buffers, **inputs), ids)

    cuts = {"ids": dict.fromkeys(mesh.shape, 0)}
    ids = names["part"]({"ids": names["mixtral_ids"]}, cuts, mesh)["ids"]
    shards = fs.shard(params, plan, mesh)
    with fs.record_events() as events:
        _, grads = fs.value_and_grad(loss_fn)(shards, buffers, ids)
    kept = tuple(event for event in events if event.unit is not None)  # the model's own collectives belong to no unit
    assert kept == fs.predict_events(plan, sharded.schedule)
    assert any(event.axis == "expert" for event in kept)
    assert not any(event.axis == "expert" and "expert" in event.buffer for event in kept)

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=0.01), plan, mesh)
    state, metrics = step(step.init(shards, buffers), ids)
    return metrics["loss"], fs.gather(grads, plan, mesh), fs.to_state_dict(state.shards, plan, mesh)


@functools.cache
def train_whole_mixtral():
    names = page(modules=True)
    net = names["mixtral"]()
    loss = names["mixtral_loss"](net, names["mixtral_ids"])
    loss.backward()
    grads = {name: p.grad for name, p in net.named_parameters()}
    torch.optim.AdamW(net.parameters(), lr=0.01).step()
    return loss.detach(), grads, {name: p.detach() for name, p in net.named_parameters()}


def slices(whole, mesh_shape, rank):
    """Return this rank's part of whole tensors: its group of each layer's experts, and the rest."""
    ranks = mesh_shape["expert"]
    index = rank % ranks  # the expert axis is the last one
    return {name: p.chunk(ranks)[index] if ".experts." in name else p for name, p in whole.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [{"expert": 4}, {"shard": 2, "expert": 2}, {"replicate": 2, "expert": 2}],
    ids=lambda shape: "x".join(shape),
)
def test_mixtral_with_groups_of_experts_equals_its_unsharded_self(shape):
    loss, grads, params = train_whole_mixtral()
    for rank, found in enumerate(run_simulated(train_mixtral, 4, shape=shape)):
        torch.testing.assert_close(found, (loss, slices(grads, shape, rank), params), **EXACT)
