"""Small units become groups: up to a size with ``bucket_bytes``, and by a rule without it."""

import itertools

import pytest
import torch
from torch import nn

import funcshard as fs

KIB = 1 << 10


def tree(*sizes, **leaf):
    """Return the parameters of units with so many elements each."""
    return {"u": [{"w": torch.zeros(size, **leaf)} for size in sizes]}


def groups(params, mesh=3, *, units=("u.*",), **options):
    """Return the units that became groups."""
    plan = fs.make_plan(params, mesh, units=units, **{"bucket_bytes": 10**6, **options})
    return [tuple(int(path.removeprefix("u.")) for path in unit.members) for unit in plan.unit_list if unit.members]


def modules(count, size=KIB):
    """Return the params of a module of so many units, each of ``size`` bytes."""
    scale = lambda size: nn.ParameterDict({"w": torch.zeros(size // 4, device="meta")})  # noqa: E731
    net = nn.ModuleDict({"u": nn.ModuleList(scale(size) for _ in range(count)), "root": scale(12)})
    return fs.make_functional(net)[1]


def planned(params, **options):
    return fs.make_plan(params, 2, **{"units": ["u.*"], **options})


def kept(plan):
    return {unit.name for unit in plan.unit_list if unit.name and not unit.reshard_after_forward}


LOW = fs.MixedPrecision(param_dtype=torch.bfloat16)
FROZEN = {"u": [{"w": torch.zeros(3, requires_grad=number < 3)} for number in range(5)]}
GROUPS = {  # parameters, options, and the groups
    "too small a size": (tree(*[3] * 6), {"bucket_bytes": 23}, []),
    "two units": (tree(*[3] * 6), {"bucket_bytes": 24}, [(0, 1), (2, 3), (4, 5)]),
    "five units": (tree(*[3] * 6), {"bucket_bytes": 60}, [(0, 1, 2, 3, 4)]),
    "all units": (tree(*[3] * 6), {"bucket_bytes": 10**9}, [(0, 1, 2, 3, 4, 5)]),
    # 4 elements are 6 with padding on 3 ranks, and low precision travels
    "padding counts": (tree(4, 4), {"bucket_bytes": 47}, []),
    "with padding": (tree(4, 4), {"bucket_bytes": 48}, [(0, 1)]),
    "half of it": (tree(4, 4), {"bucket_bytes": 24, "precision": LOW}, [(0, 1)]),
    "a large unit": (tree(3, 3, 300, 3, 3), {"bucket_bytes": 100}, [(0, 1), (3, 4)]),
    "a unit and the root": ({**tree(3), "root": torch.zeros(3)}, {}, []),
    "beside a group": (tree(*[3] * 5), {"units": ["u.0", "u.1", ["u.2", "u.3"], "u.4"]}, [(0, 1), (2, 3)]),
    "frozen leaves": (FROZEN, {}, [(0, 1, 2), (3, 4)]),
    "local leaves": (tree(*[3] * 5), {"local": ["u.0", "u.1"]}, [(0, 1), (2, 3, 4)]),
}


@pytest.mark.parametrize(("params", "options", "found"), GROUPS.values(), ids=GROUPS)
def test_adjacent_units_of_one_kind_become_groups_up_to_a_size(params, options, found) -> None:
    assert groups(params, **options) == found


def test_a_group_is_named_after_the_first_and_the_last_of_its_units() -> None:
    plan = fs.make_plan(tree(3, 3, 3, 300), 3, units=["u.*"], bucket_bytes=100)
    assert [*plan.units] == ["u.0…u.2", "u.3"]
    params = {"a": {"w": torch.zeros(3)}, "b": {"w": torch.zeros(3)}, "a…b": {"w": torch.zeros(300)}}
    assert [*fs.make_plan(params, 3, units=["a", "b", "a…b"], bucket_bytes=100).units] == ["a…b+", "a…b"]


W = {"w": torch.zeros(3)}
OTHERS = {  # leaves and options of the third of five units
    "strategy": (W, {"strategy": "shard_grad_op"}),
    "offload": (W, {"offload": True}),
    "precision": (W, {"precision": fs.MixedPrecision(reduce_dtype=torch.float64)}),
    "kept over micro-batches": (W, {"reshard_after_forward": False, "reshard_after_backward": False}),
    "dtype": ({"w": torch.zeros(3, dtype=torch.float64)}, {}),
    "one buffer more": ({"w": torch.zeros(3), "x": torch.zeros(3, dtype=torch.float64)}, {}),
}


@pytest.mark.parametrize(("leaves", "options"), OTHERS.values(), ids=OTHERS)
def test_the_units_of_a_group_have_the_same_options_and_dtypes(leaves, options) -> None:
    params = tree(*[3] * 5)
    params["u"][2] = leaves
    units = fs.wrap.Units([f"u.{number}" for number in range(5)], {"u.2": options} if options else {})
    assert groups(params, units=units) == [(0, 1), (3, 4)]


def test_a_unit_and_one_inside_it_are_in_different_groups() -> None:
    params = {"u": [{"w": torch.zeros(3), "inner": {"w": torch.zeros(3)}} for _ in range(3)]}
    plan = fs.make_plan(params, 2, units=["u.*", "u.*.inner"], bucket_bytes=10**6)
    assert [unit.members for unit in plan.unit_list] == [
        ("u.0", "u.1", "u.2"),
        ("u.0.inner", "u.1.inner", "u.2.inner"),
    ]
    mixed = [path for number in range(3) for path in (f"u.{number}", f"u.{number}.inner")]
    for unit in fs.make_plan(params, 2, units=mixed, bucket_bytes=10**6).unit_list:
        assert not any(one.startswith(f"{other}.") for one, other in itertools.permutations(unit.paths, 2))


MANY = [(31, KIB, []), (32, KIB, [32]), (32, 32 * KIB + 8, []), (70, 32 * KIB, [32, 32, 6])]


@pytest.mark.parametrize(("count", "size", "found"), MANY, ids=str)
def test_many_adjacent_tiny_modules_become_groups_of_a_mebibyte(count, size, found) -> None:
    assert [len(unit.members) for unit in planned(modules(count, size)).unit_list if unit.members] == found


def test_the_rule_leaves_programs_by_hand_alone() -> None:
    assert len(fs.make_plan(tree(*[3] * 40), 2, units=["u.*"]).units) == 40


STAYS = [
    ({}, True),
    ({"reshard_after_forward": True}, False),
    ({"strategy": "shard_grad_op"}, True),
    ({"units": {"u.*": {"reshard_after_forward": True}}}, False),
    ({"bucket_bytes": 1 << 20}, False),
    ({"bucket_bytes": 0}, False),
]


@pytest.mark.parametrize(("options", "stays"), STAYS, ids=str)
def test_tiny_units_stay_gathered_unless_an_option_frees_them(options, stays) -> None:
    plan = planned(modules(40), **options)
    assert bool(kept(plan)) is stays
    assert ("u.0…u.39" in plan.units) is (options.get("bucket_bytes") != 0)


def test_groups_of_more_than_a_mebibyte_together_are_freed() -> None:
    assert kept(planned(modules(64, 16 * KIB))) == {"u.0…u.63"}
    assert kept(planned(modules(65, 16 * KIB))) == set()
