"""When gathered leaves are freed, as plan data: options of the plan, and of single units."""

import pytest
import torch

import funcshard as fs

PARAMS = {"blocks": [{"w": torch.zeros(3, 3)} for _ in range(2)], "head": torch.zeros(5)}


STAYS = {key: {"reshard_after_backward": False} for key in ("", "blocks.0", "blocks.1")}


def planned(overrides=None, **options):
    units = fs.wrap.Units(["blocks.0", "blocks.1"], overrides)
    return fs.make_plan(PARAMS, 2, units=units, **options)


def freed(plan):
    return [unit.reshard_after_forward for unit in plan.unit_list]


FREED = [  # strategy, option, overrides, and whether the root and two blocks are freed after forward
    ("full_shard", None, {}, [False, True, True]),
    ("full_shard", True, {}, [True, True, True]),
    ("full_shard", False, {}, [False, False, False]),
    ("full_shard", None, {"": {"reshard_after_forward": True}}, [True, True, True]),
    ("full_shard", None, {"blocks.1": {"reshard_after_forward": False}}, [False, True, False]),
    ("full_shard", True, {"": {"reshard_after_forward": None}}, [False, True, True]),
    ("full_shard", True, {"blocks.0": {"strategy": "no_shard"}}, [True, False, True]),
    ("shard_grad_op", None, {}, [False, False, False]),
    ("shard_grad_op", True, {}, [True, True, True]),
    ("shard_grad_op", None, {"blocks.0": {"reshard_after_forward": True}}, [False, True, False]),
    ("no_shard", False, {}, [False, False, False]),
]


@pytest.mark.parametrize(("strategy", "option", "overrides", "expected"), FREED)
def test_an_option_of_a_unit_comes_before_the_plans_and_that_before_the_strategy(strategy, option, overrides, expected):
    plan = planned(overrides, strategy=strategy, reshard_after_forward=option)
    assert freed(plan) == expected
    assert fs.Plan.from_json(plan.to_json()) == plan


def test_options_that_say_what_the_strategy_says_keep_the_plan_and_its_fingerprint():
    for strategy in ("shard_grad_op", "no_shard"):
        plain, given = planned(strategy=strategy), planned(strategy=strategy, reshard_after_forward=False)
        assert plain == given
        assert "reshard_after_backward" not in plain.to_json()
    assert planned() != planned(reshard_after_forward=True)
    assert planned().fingerprint() != planned(reshard_after_forward=True).fingerprint()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": "full_shard"}, ["full_shard, kept until backward", "full_shard"]),
        ({"reshard_after_forward": True}, ["full_shard"] * 2),
        ({"strategy": "shard_grad_op", "reshard_after_forward": True}, ["shard_grad_op, freed after forward"] * 2),
        ({"strategy": "shard_grad_op", "overrides": STAYS}, ["shard_grad_op, kept over micro-batches"] * 2),
    ],
)
def test_a_printed_plan_says_when_units_are_freed(options, words):
    rows = [row for row in str(planned(**options)).splitlines() if row.startswith(("(root)", "2 × blocks.*"))]
    assert [row.split(" B  ")[-1].strip() for row in rows] == words


def test_an_option_that_can_mean_nothing_for_copies_is_passed_over():
    plan = planned(STAYS | {"": {"strategy": "no_shard", "reshard_after_backward": False}}, strategy="shard_grad_op")
    assert [unit.reshard_after_backward for unit in plan.unit_list] == [True, False, False]


def test_the_root_overrides_options_like_any_unit():
    precision = fs.MixedPrecision(param_dtype=torch.bfloat16)
    plan = planned({"": {"precision": precision, "strategy": "shard_grad_op"}})
    assert plan.precision == plan.units[""].precision == precision
    assert plan.units["blocks.0"].precision is None
    assert [unit.strategy for unit in plan.unit_list] == ["shard_grad_op", "full_shard", "full_shard"]
