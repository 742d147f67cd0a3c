"""A state of one degree of tensor parallelism restores under any other, in files and in memory."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from funcshard.checkpoint import unflatten_state
from funcshard.checkpoint.resharding import Run, copy_run
from funcshard.plan import Box
from tests.ranks import run_simulated
from tests.slices import batch, forward, loss_of, make_params, plan_on, ranks, slices_at

MESHES: dict[str, dict[str, int]] = {
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "no tensor axis": {"shard": 3},
    "tensor 4": {"shard": 1, "tensor": 4},
    "one rank of tensor": {"shard": 2, "tensor": 1},
    "replicate 2, expert 2, tensor 2": {"replicate": 2, "expert": 2, "tensor": 2},
    "tensor before shard": {"tensor": 2, "shard": 3},
}
# Every mesh once as the old one and once as the new one, and the degrees 2 -> none -> 4 -> 2.
MOVES = [*itertools.pairwise([*MESHES, "shard 2, tensor 2", "tensor 4", "shard 2, tensor 2"])]
PARAMS = make_params()
NAMES = dict(zip(*tree.describe(PARAMS)[:0:-1], strict=True))


def state_of(mesh: fs.Mesh, plan: fs.Plan) -> dict[str, Any]:
    """Return a state with parameters, moments that differ from them, counters and values of each rank's own."""
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    shards = fs.shard(slices_at(PARAMS, mesh.position, mesh.shape), plan, mesh)
    grads = tree.map(lambda leaf: leaf * leaf, shards)
    _, opt_state = optimizer.step(grads, optimizer.init(shards), fs.copy(shards))
    return {"shards": shards, "opt": opt_state, "step": 3, "own": fs.PerRank(mesh.rank)}


def check_state(state: dict[str, Any], plan: fs.Plan, mesh: fs.Mesh) -> None:
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    found = fs.to_state_dict(state["shards"], plan, mesh)
    moments = fs.optimizer_to_state_dict(state["opt"], optimizer, plan, mesh)["state"]
    for name, whole in NAMES.items():
        assert torch.equal(found[name], whole)
        torch.testing.assert_close(moments[name]["exp_avg"], 0.1 * whole * whole)
        assert moments[name]["step"] == 1
    assert state["step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_states_restore_under_another_degree(before: str, after: str, tmp_path: Path) -> None:
    def begin(mesh: fs.Mesh) -> dict[str, Any]:
        plan = plan_on(mesh.shape, PARAMS)
        state = state_of(mesh, plan)
        fs.save(tmp_path / "last", state, plan, mesh)
        return state

    def go_on(mesh: fs.Mesh, replanned: list[Any]) -> None:
        plan = plan_on(mesh.shape, PARAMS, units=["blocks.0"], strategy="shard_grad_op")
        state = fs.restore(tmp_path / "last", plan, mesh)
        check_state(state, plan, mesh)
        own, same = state.pop("own"), replanned[mesh.rank].copy()
        assert own == same.pop("own") == fs.PerRank(mesh.rank % math.prod(MESHES[before].values()))
        torch.testing.assert_close(state, same, rtol=0, atol=0)

    states = ranks(begin, MESHES[before])
    old = plan_on(MESHES[before], PARAMS)
    new = plan_on(MESHES[after], PARAMS, units=["blocks.0"], strategy="shard_grad_op")
    replanned = fs.replan(states, old, new)
    ranks(go_on, MESHES[after], replanned)
    back = fs.replan(replanned, new, old)
    for one, other in zip(states, back, strict=True):
        assert tree.map(torch.equal, one["shards"], other["shards"]) == tree.map(lambda leaf: True, one["shards"])


def test_the_table_shows_whole_tensors(tmp_path: Path) -> None:
    def begin(mesh: fs.Mesh) -> None:
        plan = plan_on(mesh.shape, PARAMS)
        fs.save(
            tmp_path / "last", {"shards": fs.shard(slices_at(PARAMS, mesh.position, mesh.shape), plan, mesh)}, plan, mesh
        )

    ranks(begin, MESHES["shard 2, tensor 2"])
    numel = sum(leaf.numel() for leaf in NAMES.values())
    table = str(fs.restore(tmp_path / "last"))
    assert "shards, float64; shards, in slices along tensor, float64" in " ".join(table.split()), table
    assert f"{len(NAMES)}" in table
    assert str(numel) in table.replace(",", "")


def test_the_same_degree_reads_runs_and_no_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unflatten_state, "copy_run", lambda *_: pytest.fail("a box was read"))
    shape = MESHES["shard 2, tensor 2"]

    def main(mesh: fs.Mesh) -> None:
        plan = plan_on(mesh.shape, PARAMS)
        fs.save(tmp_path / "last", state_of(mesh, plan), plan, mesh)
        check_state(fs.restore(tmp_path / "last", plan, mesh), plan, mesh)

    ranks(main, shape)


@pytest.mark.parametrize("within", [Box((0, 0, 0), (3, 4, 5)), Box((1, 1, 2), (2, 2, 3)), Box((0, 2, 0), (3, 2, 4))])
def test_a_run_of_a_slice_gets_its_elements_from_runs_of_any_other_slice(within: Box) -> None:
    whole = torch.arange(60).view(3, 4, 5)
    flat = whole[within.slices].ravel()
    for begin, end in itertools.combinations(range(0, within.numel + 1, 5), 2):
        target, out = Run(begin, end - begin, within), torch.full((end - begin,), -1)
        for cut in range(0, 61, 7):
            runs = [Run(0, cut, Box((0, 0, 0), (3, 4, 5))), Run(cut, 60 - cut, Box((0, 0, 0), (3, 4, 5)))]
            copied = [copy_run(out, target, whole.ravel()[run.begin : run.begin + run.numel], run) for run in runs]
            assert sum(copied) == end - begin
            assert torch.equal(out, flat[begin:end])


def train(mesh: fs.Mesh, folder: Path, steps: int) -> list[float]:
    plan = plan_on(mesh.shape, PARAMS)
    loss_fn = lambda shards, buffers, x: loss_of(forward(plan, mesh, shards, x))  # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=0.02), plan, mesh)
    last = fs.latest(folder)
    if last is None:
        state = step.init(fs.shard(slices_at(PARAMS, mesh.position, mesh.shape), plan, mesh), {})
    else:
        state = fs.restore(last, plan, mesh)
    losses = []
    while state.step < steps:
        state, metrics = step(state, batch(mesh.position, mesh.shape))
        losses.append(metrics["loss"].item())
    fs.save(folder / f"step-{state.step}", state, plan, mesh)
    return losses


@pytest.mark.slow
def test_training_goes_on_from_2_to_1_to_4(tmp_path: Path) -> None:
    """Losses of a run that changes its degree twice are those of a run without tensor parallelism."""
    found = ranks(train, {"shard": 2, "tensor": 2}, tmp_path, 2)[0]
    found += run_simulated(train, 2, tmp_path, 4)[0]
    found += ranks(train, {"shard": 1, "tensor": 4}, tmp_path, 6)[0]
    (whole,) = run_simulated(train, 1, tmp_path / "whole", 6)
    torch.testing.assert_close(found, whole)
