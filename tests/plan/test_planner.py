"""``make_plan``: every leaf is in exactly one unit, and flat buffers have padding at the end only."""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import funcshard as fs
from funcshard._utils import tree


def owners(plan: fs.Plan) -> dict[str, str]:
    """Return the unit that owns each leaf, by path; check that only one unit does."""
    pairs = [(leaf.path, unit.name) for unit in plan.unit_list for leaf in unit.leaves]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def zeros(*shape: int, **options: Any) -> torch.Tensor:
    return torch.zeros(shape, **options)


def model() -> dict:
    return {"blocks": [{"attn": {"w": zeros(2, 2)}, "mlp": zeros(3)} for _ in range(11)], "head": zeros(5), "emb": zeros(2)}


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (["blocks.*"], [f"blocks.{i}" for i in range(11)]),
        (["*.0"], ["blocks.0"]),
        (["**.attn"], [f"blocks.{i}.attn" for i in range(11)]),
        (["h*"], ["head"]),
        (["emb", "blocks.1*"], ["emb", "blocks.1", "blocks.10"]),
        (["head", "emb"], ["head", "emb"]),
        (["", "head"], ["head"]),
        (iter(["head"]), ["head"]),
        (("head",), ["head"]),
        ([], []),
    ],
)
def test_globs_match_whole_components(units: Any, expected: list[str]) -> None:
    plan = fs.make_plan(model(), 2, units=units)
    assert list(plan.units) == ["", *expected]


def test_a_unit_whose_leaves_inner_units_own_all_is_not_in_the_plan() -> None:
    plan = fs.make_plan({"a": {"b": {"w": zeros(2)}}}, 2, units=["a", "a.b"])
    assert list(plan.units) == ["a.b"]


def test_the_root_is_not_in_the_plan_when_it_owns_nothing() -> None:
    assert list(fs.make_plan({"a": [zeros(1)], "b": [zeros(1)]}, 2, units=["a", "b"]).units) == ["a", "b"]


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


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight


def test_marks_or_ties_say_that_parameters_of_a_module_are_tied() -> None:
    apply, params, _ = fs.make_functional(Tied())
    copies = {name: value.clone() for name, value in params.items()}  # have no marks
    assert apply.ties == (("emb.weight", "head.weight"),)
    plan = fs.make_plan(params, 2, units=["emb", "body", "head"])
    assert owners(plan)["emb.weight"] == ""
    assert plan.units[""].leaves[0].aliases == ("head.weight",)
    assert owners(fs.make_plan(copies, 2, units=["emb"]))["emb.weight"] == "emb"
    assert fs.make_plan(copies, 2, units=["emb", "body", "head"], ties=apply.ties) == plan
    # marks are read relative to where the tree of the module stands
    student = fs.make_plan({"student": params}, 2, units=["student"])
    (tied,) = [leaf for leaf in student.leaves if leaf.path == "student.emb.weight"]
    assert tied.aliases == ("student.head.weight",)
    assert owners(student)["student.emb.weight"] == "student"


def test_ties_that_name_no_leaf_are_refused() -> None:
    with pytest.raises(ValueError, match=r"for \('x', 'y'\) found no leaf there: the leaves are 'a', 'b'"):
        fs.make_plan({"a": zeros(2), "b": zeros(2)}, 2, ties=[("x", "y")])


def test_dtypes_and_requires_grad_get_buffers_of_their_own() -> None:
    params = {
        "a": zeros(2, requires_grad=True),
        "b": zeros(2, dtype=torch.bfloat16, requires_grad=True),
        "c": zeros(3),
        "d": zeros(1, requires_grad=True),
        "e": zeros(1, dtype=torch.int64),
    }
    (unit,) = fs.make_plan(params, 2).unit_list
    assert {b.key: [leaf.path for leaf in b.leaves] for b in unit.buffers} == {
        "bfloat16": ["b"],
        "float32": ["a", "d"],
        "float32.frozen": ["c"],
        "int64.frozen": ["e"],
    }
    assert [b.trainable for b in unit.buffers] == [True, True, False, False]


