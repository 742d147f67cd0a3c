"""Merged programs are those that a trace gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.estimate import Profile
from funcshard.estimate.trace.program import MARGIN, Program, Run, make_program, merge

NAMES = [str(i) for i in range(10)]


def profiled(*blocks: nn.Module) -> Profile:
    return fs.profile(*fs.make_functional(nn.Sequential(*blocks)), torch.zeros(4, 8))


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 8))


@pytest.fixture(scope="module")
def found() -> Profile:
    return profiled(*(block(16) for _ in NAMES))


def traced(found: Profile, plan: fs.Plan, remat: Sequence[str]) -> Program:
    return make_program(found.tape(remat), {unit.name: unit.paths for unit in plan.unit_list})


def without_pauses(program: Program | None) -> Program:
    """Return a program without the times between units in which the model's own code computes nothing."""
    # Why: on Python 3.12 the traced program has one at the border.
    assert program is not None
    steps = [step for step in program.steps if not (isinstance(step, Run) and step.unit == "" and not step.work)]
    return dataclasses.replace(program, steps=tuple(steps))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [4, 5, 6])
def test_a_program_of_one_border_is_the_traced_one(found: Profile, wanted: int) -> None:
    plan = fs.make_plan(found.forms, 2, units=NAMES)
    program = found.program(plan, remat=NAMES[:5])
    merged = merge(program, program, program, NAMES, 5, wanted)
    assert without_pauses(merged) == without_pauses(traced(found, plan, NAMES[:wanted]))


@pytest.mark.slow
@pytest.mark.parametrize(("narrow", "wide"), [(4, 6), (6, 5), (0, 6)])
def test_two_groups_of_equal_units_share_the_traces_of_their_middles(narrow: int, wide: int) -> None:
    two = profiled(*(block(width) for width in (16, 32) for _ in NAMES))
    plan = fs.make_plan(two.forms, 2, units=[str(i) for i in range(20)])
    remat = [str(i) for i in (*range(narrow), *range(10, 10 + wide))]
    merged = two.program(plan, remat=remat)
    assert {len(key[1]) for key in two._made if key[0] == "tape"} <= {0, 5, 10}
    assert without_pauses(merged) == without_pauses(traced(two, plan, remat))


@pytest.mark.parametrize("wanted", [0, MARGIN, 10 - MARGIN, 10])
def test_a_border_near_an_end_takes_no_trace_of_one_border(wanted: int) -> None:
    fresh = profiled(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in NAMES))
    plan = fs.make_plan(fresh.forms, 2, units=NAMES)
    near = fresh.program(plan, remat=NAMES[:wanted])
    assert without_pauses(near) == without_pauses(traced(fresh, plan, NAMES[:wanted]))


def test_a_unit_in_pieces_is_left_to_the_trace(found: Profile) -> None:
    plan = fs.make_plan(found.forms, 2, units=[*NAMES, *(f"{name}.2" for name in NAMES)])
    program = found.program(plan, remat=NAMES[:5])
    assert merge(program, program, program, [f"{name}.0" for name in NAMES], 5, 4) is None


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's checkpoint makes tensors outside of the unit")
@pytest.mark.parametrize("wanted", [2, 3, 5, 6, 11, 12])
def test_units_of_two_kinds_take_their_own_steps(wanted: int) -> None:
    names = [str(i) for i in range(14)]
    mixed = profiled(*(nn.Sequential(nn.Linear(8, 8), nn.ELU() if i % 6 == 5 else nn.GELU()) for i in range(14)))
    plan = fs.make_plan(mixed.forms, 2, units=names)
    *three, alone = (traced(mixed, plan, names[:count]) for count in (0, 14, 7, wanted))
    assert without_pauses(merge(*three, names, 7, wanted)) == without_pauses(alone)
