"""The work of planning grows with the number of units, and not with its square: no unit is searched for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.plan import layout, unit_options


def operations(work: Callable[[], object]) -> int:
    """Return the number of operations of Python that some work takes, which no load changes."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def nested(units: int) -> dict[str, Any]:
    return {"blocks": [{"w": torch.zeros(2), "norm": {"w": torch.zeros(3)}} for _ in range(units)]}


def flat(units: int) -> dict[str, Any]:
    return {f"blocks.{i}.{name}": torch.zeros(2) for i in range(units) for name in ("w", "norm.w")}


def norms(units: int) -> Any:
    return fs.make_functional(nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(units)]))[1]


PRECISION = fs.MixedPrecision(param_dtype=torch.bfloat16)
PLANS: dict[str, Callable[[int], fs.Plan]] = {
    "a glob": lambda n: fs.make_plan(nested(n), 4, units=["blocks.*"]),
    "two globs of many stars": lambda n: fs.make_plan(nested(n), 4, units=["**.b*s.*", "**.n*m*"]),
    "paths": lambda n: fs.make_plan(nested(n), 4, units=[f"blocks.{i}" for i in range(n)]),
    "groups": lambda n: fs.make_plan(nested(n), 4, units=[[f"blocks.{i}.w", f"blocks.{i}.norm"] for i in range(n)]),
    "a flat dictionary": lambda n: fs.make_plan(flat(n), 4, units=["blocks.*"]),
    "options of each unit": lambda n: fs.make_plan(
        nested(n), 4, units={f"blocks.{i}": {"reshard_after_forward": False} for i in range(n)}
    ),
    "JSON": lambda n: fs.Plan.from_json(fs.make_plan(nested(n), 4, units=["blocks.*"]).to_json()),
    "modules of full precision": lambda n: fs.make_plan(norms(n), 4, units=["*"], precision=PRECISION),
}  # fmt: skip


@pytest.mark.nightly(one_in=4)
@pytest.mark.filterwarnings("ignore:ignored_classes of the precision hold BatchNorm1d:UserWarning")
@pytest.mark.parametrize("name", PLANS)
def test_twice_as_many_units_take_twice_the_work(name: str) -> None:
    def work(units: int) -> int:
        unit_options.nodes_of.cache_clear()
        layout._laid_out.cache_clear()
        return operations(lambda: PLANS[name](units))

    work(3)  # what is computed once
    few, many = work(50), work(100)
    assert many < 2.2 * few
