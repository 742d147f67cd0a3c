"""State dicts of parameters and of AdamW: full ones on rank 0, and every rank's own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.models import build, by_fsdp2

__all__ = ["CASES"]

_MILLIONS = 51
_Taken = Callable[[], dict[str, Any]]


def _ours(take: str, sharded: bool) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        import funcshard as fs

        mesh = fs.init_mesh(device="cpu")
        _, params, _ = fs.make_functional(build(_MILLIONS, place))
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        shards = fs.shard(params, plan, mesh)
        optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        grads = {unit: {key: torch.ones_like(flat) for key, flat in own.items()} for unit, own in shards.items()}
        shards, state = optimizer.step(grads, optimizer.init(shards), shards)
        options: dict[str, Any] = {"sharded": True} if sharded else {"rank0_only": True, "offload": True}

        def take_model() -> dict[str, Any]:
            return fs.to_state_dict(shards, plan, mesh, **options)

        def take_optimizer() -> dict[str, Any]:
            return fs.optimizer_to_state_dict(state, optimizer, plan, mesh, **options)

        return _turn(place, take_model if take == "model" else take_optimizer, sharded)

    return make


def _theirs(take: str, sharded: bool) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        module = by_fsdp2(build(_MILLIONS, place), place.size)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        options = StateDictOptions() if sharded else StateDictOptions(full_state_dict=True, cpu_offload=True)

        def take_model() -> dict[str, Any]:
            return get_model_state_dict(module, options=options)

        def take_optimizer() -> dict[str, Any]:
            return get_optimizer_state_dict(module, optimizer, options=options)

        return _turn(place, take_model if take == "model" else take_optimizer, sharded)

    return make


def _turn(place: Place, take: _Taken, sharded: bool) -> Turn:
    def turn() -> float | None:
        with place.timed():
            found = take()
        if sharded:  # the two sides cut leaves in different places
            return None
        tensors = {f"{name}.{key}": value for name, own in found.get("state", {}).items() for key, value in own.items()}
        tensors = tensors or {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        return sum(float(value.double().norm()) for name, value in tensors.items() if "head." not in name)

    return turn


_TITLES = {
    ("model", False): ("state", "full state dict on rank 0, GPT, 51 M"),
    ("model", True): ("state-sharded", "sharded state dict, GPT, 51 M"),
    ("optimizer", False): ("optimizer-state", "AdamW's state by name on rank 0, GPT, 51 M"),
    ("optimizer", True): ("optimizer-state-sharded", "AdamW's state by name, sharded, GPT, 51 M"),
}
CASES = tuple(
    Case(name, title, "FSDP2", 0.7, _ours(take, sharded), _theirs(take, sharded))
    for (take, sharded), (name, title) in _TITLES.items()
)
