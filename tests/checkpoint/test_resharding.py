"""A state of one degree of tensor parallelism restores under any other, in files and in memory."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from funcshard.checkpoint.resharding import Run, copy_run
from funcshard.plan import Box
from tests.checkpoint.test_resharding_pieces import MESHES, NAMES, PARAMS
from tests.slices import plan_on, ranks, slices_at

# Every mesh once as the old one and once as the new one, and the degrees 2 -> none -> 4 -> 2.
MOVES = [*itertools.pairwise([*MESHES, "shard 2, tensor 2", "tensor 4", "shard 2, tensor 2"])]


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
    by_name = fs.optimizer_to_state_dict(state["opt"], optimizer, plan, mesh)
    for name, whole in NAMES.items():
        assert torch.equal(found[name], whole)
        torch.testing.assert_close(by_name["state"][name]["exp_avg"], 0.1 * whole * whole)
        assert by_name["state"][name]["step"] == 1
    assert state["step"] == 3
    pieces = fs.optimizer_to_state_dict(state["opt"], optimizer, plan, mesh, sharded=True)
    of_one = by_name if mesh.rank == mesh.world_size - 1 else {}
    for form, options in ((by_name, {}), (pieces, {}), (of_one, {"src": mesh.world_size - 1})):
        again = fs.optimizer_from_state_dict(form, optimizer, plan, mesh, **options)
        torch.testing.assert_close(again, state["opt"], rtol=0, atol=0)


@pytest.mark.nightly(one_in=3)
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
    table = str(fs.restore(tmp_path / "last"))
    assert f" {sum(leaf.numel() for leaf in NAMES.values())} " in table.replace(",", ""), "it shows whole tensors"
    old = plan_on(MESHES[before], PARAMS)
    new = plan_on(MESHES[after], PARAMS, units=["blocks.0"], strategy="shard_grad_op")
    replanned = fs.replan(states, old, new)
    ranks(go_on, MESHES[after], replanned)
    back = fs.replan(replanned, new, old)
    for one, other in zip(states, back, strict=True):
        assert tree.map(torch.equal, one["shards"], other["shards"]) == tree.map(lambda leaf: True, one["shards"])


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
