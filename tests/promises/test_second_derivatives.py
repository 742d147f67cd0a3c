"""A gradient penalty before or after the critic's other forwards: ours is right, FSDP2's depends on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

import funcshard as fs
from tests.ranks import run_ranks, run_simulated

ORDERS = ["penalty last", "penalty first"]
Result = dict[str, torch.Tensor | None]


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)


def wgan_gp(f: Any, rank: int, order: str) -> torch.Tensor:
    real, fake = data(rank)
    middle = (0.3 * real + 0.7 * fake).requires_grad_()

    def penalty() -> torch.Tensor:
        (slope,) = torch.autograd.grad(f(middle).sum(), middle, create_graph=True)
        return 10 * (slope.norm(dim=1) - 1).square().mean()

    if order == "penalty first":
        first = penalty()
        return f(fake).mean() - f(real).mean() + first
    return f(fake).mean() - f(real).mean() + penalty()


def expected(world_size: int) -> Result:
    """Return the mean of the ranks' gradients of the plain module; the last bias has none."""
    net = critic()
    loss = torch.stack([wgan_gp(net, rank, "penalty last") for rank in range(world_size)]).mean()
    loss.backward()
    return {name: p.grad for name, p in net.named_parameters()}


def ours(mesh: fs.Mesh, order: str, strategy: str) -> Result:
    apply, params, buffers = fs.make_functional(critic())
    plan = fs.make_plan(params, mesh, units=["0", "2", "4"], strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh)
    loss_fn = lambda shards: wgan_gp(lambda x: sharded(shards, buffers, x), mesh.rank, order)  # noqa: E731
    _, grads = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))
    return fs.gather(grads, plan, mesh)


def theirs(mesh: fs.Mesh, order: str) -> Result:
    net, device_mesh = critic(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fsdp2(layer, mesh=device_mesh)
    module = fsdp2(net, mesh=device_mesh)
    module.set_reshard_after_backward(False)
    held = dict(net.named_parameters())
    wgan_gp(net, mesh.rank, order).backward()
    grads: dict[str, Any] = {name: p.grad for name, p in held.items()}
    return {name: None if grad is None else grad.full_tensor() for name, grad in grads.items()}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_penalty_before_or_after_other_forwards_has_the_gradient_of_the_module(order: str, strategy: str) -> None:
    for grads in run_simulated(ours, 2, order, strategy):
        for name, grad in expected(2).items():
            assert grads[name] is not None
            torch.testing.assert_close(grads[name], grad)


@pytest.mark.slow
def test_fsdp2_loses_a_gradient_without_an_error_if_the_penalty_comes_first() -> None:
    right = expected(2)
    for order in ORDERS:
        for grads in run_ranks(theirs, 2, order):
            missing = [name for name, grad in grads.items() if grad is None]
            assert missing == (["4.weight"] if order == "penalty first" else [])
            for name in grads.keys() - missing:
                torch.testing.assert_close(grads[name], right[name])
    assert right["4.weight"] is not None
    assert right["4.weight"].norm() > 1
