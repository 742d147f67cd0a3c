"""How a unit's module runs: forwards set on module objects, and hooks of torch that need parameters too early."""

from __future__ import annotations

import functools
import gc
import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.ranks import one_thread, run_simulated

x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def class_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return type(self).forward(self, x) * 2


def class_forward_by_attribute(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return self.__class__.forward(self, x) * 2


def class_forward_by_name(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.Linear.forward(self, x) * 2


class Announces(nn.Linear):
    """A class that wraps the forward of its subclasses, as layers of Hugging Face do."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        forward = cls.forward
        cls.forward = lambda self, x: forward(self, x)


def patched(forward: Callable[..., Any], cls: type[nn.Module] = nn.Linear) -> nn.Module:
    module = cls(3, 3)
    module.forward = types.MethodType(forward, module)
    return module


PATCHED: dict[str, Callable[[], nn.Module]] = {
    "type(self).forward": lambda: patched(class_forward),
    "self.__class__.forward": lambda: patched(class_forward_by_attribute),
    "nn.Linear.forward": lambda: patched(class_forward_by_name),
    "a class that wraps its subclasses": lambda: patched(class_forward, Announces),
}


def gradients(net: nn.Module, units: list[str]) -> None:
    """Check the gradients of a sharded module."""
    apply, params, buffers = fs.make_functional(net)
    with one_thread():
        wanted = dict(zip(params, torch.autograd.grad(net(x).square().mean(), tuple(net.parameters())), strict=True))

    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(params, mesh, units=units)
        sharded = fs.fully_shard(apply, plan, mesh)
        _, grads = fs.value_and_grad(lambda s: sharded(s, buffers, x).square().mean())(fs.shard(params, plan, mesh))
        return fs.gather(grads, plan, mesh)

    for grads in run_simulated(main, 2):
        torch.testing.assert_close(grads, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("units", [[], ["*"]], ids=["whole", "units"])
@pytest.mark.parametrize("make", PATCHED.values(), ids=PATCHED)
def test_a_forward_set_on_the_object_may_call_that_of_its_class(make, units) -> None:
    torch.manual_seed(0)
    gradients(nn.Sequential(make(), nn.Linear(3, 3)), units)  # the second has the class of the first, but no own forward


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def old(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(nn.utils, name)(nn.Linear(3, 3)).eval()

    return make


HOOKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "weight_norm": (old("weight_norm"), r"torch\.nn\.utils\.weight_norm \(WeightNorm\)"),
    "spectral_norm": (old("spectral_norm"), r"torch\.nn\.utils\.spectral_norm \(SpectralNorm\)"),
    "prune": (lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", 4), r"torch\.nn\.utils\.prune \(L1Unstructured\)"),
}


@pytest.mark.parametrize(("make", "hook"), HOOKS.values(), ids=HOOKS)
def test_a_hook_that_computes_a_weight_before_the_units_forward_is_refused_and_its_remedy_works(make, hook) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Around(make()), nn.Linear(3, 3))
    apply, params, _ = fs.make_functional(net)
    words = (
        rf"unit '0\.inner' has a hook of {hook}, which computes a weight from parameters before the unit's forward, .*: use "
        r"the functions of torch\.nn\.utils\.parametrizations, call prune\.remove, or make a module around '0\.inner' the"
    )
    with pytest.raises(ValueError, match=words):
        fs.fully_shard(apply, fs.make_plan(params, fs.Mesh(), units=["0.inner"]), fs.Mesh())
    gradients(net, ["0", "1"])
    gradients(net, [])


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm"])
def test_the_new_functions_of_torch_train_as_units(name) -> None:
    torch.manual_seed(0)
    gradients(nn.Sequential(getattr(parametrizations, name)(nn.Linear(3, 3)).eval(), nn.Linear(3, 3)), ["0", "1"])


def test_a_users_hook_that_reads_a_parameter_of_its_unit_is_told_when_hooks_run() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * module.weight.sum(),))
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, fs.Mesh(), units=["0"])
    words = r"'0\.weight' was read .* only during that forward \(hooks of the unit's own module run before or after it\)"
    with pytest.raises(ValueError, match=words):
        fs.fully_shard(apply, plan, fs.Mesh())(fs.shard(params, plan, fs.Mesh()), buffers, x)


class Registered(nn.Linear):
    """A class whose subclasses are registered under a name that they have to give."""

    registry: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, name, **kwargs):
        super().__init_subclass__(**kwargs)
        cls.registry[name] = cls


class Named(Registered, name="named"):
    pass


@pytest.mark.parametrize("cls", [Registered, Named])
def test_a_class_whose_subclasses_have_to_give_a_name_is_a_unit(cls):
    module = nn.Sequential(cls(3, 3), nn.Linear(3, 2))
    apply, params, buffers = fs.make_functional(module)
    x = torch.randn(2, 3)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["0"])
        return fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), buffers, x)

    for output in run_simulated(main, 2):
        assert torch.equal(output, module(x))
    assert Registered.registry == {"named": Named}


# --- during a call --------------------------------------------------------------------------------

STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * scale


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


class Registry(nn.Module):
    """Finds what to do with a block by its class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Doubled(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=BY_CLASS[type(block)]) + BY_NAME[str(type(block))]
        return x


def same_as_plain(net: nn.Module, units: list[str], strategy: str = "full_shard", **options: Any) -> None:
    """Check output and gradients of three sharded calls, bit for bit."""
    apply, params, buffers = fs.make_functional(net)
    with one_thread():
        output = net(x)
        wanted = dict(zip(params, torch.autograd.grad(output.square().mean(), tuple(net.parameters())), strict=True))

    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(params, mesh, units=units, strategy=strategy)
        sharded, shards = fs.fully_shard(apply, plan, mesh, **options), fs.shard(params, plan, mesh)
        for _ in range(3):
            _, grads = fs.value_and_grad(lambda s: sharded(s, buffers, x).square().mean())(shards)
        return sharded(shards, buffers, x).detach(), fs.gather(grads, plan, mesh)

    for found, grads in run_simulated(main, 2):
        torch.testing.assert_close(found, output.detach(), rtol=0, atol=0)
        torch.testing.assert_close(grads, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_unit_keeps_its_class_so_registries_by_class_find_it(strategy) -> None:
    torch.manual_seed(0)
    same_as_plain(Registry(), ["blocks.*"], strategy)


class Checkpointed(nn.Module):
    """Hands a checkpoint the forward of its block, and nothing else of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block.forward, x, 0.5, use_reentrant=False))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_may_keep_the_forward_of_a_unit_alone(strategy) -> None:
    torch.manual_seed(0)
    same_as_plain(Checkpointed(), ["block", "head"], strategy)


class Patches(nn.Module):
    """Replaces the forward of its block for a while, as Hugging Face does to capture outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        old = self.block.forward
        outputs = []

        @functools.wraps(old)
        def capturing(*args: Any, **kwargs: Any) -> torch.Tensor:
            outputs.append(old(*args, **kwargs))
            return outputs[-1]

        self.block.forward = capturing
        try:
            x = self.block(self.block(x))
        finally:
            self.block.forward = old
        return self.block(x) + sum(outputs)


@pytest.mark.parametrize(
    "options", [{}, {"remat": True}, {"compiler": lambda forward: forward}], ids=["plain", "remat", "compiled"]
)
def test_a_module_may_replace_the_forward_of_a_unit_while_it_runs(options) -> None:
    torch.manual_seed(0)
    same_as_plain(Patches(), ["block"], **options)


class Looks(nn.Module):
    """Looks at the forward of its block, as tools do."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert list(inspect.signature(self.block.forward).parameters) == ["x", "scale"]
        assert self.block.forward.__self__ is self.block
        assert self.block.forward.__name__ == "forward"
        return self.block(x)


def test_the_forward_of_a_unit_looks_like_that_of_its_class() -> None:
    torch.manual_seed(0)
    same_as_plain(Looks(), ["block"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_modules_of_a_call_are_freed_without_the_collector(strategy) -> None:
    alive: list[weakref.ref[nn.Module]] = []

    class Noted(Base):
        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            alive.append(weakref.ref(self))
            return self.linear(x)

    net = nn.Sequential(Noted(), Noted())
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, fs.Mesh(), units=["*"], strategy=strategy)
    sharded, shards = fs.fully_shard(apply, plan, fs.Mesh()), fs.shard(params, plan, fs.Mesh())
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            fs.value_and_grad(lambda s: sharded(s, buffers, x).square().mean())(shards)
            assert [ref for ref in alive if ref() is not None] == []
    finally:
        gc.enable()
    assert len(alive) == 4
