"""Options of a training step that meet in one graph, which ``test_traced`` has one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchopt

import funcshard as fs
from tests.graph.test_traced import BFLOAT16, FLOAT16, run, same, torch_optimizer

CASES: dict[str, dict[str, Any]] = {
    "no_shard, float16, scaler, clipped": {
        "plan": {"strategy": "no_shard", "precision": FLOAT16},
        "scaler": fs.GradScaler(2.0**10),
        "max_norm": 1.0,
        "optimizer": torch_optimizer(torch.optim.SGD, lr=0.1),
    },
    "full_shard, bfloat16, mutable, TorchOpt, remat": {
        "plan": {"precision": BFLOAT16},
        "mutable": True,
        "optimizer": lambda plan, mesh: torchopt.rmsprop(0.01),
        "remat": ("blocks.0",),
        "dropout": 0.5,
    },
    "shard_grad_op, muon, clipped, weights": {
        "plan": {"strategy": "shard_grad_op"},
        "optimizer": lambda plan, mesh: fs.muon(plan=plan, mesh=mesh, lr=1e-2),
        "max_norm": 1.0,
        "weighted": True,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:ignored_classes of the precision hold")
def test_a_traced_step_has_the_bits_and_the_collectives_of_the_step(case: str) -> None:
    def main(mesh: fs.Mesh) -> None:
        eager, traced = (run(mesh, traced, **CASES[case]) for traced in (False, True))
        assert same(traced["metrics"], eager["metrics"])
        assert same(traced["state"], eager["state"])
        assert traced["events"] == eager["events"]

    fs.simulate(main, 2)
