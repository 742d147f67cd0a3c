"""The numbers of a log line."""

from __future__ import annotations

import time

import pytest
import torch

import funcshard as fs
from funcshard.train import metering
from tests.core.units import of_module
from tests.ranks import on_ranks


def state_at(step: int) -> fs.TrainState:
    return fs.TrainState({"": {"float32": torch.ones(2)}}, {}, {}, step)


class Clock:
    """Two seconds pass between any two looks at the clock."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 2.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "time", Clock())


@pytest.mark.usefixtures("clock")
def test_speed_is_the_mean_over_the_steps_since_the_last_call() -> None:
    meter = fs.make_meter(fs.Mesh(), tokens=100, step=10)
    first, second = meter(state_at(11), {}), meter(state_at(15), {})
    assert (first["step"], first["seconds_per_step"], first["tokens_per_second"]) == (11, 2.0, 50.0)
    assert (second["step"], second["seconds_per_step"], second["tokens_per_second"]) == (15, 0.5, 200.0)


@pytest.mark.usefixtures("clock")
def test_a_skipped_step_has_no_speed() -> None:
    meter = fs.make_meter(fs.Mesh(), tokens=100)
    assert meter(state_at(0), {"found_inf": torch.tensor(True)}).keys() >= {"step", "found_inf"}
    assert "tokens_per_second" not in meter(state_at(0), {})
    assert meter(state_at(1), {})["tokens_per_second"] == 50.0


def test_metrics_of_one_element_become_plain_numbers() -> None:
    metrics = {"loss": torch.tensor(2.5), "weight": torch.tensor([3.0]), "lr": 0.1, "aux": {"a": 1}, "many": torch.ones(2)}
    values = fs.make_meter(fs.Mesh())(state_at(1), metrics)
    values.pop("seconds_per_step")
    assert values.pop("peak_memory", 10**6) >= 10**6
    assert values == {"step": 1, "loss": 2.5, "weight": 3.0, "lr": 0.1}


@pytest.mark.usefixtures("clock")
@on_ranks({"shard": 2, "tensor": 3})
def test_ranks_along_a_model_axis_share_their_tokens(mesh: fs.Mesh) -> None:
    values = fs.make_meter(mesh, tokens=100)(state_at(1), {})
    assert values["tokens_per_second"] * values["seconds_per_step"] == 200.0  # of two data ranks


@on_ranks(2)
def test_the_log_line_of_a_step(mesh: fs.Mesh) -> None:
    plan, sharded, shards = of_module(mesh, torch.nn.Linear(4, 2))
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3)
    step = fs.make_train_step(lambda s, b, x: sharded(s, b, x).square().mean(), optimizer, plan, mesh, max_norm=1.0)
    meter, began = fs.make_meter(mesh, tokens=3), time.perf_counter()
    values = meter(*step(step.init(shards, {}), torch.ones(3, 4)))
    assert 0 < values["seconds_per_step"] <= time.perf_counter() - began + 1
    names = {"step", "loss", "local_loss", "lr", "grad_norm", "seconds_per_step", "tokens_per_second", "peak_memory"}
    assert names <= values.keys()
