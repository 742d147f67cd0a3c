"""Equal units as one row of a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.plan import fold_units, representatives, unit_class
from funcshard.plan.wrap import Units


def block(width: int = 4, **more: Any) -> dict[str, Any]:
    return {"w": torch.zeros(width, 3), **more}


BLOCKS = {"blocks": [block() for _ in range(126)], "head": torch.zeros(2)}
SIX = [f"blocks.{i}" for i in range(6)]
GRAD_OP, LOW = {"strategy": "shard_grad_op"}, fs.MixedPrecision(torch.bfloat16)
TWO = ["blocks.0", "blocks.1"]
CASES: dict[str, tuple[Any, Any, list[str]]] = {  # params, units, titles of the groups
    "126 equal blocks": (BLOCKS, ["blocks.*"], ["(root)", "126 × blocks.*"]),
    "experts in blocks": (
        {"blocks": [block(experts=[block() for _ in range(4)]) for _ in range(3)]}, ["blocks.*", "blocks.*.experts.*"],
        ["3 × blocks.*", "12 × blocks.*.experts.*"],
    ),
    "other leaf names": ({"blocks": [{"q": torch.zeros(3)}, {"k": torch.zeros(3)}]}, ["blocks.*"], TWO),
    "equal numel, other shapes": ({"blocks": [{"w": torch.zeros(2, 6)}, {"w": torch.zeros(6, 2)}]}, ["blocks.*"], TWO),
    "several linears in each block": (
        {"blocks": [{"q": block(), "k": block()} for _ in range(2)]}, ["blocks.*.*"], ["2 × blocks.*.k", "2 × blocks.*.q"],
    ),
    "a block of another precision": (
        {"blocks": BLOCKS["blocks"][:2]}, Units(SIX[:2], {SIX[1]: {"precision": LOW}}), TWO,
    ),
    **{
        f"another strategy of {odd}": ({"blocks": BLOCKS["blocks"][:6]}, Units(SIX, dict.fromkeys(odd, GRAD_OP)), titles)
        for odd, titles in (
            (SIX[::2], ["3 × blocks.0 … blocks.4", "3 × blocks.1 … blocks.5"]),
            (SIX[3:4], ["5 × blocks.0 … blocks.5", "blocks.3"]),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_units_that_differ_in_numbers_of_their_names_alone_are_one_group(case: str) -> None:
    params, units, titles = CASES[case]
    plan = fs.make_plan(params, 2, units=units)
    groups = fold_units(plan.unit_list)
    assert sorted(group.title for group in groups) == sorted(titles)
    assert sorted(name for group in groups for name in group.names) == sorted(plan.units)
    assert len({unit_class(group.first) for group in groups}) == len(groups)


def test_a_key_parts_equal_units() -> None:
    plan = fs.make_plan(BLOCKS, 2, units=["blocks.*"])
    groups = fold_units(plan.unit_list, key=lambda unit: unit.name == "blocks.7")
    assert [len(group.units) for group in groups] == [1, 125, 1]
    assert groups[1].title == "125 × blocks.0 … blocks.125"


def test_a_folded_plan_shows_one_of_the_equal_units_and_the_total_of_all() -> None:
    plan = fs.make_plan(BLOCKS, 2, units=["blocks.*"], bucket_bytes=0)
    title, _, _, _, root, blocks, _, total = str(plan).splitlines()
    assert title == f"Plan {plan.fingerprint()} for 2 ranks; a row n × shows one of n equal units"
    assert root.split()[:5] == ["(root)", "float32", "1", "2", "0"]
    assert blocks.split("  ")[0] == "126 × blocks.*"
    assert blocks.split()[3:9] == ["float32", "1", "12", "0", "24", "B"]
    assert total.split()[:4] == ["total", "127", f"{126 * 12 + 2:,}", "0"]


@pytest.mark.parametrize(
    "options", [{}, {"strategy": "no_shard"}, {"offload": True}, {"reshard_after_forward": False}, {"precision": LOW}]
)
def test_a_unit_stands_for_others_of_the_same_sizes_and_options(options: dict[str, object]) -> None:
    params = {"a": torch.zeros(2, 3), "b": torch.zeros(6), "c": torch.zeros(7)}
    plan = fs.make_plan(params, 4, units={"a": {}, "b": options, "c": {}})
    found = {name: unit.name for name, unit in representatives(plan.unit_list).items()}
    assert found == {"a": "a", "b": "b" if options else "a", "c": "c"}
