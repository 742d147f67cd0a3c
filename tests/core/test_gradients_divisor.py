"""Divisors of gradients: one of your own, division before reductions, and plain tensors beside shards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import funcshard as fs
from tests.core.units import by_hand, each_by_hand, mlp, of_module, recorded, same_bits
from tests.ranks import on_ranks, run_ranks

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
