"""Norms, clipping, loss scaling and averages of leaves that are cut along model axes.

Each equals, in float64, that of the unsharded model.
"""

from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from tests.slices import WHOLE, batch, meshes, ranks, setup, whole


def gradient(mesh: fs.Mesh, strategy: str = "full_shard") -> tuple[Any, Any]:
    plan, shards, loss_fn = setup(mesh, strategy)
    return plan, fs.value_and_grad(loss_fn)(shards, batch(mesh.position, mesh.shape))[1]


@meshes
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_norms_and_clipping_count_every_element_of_the_whole_model_once(shape: dict[str, int], strategy: str) -> None:
    def main(mesh: fs.Mesh, strategy: str = "full_shard") -> Any:
        plan, grads = gradient(mesh, strategy)
        found: dict[str, Any] = {"grads": whole(grads, plan, mesh)}
        for norm_type in (1.0, 2.0, 3.5, float("inf")):
            clipped, norm = fs.clip_by_global_norm(grads, plan, mesh, 0.01, norm_type)
            found[f"norm {norm_type}"] = norm
            found[f"clipped {norm_type}"] = whole(clipped, plan, mesh)
            assert torch.equal(norm, fs.global_norm(grads, plan, mesh, norm_type))
        return found

    (wanted,) = ranks(main, WHOLE)
    torch.testing.assert_close(wanted["norm 2.0"], torch.cat([grad.ravel() for grad in wanted["grads"].values()]).norm())
    for found in ranks(main, shape, strategy):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@meshes
def test_scaled_training_with_groups_and_averages_is_the_whole_models(shape: dict[str, int]) -> None:
    def main(mesh: fs.Mesh) -> Any:
        plan, shards, loss_fn = setup(mesh)
        groups = [{"paths": ["**.scale", "**.bias"], "weight_decay": 0.0, "lr": 0.01}]
        optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.03, groups=groups, plan=plan, mesh=mesh)
        scaler = fs.GradScaler(init_scale=2.0**6, growth_interval=2)
        step = fs.make_train_step(
            lambda shards, _, x: loss_fn(shards, x), optimizer, plan, mesh, max_norm=0.5, scaler=scaler
        )
        state, average = step.init(shards, {}), fs.copy(shards)
        losses, scales = [], []
        for number in range(4):
            x = batch(mesh.position, mesh.shape)
            # One rank's infinity makes every rank skip the step.
            bad = number == 1 and mesh.rank == mesh.world_size - 1
            state, metrics = step(state, x * torch.inf if bad else x)
            average = tree.map(lambda old, new: 0.9 * old + 0.1 * new, average, state.shards)
            losses += [] if number == 1 else [metrics["loss"]]
            scales.append(state.scaler.scale)
        return whole(state.shards, plan, mesh), whole(average, plan, mesh), losses, scales

    (wanted,) = ranks(main, WHOLE)
    for found in ranks(main, shape):
        torch.testing.assert_close(found, wanted)
