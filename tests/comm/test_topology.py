"""Along which axes a buffer is gathered and reduced."""

from __future__ import annotations

import torch

import funcshard as fs
from funcshard.comm import Topology
from tests.ranks import run_simulated


def test_reductions_run_along_shard_then_replicate_then_the_other_axes_whatever_the_order_of_the_mesh() -> None:
    def main(mesh: fs.Mesh) -> list[list[str]]:
        plan = fs.make_plan({"w": torch.ones(8)}, mesh)
        with fs.record_events() as events:
            unit = fs.unshard(lambda leaves: leaves["w"].sum(), plan.units[""], mesh)
            fs.value_and_grad(lambda s: unit(s[""]))(fs.shard({"w": torch.ones(8)}, plan, mesh))
        copied = Topology(mesh, sharded=False).repeated
        return [[axis for axis, _ in copied], [event.axis for event in events]]

    found = run_simulated(main, {"tensor": 2, "replicate": 2, "shard": 2})
    assert found == [[["shard", "replicate", "tensor"], ["shard", "shard", "replicate", "tensor"]]] * 8
