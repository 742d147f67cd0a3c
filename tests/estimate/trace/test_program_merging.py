"""Merged programs are those that a trace gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import funcshard as fs
from funcshard.estimate import Profile, profile
from funcshard.estimate.trace.program import MARGIN, Program, Run, make_program, merge

NAMES = [str(i) for i in range(10)]


@pytest.fixture(scope="module")
def found() -> Profile:
    net = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)) for _ in NAMES)
    )
    apply, params, buffers = fs.make_functional(net)
    return profile(apply, params, buffers, torch.zeros(4, 8))


def without_pauses(program: Program) -> Program:
    """Return a program without the times between units in which the model's own code computes nothing."""
    # Why: on Python 3.12 the traced program has one at the border.
    steps = [step for step in program.steps if not (isinstance(step, Run) and step.unit == "" and not step.work)]
    return dataclasses.replace(program, steps=tuple(steps))


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [4, 5, 6])
def test_a_program_of_one_border_is_the_traced_one(found: Profile, wanted: int) -> None:
    plan = fs.make_plan(found.forms, 2, units=NAMES)
    program = found.program(plan, remat=NAMES[:5])
    merged = merge(program, program, program, NAMES, 5, wanted)
    assert merged is not None
    paths = {unit.name: unit.paths for unit in plan.unit_list}
    traced = make_program(found.tape(NAMES[:wanted]), paths)
    assert without_pauses(merged) == without_pauses(traced)


@pytest.mark.slow
@pytest.mark.parametrize(("narrow", "wide"), [(4, 6), (6, 5), (0, 6)])
def test_two_groups_of_equal_units_share_the_traces_of_their_middles(narrow: int, wide: int) -> None:
    net = torch.nn.Sequential(
        *(
            torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.GELU(), torch.nn.Linear(width, 8))
            for width in (16, 32)
            for _ in NAMES
        )
    )
    apply, params, buffers = fs.make_functional(net)
    two = profile(apply, params, buffers, torch.zeros(4, 8))
    plan = fs.make_plan(params, 2, units=[str(i) for i in range(20)])
    remat = [str(i) for i in (*range(narrow), *range(10, 10 + wide))]
    merged = two.program(plan, remat=remat)
    traced_counts = {len(key[1]) for key in two._made if key[0] == "tape"}
    assert traced_counts <= {0, 5, 10}
    paths = {unit.name: unit.paths for unit in plan.unit_list}
    assert without_pauses(merged) == without_pauses(make_program(two.tape(remat), paths))


@pytest.mark.parametrize("wanted", [0, MARGIN, 10 - MARGIN, 10])
def test_a_border_near_an_end_takes_no_trace_of_one_border(wanted: int) -> None:
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in NAMES))
    apply, params, buffers = fs.make_functional(net)
    fresh = profile(apply, params, buffers, torch.zeros(4, 8))
    plan = fs.make_plan(params, 2, units=NAMES)
    near = fresh.program(plan, remat=NAMES[:wanted])
    paths = {unit.name: unit.paths for unit in plan.unit_list}
    traced = make_program(fresh.tape(NAMES[:wanted]), paths)
    assert without_pauses(near) == without_pauses(traced)


def test_a_unit_in_pieces_is_left_to_the_trace(found: Profile) -> None:
    plan = fs.make_plan(found.forms, 2, units=[*NAMES, *(f"{name}.2" for name in NAMES)])
    program = found.program(plan, remat=NAMES[:5])
    assert merge(program, program, program, [f"{name}.0" for name in NAMES], 5, 4) is None


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch's checkpoint makes tensors outside of the unit")
@pytest.mark.parametrize("wanted", [2, 3, 5, 6, 11, 12])
def test_units_of_two_kinds_take_their_own_steps(wanted: int) -> None:
    names = [str(i) for i in range(14)]
    net = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ELU() if i % 6 == 5 else torch.nn.GELU()) for i in range(14))
    )
    apply, params, buffers = fs.make_functional(net)
    mixed = profile(apply, params, buffers, torch.zeros(4, 8))
    plan = fs.make_plan(params, 2, units=names)
    paths = {unit.name: unit.paths for unit in plan.unit_list}
    none, every, middle, traced = (make_program(mixed.tape(names[:count]), paths) for count in (0, 14, 7, wanted))
    merged = merge(none, every, middle, names, 7, wanted)
    assert merged is not None
    assert without_pauses(merged) == without_pauses(traced)
