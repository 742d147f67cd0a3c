"""The law of this wing: a sharded module has the loss and the gradients of the plain one."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import funcshard as fs
from tests.core.units import same_bits
from tests.ranks import one_thread, run_simulated
from tests.storages import Log

__all__ = [
    "Call", "Runs", "Watch", "calls_on", "check_equal", "gathers", "held", "outputs_on", "plain_call", "same_bits",
    "sharded_call", "squares",
]  # fmt: skip


class Runs(nn.Module):
    """A module with parts by name, whose forward is a function of the module and its inputs.

    A part is a module or a parameter; a plain tensor becomes a buffer.
    """

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.run(self, *args, **options)


class Watch(Log):
    """A log that knows the most of its storages that were alive at a time."""

    most = 0

    def __call__(self, tensor: torch.Tensor) -> None:
        super().__call__(tensor)
        self.most = max(self.most, self.alive())


class Call(NamedTuple):
    """What one rank has after a call of a sharded module: ``grads`` are those of whole leaves, by name."""

    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    events: tuple[fs.Event, ...]
    plan: fs.Plan
    schedule: fs.Schedule

    def predicted(self, **options: Any) -> tuple[fs.Event, ...]:
        return fs.predict_events(self.plan, self.schedule, **options)


Program = Callable[[Callable[..., Any], Any], torch.Tensor]  # of a model and an input to a loss


def squares(model: Callable[..., Any], x: Any) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def _input(x: Any, rank: int) -> Any:
    return x(rank) if callable(x) else x


def sharded_call(
    mesh: fs.Mesh,
    functional: Any,
    x: Any,
    units: Any = (),
    *,
    program: Program = squares,
    calls: int = 2,
    evaluate: Callable[..., Any] = fs.value_and_grad,
    how: Mapping[str, Any] | None = None,
    **options: Any,
) -> Call:
    """Take the gradient of a sharded module ``calls`` times; return what the last one gave.

    Arguments:
        functional: what ``make_functional`` returned.
        x: the input of every rank, or a function from a rank to its input.
        program: the loss of a model and an input.
        calls: number of calls; the first learns the order of units.
        evaluate: makes a loss function one that returns loss and gradients.
        how: options of ``fully_shard``.
        options: options of ``make_plan``.
    """
    apply, params, buffers = functional
    plan = fs.make_plan(params, mesh, units=units, **options)
    sharded, shards = fs.fully_shard(apply, plan, mesh, **(how or {})), fs.shard(params, plan, mesh)
    loss_fn = lambda shards, x: program(functools.partial(sharded, shards, buffers), x)  # noqa: E731
    for _ in range(calls):
        with fs.record_events() as events:
            loss, grads = evaluate(loss_fn)(shards, _input(x, mesh.rank))
    return Call(loss, fs.gather(grads, plan, mesh), tuple(events), plan, sharded.schedule)


def plain_call(
    net: nn.Module, x: Any, ranks: int = 1, program: Program = squares
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the loss of each rank's input, and the gradients of their mean; unused parameters have zeros."""
    leaves = {name: p for name, p in net.named_parameters() if p.requires_grad}
    with one_thread():
        losses = [program(net, _input(x, rank)) for rank in range(ranks)]
        grads = [torch.autograd.grad(loss, [*leaves.values()], materialize_grads=True) for loss in losses]
    means = [torch.stack(parts).sum(0) / ranks for parts in zip(*grads, strict=True)]
    return [loss.detach() for loss in losses], dict(zip(leaves, means, strict=True))


def calls_on(
    world: int | Mapping[str, int],
    functional: Any,
    x: Any,
    units: Any = (),
    *,
    run: Callable[..., list[Any]] = run_simulated,
    **options: Any,
) -> list[Call]:
    """Return what ``sharded_call`` gives on each rank of a mesh."""
    ranks, shape = (world, None) if isinstance(world, int) else (math.prod(world.values()), world)
    return run(functools.partial(sharded_call, **options), ranks, functional, x, units, shape=shape)


def outputs_on(world: int | Mapping[str, int], functional: Any, x: Any, units: Any = (), **options: Any) -> list[Any]:
    """Return the output of one call of a sharded module on each rank, with the arguments of ``sharded_call``."""
    forward = lambda run: lambda shards, x: (run(shards, x), shards)  # noqa: E731
    call = {"program": lambda model, x: model(x), "calls": 1, "evaluate": forward}
    return [each.loss for each in calls_on(world, functional, x, units, **{**call, **options})]


def check_equal(
    net: nn.Module,
    x: Any,
    units: Any = (),
    world: int | Mapping[str, int] = 2,
    *,
    bits: bool = False,
    program: Program = squares,
    **options: Any,
) -> list[Call]:
    """Check that ranks have the loss and gradients of the plain module, and return what they have."""
    functional, exact = fs.make_functional(net), {"rtol": 0, "atol": 0} if bits else {}
    found = calls_on(world, functional, x, units, program=program, **options)
    losses, grads = plain_call(net, x, len(found), program)
    for call, loss in zip(found, losses, strict=True):
        torch.testing.assert_close(call.loss, loss, **exact)
        torch.testing.assert_close({name: g for name, g in call.grads.items() if g is not None}, grads, **exact)
    return found


def gathers(events: Any, unit: str) -> int:
    """Return how many all-gathers of a unit there are among events."""
    return sum(event.kind == "all_gather" and event.unit == unit for event in events)


def held(mesh: fs.Mesh, log: Log) -> int:
    """Return how many logged storages of all ranks live while every rank is here."""
    mesh.shard.all_gather_text("")
    found = len({ref.cdata for ref in log if not ref.expired()})
    mesh.shard.all_gather_text("")
    return found
