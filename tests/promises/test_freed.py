"""What nobody holds is free at once, without a garbage collection: parameters, shards, states."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchopt

import funcshard as fs

MESH = fs.Mesh()


def state_dicts(params: dict[str, torch.Tensor], folder: Path) -> list[torch.Tensor]:
    plan = fs.make_plan(params, MESH)
    shards = fs.shard(params, plan, MESH)
    again = fs.from_state_dict(fs.to_state_dict(shards, plan, MESH), plan, MESH)
    return [*shards[""].values(), *again[""].values(), *fs.gather(shards, plan, MESH).values()]


def checkpoints(params: dict[str, torch.Tensor], folder: Path) -> list[torch.Tensor]:
    plan = fs.make_plan(params, MESH)
    shards = fs.shard(params, plan, MESH)
    fs.save(folder, {"shards": shards, "whole": params}, plan, MESH)
    state = fs.restore(folder, plan, MESH)
    return [*shards[""].values(), *state["shards"][""].values(), *state["whole"].values()]


def states_of_torchopt(params: dict[str, torch.Tensor], folder: Path) -> list[torch.Tensor]:
    plan, optimizer = fs.make_plan(params, MESH), torchopt.adam(0.1)
    state = optimizer.init(fs.shard(params, plan, MESH))
    by_name = fs.optimizer_to_state_dict(state, optimizer, plan, MESH)
    again = fs.optimizer_from_state_dict(by_name, optimizer, plan, MESH, steps=0)
    return [*state[0].mu, *state[0].nu, *state[0].count, *again[0].mu, *again[0].nu]


WAYS: dict[str, Callable[[dict[str, torch.Tensor], Path], list[torch.Tensor]]] = {
    "state dicts": state_dicts,
    "checkpoints": checkpoints,
    "states of TorchOpt": states_of_torchopt,
}


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("way", WAYS)
def test_tensors_are_free_when_their_callers_drop_them(way: str, tmp_path: Path) -> None:
    WAYS[way]({"w": torch.ones(7)}, tmp_path / "first")  # a first call imports, which leaves frames
    params = {"w": torch.ones(7)}
    tensors = [*WAYS[way](params, tmp_path / "second"), *params.values()]
    references = [weakref.ref(tensor) for tensor in tensors]
    del params, tensors
    assert [reference() for reference in references] == [None] * len(references)
