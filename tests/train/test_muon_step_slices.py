"""Muon on matrices that are cut along model axes equals ``torch.optim.Muon`` on the whole ones."""

from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_ranks, run_simulated
from tests.slices import make_params, plan_on, slices_at

MUON = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
MESHES: dict[str, dict[str, int]] = {
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "replicate 2, shard 2, tensor 2": {"replicate": 2, "shard": 2, "tensor": 2},
    "tensor before shard 3": {"tensor": 2, "shard": 3},
    "tensor 4": {"tensor": 4},
    "expert 2, tensor 2": {"expert": 2, "tensor": 2},
    "one rank of tensor": {"shard": 2, "tensor": 1},
}
PARAMS = make_params(torch.float32)


def grads_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(50 + step)
    return tree.map(lambda leaf: torch.randn(leaf.shape, generator=generator), PARAMS)


def by_path(params: Any) -> dict[str, torch.Tensor]:
    return dict(zip(*tree.describe(params)[:0:-1], strict=True))


def whole_run(steps: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return parameters and momentum after some steps of ``torch.optim.Muon`` on the whole model."""
    params = {path: torch.nn.Parameter(leaf.clone()) for path, leaf in by_path(PARAMS).items()}
    matrices = {path: leaf for path, leaf in params.items() if leaf.ndim == 2}
    muon = torch.optim.Muon([*matrices.values()], **MUON)
    adamw = torch.optim.AdamW([leaf for path, leaf in params.items() if path not in matrices], lr=0.01)
    for step in range(steps):
        for path, grad in by_path(grads_of(step)).items():
            params[path].grad = grad
        muon.step()
        adamw.step()
    momentum = {path: muon.state[leaf]["momentum_buffer"] for path, leaf in matrices.items()}
    return {path: leaf.detach() for path, leaf in params.items()}, momentum


def steps_on(mesh: fs.Mesh, strategy: str = "full_shard") -> None:
    plan = plan_on(mesh.shape, PARAMS, strategy=strategy)
    optimizer = fs.muon(plan, mesh, **MUON, adamw={"lr": 0.01})
    shards = fs.shard(slices_at(PARAMS, mesh.position, mesh.shape), plan, mesh)
    state = optimizer.init(shards)
    for step in range(3):
        grads = fs.shard(slices_at(grads_of(step), mesh.position, mesh.shape), plan, mesh)
        with fs.record_events() as events:
            shards, state = optimizer.step(grads, state, shards)
        assert tuple(events) == optimizer.step.owners.events
        if step == 1:  # by name and back
            by_name = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
            again = fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh)
            torch.testing.assert_close(again["momentum"], state["momentum"], rtol=0, atol=0)
            state = again
    wanted, momentum = whole_run(3)
    found = fs.to_state_dict(shards, plan, mesh)
    by_name = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)["state"]
    for path, leaf in wanted.items():
        assert torch.equal(found[path], leaf) if leaf.ndim == 2 else torch.allclose(found[path], leaf), path
    assert all(torch.equal(by_name[path]["momentum_buffer"], own) for path, own in momentum.items())


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_the_bits_are_those_of_the_whole_matrices(shape: dict[str, int], strategy: str) -> None:
    run_simulated(steps_on, int(torch.tensor(list(shape.values())).prod()), strategy, shape=shape)


@pytest.mark.slow
def test_processes_compute_the_same_bits() -> None:
    run_ranks(steps_on, 4, shape={"shard": 2, "tensor": 2})


def nested(mesh: fs.Mesh) -> None:
    """Two axes cut one matrix, along one dimension or along both; another is cut along ``shard``."""
    whole = {"a": torch.randn(8, 6), "b": torch.randn(8, 6), "c": torch.randn(6, 8), "d": torch.randn(4, 6)}
    cuts = {"a": {"expert": 0, "tensor": 0}, "b": {"expert": 1, "tensor": 0}, "c": {"tensor": 1}, "d": {"shard": 0}}

    def mine(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = dict(tensors)
        for name, own in cuts.items():
            for axis, dim in own.items():
                out[name] = out[name].chunk(2, dim)[mesh.position[axis]]
        return out

    plan = fs.make_plan(mine(whole), mesh, local=cuts)
    optimizer = fs.muon(plan, mesh, **MUON)
    shards = fs.shard(mine(whole), plan, mesh)
    params = {name: torch.nn.Parameter(leaf.clone()) for name, leaf in whole.items()}
    theirs = torch.optim.Muon([*params.values()], **MUON)
    for name, leaf in params.items():
        leaf.grad = whole[name].cos()
    theirs.step()
    with fs.record_events() as events:
        shards, _ = optimizer.step(
            fs.shard(mine({n: t.cos() for n, t in whole.items()}), plan, mesh), optimizer.init(shards), shards
        )
    assert tuple(events) == optimizer.step.owners.events
    found = fs.to_state_dict(shards, plan, mesh)
    assert all(torch.equal(found[name], leaf) for name, leaf in params.items())


def test_matrices_may_be_cut_along_several_axes() -> None:
    run_simulated(nested, 8, shape={"expert": 2, "shard": 2, "tensor": 2})


def test_the_work_on_cut_matrices_is_shared_along_their_axes() -> None:
    params = {f"w{i}": torch.zeros(4, 8) for i in range(8)}
    plan = fs.make_plan(params, {"shard": 2, "tensor": 2}, local={"*": {"tensor": 0}})
    owners = fs.assign_owners(plan)
    table = str(owners)
    assert table.startswith("Owners of 8 matrices, ")
    assert "shard × tensor" in table
    assert [row.split()[3] for row in table.splitlines() if row.strip()[:1] in "01"] == ["2"] * 4, table
    axes = [event.axis for event in owners.events]
    assert axes == ["shard", "tensor", "tensor", "shard"]
