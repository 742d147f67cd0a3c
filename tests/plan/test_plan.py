"""The plan as data: exact JSON, fingerprints, tables in text and HTML, and JSON that is damaged."""

from __future__ import annotations

import functools
import json
import operator
import sys
import xml.etree.ElementTree
from typing import Any, NamedTuple

import pytest
import torch

import funcshard as fs
from funcshard.plan import fold_units
from tests.json_damage import changed_once

PARAMS = {
    "blocks": [{"w": torch.zeros(4, 4), "b": torch.zeros(3)} for _ in range(2)],
    "head": {"w": torch.zeros(4, 2, dtype=torch.bfloat16)},
    "steps": torch.zeros((), dtype=torch.int64),
}
FLAT = {"a.w": torch.zeros(2), "a.b": torch.zeros(1), "c": torch.zeros(0)}
shared = torch.zeros(3, 5)
MIXED = fs.MixedPrecision(
    torch.float16, torch.float32, torch.bfloat16, keep_low_precision_grads=True, cast_forward_inputs=True,
    cast_root_forward_inputs=False, ignored_classes=("elsewhere.Norm",), full_precision_in_eval=True,
    output_dtype=torch.float32, divide_before_reduce=True,
)  # fmt: skip
# Why fingerprints: plans are compared across processes and versions, so a change must be noticed.
PRINTED = {
    ("nested", "ebbc0a0580dbe0f1"): fs.make_plan(PARAMS, {"replicate": 2, "shard": 4}, units=["blocks.*"]),
    ("no units", "893fa5caf54331f9"): fs.make_plan(PARAMS, 3),
    ("one rank", "d0b55294ee0b5e70"): fs.make_plan(PARAMS, 1, units=["blocks.0"]),
    ("no_shard", "6eece7129bbc8918"): fs.make_plan(PARAMS, 2, strategy="no_shard", units=["head"]),
    ("shard_grad_op", "d9e1fda02a6856a8"): fs.make_plan(PARAMS, 2, strategy="shard_grad_op", units=["head"]),
    ("flat names", "ec116e058c136f28"): fs.make_plan(FLAT, 2, units=["a"]),
    ("tied", "936e593efcdf07e5"): fs.make_plan({"a": shared, "b": {"c": shared}}, 2),
    ("tuples and None", "24a96f5dc04285ed"): fs.make_plan((torch.zeros(2), None, [torch.zeros(3)]), 2, units=["2"]),
    ("a leaf", "da084ae0dcff0eb1"): fs.make_plan(torch.zeros(3), 2),
    ("frozen", "9d95d5df7395527e"): fs.make_plan({"a": torch.zeros(2, requires_grad=True), "b": torch.zeros(2)}, 2),
    ("unicode", "c904b9c680673c3b"): fs.make_plan({"größe": torch.zeros(2)}, 2),
    ("empty", "fa414d62af1ddd5e"): fs.make_plan({}, 2),
    ("offload", "1122775370da04d6"): fs.make_plan(PARAMS, 2, units=["head"], offload=True),
    ("precision", "cf35b6f9a3155e84"): fs.make_plan(PARAMS, 2, units=["head"], precision=fs.MixedPrecision(torch.bfloat16)),
    ("each field of a precision", "ff42544e8e36a59e"): fs.make_plan(PARAMS, 2, precision=MIXED),
    ("a group", "67c32a29b9cdf5dd"): fs.make_plan(PARAMS, 2, units=[["blocks.0", "head"]]),
    ("a group of small units", "d12cc15ef2f99288"): fs.make_plan(PARAMS, 2, units=["blocks.*"], bucket_bytes=1 << 20),
    ("slices", "432a6b2f6e130ea3"): fs.make_plan(PARAMS, 4, units=["blocks.*"], reshard_after_forward=2),
    ("kept over micro-batches", "cbf551b74c9acc57"): fs.make_plan(
        PARAMS, 2, strategy="shard_grad_op", units={"": {"reshard_after_backward": False}}
    ),
    ("cut along an axis", "e52c9412d9dc783d"): fs.make_plan(
        PARAMS, {"shard": 2, "tensor": 2}, local={"head.w": {"tensor": 1}}
    ),
}
PLANS = {name: plan for (name, _), plan in PRINTED.items()}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_json_is_an_exact_round_trip(plan: fs.Plan) -> None:
    again = fs.Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()
    assert again.fingerprint() == plan.fingerprint()
    assert str(again) == str(plan)
    assert plan.to_json().isascii()


def test_known_plans_have_the_fingerprints_that_were_written_down() -> None:
    assert {(name, plan.fingerprint()): plan for name, plan in PLANS.items()} == PRINTED
    assert len({printed for _, printed in PRINTED}) == len({*PLANS.values()}) == len(PRINTED)


def cells(markup: str) -> list[list[str]]:
    """Return the text of each cell of an HTML table, which is checked to be well-formed, by row."""
    rows = xml.etree.ElementTree.fromstring(markup.replace("&nbsp;", " ")).iter("tr")
    return [["".join(cell.itertext()) for cell in row] for row in rows]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_html_table_is_well_formed_and_says_what_the_text_says(plan: fs.Plan) -> None:
    rows, folded = cells(plan._repr_html_()), fold_units(plan.unit_list)
    assert rows[0] == ["unit", "buffer", "leaves", "numel", "padding", "bytes a rank", "strategy"]
    assert len(rows) == 2 + sum(len(group.first.buffers) for group in folded)
    two_equal_blocks = plan in (PLANS["nested"], PLANS["slices"])
    assert len(folded) == len(plan.unit_list) - two_equal_blocks
    assert all(cell in str(plan) for row in rows for cell in row)
    assert str(plan) == repr(plan)
    assert ("for 1 rank\n" in repr(plan)) == (plan == PLANS["one rank"])


# --- damaged JSON ---------------------------------------------------------------------------------


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


def put(*keys: Any, value: Any) -> str:
    """Return the plan's JSON with another value at a place."""
    data = json.loads(TEXT)
    functools.reduce(operator.getitem, keys[:-1], data)[keys[-1]] = value
    return json.dumps(data)


def edited(plan: fs.Plan, old: str, new: str) -> str:
    return plan.to_json().replace(old, new)


CASES: dict[str, tuple[str, str]] = {
    "a byte order mark": ("\ufeff" + TEXT, "it is no JSON: Unexpected UTF-8 BOM"),
    "lists inside each other": ("[" * 100_000, "nested in more than 500 levels"),
    "a key twice": (TEXT.replace('"mesh_shape"', '"structure"', 1), "twice in one object"),
    "a long number": ("9" * 5000, "integer string conversion"),
    "nothing": ("null", "found 'NoneType'"),
    "no units": (TEXT.replace('"unit_list"', '"units"'), "the plan must have 'unit_list'"),
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
    "a mesh of 2^32 ranks": (TEXT.replace('["tensor",2]', '["tensor",2147483648]'), "must fit the mesh|must be those of"),
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
    text, words = CASES[case]
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
