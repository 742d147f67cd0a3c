"""``make_plan``: every leaf is in exactly one unit, buffers have padding at the end only, and small units become groups."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from funcshard.plan import layout, unit_options


def owners(plan: fs.Plan) -> dict[str, str]:
    """Return the unit that owns each leaf, by path; check that only one unit does."""
    pairs = [(leaf.path, unit.name) for unit in plan.unit_list for leaf in unit.leaves]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


def model() -> dict:
    return {"blocks": [{"attn": {"w": zeros(2, 2)}, "mlp": zeros(3)} for _ in range(11)], "head": zeros(5), "emb": zeros(2)}


UNITS = [
    (["**.attn"], [f"blocks.{i}.attn" for i in range(11)]),
    (["head", "blocks.1*"], ["head", "blocks.1", "blocks.10"]),
    (iter(["", "head"]), ["head"]),
    (("head",), ["head"]),
    ([], []),
]


@pytest.mark.parametrize(("units", "expected"), UNITS, ids=[str(expected) for _, expected in UNITS])
def test_units_come_in_the_order_of_their_names_and_numbers(units: Any, expected: list[str]) -> None:
    assert list(fs.make_plan(model(), 2, units=units).units) == ["", *expected]


def test_a_unit_of_a_flat_tree_takes_its_own_keys_and_no_others_that_begin_alike() -> None:
    plan = fs.make_plan({f"blocks.{key}.w": zeros(3) for key in ("1", "1-x", "10")}, 2, units=["blocks.1"])
    assert plan.units["blocks.1"].structure == ("dict", ("w",), (0,))
    assert [leaf.path for leaf in plan.units[""].leaves] == ["blocks.1-x.w", "blocks.10.w"]


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat names"])
def test_a_tensor_at_two_places_belongs_to_the_innermost_unit_that_holds_both(flat: bool) -> None:
    w = zeros(2, 2)
    params: Any = {"x": {"a": {"w": w}, "b": {"w": w}}, "y": {"w": zeros(3)}}
    if flat:
        _, leaves, paths = tree.describe(params)
        params = dict(zip(paths, leaves, strict=True))
    for units, owner in ([["x"], "x"], [["x", "x.a"], "x"], [["x.a", "x.b"], ""], [["x.a", "y"], ""]):
        plan = fs.make_plan(params, 2, units=units)
        assert owners(plan)["x.a.w"] == owner
        (leaf,) = [leaf for leaf in plan.leaves if leaf.path == "x.a.w"]
        assert leaf.aliases == ("x.b.w",)
        assert len(plan.leaves) == 2


def test_marks_say_that_parameters_of_a_module_are_tied() -> None:
    net = nn.ModuleDict({"emb": nn.Embedding(5, 3), "body": nn.Linear(3, 3), "head": nn.Linear(3, 5, bias=False)})
    net["head"].weight = net["emb"].weight
    apply, params, _ = fs.make_functional(net)
    copies = {name: value.clone() for name, value in params.items()}  # have no marks
    assert apply.ties == (("emb.weight", "head.weight"),)
    plan = fs.make_plan(params, 2, units=["emb", "body", "head"])
    assert owners(plan)["emb.weight"] == ""
    assert plan.units[""].leaves[0].aliases == ("head.weight",)
    assert owners(fs.make_plan(copies, 2, units=["emb"]))["emb.weight"] == "emb"
    # marks are read relative to where the tree of the module stands
    student = fs.make_plan({"student": params}, 2, units=["student"])
    (tied,) = [leaf for leaf in student.leaves if leaf.path == "student.emb.weight"]
    assert tied.aliases == ("student.head.weight",)
    assert owners(student)["student.emb.weight"] == "student"


leaves = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3)
    ),
    max_leaves=10,
)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=100)
@given(trees, st.data())
def test_any_choice_of_units_lays_every_leaf_out_once(params: Any, data: st.DataObject) -> None:
    _, found, paths = tree.describe(params)
    nodes = sorted({".".join(p.split(".")[:n]) for p in paths for n in range(1, p.count(".") + 2)} - {""})
    units = data.draw(st.lists(st.sampled_from(nodes), unique=True, max_size=4)) if nodes else []
    world = data.draw(st.integers(1, 5))
    plan = fs.make_plan(params, world, units=units)
    owned = owners(plan)
    assert owned.keys() == set(paths)
    for path, owner in owned.items():
        inside = [unit for unit in units if tree.is_under(path, unit)]
        assert owner == max(inside, key=len, default="")
    for unit in plan.unit_list:
        assert unit.leaves or not paths
        assert {leaf.path: leaf.shape for leaf in unit.leaves}.items() <= {
            path: tuple(leaf.shape) for path, leaf in zip(paths, found, strict=True)
        }.items()
        part = tree.build(unit.structure, [leaf.path for leaf in unit.leaves])
        assert sorted(tree.leaves(part)) == sorted(leaf.path for leaf in unit.leaves)
        for buffer in unit.buffers:
            ends = [leaf.offset + leaf.numel for leaf in buffer.leaves]
            assert [leaf.offset for leaf in buffer.leaves] == [0, *ends[:-1]]
            assert buffer.padded_numel - ends[-1] < world
    assert fs.Plan.from_json(plan.to_json()) == plan


def test_shards_of_offloaded_units_are_refused_unless_they_are_on_the_cpu() -> None:
    mesh, on = fs.Mesh(device=torch.device("meta")), {}  # meta in place of an accelerator
    for offload, device in ((True, "cpu"), (False, "meta")):
        unit = fs.make_plan({"w": zeros(4)}, 1, offload=offload).units[""]
        on[offload] = fs.reshard(fs.unshard(lambda leaves: leaves["w"].device.type, unit, mesh))
        assert on[offload]({"float32": zeros(4, device=device)}) == "meta"
    with pytest.raises(ValueError, match="must be on the CPU, because the plan offloads the unit; found meta: make it with"):
        on[True]({"float32": zeros(4, device="meta")})
    with pytest.raises(ValueError, match="must be on the mesh's device, meta; found cpu"):
        on[False]({"float32": zeros(4)})


def test_a_large_model_in_one_unit_warns() -> None:
    layers = {"head": zeros(2), "blocks": [{"w": torch.empty(2**14, 2**14, device="meta")} for _ in range(2)]}
    with pytest.warns(UserWarning, match=r"unit 'blocks' holds 2 modules, 2\.0 GiB of the model's 2\.0 GiB, .* at once"):
        fs.make_plan(layers, 2, units=["blocks"])
    with pytest.warns(UserWarning, match=r"the plan has no units, so each call gathers the whole model at once, 2\.0 GiB"):
        fs.make_plan(layers, 2)
    for options in ({"units": ["blocks.*"]}, {"strategy": "no_shard"}):
        fs.make_plan(layers, 2, **options)
    fs.make_plan(layers, 1)
    fs.make_plan({"w": torch.empty(2**29, device="meta")}, 2, units=["w"])  # one unit is no lack of units
    layers["blocks"][1]["w"], layers["head"] = zeros(2, 2), torch.empty(2**15, 2**14, device="meta")
    fs.make_plan(layers, 2, units=["blocks"])  # the smaller part of the model


# --- small units ----------------------------------------------------------------------------------


KIB = 1 << 10


def units_of(*sizes, **leaf):
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
    "too small a size": (units_of(*[3] * 6), {"bucket_bytes": 23}, []),
    "two units": (units_of(*[3] * 6), {"bucket_bytes": 24}, [(0, 1), (2, 3), (4, 5)]),
    "five units": (units_of(*[3] * 6), {"bucket_bytes": 60}, [(0, 1, 2, 3, 4)]),
    "all units": (units_of(*[3] * 6), {"bucket_bytes": 10**9}, [(0, 1, 2, 3, 4, 5)]),
    # 4 elements are 6 with padding on 3 ranks, and low precision travels
    "padding counts": (units_of(4, 4), {"bucket_bytes": 47}, []),
    "with padding": (units_of(4, 4), {"bucket_bytes": 48}, [(0, 1)]),
    "half of it": (units_of(4, 4), {"bucket_bytes": 24, "precision": LOW}, [(0, 1)]),
    "a large unit": (units_of(3, 3, 300, 3, 3), {"bucket_bytes": 100}, [(0, 1), (3, 4)]),
    "a unit and the root": ({**units_of(3), "root": torch.zeros(3)}, {}, []),
    "beside a group": (units_of(*[3] * 5), {"units": ["u.0", "u.1", ["u.2", "u.3"], "u.4"]}, [(0, 1), (2, 3)]),
    "frozen leaves": (FROZEN, {}, [(0, 1, 2), (3, 4)]),
    "local leaves": (units_of(*[3] * 5), {"local": ["u.0", "u.1"]}, [(0, 1), (2, 3, 4)]),
}


@pytest.mark.parametrize(("params", "options", "found"), GROUPS.values(), ids=GROUPS)
def test_adjacent_units_of_one_kind_become_groups_up_to_a_size(params, options, found) -> None:
    assert groups(params, **options) == found


def test_a_group_is_named_after_the_first_and_the_last_of_its_units() -> None:
    plan = fs.make_plan(units_of(3, 3, 3, 300), 3, units=["u.*"], bucket_bytes=100)
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
    params = units_of(*[3] * 5)
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
    assert len(fs.make_plan(units_of(*[3] * 40), 2, units=["u.*"]).units) == 40


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


# --- the work, which grows with the number of units and not with its square -----------------------


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
