"""How a unit's module runs: forwards set on module objects, and hooks of torch that need parameters too early."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.module.law import Runs, check_equal, sharded_call

x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


PATCHED: dict[str, Callable[..., torch.Tensor]] = {
    "type(self).forward": lambda self, x: type(self).forward(self, x) * 2,
    "self.__class__.forward": lambda self, x: self.__class__.forward(self, x) * 2,
    "nn.Linear.forward": lambda self, x: nn.Linear.forward(self, x) * 2,
}


@pytest.mark.parametrize("units", [[], ["*"]], ids=["whole", "units"])
@pytest.mark.parametrize("forward", PATCHED.values(), ids=PATCHED)
def test_a_forward_set_on_the_object_may_call_that_of_its_class(forward, units) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))  # the second has no forward of its own
    net[0].forward = types.MethodType(forward, net[0])
    check_equal(net, x, units, bits=True)


def old(name: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(nn.utils, name)(nn.Linear(3, 3)).eval()


def reading() -> nn.Module:
    module = nn.Linear(3, 3)
    module.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.sum(),))
    return module


HOOKS: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: old("weight_norm"),
    "spectral_norm": lambda: old("spectral_norm"),
    "prune": lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 4),
    "a user's": reading,
}


@pytest.mark.parametrize("make", HOOKS.values(), ids=HOOKS)
def test_a_hook_that_reads_a_parameter_of_its_unit_is_told_when_hooks_run_and_a_unit_around_it_works(make) -> None:
    net = nn.Sequential(nn.Sequential(make()), nn.Linear(3, 3))
    words = r"'0\.0\.weight\w*' was read .* outside the forward of unit '0\.0', which owns it; hooks run outside too"
    with pytest.raises(ValueError, match=words):
        check_equal(net, x, ["0.0"])
    for units in (["0", "1"], []):
        check_equal(net, x, units, bits=True)


class Base(nn.Linear):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.tanh(super().forward(x)) * scale


class Block(Base):
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        assert type(self) is Block
        return super().forward(x, scale)


class Doubled(Base):
    """Calls the forward of its base by ``super``, by its name and by its own class."""

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        assert type(self) is Doubled
        return super().forward(x) + Base.forward(self, x) + type(self).__base__.forward(self, x, scale)


BY_CLASS = {Block: 2.0, Doubled: 3.0}
BY_NAME = {str(cls): number for cls, number in BY_CLASS.items()}


class Looks(nn.Sequential):
    """Finds what to do with a block by its class, and looks at its forward, as tools do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self:
            assert list(inspect.signature(block.forward).parameters) == ["x", "scale"]
            assert block.forward.__self__ is block
            assert block.forward.__name__ == "forward"
            x = block(x, scale=BY_CLASS[type(block)]) + BY_NAME[str(type(block))]
        return x


class HandsOn(nn.Sequential):
    """Hands a checkpoint the forward of its block, and nothing else of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](checkpoint(self[0].forward, x, 0.5, use_reentrant=False))


class Patches(nn.Sequential):
    """Replaces the forward of its block for a while, as Hugging Face does to capture outputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (block,), outputs = self, []
        old = block.forward

        @functools.wraps(old)
        def capturing(*args: Any, **kwargs: Any) -> torch.Tensor:
            outputs.append(old(*args, **kwargs))
            return outputs[-1]

        block.forward = capturing
        try:
            x = block(block(x))
        finally:
            block.forward = old
        return block(x) + sum(outputs)


OPTIONS: dict[str, dict[str, Any]] = {
    "full_shard": {},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "no_shard": {"strategy": "no_shard"},
    "remat": {"how": {"remat": True}},
    "compiled": {"how": {"compiler": lambda forward: forward}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("cls", "blocks"), [(Looks, (Block, Doubled, Block)), (HandsOn, (Block, nn.Linear)), (Patches, (Block,))]
)
def test_a_model_may_look_at_hand_on_and_replace_the_forward_of_a_unit(cls, blocks, options) -> None:
    check_equal(cls(*(block(3, 3) for block in blocks)), x, ["*"], bits=True, **options)


@pytest.mark.usefixtures("without_garbage_collection")
def test_the_modules_of_a_call_are_freed_without_the_collector() -> None:
    alive: list[weakref.ref[nn.Module]] = []

    def noted(module: Any, x: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(module))
        return torch.tanh(module.lin(x))

    functional = fs.make_functional(nn.Sequential(*(Runs(noted, lin=nn.Linear(3, 3)) for _ in range(2))))
    sharded_call(fs.Mesh(), functional, x, ["*"])
    assert [ref() for ref in alive] == [None] * 4
