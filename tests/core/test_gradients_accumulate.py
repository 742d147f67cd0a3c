"""accumulate: one gradient of many micro-batches, reduced for each of them or once; divisors of gradients."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import by_hand, each_by_hand, mlp, of_module, recorded, same_bits
from tests.ranks import on_ranks, run_ranks

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


# --- divisors -------------------------------------------------------------------------------------


GRID = {"replicate": 2, "shard": 2}
FP16 = torch.float16
PARAMS = {"w": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}


def linear(mesh: fs.Mesh, **options: Any) -> Any:
    """Return a plan, shards, and a loss whose gradient on rank r is r + 1 at every element."""
    plan, f, shards = by_hand(mesh, PARAMS, lambda leaves: leaves["w"].sum() * (mesh.rank + 1), **options)
    return plan, shards, lambda shards, *_: f(shards[""])


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize("world", [1, 3, GRID], ids=str)
@on_ranks()
def test_the_sum_of_the_ranks_gradients_is_divided_by_it(mesh: fs.Mesh, world: Any, strategy: str) -> None:
    plan, shards, loss_fn = linear(mesh, strategy=strategy)
    total = sum(rank + 1 for rank in range(mesh.world_size))
    for divisor in (None, 1, 2.5, torch.tensor(8)):
        (loss, grads), events = recorded(fs.value_and_grad(loss_fn, divisor=divisor), shards)
        assert events == fs.predict_events(plan, not_saved=[""])
        assert loss == 6 * (mesh.rank + 1)  # its own, whatever the divisor
        by = mesh.world_size if divisor is None else float(divisor)
        assert fs.gather(grads, plan, mesh)["w"].tolist() == [total / by] * 3


@on_ranks(2)
def test_it_divides_direct_terms_local_leaves_and_weighted_losses_alike(mesh: fs.Mesh) -> None:
    _, shards, loss_fn = linear(mesh, local=["w"])
    (key,), rank = shards[""], mesh.rank
    both = lambda s: loss_fn(s) + s[""][key].sum()  # noqa: E731
    (_, grads), events = recorded(fs.value_and_grad(both, divisor=10), shards)
    assert events == ()
    assert grads[""][key][0].item() == pytest.approx((rank + 2) / 10)
    (loss, weight), grads = fs.value_and_grad(lambda s: (both(s), rank + 1), weighted=True, divisor=10)(shards)
    assert grads[""][key][0].item() == pytest.approx((rank + 1) * (rank + 2) / 10)
    assert (loss.item(), weight.item()) == (pytest.approx((12 + 2 * 18) / 3), 3)  # the weighted mean all the same


HALF = fs.MixedPrecision(reduce_dtype=FP16, divide_before_reduce=True)


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@pytest.mark.parametrize(("world", "before"), [(1, 1), (2, 2), (GRID, 2), (6, 4)], ids=str)
@on_ranks()
def test_a_power_of_two_divides_before_the_sum_and_the_rest_after_it(
    mesh: fs.Mesh, world: Any, before: int, strategy: str
) -> None:
    scale, seen, sums = 30000.0, [], []  # twice this is infinite in float16
    params, apply = {"w": torch.zeros(12)}, lambda leaves: leaves["w"].sum() * scale
    plan, f, shards = by_hand(mesh, params, apply, strategy=strategy, precision=HALF)
    hooks: dict[str, Any] = {
        "on_grads": lambda unit, grads: seen.append(grads["w"][0].item()),
        "on_reduce_scattered": lambda unit, key, partial: sums.append(partial[0].item()),
    }
    direct = lambda s: f(s[""]) + s[""]["float32"].sum()  # noqa: E731
    for evaluate, wanted in (
        (fs.value_and_grad(lambda s: f(s[""])), scale),
        (fs.value_and_grad(direct, **hooks), scale + 1 / mesh.world_size),
    ):
        found = fs.gather(evaluate(shards)[1], plan, mesh)["w"]
        torch.testing.assert_close(found, torch.full((12,), wanted), rtol=1e-3, atol=0)
    added = mesh.shard.size if strategy == "full_shard" else 1
    assert (seen, sums) == ([scale], [pytest.approx(scale / before * added, rel=1e-3)])


@pytest.mark.parametrize("reduce", ["each", "once", "shard_each"])
@on_ranks(GRID)
def test_it_changes_no_bit_of_gradients_of_ordinary_size(mesh: fs.Mesh, reduce: str) -> None:
    params = {name: torch.linspace(1, 2, 5) for name in "ab"}
    found = []
    for divide in (False, True):
        precision = fs.MixedPrecision(FP16, keep_low_precision_grads=True, divide_before_reduce=divide)
        functions = dict.fromkeys(params, lambda w, x: w * w * x)
        _, f, shards = each_by_hand(mesh, params, functions, precision=precision)
        loss_fn = lambda s, x, f=f: f["a"](s["a"], f["b"](s["b"], x)).float().mean()  # noqa: E731
        x = torch.linspace(1, 2, 4, dtype=FP16)[:, None] + mesh.rank / 8
        found.append(fs.accumulate(loss_fn, 2, reduce=reduce)(shards, x)[1])
    same_bits(found[0], found[1])


def compare(mesh: fs.Mesh) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).chunk(mesh.world_size)[mesh.rank]
    low = fs.MixedPrecision(FP16, FP16, divide_before_reduce=True)
    for precision, divisor in ((low, None), (None, 3.0), (low, 4.0)):
        theirs = mlp(6, 6, 6, dtype=torch.float32)
        policy = MixedPrecisionPolicy() if precision is None else MixedPrecisionPolicy(FP16, FP16)
        for module in (theirs[0], theirs[2], theirs):
            fully_shard(module, mesh=init_device_mesh("cpu", (mesh.world_size,)), mp_policy=policy)
        if divisor is not None:
            for module in (theirs[0], theirs[2], theirs):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(divisor)
        (theirs(x).float().square().mean() * 64).backward()
        plan, sharded, shards = of_module(mesh, mlp(6, 6, 6, dtype=torch.float32), ["0", "2"], precision=precision)
        loss_fn = lambda s, sharded=sharded: sharded(s, {}, x).float().square().mean() * 64  # noqa: E731
        grads = fs.gather(fs.value_and_grad(loss_fn, divisor=divisor)(shards)[1], plan, mesh)
        for name, leaf in theirs.named_parameters():
            assert torch.equal(grads[name], leaf.grad.full_tensor()), (name, divisor)  # type: ignore[union-attr]
            assert math.isfinite(grads[name].sum())


@pytest.mark.slow
def test_on_processes_sums_of_float16_and_other_factors_are_those_of_fsdp2_to_the_bit() -> None:
    run_ranks(compare, 2)