def test_meta_tensors_give_the_plan_of_real_ones() -> None:
    meta = {name: value.to("meta") for name, value in {"w": zeros(3, 3), "s": zeros()}.items()}
    assert fs.make_plan(meta, 2) == fs.make_plan({"w": zeros(3, 3), "s": zeros()}, 2)
    assert str(fs.make_plan(meta, 2))


class Layer(NamedTuple):
    w: Any
    b: Any


leaves = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), inner, min_size=1, max_size=3),
        st.builds(Layer, inner, inner),
        st.tuples(inner, st.none()),
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


@pytest.mark.parametrize("mesh", ["4", None, True, 2.0, {}, {"d p": 2}, {"shard": 2, 1: 2}, [2, 2]])
def test_a_mesh_of_another_form_is_refused(mesh: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r'mesh must be a number of ranks, a shape such as \{"replicate": R, "shard": S\}, or a funcshard\.Mesh',
    ):
        fs.make_plan(model(), mesh)


@pytest.mark.parametrize("mesh", [0, -1, {"shard": 0}, {"replicate": 2, "shard": 1.5}, {"shard": True}])
def test_a_mesh_without_ranks_is_refused(mesh: Any) -> None:
    with pytest.raises(ValueError, match="mesh axes must be whole numbers of ranks, at least one each"):
        fs.make_plan(model(), mesh)


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (["nothing"], r"unit 'nothing' matches no part of the tree; units are paths or globs .* such as 'blocks', "),
        (["blocks.11"], r"unit 'blocks\.11' matches no part of the tree"),
        (["blocks.0.atn"], r"unit 'blocks\.0\.atn' .*: did you mean 'blocks\.0\.attn'\?"),
        (["block.*"], r"unit 'block\.\*' matches no part of the tree; .*: did you mean 'blocks\.\*'\?"),
        (["*.attn"], r"unit '\*\.attn' matches .*: did you mean 'blocks\.\*\.attn'\?"),
        (["x.*"], r"unit 'x\.\*' matches no part of the tree; .* and \d+ more$"),
        (nn.Linear, r"found <class .*: pass units=fs\.wrap\.by_class\(Linear\)\(module\)"),
        (["head", "head"], r"units name 'head' twice, in 'head' and in 'head'; remove one of the two"),
    ],
    ids=str,
)
def test_units_that_cannot_be_are_refused(units: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        fs.make_plan(model(), 2, units=units)


LEAVES: dict[str, tuple[Any, str]] = {
    "float": (1.0, r"must be a torch\.Tensor; found float: move it out"),
    "object": (object(), r"must be a torch\.Tensor; found object: move it out"),
    "module": (nn.Linear(1, 1), r"must be a torch\.Tensor; found Linear: call apply, params, buffers ="),
    "sparse": (torch.eye(2).to_sparse(), r"must be a dense tensor; found layout torch\.sparse_coo: call \.to_dense"),
}


@pytest.mark.parametrize(("leaf", "words"), LEAVES.values(), ids=LEAVES)
def test_a_leaf_that_is_no_dense_tensor_is_refused(leaf: Any, words: str) -> None:
    with pytest.raises(TypeError, match=rf"leaf 'a\.b' {words}"):
        fs.make_plan({"a": {"b": leaf}}, 2)


def test_offload_is_the_plans_unless_a_unit_overrides_it() -> None:
    params = {"a": torch.zeros(4), "b": torch.zeros(4), "c": torch.zeros(4)}
    units = fs.wrap.Units(["a", "b"], {"b": {"offload": True}})
    assert {name: unit.offload for name, unit in fs.make_plan(params, 2, units=units).units.items()} == {
        "": False, "a": False, "b": True,
    }  # fmt: skip
    everywhere = fs.make_plan(params, 2, units=fs.wrap.Units(["a", "b"], {"b": {"offload": False}}), offload=True)
    assert [unit.offload for unit in everywhere.unit_list] == [True, True, False]
    assert fs.Plan.from_json(everywhere.to_json()) == everywhere


@pytest.mark.parametrize(
    "options", [{"offload": "cpu"}, {"units": fs.wrap.Units(["a"], {"a": {"offload": "cpu"}})}], ids=["plan", "unit"]
)
def test_an_offload_that_is_no_choice_is_refused(options: Any) -> None:
    with pytest.raises(TypeError, match="offload must be True or False; found 'cpu': use the overrides of a policy to"):
        fs.make_plan({"a": torch.zeros(4)}, 2, **options)


def test_shards_of_offloaded_units_are_refused_unless_they_are_on_the_cpu() -> None:
    mesh = fs.Mesh(device=torch.device("meta"))  # in place of an accelerator
    params = {"w": torch.zeros(4)}
    unit = fs.make_plan(params, 1, offload=True).units[""]
    f = fs.reshard(fs.unshard(lambda leaves: leaves["w"].device.type, unit, mesh))
    assert f({"float32": torch.zeros(4)}) == "meta"
    with pytest.raises(ValueError, match="must be on the CPU, because the plan offloads the unit; found meta: make it with"):
        f({"float32": torch.zeros(4, device="meta")})
    f = fs.unshard(lambda leaves: None, fs.make_plan(params, 1).units[""], mesh)
    with pytest.raises(ValueError, match="must be on the mesh's device, meta; found cpu"):
        f({"float32": torch.zeros(4)})


@pytest.mark.parametrize("kept", [False, True], ids=["cut", "local"])
def test_gathering_an_offloaded_shard_moves_it_to_the_device_first(kept: bool) -> None:
    def main(mesh: fs.Mesh) -> Any:
        on = fs.Mesh({"shard": mesh.shard}, device=torch.device("meta"))
        plan = fs.make_plan({"w": torch.zeros(4)}, on, local=["w"] if kept else [], offload=True)
        shard = {key: value.requires_grad_() for key, value in fs.shard({"w": torch.zeros(4)}, plan, on)[""].items()}
        out = fs.reshard(fs.unshard(lambda leaves: leaves["w"] * leaves["w"], plan.units[""], on))(shard)
        return [value.device.type for value in shard.values()], out.device.type, out.requires_grad

    assert fs.simulate(main, 2) == [(["cpu"], "meta", True)] * 2


def test_a_unit_of_all_layers_of_a_large_model_warns() -> None:
    params = {"head": zeros(2), "blocks": [{"w": torch.empty(2**14, 2**14, device="meta")} for _ in range(2)]}
    words = r"unit 'blocks' holds 2 modules, 2\.0 GiB of the model's 2\.0 GiB, .* at once: write units=\['blocks\.\*'\]"
    with pytest.warns(UserWarning, match=words):
        fs.make_plan(params, 2, units=["blocks"])
    params["blocks"][1]["w"] = zeros(2, 2)
    params["head"] = torch.empty(2**15, 2**14, device="meta")
    fs.make_plan(params, 2, units=["blocks"])  # the smaller part of the model


def test_a_large_model_without_units_warns() -> None:
    params = {"blocks": [{"w": torch.empty(2**14, 2**14, device="meta")} for _ in range(2)]}
    with pytest.warns(UserWarning, match=r"the plan has no units, so each call gathers the whole model at once, 2\.0 GiB"):
        fs.make_plan(params, 2)
    for options in ({"units": ["blocks.*"]}, {"strategy": "no_shard"}):
        fs.make_plan(params, 2, **options)
    fs.make_plan(params, 1)
    fs.make_plan({"w": torch.empty(2**29, device="meta")}, 2, units=["w"])  # one unit is no lack of units
