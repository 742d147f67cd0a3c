"""Steps of a linear layer and of other small modules, which are recorded soon, and equality to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module
from tests.states import equal as same

__all__ = ["BATCH", "made", "same", "squares"]

BATCH = torch.arange(6.0).view(2, 3)
LINEAR = nn.Linear(3, 2)


def with_constant(f: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (f(x) * torch.tensor([1.0, 2.0])).square().mean()
    return loss


def squares(f: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = f(x).square().mean()
    return loss


def made(
    mesh: fs.Mesh, loss: Callable[..., Any] = with_constant, *, module: nn.Module = LINEAR, units: Any = (), lr: Any = 0.1,
    momentum: float = 0.0, optimizer: Any = None, plan: Any = None, **options: Any,
) -> Any:  # fmt: skip
    """Return the step of a module, and its first state; ``loss`` gets the module and a batch, and ``plan`` has options."""
    cut, sharded, shards = of_module(mesh, module, units, **(plan or {}))
    optimizer = optimizer or fs.torch_optimizer(torch.optim.SGD, lr=lr, momentum=momentum)
    loss_fn = lambda shards, _, batch: loss(lambda x: sharded(shards, {}, x), batch)  # noqa: E731
    step = fs.make_train_step(loss_fn, optimizer, cut, mesh, **options)
    return step, step.init(shards, {})
