"""Profiles of models that do not exist: chains of units with random sizes, for tests of searches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from funcshard.estimate import Profile
from funcshard.estimate.trace.tape import LOSS, Alloc, At, Enter, Event, Exit, Free, Grad, Op, Save, Tape, UseParam


@dataclass(frozen=True)
class Unit:
    """One unit of a chain: elements of its parameter, bytes, and FLOPs."""

    numel: int
    saved: int
    out: int
    temporary: int
    flops: int


def expanded(tape: Tape) -> Iterator[Event]:
    """Yield all events of a tape, with those of folds in place of the calls."""
    return itertools.chain.from_iterable(tape.expanded(tape.events))


def chain(units: list[Unit]) -> Profile:
    """Return the profile of units ``u0``, ``u1``, … that run one after the other."""
    forms = {f"u{i}.w": torch.empty(unit.numel, device="meta", requires_grad=True) for i, unit in enumerate(units)}
    return Profile(
        retrace=lambda remat, apart: _tape(units, remat), dtypes=dict.fromkeys(forms, "float32"), tokens=8, inputs=64,
        buffers=0, forms=forms,
    )  # fmt: skip


def _tape(units: list[Unit], remat: frozenset[str]) -> Tape:
    events: list[Event] = []
    for i, unit in enumerate(units):
        path = f"u{i}"
        saved, out, temporary = _storages(i)
        events += [At(path, "forward"), Enter(path, (_storages(i - 1)[1],)), Alloc(temporary, unit.temporary)]
        if path not in remat:
            events += [Alloc(saved, unit.saved), Save(saved, "float32"), UseParam(f"{path}.w")]
        events += [
            Op(unit.flops, unit.saved + unit.out, "float32"),
            Alloc(out, unit.out),
            Free(temporary),
            Exit(path, (out,)),
        ]
    loss = 10**6
    events += [At(LOSS, "forward"), Alloc(loss, 4), Op(0, units[-1].out, "float32"), At(LOSS, "backward")]
    events += [Op(0, units[-1].out, "float32"), Free(loss)]
    for i, unit in reversed([*enumerate(units)]):
        path = f"u{i}"
        saved, out, temporary = _storages(i)
        if path in remat:
            events += [At(path, "recompute"), Enter(path, ()), Alloc(temporary, unit.temporary), Alloc(saved, unit.saved)]
            events += [Save(saved, "float32"), UseParam(f"{path}.w"), Op(unit.flops, unit.saved, "float32"), Free(temporary)]
            events += [Exit(path, ())]
        grad = 10**7 + i
        events += [At(path, "backward"), UseParam(f"{path}.w"), Alloc(grad, 4 * unit.numel)]
        events += [Op(2 * unit.flops, 2 * unit.saved, "float32"), Free(saved), Free(out), Grad(f"{path}.w", grad)]
    return Tape(tuple(events))


def _storages(i: int) -> tuple[int, int, int]:
    return 10 * i + 11, 10 * i + 12, 10 * i + 13
