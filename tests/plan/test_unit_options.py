"""Units that the user names: groups of paths, globs, and options of single units."""

import pytest
import torch

import funcshard as fs
from funcshard.plan import unit_mode
from funcshard.plan.unit_options import matcher

BLOCKS = [{"up": torch.zeros(4, 3), "norm": torch.zeros(3)} for _ in range(3)]
PARAMS = {"embed": {"w": torch.zeros(5, 4)}, "blocks": BLOCKS, "head": {"w": torch.zeros(4, 5)}}

GROUPS = {
    # case: (units, name of the group, its paths)
    "paths": ([["embed", "head"]], "embed+head", ("embed", "head")),
    "a tuple": ([("head", "embed")], "head+embed", ("head", "embed")),
    "globs": ([["blocks.*.norm", "head"]], "blocks.*.norm+head", (*(f"blocks.{i}.norm" for i in range(3)), "head")),
    "one glob": ([["blocks.*.norm"]], "blocks.*.norm", tuple(f"blocks.{i}.norm" for i in range(3))),
    "inside other units": (["blocks.*", ["blocks.0.norm", "head"]], "blocks.0.norm+head", ("blocks.0.norm", "head")),
    "around other units": (["blocks.0.norm", ["blocks.0", "head"]], "blocks.0+head", ("blocks.0", "head")),
    "a key of the mapping": ({("embed", "head"): {"offload": True}}, "embed+head", ("embed", "head")),
}


@pytest.mark.parametrize("case", GROUPS)
def test_a_group_is_one_unit_with_one_buffer_that_owns_what_no_inner_unit_owns(case):
    units, name, paths = GROUPS[case]
    plan = fs.make_plan(PARAMS, 2, units=units)
    unit = plan.units[name]
    assert (unit.members, unit.paths, len(unit.buffers)) == (paths, paths, 1)
    inner = [other for other in plan.units if other not in ("", name) and any(other.startswith(f"{p}.") for p in paths)]
    owned = {leaf.path for leaf in plan.leaves if any(f"{leaf.path}.".startswith(f"{p}.") for p in paths)}
    assert {leaf.path for leaf in unit.leaves} == owned - set(inner)
    assert fs.Plan.from_json(plan.to_json()) == plan
    assert name in str(plan)
    built = fs.simulate(lambda mesh: fs.unshard(lambda leaves: leaves, unit, mesh)(fs.shard(PARAMS, plan, mesh)[name]), 2)
    assert set(built[0]) == set(paths)  # a function written by hand gets the leaves by path


def test_a_group_of_one_module_is_a_plain_unit_of_that_path():
    assert fs.make_plan(PARAMS, 2, units=[["head"], "blocks.*"]) == fs.make_plan(PARAMS, 2, units=["head", "blocks.*"])


@pytest.mark.parametrize("taken", [["a+b"], ["a+b", "a+b+"], ["a+b+"]])
def test_the_name_of_a_group_is_no_path_of_the_tree(taken):
    params = {name: torch.zeros(3) for name in ("a", "b", *taken)}
    plan = fs.make_plan(params, 2, units=[["a", "b"], *taken])
    name = next(unit.name for unit in plan.unit_list if unit.members)
    assert name.startswith("a+b")
    assert name not in params
    assert all([leaf.path for leaf in plan.units[path].leaves] == [path] for path in taken)


def test_a_group_owns_a_tied_leaf_whose_uses_it_holds():
    w = torch.zeros(5, 4)
    params = {"embed": {"w": w}, "norm": torch.zeros(4), "head": {"w": w}}
    plan = fs.make_plan(params, 2, units=[["embed", "head"]])
    assert [(leaf.path, leaf.aliases) for leaf in plan.units["embed+head"].leaves] == [("embed.w", ("head.w",))]
    alone = fs.make_plan(params, 2, units=["embed", "head"])
    assert list(alone.units) == [""]  # no unit of one path holds both uses


COPIES, BLOCK = {"strategy": "no_shard"}, dict.fromkeys(("blocks.0", "blocks.1", "blocks.2"), "full_shard")
OPTIONS = {  # units, and the strategy of each by name, in the order of the plan
    "a group": ({"blocks.*": {}, ("embed", "head"): COPIES}, BLOCK | {"embed+head": "no_shard"}),
    "the root": ({"blocks.*": {}, "": COPIES}, {"": "no_shard"} | BLOCK),
    "a path of a glob": ({"blocks.*": {}, "blocks.1": COPIES}, {"": "full_shard"} | BLOCK | {"blocks.1": "no_shard"}),
    "nothing": ({}, {"": "full_shard"}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_a_mapping_gives_units_options_of_their_own(case):
    units, wanted = OPTIONS[case]
    plan = fs.make_plan(PARAMS, 2, units=units)
    assert [(name, unit.strategy) for name, unit in plan.units.items()] == [*wanted.items()]


def test_units_of_a_policy_and_groups_add_up_and_keep_their_overrides():
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2), "norm": torch.nn.LayerNorm(2)})
    policy = fs.wrap.by_function(lambda m: {"strategy": "no_shard"} if isinstance(m, torch.nn.LayerNorm) else False)
    units = fs.wrap.any_of(policy, lambda module: fs.wrap.Units([("a", "b")], {("a", "b"): {"offload": True}}))(net)
    plan = fs.make_plan(dict(net.named_parameters()), 2, units=units)
    found = {name: (unit.strategy, unit.offload) for name, unit in plan.units.items()}
    assert found == {"norm": ("no_shard", False), "a+b": ("full_shard", True)}


