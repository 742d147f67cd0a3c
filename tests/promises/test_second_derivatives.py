"""A gradient penalty before or after the critic's other forwards: ours is right, FSDP2's depends on it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2

import funcshard as fs
from tests.module.law import check_equal, plain_call
from tests.ranks import run_ranks

ORDERS = ["penalty last", "penalty first"]
Result = dict[str, torch.Tensor | None]


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5, 4, generator=generator), torch.randn(5, 4, generator=generator)


def wgan_gp(f: Any, batch: tuple[torch.Tensor, torch.Tensor], order: str) -> torch.Tensor:
    real, fake = batch
    middle = (0.3 * real + 0.7 * fake).requires_grad_()

    def penalty() -> torch.Tensor:
        (slope,) = torch.autograd.grad(f(middle).sum(), middle, create_graph=True)
        return 10 * (slope.norm(dim=1) - 1).square().mean()

    if order == "penalty first":
        first = penalty()
        return f(fake).mean() - f(real).mean() + first
    return f(fake).mean() - f(real).mean() + penalty()


def theirs(mesh: fs.Mesh, order: str) -> Result:
    net, device_mesh = critic(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fsdp2(layer, mesh=device_mesh)
    module = fsdp2(net, mesh=device_mesh)
    module.set_reshard_after_backward(False)
    held = dict(net.named_parameters())
    wgan_gp(net, data(mesh.rank), order).backward()
    grads: dict[str, Any] = {name: p.grad for name, p in held.items()}
    return {name: None if grad is None else grad.full_tensor() for name, grad in grads.items()}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_penalty_before_or_after_other_forwards_has_the_gradient_of_the_module(order: str, strategy: str) -> None:
    loss = functools.partial(wgan_gp, order=order)
    calls = check_equal(critic(), data, ["0", "2", "4"], program=loss, strategy=strategy)
    assert all(call.grads.keys() == dict(critic().named_parameters()).keys() for call in calls)


@pytest.mark.slow
def test_fsdp2_loses_a_gradient_without_an_error_if_the_penalty_comes_first() -> None:
    _, right = plain_call(critic(), data, 2, functools.partial(wgan_gp, order="penalty last"))
    for order in ORDERS:
        for grads in run_ranks(theirs, 2, order):
            missing = [name for name, grad in grads.items() if grad is None]
            assert missing == (["4.weight"] if order == "penalty first" else [])
            for name in grads.keys() - missing:
                torch.testing.assert_close(grads[name], right[name])
    assert right["4.weight"].norm() > 1
