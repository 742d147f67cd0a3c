"""Policies choose the modules that torch's own policies choose, and return their paths."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, always_wrap_policy, size_based_auto_wrap_policy

import funcshard as fs
from funcshard.plan import wrap
from tests.core.units import of_module
from tests.pairwise import crossed


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)
        self.bn1 = nn.BatchNorm1d(10)
        self.bn2 = nn.BatchNorm2d(10)
        self.bn3 = nn.BatchNorm3d(10)
        self.sync_bn = nn.SyncBatchNorm(10)


def linear(n: int = 5) -> nn.Linear:
    return nn.Linear(n, n)


MODELS = {
    "nested sequential": lambda: nn.Sequential(linear(), linear(), nn.Sequential(linear(), linear())),
    "small list": lambda: nn.ModuleList([linear(), linear()]),
    "list of one": lambda: nn.ModuleList([linear(10)]),
    "attention": lambda: nn.Sequential(linear(10), nn.MultiheadAttention(100, 1)),
    "list inside": lambda: nn.Sequential(linear(10), nn.ModuleList([linear(10)])),
    "dict inside": lambda: nn.Sequential(nn.ModuleDict({"a": linear(), "b": nn.Sequential(linear(), linear())})),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "deep": lambda: nn.Sequential(nn.Sequential(nn.Sequential(linear(3), linear(4)), linear(2)), linear(9)),
    "batch norm": BatchNormNet,
    "shared by a parent": lambda: (lambda m: nn.Sequential(m, m, linear(2)))(linear()),
    "activations": lambda: nn.Sequential(linear(), nn.ReLU(), nn.Sequential(nn.GELU(), linear())),
}


class Marked(nn.Module):
    """The wrapper around a chosen module, in place of torch's own class."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def chosen_by_torch(net: nn.Module, policy: Any) -> list[str]:
    names, chosen = {id(m): name for name, m in net.named_modules()}, []
    mark = lambda m: chosen.append(names[id(m)]) or Marked(m)  # noqa: E731
    _recursive_wrap(net, policy, mark, ignored_modules=set(), ignored_params=set(), only_wrap_children=True)
    return sorted(chosen)


@pytest.mark.slow
@crossed(
    least=[1, 20, 40, 60, 100, 1000],
    make=MODELS,
    options={"preset": {}, "leaf": {"force": [nn.Linear]}, "exclude": {"exclude": [nn.Sequential]}},
)
def test_by_size_chooses_what_torch_chooses(make: Any, least: int, options: dict) -> None:
    leaf = {nn.MultiheadAttention, *options.get("force", ())}
    exclude = {nn.ModuleList, nn.ModuleDict, *options.get("exclude", ())}
    theirs = functools.partial(
        size_based_auto_wrap_policy, min_num_params=least, force_leaf_modules=leaf, exclude_wrap_modules=exclude
    )
    net = make()
    ours = wrap.by_size(least, exclude=tuple(exclude), force_leaf=tuple(leaf))(net)
    assert ours == [name for name, _ in net.named_modules() if name in ours]
    assert sorted(ours) == chosen_by_torch(net, theirs)


def test_always_chooses_all_that_torch_wraps_but_modules_without_parameters_and_containers() -> None:
    net = nn.Sequential(linear(), nn.ReLU(), nn.ModuleList([linear(), nn.Sequential(linear())]))
    ours = wrap.always()(net)
    assert ours == ["0", "2.0", "2.1", "2.1.0"]
    assert set(chosen_by_torch(net, always_wrap_policy)) - set(ours) == {"1", "2"}


def test_by_class_chooses_subclasses_outer_before_inner_and_never_the_root_or_what_has_no_parameters() -> None:
    net = nn.Sequential(nn.Sequential(linear()), BatchNormNet(), linear(), nn.BatchNorm1d(3, affine=False))
    assert wrap.by_class(nn.Sequential, nn.Linear)(net) == ["0", "0.0", "1.lin", "2"]
    assert wrap.by_class(nn.modules.batchnorm._BatchNorm)(net) == ["1.bn1", "1.bn2", "1.bn3", "1.sync_bn"]


