"""Units on one rank, for the tests of this wing: a plan, what runs its units, and the shards; small models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree

__all__ = [
    "by_hand", "close", "each_by_hand", "forward_mode", "mlp", "of_module", "of_precision_page", "random", "recorded",
    "requiring_grad", "same_bits",
]  # fmt: skip

# The first use of forward-mode AD makes torch import a file that calls a deprecated function of torch.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def by_hand(mesh: fs.Mesh, params: Any, apply: Any, *, how: Any = lambda f: f, cast: Any = None, **options: Any) -> Any:
    """Return a plan, ``how`` of the unsharded function of its root, and the shards; ``options`` are the plan's."""
    plan = fs.make_plan(params, mesh, **options)
    return plan, how(fs.unshard(apply, plan.units[""], mesh, cast=cast)), fs.shard(params, plan, mesh)


def each_by_hand(mesh: fs.Mesh, params: Any, functions: Mapping[str, Any], *, how: Any = fs.reshard, **options: Any) -> Any:
    """Return a plan, ``how`` of the unsharded function of each unit by name, and the shards."""
    plan = fs.make_plan(params, mesh, units=[name for name in functions if name], **options)
    runs = {name: how(fs.unshard(apply, plan.units[name], mesh)) for name, apply in functions.items()}
    return plan, runs, fs.shard(params, plan, mesh)


def of_module(
    mesh: fs.Mesh,
    module: Any,
    units: Any = (),
    *,
    schedule: Mapping[str, Any] | None = None,
    how: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a plan, the sharded function of a module without buffers, and the shards.

    The module may be what ``make_functional`` made of it. ``options`` are the plan's, ``how`` are those of
    ``fully_shard``, and ``schedule`` those of ``make_schedule``; without them the order is learned.
    """
    apply, params, _ = fs.make_functional(module) if isinstance(module, nn.Module) else module
    plan = fs.make_plan(params, mesh, units=units, **options)
    how = {**(how or {}), "schedule": None if schedule is None else fs.make_schedule(plan, **schedule)}
    return plan, fs.fully_shard(apply, plan, mesh, **how), fs.shard(params, plan, mesh)


def recorded(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, tuple[fs.Event, ...]]:
    """Return the result of a call and its events."""
    with fs.record_events() as events:
        result = call(*args, **kwargs)
    return result, tuple(events)


def requiring_grad(shards: Any, grad: bool = True) -> Any:
    return tree.map(lambda shard: shard.requires_grad_(grad), shards)


def same_bits(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def mlp(*widths: int, dtype: torch.dtype = torch.float64, frozen: Collection[str] = ()) -> nn.Sequential:
    """Return linear layers of these widths with tanh between them, the same every time."""
    torch.manual_seed(0)
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.Tanh())]
    net = nn.Sequential(*layers[:-1]).to(dtype)
    for name in frozen:
        net.get_parameter(name).requires_grad_(False)
    return net


def of_precision_page(*starts: str) -> dict[str, Any]:
    """Return the functions of code blocks of docs/precision.md that start so, without the blocks' examples."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "precision.md").read_text()
    names: dict[str, Any] = {"torch": torch, "fs": fs}
    for start in starts:
        (block,) = re.findall(rf"^```python\n({re.escape(start)}.*?)^def (?:quantised|both_ways)", text, re.M | re.S)
        exec(block, names)
    return names
