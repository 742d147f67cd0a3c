"""Python's ``logging`` shows plans, meshes, checkpoints, units and collectives; by default nothing."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.plan import current_recorders

NET = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
APPLY, PARAMS, BUFFERS = fs.make_functional(NET)


def plan_of(mesh: Any) -> fs.Plan:
    return fs.make_plan(PARAMS, mesh, units=["0", "2"])


def train(mesh: fs.Mesh) -> None:
    plan = plan_of(mesh)
    sharded = fs.fully_shard(APPLY, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return sharded(shards, buffers, x).square().mean()

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh)
    step(step.init(fs.shard(PARAMS, plan, mesh), BUFFERS), torch.ones(2, 4, requires_grad=True))


def lines(caplog: pytest.LogCaptureFixture, rank: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.threadName == f"rank {rank}"]


def test_debug_shows_units_and_the_predicted_collectives_in_order(caplog: pytest.LogCaptureFixture) -> None:
    world = {"replicate": 2, "shard": 2}
    with caplog.at_level(logging.DEBUG, "funcshard"):
        fs.simulate(train, world)
    predicted = [
        f"{e.kind} of buffer {e.buffer!r} of unit {e.unit!r} begins: {e.bytes} bytes of {e.dtype} along {e.axis!r}, "
        f"{e.ranks} ranks"
        for e in fs.predict_events(plan_of(world))
    ]
    for rank in range(4):
        found = lines(caplog, rank)
        own = found[found.index("step 1 begins") : found.index("root post_backward")]
        assert [line for line in own if "begins:" in line] == predicted
        moments = [line for line in own if re.match("(root )?(pre|post)_", line)]
        label = "buffer 'float32' of unit"
        assert moments == [
            "root pre_forward",
            *(f"{when} of unit '{unit}'" for unit in "02" for when in ("pre_forward", "post_forward")),
            "root post_forward",
            *(line for unit in "20" for line in (f"pre_backward of unit '{unit}'", f"post_backward of {label} '{unit}'")),
        ]
        assert found[-1] == "step 1 ends"
    wings = {record.name for record in caplog.records}
    assert wings == {f"funcshard.{wing}" for wing in ("plan", "comm", "core", "module", "train")}


def test_debug_shows_plans_and_checkpoints_and_info_nothing_of_a_usual_run(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def main(mesh: fs.Mesh) -> None:
        train(mesh)
        plan = plan_of(mesh)
        fs.save(tmp_path / "last", fs.shard(PARAMS, plan, mesh), plan, mesh)
        fs.restore(tmp_path / "last", plan, mesh)

    with caplog.at_level(logging.INFO):  # of the root logger, as programs set it
        fs.simulate(main, 2)
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "funcshard.plan"), caplog.at_level(logging.DEBUG, "funcshard.checkpoint"):
        fs.simulate(main, 2)
    plan = plan_of(2)
    made, path = f"plan {plan.fingerprint()}: 2 units, 4 leaves, 2 ranks", tmp_path / "last"
    assert lines(caplog, 1) == [
        made,
        made,
        f"checkpoint {path}: this rank writes 2 tensors",
        f"checkpoint {path} is complete",
        f"checkpoint {path} is restored on 2 ranks",
    ]


def test_by_default_nothing_is_logged_and_no_event_is_built(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an event was built")

    monkeypatch.setattr("funcshard.core.buffer_comm.Event", built)
    fs.simulate(train, 2)
    assert not caplog.records
    assert not current_recorders()
    with caplog.at_level(logging.DEBUG, "funcshard.comm"), pytest.raises(AssertionError, match="an event was built"):
        fs.simulate(train, 2)


def test_the_package_adds_no_output_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert [type(handler) for handler in logging.getLogger("funcshard").handlers] == [logging.NullHandler]
    logger, root = logging.getLogger("funcshard.checkpoint"), logging.getLogger()
    handlers, root.handlers = root.handlers, []  # as in a program that sets up no logging
    try:
        logger.warning("not for standard error")
    finally:
        root.handlers = handlers
    assert capfd.readouterr().err == ""
