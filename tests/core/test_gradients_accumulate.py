"""accumulate: one gradient of many micro-batches, reduced for each of them or once."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import each_by_hand, mlp, of_module, recorded, same_bits
from tests.ranks import on_ranks

MICRO = 3
net = functools.partial(mlp, 3, 5, 5, 2, frozen=["2.bias"])


def batch() -> torch.Tensor:
    return torch.randn(24, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def setup(mesh: fs.Mesh) -> Any:
    _, sharded, shards = of_module(mesh, net(), ["2", "4"])
    return shards, lambda shards, x: sharded(shards, {}, x).square().mean(), batch().chunk(mesh.world_size)[mesh.rank]


@on_ranks(2)
def test_once_reduces_a_checkpointed_unit_as_soon_as_its_gradient_is_whole(mesh: fs.Mesh) -> None:
    params = {"a": torch.linspace(1, 2, 5), "b": torch.linspace(3, 4, 5)}
    _, runs, shards = each_by_hand(mesh, params, dict.fromkeys(params, lambda w, x: w * w * x))

    def loss_fn(s: Any, x: torch.Tensor) -> torch.Tensor:
        for name in params:
            x = torch.utils.checkpoint.checkpoint(runs[name], s[name], x, use_reentrant=False)
        return x.sum()

    _, events = recorded(fs.accumulate(loss_fn, 2, reduce="once"), shards, torch.ones(2, 1))
    events = [(event.kind, event.unit) for event in events]
    assert [event for event in events if event[0] != "all_gather"] == [("reduce_scatter", "b"), ("reduce_scatter", "a")]
    last_gather = len(events) - 1 - events[::-1].index(("all_gather", "a"))
    assert events.index(("reduce_scatter", "b")) < last_gather


@on_ranks(2)
def test_once_hands_on_grads_the_sum_over_micro_batches_once_a_unit(mesh: fs.Mesh) -> None:
    (shards, loss_fn, mine), seen = setup(mesh), []
    note = lambda unit, grads: seen.append((unit, tree.map(torch.clone, grads)))  # noqa: E731
    fs.accumulate(loss_fn, MICRO, reduce="once", on_grads=note)(shards, mine)
    model = net()
    model(mine).square().mean().backward()
    for _, grads in seen:
        for path, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(path).grad)
    assert [unit for unit, _ in seen] == ["4", "2", ""]


CANNOT_BE_SPLIT: dict[str, tuple[Any, str]] = {
    "not a multiple": (torch.ones(3), "must be a multiple of the 2 micro-batches; found 3: choose a divisor, or pad"),
    "empty": (torch.ones(0), "must be a multiple of the 2 micro-batches; found 0"),
    "sizes that differ": ([torch.ones(2), torch.ones(4)], r"one size of dim 0.*found \['2', '4'\]: pass what is not"),
    "a scalar": (torch.ones(()), r"one size of dim 0.*found \['Tensor'\]"),
    "no tensor": ({"x": torch.ones(2), "k": 3}, r"one size of dim 0.*found \['2', 'int'\]"),
    "nothing": ({}, "one size of dim 0.*found no leaves"),
}


@pytest.mark.parametrize("name", CANNOT_BE_SPLIT)
def test_a_batch_that_cannot_be_split_is_refused(name: str) -> None:
    rows, words = CANNOT_BE_SPLIT[name]
    with pytest.raises(ValueError, match=words):
        fs.accumulate(lambda shards, x: x.sum(), 2)({"": {"float32": torch.ones(2)}}, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@on_ranks(2)
def test_the_mean_of_losses_of_low_precision_is_in_float32(mesh: fs.Mesh, dtype: torch.dtype) -> None:
    shards, loss_fn, _ = setup(mesh)
    low = lambda shards, x: loss_fn(shards, x).to(dtype)  # noqa: E731
    losses = [low(shards, part).double() for part in batch().chunk(8)]
    loss, _ = fs.accumulate(low, 8)(shards, batch())
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss.double(), torch.stack(losses).mean(), rtol=2e-7, atol=0)
    same_bits(fs.value_and_grad(low)(shards, batch())[0], low(shards, batch()).detach())


@pytest.mark.parametrize("reduce", ["each", "once"])
@on_ranks(2)
def test_an_iterator_gives_micro_batches_one_by_one_with_the_same_bits(mesh: fs.Mesh, reduce: str) -> None:
    (shards, loss_fn, mine), seen = setup(mesh), []

    def stream() -> Any:
        for number, part in enumerate(mine.chunk(MICRO)):
            seen.append(f"batch {number}")
            yield part

    def noted(shards: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append("forward")
        return loss_fn(shards, x)

    whole_batch = fs.accumulate(loss_fn, MICRO, reduce=reduce)(shards, mine)
    same_bits(fs.accumulate(noted, MICRO, reduce=reduce)(shards, stream()), whole_batch)
    assert seen == [f for number in range(MICRO) for f in (f"batch {number}", "forward")]


@on_ranks(1)
def test_a_call_takes_its_micro_batches_from_an_iterator_and_leaves_the_rest(mesh: fs.Mesh) -> None:
    shards, loss_fn, _ = setup(mesh)
    evaluate, parts = fs.accumulate(loss_fn, 3), iter(batch().split(5))  # five micro-batches
    evaluate(shards, parts)
    with pytest.raises(ValueError, match="must hold the 3 micro-batches of every call, on every rank; found 2: leave out"):
        evaluate(shards, parts)


@on_ranks(1)
def test_a_trace_takes_no_iterator(mesh: fs.Mesh) -> None:
    plan, sharded, shards = of_module(mesh, nn.Linear(3, 1))
    loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, accumulate=2)
    with pytest.raises(ValueError, match="cannot ask an iterator for micro-batches"):
        fs.trace(step, step.init(shards, {}), iter([torch.ones(2, 3)] * 2))
