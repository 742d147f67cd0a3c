"""Checks of optimizer state: whose it is, and whether ranks have the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funcshard.checkpoint.state_dict import is_full
from funcshard.core import LeafChecksums
from funcshard.plan import Plan, own_axes
from funcshard.train import KnownEntries, MuonStep, TorchOptimizer, learn_entries, trainable_buffers

LeafState = dict[str, Any]
"""The state of one parameter: ``{"exp_avg": tensor, "step": tensor, ...}``."""


def check_opt_state(opt_state: Any, optimizer: Any, plan: Plan) -> None:
    """Raise unless ``opt_state`` is a state of an optimizer of ``torch.optim`` under the plan."""
    if not isinstance(optimizer, TorchOptimizer):
        return
    if not isinstance(opt_state, Mapping):
        raise TypeError(
            f"opt_state must be the optimizer's own state; found {type(opt_state).__name__}: pass "
            "state.opt_state of a TrainState"
        )
    leaves = opt_state.get("leaves")
    if isinstance(leaves, Mapping) and not leaves.keys() <= plan.units.keys():
        raise ValueError(
            f"opt_state must hold the units of the plan, {list(plan.units)[:6]}; found "
            f"{list(leaves)[:6]}: pass the plan that the state was made with"
        )


def add_checksums(
    checksums: LeafChecksums,
    by_path: Mapping[str, LeafState],
    others: Mapping[str, Any],
    plan: Plan,
) -> None:
    """Add the full tensors and scalars of a state dict, which must be the same on every rank."""

    def add(name: str, value: Any, local: tuple[str, ...]) -> None:
        if is_full(value):
            checksums.add(name, value, local)
        elif isinstance(value, int | float):
            checksums.add(
                name, torch.tensor(float(value), dtype=torch.float64, device="cpu"), local
            )

    for _, buffer in trainable_buffers(plan):
        for leaf in buffer.leaves:
            for name, value in by_path.get(leaf.path, {}).items():
                add(f"{leaf.path}.{name}", value, own_axes(buffer.local, leaf.cuts))
    for name, value in others.items():
        add(name, value, ())


def check_names(by_path: dict[str, LeafState], step: Any) -> None:
    """Raise ``ValueError`` unless the state of each leaf has the names that the optimizer keeps."""
    if isinstance(step, MuonStep):
        known_entries = KnownEntries({"momentum_buffer": True}, exact=True)
        of_group = dict.fromkeys(range(step.layout.count), known_entries)
    elif step.known is not None and step.cls.__module__.startswith("torch.optim."):
        known_entries = step.known
        of_group = {
            n: learn_entries(step.cls, step.options, [n]) or known_entries
            for n in range(len(step.options))
        }
    else:
        return  # a class of the user's own may keep other names for other leaves
    for path, leaf_state in by_path.items():
        group = 0 if step.layout is None else step.layout.group_of.get(path)
        if (
            group is None or not leaf_state
        ):  # some optimizers keep no state of a leaf that got no gradient
            continue
        missing_names = sorted(of_group[group].flat.keys() - leaf_state.keys())
        unexpected = sorted(
            name
            for name in leaf_state.keys() - known_entries.flat.keys()
            if known_entries.exact and leaf_state[name] is not None
        )
        if missing_names or unexpected:
            raise ValueError(
                f"the optimizer's state dict must hold {sorted(of_group[group].flat) or 'nothing'} "
                f"of leaf {path!r}, as this optimizer keeps; found {sorted(leaf_state)}: it is of another "
                "optimizer, or of other options; make the optimizer as it was made then, or begin "
                "with its init"
            )