N, F = "no_shard", "full_shard"
ENTRIES = [
    ({"blocks.*": N, "blocks.1": F}, [N, F, N]),
    ({"blocks.1": F, "blocks.*": N}, [N, F, N]),
    ({"blocks.*": N, "**.2": F}, [N, N, F]),
    ({"**.2": F, "blocks.*": N}, [N, N, N]),
]


@pytest.mark.parametrize(("entries", "expected"), ENTRIES, ids=str)
def test_a_path_counts_before_a_glob_and_a_later_glob_before_an_earlier_one(entries, expected):
    def chosen(no, full):  # the same choice in other words
        words = {N: no, F: full}
        return {entry: words[strategy] for entry, strategy in entries.items()}, [words[strategy] for strategy in expected]

    units = [f"blocks.{number}" for number in range(3)]
    plan = fs.make_plan(PARAMS, 2, units={entry: {"strategy": strategy} for entry, strategy in entries.items()})
    assert [plan.units[name].strategy for name in units] == expected
    reduce, modes = chosen("once", "shard_each")
    assert [unit_mode(reduce, name) for name in units] == modes
    local, axes = chosen("replicate", "shard")
    cut = fs.make_plan(PARAMS, {"replicate": 2, "shard": 2}, units=["blocks.*"], local=local)
    assert [cut.units[name].buffers[0].local for name in units] == [(axis,) for axis in axes]


def test_a_group_that_writes_a_path_counts_before_a_glob():
    plan = fs.make_plan(PARAMS, 2, units=["blocks.*", ["blocks.0", "head"], "embed"])
    assert [*plan.units] == ["blocks.1", "blocks.2", "blocks.0+head", "embed"]
    plan = fs.make_plan(PARAMS, 2, units=[["blocks.*", "head"], "blocks.1"])
    assert [unit.paths for unit in plan.unit_list if unit.name] == [("blocks.0", "blocks.2", "head"), ("blocks.1",)]


# --- globs ----------------------------------------------------------------------------------------


PATHS = ["", "w", "a", "a.w", "a.b", "a.b.w", "a.bw", "ab.w", "b.a.b.w", "b.a.w", "blocks.10.w"]

# glob -> the paths of PATHS that it matches
GLOBS = {
    "": [""],
    "a": ["a"],
    "*": ["", "w", "a"],
    "**": PATHS,
    "*.*": ["a.w", "a.b", "a.bw", "ab.w"],
    "**.w": ["w", "a.w", "a.b.w", "ab.w", "b.a.b.w", "b.a.w", "blocks.10.w"],
    "a.**": ["a", "a.w", "a.b", "a.b.w", "a.bw"],
    "a.*.w": ["a.b.w"],
    "**.a.**": ["a", "a.w", "a.b", "a.b.w", "a.bw", "b.a.b.w", "b.a.w"],
    "**.*b.*": ["a.b.w", "ab.w", "b.a.b.w"],
    "*b*": [],
    "*b*.w": ["ab.w"],
    "**b**": ["a.b", "a.b.w", "a.bw", "ab.w", "b.a.b.w", "b.a.w", "blocks.10.w"],
    "blocks.*.*": ["blocks.10.w"],
    "*.1*.*": ["blocks.10.w"],
}


@pytest.mark.parametrize(("glob", "matched"), GLOBS.items(), ids=map(repr, GLOBS))
def test_a_glob_matches_these_paths(glob: str, matched: list[str]) -> None:
    assert [path for path in PATHS if matcher(glob)(path)] == matched


# --- when leaves are freed ------------------------------------------------------------------------


TWO_BLOCKS = {"blocks": [{"w": torch.zeros(3, 3)} for _ in range(2)], "head": torch.zeros(5)}


STAYS = {key: {"reshard_after_backward": False} for key in ("", "blocks.0", "blocks.1")}


def planned(overrides=None, **options):
    units = fs.wrap.Units(["blocks.0", "blocks.1"], overrides)
    return fs.make_plan(TWO_BLOCKS, 2, units=units, **options)


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
