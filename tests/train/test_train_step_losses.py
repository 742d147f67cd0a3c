"""metrics["local_loss"]: the loss of this rank's own batch, without a collective more."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.ranks import on_ranks

NAN = float("nan")
PARAMS = {"w": torch.ones(3)}


def losses(mesh: fs.Mesh, batch: Any, form: Any = lambda loss: loss, **options: Any) -> tuple[float, float]:
    """Return the metrics ``local_loss`` and ``loss`` of one step, on a batch of losses, and of weights."""
    plan = fs.make_plan(PARAMS, mesh)
    f = fs.unshard(lambda leaves, x: (leaves["w"] * 0).sum() + x, plan.units[""], mesh)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> Any:
        if not options.get("weighted"):
            return form(f(shards[""], batch.mean()))
        values, weights = batch
        total = weights.sum()
        return form(f(shards[""], (values * weights).sum() / total)), total

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, **options)
    _, metrics = step(step.init(fs.shard(PARAMS, plan, mesh), {}), batch)
    return metrics["local_loss"].item(), metrics["loss"].item()


OPTIONS: dict[str, Any] = {"plain": {}, "accumulate": {"accumulate": 2}, "scaler": {"scaler": fs.GradScaler(init_scale=8.0)}}


@pytest.mark.parametrize("options", [*OPTIONS.values(), {"divisor": 7}], ids=[*OPTIONS, "divisor"])
@on_ranks(2)
def test_it_is_the_mean_over_this_ranks_batch_and_the_loss_is_the_mean_of_all(mesh: fs.Mesh, options: Any) -> None:
    batch = torch.tensor([1.0, 3.0]) + 7 * mesh.rank
    assert losses(mesh, batch, **options) == (2.0 + 7 * mesh.rank, 5.5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_ranks(3)
def test_with_weights_it_is_the_weighted_mean_of_this_rank_and_zero_without_data(mesh: fs.Mesh, options: Any) -> None:
    batch = torch.tensor([1.0, 4.0]) + 10 * mesh.rank, torch.tensor([1.0, 3.0]) * (1 + mesh.rank)
    nothing = torch.tensor([NAN, NAN]), torch.tensor([0.0, 0.0])
    local, loss = losses(mesh, nothing if mesh.rank == 2 else batch, weighted=True, **options)
    assert local == pytest.approx([3.25, 13.25, 0.0][mesh.rank])
    assert loss == pytest.approx((4 * 3.25 + 8 * 13.25) / 12)


@on_ranks(2)
def test_a_micro_batch_of_weight_zero_does_not_count(mesh: fs.Mesh) -> None:
    batch = torch.tensor([NAN, 5.0]), torch.tensor([0.0, 2.0])
    assert losses(mesh, batch, weighted=True, accumulate=2) == (5.0, 5.0)


LOW = [2.984375, 3.015625, 3.0, 2.984375, 3.015625, 3.0, 3.03125, 2.96875]  # numbers of bfloat16, which their sum is not


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("weights", [None, [513.0, 513.0, 7.0, 1.0, 1.0, 1.0, 2.0, 2.0]], ids=["mean", "weighted"])
@on_ranks(2)
def test_losses_of_low_precision_or_of_one_element_are_averaged_in_float32(mesh: fs.Mesh, weights: Any, dtype: Any) -> None:
    batch = torch.tensor(LOW) if weights is None else (torch.tensor(LOW), torch.tensor(weights))
    expected = sum(map(operator.mul, LOW, weights or [1.0] * 8)) / sum(weights or [1.0] * 8)
    one_element = lambda loss: loss.to(dtype).view(1, 1)  # noqa: E731
    metrics = losses(mesh, batch, one_element, accumulate=8, weighted=weights is not None)
    assert metrics == (pytest.approx(expected, rel=2e-7, abs=0),) * 2


@on_ranks(2)
def test_it_costs_no_collective(mesh: fs.Mesh) -> None:
    with fs.record_events() as events:
        losses(mesh, torch.ones(2))
    # The last one is of the mean loss.
    assert [event.kind for event in events] == ["all_gather", "reduce_scatter", "all_reduce"]
