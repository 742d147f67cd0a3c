"""Norms and clipping of leaves that are cut along model axes are those of the unsharded model."""

from typing import Any

import pytest
import torch

import funcshard as fs
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