def test_a_shared_module_is_chosen_once_under_its_first_name() -> None:
    net = nn.Sequential(nn.Sequential(linear(4)))
    net.append(nn.Sequential(net[0][0], nn.Linear(4, 2)))
    assert wrap.by_class(nn.Linear)(net) == ["0.0", "1.1"]
    assert "1.0.weight" not in fs.make_functional(net)[1]


def test_batch_norms_inside_a_chosen_container_are_units_of_their_own() -> None:
    net = nn.Sequential(BatchNormNet())
    only_container = wrap.by_class(BatchNormNet)
    both = wrap.any_of(only_container, wrap.by_class(nn.modules.batchnorm._BatchNorm))
    assert only_container(net) == ["0"]
    assert both(net) == ["0", "0.bn1", "0.bn2", "0.bn3", "0.sync_bn"]
    _, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, 2, units=both(net))
    assert [leaf.path for leaf in plan.units["0"].leaves] == ["0.lin.weight"]
    assert [leaf.path for leaf in plan.units["0.bn2"].leaves] == ["0.bn2.bias", "0.bn2.weight"]


def test_any_of_gives_each_module_once_in_the_order_of_the_model() -> None:
    net = nn.Sequential(linear(), nn.LayerNorm(5), linear())
    policy = wrap.any_of(wrap.by_class(nn.LayerNorm), wrap.by_class(nn.Linear), wrap.by_function(lambda m: True))
    assert policy(net) == ["0", "1", "2"]
    assert wrap.any_of()(net) == []


def test_by_function_sees_modules_and_leaves_out_the_root_and_the_empty() -> None:
    seen: list[nn.Module] = []
    net = nn.Sequential(linear(), nn.ReLU(), linear(9))
    policy = wrap.by_function(lambda m: seen.append(m) or isinstance(m, nn.ReLU) or getattr(m, "in_features", 0) > 5)
    assert policy(net) == ["2"]
    assert net not in seen


def test_policies_read_meta_modules() -> None:
    with torch.device("meta"):
        net = nn.Sequential(linear(), nn.Linear(100, 100))
    assert wrap.by_size(1000)(net) == ["1"]
    assert wrap.by_class(nn.Linear)(net) == ["0", "1"]


class ReadsItsChild(torch.nn.Module):
    """A block that reads the weight of one child, and calls the other."""

    def __init__(self, width=8):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x, *, scale=1.0):
        assert self.qkv.weight.shape[0] == self.out.weight.shape[0]  # which reads no values
        return self.out(torch.nn.functional.linear(x, self.qkv.weight, self.qkv.bias)) * scale


@pytest.mark.parametrize("inputs", [torch.ones(2, 8), (torch.ones(2, 8),), {"x": torch.ones(2, 8), "scale": 2.0}])
def test_by_size_with_inputs_keeps_a_module_and_the_child_that_it_reads_in_one_unit(inputs):
    block = ReadsItsChild()
    net = torch.nn.Sequential(block, torch.nn.Linear(8, 8))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert fs.wrap.by_size(72)(net) == ["0.qkv", "0.out", "1"]
    if isinstance(inputs, dict):
        assert fs.wrap.by_size(72)(torch.nn.ModuleDict({"a": block})["a"], inputs) == ["out"]
        return
    units = fs.wrap.by_size(72)(net, inputs)
    assert units == ["0", "0.out", "1"]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert "forward" not in vars(block)

    def main(mesh):
        _, sharded, shards = of_module(mesh, net, units)
        return sharded(shards, {}, torch.ones(2, 8))

    for found in fs.simulate(main, world_size=2):
        assert torch.equal(found, net(torch.ones(2, 8)))
