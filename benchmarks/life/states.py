"""State dicts of parameters and of AdamW: full ones on rank 0, and every rank's own part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.models import adamw_by_fsdp2, adamw_by_funcshard

__all__ = ["CASES"]

_MILLIONS = 51
_Taken = Callable[[], dict[str, Any]]


def _ours(take: str, sharded: bool) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        import funcshard as fs

        own = adamw_by_funcshard(_MILLIONS, place)
        options: dict[str, Any] = {"sharded": True} if sharded else {"rank0_only": True, "offload": True}

        def take_model() -> dict[str, Any]:
            return fs.to_state_dict(own.shards, own.plan, own.mesh, **options)

        def take_optimizer() -> dict[str, Any]:
            return fs.optimizer_to_state_dict(own.opt_state, own.optimizer, own.plan, own.mesh, **options)

        return _turn(place, take_model if take == "model" else take_optimizer, sharded)

    return make


def _theirs(take: str, sharded: bool) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        module, optimizer = adamw_by_fsdp2(_MILLIONS, place)
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
