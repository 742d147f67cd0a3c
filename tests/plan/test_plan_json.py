"""The JSON of a plan that is damaged, or made to do harm, is a ``ValueError`` with the part's name."""

from __future__ import annotations

import functools
import json
import operator
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import funcshard as fs
from tests.json_damage import changed_once


class Pair(NamedTuple):
    """A container of the plan."""

    one: Any
    other: Any


PLAN = fs.make_plan(
    {"a": {"w": torch.zeros(4, 2)}, "b": Pair(torch.zeros(3), torch.zeros(2, 2))},
    {"shard": 2, "tensor": 2}, units=["a"], local={"b.1": {"tensor": 1}}, precision=fs.MixedPrecision(torch.bfloat16),
)  # fmt: skip
TEXT = PLAN.to_json()
ROOT, BUFFER = ("unit_list", 0), ("unit_list", 0, "buffers", 0)
OTHER = "its units must be those of make_plan for its leaves"
LEAF, CUTS = (*BUFFER, "leaves", 0), ("unit_list", 0, "buffers", 1, "leaves", 0, "cuts")


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    return lambda data: functools.reduce(operator.getitem, keys[:-1], data).__setitem__(keys[-1], value)


def put_ranks(data: Any) -> None:
    for part in (data, *data["unit_list"]):
        part["axes"][2][1] = 2**31


def edited(plan: fs.Plan, old: str, new: str) -> str:
    return plan.to_json().replace(old, new)


def without(*keys: Any) -> Callable[[Any], None]:
    return lambda data: functools.reduce(operator.getitem, keys[:-1], data).__delitem__(keys[-1])


CASES: dict[str, tuple[Callable[[Any], None], str]] = {
    "no units": (without("unit_list"), "the plan must have 'unit_list'"),
    "units that are a text": (put("unit_list", value="units"), "unit_list must be a list; found 'units'"),
    "a plan of a later version": (put("color", value=1), "the plan must have no other keys .* found 'color'"),
    "a flag that is 1": (put(*ROOT, "offload", value=1), "offload must be true or false; found 1"),
    "a shape of NaN": (put(*LEAF, "shape", value=[float("nan")]), "leaves\\[0\\]\\.shape\\[0\\] must be a whole number"),
    "a shape of 2^70": (put(*LEAF, "shape", value=[2**70]), "leaves\\[0\\]\\.shape.* must be .* to 9223372036854775807"),
    "a placement of three entries": (put(*LEAF, "placements", value=[["tensor", 0, 1]]), "s\\[0\\] must be a list of 2"),
    "a dtype that is a list": (put(*BUFFER, "dtype", value=[]), "dtype must be a text; found"),
    "a precision of an unknown dtype": (
        put("precision", "param_dtype", value="float17"), "'float17' is not the name of a torch dtype",
    ),
    # What has the right types has to be a plan that make_plan makes.
    "two units of one name": (put("unit_list", 1, "name", value=""), OTHER),
    "other axes": (put("axes", value=[["shard", 3], ["replicate", 1]]), "leaf 'b.1' must fit the mesh"),
    "a mesh of 2^32 ranks": (put_ranks, "must fit the mesh|must be those of make_plan"),
    "a product of 2^80": (put(*LEAF, "shape", value=[2**40, 2**40]), "leaf 'b.0' must fit the mesh"),
    "a cut for other ranks": (put(*CUTS, value=[["tensor", 1, 4]]), "leaf 'b.1' must fit the mesh"),
    "a cut of a dim that is not there": (put(*CUTS, value=[["tensor", 2, 2]]), "index out of range"),
    "a placement of a dim that is not there": (put(*LEAF, "placements", value=[["tensor", 5]]), "must fit the mesh"),
    "a dtype of 5,000 letters": (put(*BUFFER, "dtype", value="f" * 5000), "is not the name of a torch dtype"),
    "a freed unit that stays": (put("unit_list", 1, "reshard_after_backward", value=False), "is freed after forward"),
    "a structure of other leaves": (put("structure", value=0), "found|KeyError|must be those"),
    "a structure that is a text": (put("structure", value="os:system"), "is damaged"),
    "a deep structure": (put("structure", value=json.loads("[" * 480 + "]" * 480)), "is damaged"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_plan_is_refused_and_its_part_named(case: str) -> None:
    change, words = CASES[case]
    data = json.loads(TEXT)
    change(data)
    with pytest.raises(ValueError, match=words):
        fs.Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\ufeff" + TEXT, "it is no JSON: Unexpected UTF-8 BOM"),
        ("[" * 100_000, "nested in more than 500 levels"),
        (TEXT.replace('"mesh_shape"', '"structure"', 1), "twice in one object"),
        ("9" * 5000, "integer string conversion"),
        ("null", "found 'NoneType'"),
    ],
)
def test_a_text_that_is_no_plan_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fs.Plan.from_json(text)


@pytest.mark.parametrize(
    ("name", "words"),
    [("antigravity:Thing", "import the module first"), ("subprocess:Popen", "isn't a namedtuple")],
)
def test_a_plan_calls_nothing_that_its_text_names(name: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    plan = fs.Plan.from_json(edited(PLAN, f"{__name__}:Pair", name))  # a plan may be shown without its classes
    assert "a " in str(plan)
    one = fs.make_plan({"x": torch.zeros(2)}, 1)
    text = edited(one, '["dict",["x"],[0]]', json.dumps(["namedtuple", name, [0]]))
    assert name in text
    with pytest.raises(ValueError, match=words):
        fs.gather(fs.shard({"x": torch.zeros(2)}, one, fs.Mesh()), fs.Plan.from_json(text), fs.Mesh())
    assert "antigravity" not in sys.modules
    assert capfd.readouterr().out == ""


@pytest.mark.slow
def test_every_small_change_makes_another_plan_or_is_a_value_error() -> None:
    assert fs.Plan.from_json(TEXT) == PLAN
    errors = 0
    for where, data in changed_once(json.loads(TEXT), 1500):
        try:
            assert isinstance(fs.Plan.from_json(json.dumps(data)), fs.Plan), where
        except ValueError:
            errors += 1
    assert 1000 < errors < 1500
