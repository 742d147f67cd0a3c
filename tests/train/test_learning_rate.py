"""Learning rates: schedules of torch and of other libraries, in steps, graphs and checkpoints."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import funcshard as fs
from tests.core.units import of_module

MESH = fs.Mesh()
X = torch.ones(3, 4)


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm_up = schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    cosine = schedulers.CosineAnnealingLR(optimizer, T_max=6)
    return schedulers.SequentialLR(optimizer, [warm_up, cosine], milestones=[3])


MAKES = {
    "StepLR": (schedulers.StepLR, {"step_size": 2}),
    "CosineAnnealingLR": (schedulers.CosineAnnealingLR, {"T_max": 5}),
    "CosineAnnealingWarmRestarts": (schedulers.CosineAnnealingWarmRestarts, {"T_0": 3}),
    "OneCycleLR": (schedulers.OneCycleLR, {"max_lr": 1.0, "total_steps": 12, "cycle_momentum": False}),
    "LambdaLR": (schedulers.LambdaLR, {"lr_lambda": lambda step: 0.9**step}),
    "a sequence": (warm_up_then_cosine, {}),
}


@pytest.mark.parametrize(("make", "options"), MAKES.values(), ids=MAKES)
def test_rates_are_those_that_the_scheduler_gives_an_optimizer(make: Any, options: dict[str, Any]) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=0.3)
    scheduler = make(optimizer, **options)
    expected = []
    for _ in range(11):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    schedule = fs.torch_schedule(make, lr=0.3, **options)
    assert schedule(10) == expected[10]  # a step that comes first, as after a restore
    assert [schedule(step) for step in range(11)] == expected


def falling(step: int) -> float:
    return 0.1 / (1 + step)


RATES = {
    "a number": (0.1, [0.1, 0.1, 0.1]),
    "a function": (falling, [0.1, 0.05, 0.1 / 3]),
    "other numbers": (lambda step: Decimal(falling(step)), [0.1, 0.05, 0.1 / 3]),
    "a scheduler of torch": (fs.torch_schedule(schedulers.StepLR, lr=0.5, step_size=1), [0.5, 0.05, 0.5 * 0.1 * 0.1]),
}


def training(optimizer: fs.train.TorchOptimizer) -> tuple[Any, Any]:
    torch.manual_seed(0)
    plan, sharded, shards = of_module(MESH, torch.nn.Linear(4, 2))
    step = fs.make_train_step(lambda s, b, x: sharded(s, b, x).square().mean(), optimizer, plan, MESH)
    return step, step.init(shards, {})


def rates(step: Any, state: Any, steps: int = 3) -> tuple[list[Any], Any]:
    found = []
    for _ in range(steps):
        state, metrics = step(state, X)
        found.append(metrics["lr"])
    return found, state


@pytest.mark.parametrize(("lr", "expected"), RATES.values(), ids=RATES)
def test_metrics_hold_the_rate_that_the_step_took(lr: Any, expected: list[float]) -> None:
    found, _ = rates(*training(fs.torch_optimizer(torch.optim.SGD, lr=lr)))
    assert found == pytest.approx(expected, rel=1e-15)
    assert all(type(each) is float for each in found)


def test_the_rate_of_muon_and_of_a_class_of_torch_with_its_default() -> None:
    _, params, _ = fs.make_functional(torch.nn.Linear(4, 2))
    plan = fs.make_plan(params, 1)
    assert rates(*training(fs.muon(plan, MESH, lr=falling)), steps=2)[0] == [0.1, 0.05]
    assert rates(*training(fs.torch_optimizer(torch.optim.AdamW)), steps=1)[0] == [1e-3]


def test_a_pair_of_functions_does_not_say_its_rate() -> None:
    pair = (lambda params: None, lambda grads, state, params: (grads, state))
    step, state = training(pair)
    assert set(step(state, X)[1]) == {"loss", "local_loss"}


REFUSED = {
    "one that needs the loss": (lambda: fs.torch_schedule(schedulers.ReduceLROnPlateau, lr=0.1), TypeError, "needs a loss"),
    "one that changes momentum": (
        lambda: fs.torch_schedule(schedulers.OneCycleLR, lr=0.1, max_lr=1.0, total_steps=9), ValueError,
        "must support momentum or beta1 with `cycle_momentum` option",
    ),
    "a step below zero": (
        lambda: fs.torch_schedule(schedulers.StepLR, lr=0.1, step_size=1)(-1), ValueError,
        "step must be a whole number of steps, at least 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_gives_no_rates_is_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()
