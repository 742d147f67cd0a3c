"""metrics["local_loss"]: the loss of this rank's own batch, without a collective more."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.ranks import run_simulated

NAN = float("nan")
PARAMS = {"w": torch.ones(3)}


def steps(mesh: fs.Mesh, batches: list[Any], count: bool = False, form: Any = lambda loss: loss, **options: Any) -> Any:
    """Return the metrics of one step for each of the batches, whose values are the losses."""
    plan = fs.make_plan(PARAMS, mesh)
    f = fs.unshard(lambda leaves, x: (leaves["w"] * 0).sum() + x, plan.units[""], mesh)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> Any:
        if not options.get("weighted"):
            return form(f(shards[""], batch.mean()))
        losses, weights = batch
        total = weights.sum()
        return form(f(shards[""], (losses * weights).sum() / total)), total

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, **options)
    state, found = step.init(fs.shard(PARAMS, plan, mesh), {}), []
    with fs.record_events() as events:
        for batch in batches:
            state, metrics = step(state, batch)
            found.append((metrics["local_loss"].item(), metrics["loss"].item()))
    return (found, [event.kind for event in events]) if count else found


SCALER = fs.GradScaler(init_scale=8.0)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"scaler": SCALER}, {"divisor": 7}], ids=lambda options: next(iter(options), "plain")
)
def test_it_is_the_mean_over_this_ranks_batch_and_the_loss_is_the_mean_of_all(options: Any) -> None:
    batches = {0: [torch.tensor([1.0, 3.0])], 1: [torch.tensor([8.0, 10.0])]}
    results = run_simulated(lambda mesh: steps(mesh, batches[mesh.rank], **options), 2)
    assert results == [[(2.0, 5.5)], [(9.0, 5.5)]]


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"scaler": SCALER}], ids=lambda options: next(iter(options), "plain")
)
def test_with_weights_it_is_the_weighted_mean_of_this_rank_and_zero_without_data(options: Any) -> None:
    def batch(rank: int) -> Any:
        if rank == 2:
            return torch.tensor([NAN, NAN]), torch.tensor([0.0, 0.0])
        return torch.tensor([1.0, 4.0]) + 10 * rank, torch.tensor([1.0, 3.0]) * (1 + rank)

    results = run_simulated(lambda mesh: steps(mesh, [batch(mesh.rank)], weighted=True, **options), 3)
    world = (4 * 3.25 + 8 * 13.25) / 12
    for rank, own in enumerate([3.25, 13.25, 0.0]):
        ((local, loss),) = results[rank]
        assert (local, loss) == (pytest.approx(own), pytest.approx(world))


def test_a_micro_batch_of_weight_zero_does_not_count() -> None:
    rows = torch.tensor([NAN, 5.0]), torch.tensor([0.0, 2.0])
    results = run_simulated(lambda mesh: steps(mesh, [rows], weighted=True, accumulate=2), 2)
    assert results == [[(5.0, 5.0)]] * 2


LOW = [2.984375, 3.015625, 3.0, 2.984375, 3.015625, 3.0, 3.03125, 2.96875]  # numbers of bfloat16, which their sum is not


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("weights", [None, [513.0, 513.0, 7.0, 1.0, 1.0, 1.0, 2.0, 2.0]], ids=["mean", "weighted"])
def test_losses_of_low_precision_or_of_one_element_are_averaged_in_float32(weights: Any, dtype: torch.dtype) -> None:
    batch = torch.tensor(LOW) if weights is None else (torch.tensor(LOW), torch.tensor(weights))
    expected = sum(map(operator.mul, LOW, weights or [1.0] * 8)) / sum(weights or [1.0] * 8)
    options: Any = {"accumulate": 8, "weighted": weights is not None, "form": lambda loss: loss.to(dtype).view(1, 1)}
    for ((local, loss),) in run_simulated(lambda mesh: steps(mesh, [batch], **options), 2):
        assert (local, loss) == (pytest.approx(expected, rel=2e-7, abs=0),) * 2


def test_it_costs_no_collective() -> None:
    _, kinds = run_simulated(lambda mesh: steps(mesh, [torch.ones(2)], count=True), 2)[0]
    assert kinds == ["all_gather", "reduce_scatter", "all_reduce"]  # the last one is of the mean loss
