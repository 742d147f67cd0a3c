"""State dicts: the module's own names and values, from shards and back."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import funcshard as fs
from funcshard import tree


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.emb.weight
        self.again = self.norm
        self.register_buffer("cache", torch.ones(2), persistent=False)


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    return net


MODULES = {
    "linear": lambda: nn.Linear(3, 5),
    "tied": Tied,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)),
    "frozen": frozen,
    "mixed dtypes": lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()),
    "no parameters": lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False)),
    "LSTM": lambda: nn.LSTM(3, 4, 2),
}
WORLDS = [1, 2, 3, {"replicate": 2, "shard": 2}]
modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@modules
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_the_state_dict_is_the_modules(make: Any, world: Any, strategy: str) -> None:
    module = make()
    apply, params, buffers = fs.make_functional(module)

    def main(mesh: fs.Mesh) -> dict[str, torch.Tensor]:
        plan = fs.make_plan(params, mesh, units=[], strategy=strategy)
        shards = fs.shard(params, plan, mesh)
        return fs.to_state_dict(shards, plan, mesh, buffers=apply.persistent(buffers))

    for state_dict in fs.simulate(main, world):
        assert same(state_dict, dict(module.state_dict()))
        other = make()
        assert str(other.load_state_dict(state_dict, strict=True)) == "<All keys matched successfully>"
        assert same(dict(other.state_dict()), dict(module.state_dict()))
        assert not any(value.requires_grad for value in state_dict.values())


@modules
@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_from_state_dict_is_the_inverse(make: Any, world: Any) -> None:
    module = make()
    _, params, _ = fs.make_functional(module)

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(params, mesh, units=fs.wrap.always()(module))
        shards = fs.shard(params, plan, mesh)
        again = fs.from_state_dict(fs.to_state_dict(shards, plan, mesh), plan, mesh)
        from_module = fs.from_state_dict(module.state_dict(), plan, mesh)
        for other in (again, from_module):
            assert tree.describe(other)[0] == tree.describe(shards)[0]
            assert all(torch.equal(a, b) for a, b in zip(tree.leaves(other), tree.leaves(shards), strict=True))

    fs.simulate(main, world)


def test_shards_share_no_memory_with_the_state_dict() -> None:
    state_dict = {"w": torch.ones(3)}
    plan = fs.make_plan(state_dict, 1)
    shards = fs.from_state_dict(state_dict, plan, fs.Mesh())
    shards[""]["float32"].zero_()
    assert state_dict["w"].tolist() == [1, 1, 1]
    state = fs.to_state_dict(shards, plan, fs.Mesh())
    state["w"].fill_(7)
    assert shards[""]["float32"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("present", [["emb.weight"], ["head.weight"], ["emb.weight", "head.weight"]], ids=str)
def test_a_tied_parameter_may_stand_under_any_of_its_names(present: list[str]) -> None:
    _, params, _ = fs.make_functional(Tied())
    plan = fs.make_plan(params, 1)
    full = fs.to_state_dict(fs.shard(params, plan, fs.Mesh()), plan, fs.Mesh())
    kept = {
        name: value for name, value in full.items() if name in present or not name.endswith(("emb.weight", "head.weight"))
    }
    again = fs.from_state_dict(kept, plan, fs.Mesh())
    assert same(fs.to_state_dict(again, plan, fs.Mesh()), full)


def test_a_nested_tree_has_dotted_names() -> None:
    params = {"blocks": [{"w": torch.ones(2)}, {"w": torch.zeros(3)}]}
    plan = fs.make_plan(params, 1, units=["blocks.*"])
    state_dict = fs.to_state_dict(fs.shard(params, plan, fs.Mesh()), plan, fs.Mesh())
    assert {name: value.tolist() for name, value in state_dict.items()} == {"blocks.0.w": [1, 1], "blocks.1.w": [0, 0, 0]}


def test_two_trees_of_one_module_do_not_mix_their_tied_names() -> None:
    _, params, _ = fs.make_functional(Tied())
    both = {"student": params, "teacher": {name: value.detach() * 2 for name, value in params.items()}}
    plan = fs.make_plan(both, 1)
    state_dict = fs.to_state_dict(fs.shard(both, plan, fs.Mesh()), plan, fs.Mesh())
    assert {name.partition(".")[0] for name in state_dict} == {"student", "teacher"}


def test_training_goes_on_from_a_state_dict_on_another_world() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    _, params, _ = fs.make_functional(net)

    def save(mesh: fs.Mesh) -> dict[str, torch.Tensor]:
        plan = fs.make_plan(params, mesh, units=["0"])
        return fs.to_state_dict(fs.shard(params, plan, mesh), plan, mesh)

    saved = fs.simulate(save, 3)[0]

    def load(mesh: fs.Mesh) -> dict[str, torch.Tensor]:
        plan = fs.make_plan(params, mesh, units=["1"])
        return fs.gather(fs.from_state_dict(saved, plan, mesh), plan, mesh)

    assert all(same(loaded, dict(net.state_dict())) for loaded in fs.simulate(load, {"replicate": 2, "shard": 2}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda s: {},
            r"the state dict must hold every leaf of the plan; missing: \['0\.bias', '0\.weight', '1\.bias'\] and 1 more",
        ),
        (
            lambda s: {"module." + k: v for k, v in s.items()},
            r"its names carry a prefix such as 'module\.' that has to be removed",
        ),
        (
            lambda s: {k: v for k, v in s.items() if k != "1.bias"},
            r"missing: \['1\.bias'\]: it is another module's, or its names",
        ),
        (
            lambda s: {**s, "1.bias": torch.zeros(3)},
            r"leaf '1\.bias' of the state dict must have shape \(2,\) .*; found \(3,\)",
        ),
        (
            lambda s: {**s, "1.bias": torch.zeros(2).double()},
            r"leaf '1\.bias' of the state dict .* found \(2,\) and float64",
        ),
        (
            lambda s: {**s, "1.bias": torch.zeros(2, device="meta")},
            r"leaf '1\.bias' of the state dict is on the meta device",
        ),
    ],
    ids=["empty", "prefix", "missing", "shape", "dtype", "meta"],
)
def test_a_state_dict_that_does_not_fit_is_refused(change: Any, words: str) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    _, params, _ = fs.make_functional(module)
    plan = fs.make_plan(params, 1)
    with pytest.raises(ValueError, match=words):
        fs.from_state_dict(change(module.state_dict()), plan, fs.Mesh())


def test_names_that_are_no_leaves_are_left_aside() -> None:
    module = nn.BatchNorm1d(3)
    _, params, _ = fs.make_functional(module)
    plan = fs.make_plan(params, 1)
    shards = fs.from_state_dict({**module.state_dict(), "other": torch.ones(1)}, plan, fs.Mesh())
    assert sorted(fs.to_state_dict(shards, plan, fs.Mesh())) == ["bias", "weight"]
