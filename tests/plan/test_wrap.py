"""Policies choose the modules that torch's own policies choose, and return their paths."""

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

import funcshard as fs
from funcshard.plan import wrap
from tests.core.units import of_module
from tests.module.law import Runs
from tests.pairwise import crossed


def linear(n: int = 5) -> nn.Linear:
    return nn.Linear(n, n)


MODELS = {
    "nested sequential": lambda: nn.Sequential(linear(), linear(), nn.Sequential(linear(), linear())),
    "attention": lambda: nn.Sequential(linear(10), nn.MultiheadAttention(100, 1)),
    "list inside": lambda: nn.Sequential(linear(10), nn.ModuleList([linear(10)])),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
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
    least=[1, 40, 60, 1000],
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


def shared() -> nn.Module:
    net = nn.Sequential(nn.Sequential(linear(4)))
    return net.append(nn.Sequential(net[0][0], nn.Linear(4, 2)))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(linear(), nn.Linear(100, 100))


nested = lambda: nn.Sequential(linear(), nn.ReLU(), nn.ModuleList([linear(), nn.Sequential(linear())]))  # noqa: E731
mixed = lambda: nn.Sequential(nn.Sequential(linear()), nn.BatchNorm1d(3, affine=False), nn.BatchNorm1d(3))  # noqa: E731
three = lambda: nn.Sequential(linear(), nn.LayerNorm(5), linear())  # noqa: E731
large = lambda m: isinstance(m, nn.ReLU) or getattr(m, "in_features", 0) > 4  # noqa: E731
CHOSEN: dict[str, tuple[Any, Any, list[str]]] = {  # a module, a policy, and the units
    "always: no containers, and nothing without parameters": (nested, wrap.always(), ["0", "2.0", "2.1", "2.1.0"]),
    "by_class: outer before inner": (mixed, wrap.by_class(nn.Linear, nn.Sequential), ["0", "0.0"]),
    "by_class: subclasses with parameters": (mixed, wrap.by_class(nn.modules.batchnorm._BatchNorm), ["2"]),
    "by_class: a shared module under its first name": (shared, wrap.by_class(nn.Linear), ["0.0", "1.1"]),
    "by_size on meta": (on_meta, wrap.by_size(1000), ["1"]),
    "by_function: no root, nothing empty": (nested, wrap.by_function(lambda m: True), ["0", "2", "2.0", "2.1", "2.1.0"]),
    "by_function: what it says": (nested, wrap.by_function(large), ["0", "2.0", "2.1.0"]),
    "any_of: each once, in the order of the model": (
        three, wrap.any_of(wrap.by_class(nn.LayerNorm), wrap.by_class(nn.Linear), wrap.by_function(lambda m: True)),
        ["0", "1", "2"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "policy", "units"), CHOSEN.values(), ids=CHOSEN)
def test_a_policy_chooses_units_in_the_order_of_the_model(make: Any, policy: Any, units: list[str]) -> None:
    assert policy(make()) == units


def read_a_child(block: Any, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Read the weight of one child, and call the other."""
    assert block.qkv.weight.shape[0] == block.out.weight.shape[0]  # which reads no values
    return block.out(torch.nn.functional.linear(x, block.qkv.weight, block.qkv.bias)) * scale


@pytest.mark.parametrize("inputs", [torch.ones(2, 8), (torch.ones(2, 8),), {"x": torch.ones(2, 8), "scale": 2.0}])
def test_by_size_with_inputs_keeps_a_module_and_the_child_that_it_reads_in_one_unit(inputs):
    block = Runs(read_a_child, qkv=linear(8), out=linear(8))
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
