"""How a unit's module runs: forwards set on module objects, and hooks of torch that need parameters too early."""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard.plan.wrap import Units
from tests.core.units import by_hand, forward_mode, mlp, of_module
from tests.module.law import Runs, calls_on, check_equal, outputs_on, plain_call, same_bits, sharded_call
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_ranks
from tests.storages import Log

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
    for units in (["0", "1"], [], fs.wrap.by_size(3)(net, x)):
        check_equal(net, x, units, bits=True)


class Refers(nn.Linear):
    """Reads its parameters through another attribute, as a cell of ncps does."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.held = {"weights": [self.weight]}, (self.bias,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, *self.held[0]["weights"], *self.held[1])


@pytest.mark.parametrize("units", [["0", "1"], [["0", "1"]], []], ids=str)
def test_a_unit_may_read_its_parameters_through_lists_and_dictionaries(units) -> None:
    check_equal(nn.Sequential(Refers(), Refers()), x, units, bits=True)


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


# --- outputs --------------------------------------------------------------------------------------


FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LOW = fs.MixedPrecision(BF16, FP32, output_dtype=FP32)


def several(owns: bool, counts: bool) -> nn.Module:
    """Return a module that returns tensors of several kinds, and may count its calls in a buffer."""

    def forward(m: Any, x: torch.Tensor) -> dict[str, Any]:
        h = m.first(x)
        m.mean = m.mean + counts / 3
        out = m.second(h) * m.scale
        return {"out": out, "ids": out.argmax(1), "pair": (h, "text"), "none": None, "inside": h.dtype}

    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    scale = nn.Parameter(torch.ones(4)) if owns else 1.0
    return Runs(forward, first=first, second=second, scale=scale, mean=torch.full((4,), 1 / 3, dtype=FP64))


def run(*, owns: bool = True, mutable: bool = False, evaluate: bool = False, **precision: Any) -> Any:
    apply, *rest = fs.make_functional(several(owns, counts=mutable), mutable=mutable)
    options = {"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": FP32, **precision}
    functional = (apply.eval() if evaluate else apply, *rest)
    (out,) = outputs_on(1, functional, torch.ones(2, 4), ["first", "second"], precision=fs.MixedPrecision(**options))
    return out


CASTS: dict[str, tuple[dict[str, Any], torch.dtype, torch.dtype]] = {  # options, dtypes of the output and inside
    "the root owns a leaf": ({}, FP32, BF16),
    "the root owns none": ({"owns": False}, FP32, BF16),
    "without a param_dtype": ({"param_dtype": None, "output_dtype": FP64}, FP64, FP32),
    "evaluation": ({"evaluate": True, "output_dtype": FP16}, FP16, BF16),
    "evaluation in full precision": ({"evaluate": True, "full_precision_in_eval": True, "output_dtype": FP16}, FP32, FP32),
}


@pytest.mark.parametrize(("options", "cast", "inside"), CASTS.values(), ids=CASTS)
def test_floating_point_outputs_of_the_model_are_cast_and_those_of_its_units_are_not(
    options: dict[str, Any], cast: torch.dtype, inside: torch.dtype
) -> None:
    out = run(**options)
    assert (out["out"].dtype, out["ids"].dtype, out["pair"][0].dtype) == (cast, torch.int64, cast)
    assert (out["pair"][1], out["none"]) == ("text", None)
    assert out["inside"] == inside
    assert torch.equal(out["out"], out["out"].to(inside).to(cast))  # computed inside


def test_new_buffers_are_no_outputs() -> None:
    out, buffers = run(mutable=True, output_dtype=FP16)
    assert out["out"].dtype == FP16
    assert torch.equal(buffers["mean"], torch.full((4,), 1 / 3, dtype=FP64) + 1 / 3)


OWN = fs.MixedPrecision(BF16, FP32, output_dtype=FP32, cast_forward_inputs=True)


def test_a_unit_that_is_written_by_hand_casts_its_outputs() -> None:
    inner = lambda leaves, x: (leaves["w"] * x, leaves["w"].dtype)  # noqa: E731
    _, f, shards = by_hand(fs.Mesh(), {"w": torch.ones(3)}, inner, precision=LOW)
    out, inside = f(shards[""], torch.ones(3))
    assert (out.dtype, inside) == (FP32, BF16)


@pytest.mark.parametrize(("cast", "expected"), [(False, (FP32, 1.0 + 2**-12)), (True, (BF16, 1.0))])
def test_the_default_lets_an_input_of_higher_precision_raise_or_promote_and_cast_forward_inputs_rounds_it(
    cast: bool, expected: tuple[torch.dtype, float]
) -> None:
    """docs/precision.md says why a unit's inputs stay as they are by default."""
    rotary = Runs(lambda m, x, angles: x * m.scale + angles, scale=nn.Parameter(torch.ones(1)))
    functional = fs.make_functional(Runs(lambda m, x: m.rotary(x, torch.tensor([[1.0 + 2**-12]])), rotary=rotary))
    precision = fs.MixedPrecision(BF16, cast_forward_inputs=cast)
    (out,) = outputs_on(1, functional, torch.zeros(1, 1), ["rotary"], precision=precision)
    assert (out.dtype, out.item()) == expected


def compare(mesh: fs.Mesh) -> None:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).chunk(mesh.world_size)[mesh.rank]
    devices = init_device_mesh("cpu", (mesh.world_size,))
    casting = MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32)
    for everywhere in (False, True):
        outs, net = [], mlp(6, 6, 6, 6, dtype=FP32)

        def program(model: Any, x: torch.Tensor, outs: list[torch.Tensor] = outs) -> torch.Tensor:
            outs.append(model(x))
            return outs[-1].square().mean()

        units = Units(["0", "2", "4"], {name: {"precision": OWN} for name in "024"} if everywhere else {})
        call = sharded_call(mesh, fs.make_functional(net), x, units, program=program, calls=1, precision=LOW)
        for name in "024":
            policy = casting if everywhere else MixedPrecisionPolicy(BF16, FP32)
            fsdp2(net.get_submodule(name), mesh=devices, mp_policy=policy)
        fsdp2(net, mesh=devices, mp_policy=casting)
        program(net, x).backward()
        ours, theirs = outs
        assert ours.dtype == FP32
        same_bits(ours, theirs)
        same_bits(call.grads, {name: leaf.grad.full_tensor() for name, leaf in net.named_parameters()})  # type: ignore[union-attr]


@pytest.mark.slow
def test_on_processes_outputs_and_gradients_are_those_of_fsdp2_to_the_bit() -> None:
    run_ranks(compare, 2)


def standardised(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x @ m.weight
    standard = (x - x.mean(-1, True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    return standard * m.bias


def attended(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    heads = (x @ m.weight)[None, None]
    return (heads @ heads.mT / x.shape[-1] ** 0.5).softmax(-1) @ heads


# What torch's kernels have wrong, or not at all, in the loss of a tangent: (the model's, written out).
INSIDE: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "layer_norm": (lambda m, x: F.layer_norm(x @ m.weight, (3,), m.bias), standardised),
    "attention": (lambda m, x: F.scaled_dot_product_attention(*[(x @ m.weight)[None, None]] * 3), attended),
}


@forward_mode
@pytest.mark.parametrize(("run", "written_out"), INSIDE.values(), ids=INSIDE)
def test_a_unit_inside_a_transform_of_the_model_has_every_derivative(run: Any, written_out: Any) -> None:
    def model(run: Any) -> nn.Module:
        torch.manual_seed(0)
        unit = Runs(run, weight=nn.Parameter(torch.randn(3, 3)), bias=nn.Parameter(torch.ones(3)))
        return Runs(lambda m, x: torch.func.jvp(m.unit, (x,), (x.square(),))[1], unit=unit).double()

    losses, grads = plain_call(model(written_out), x.double(), 2)
    for call in calls_on(2, fs.make_functional(model(run)), x.double(), ["unit"]):
        torch.testing.assert_close([call.loss, call.grads], [losses[0], grads])


# --- units of several modules: gathered for the first, freed after the last, reduced once ---------

WIDTH, WORDS = 6, 11
GRID = {"replicate": 2, "shard": 2}
NAME = "embed+norm+head"


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))


class Embed(nn.Embedding):
    log = None

    def forward(self, tokens):
        if self.log is not None:
            self.log(self.weight)
        return super().forward(tokens)


def raises(m, tokens, x):
    raise KeyError("from forward")


WAYS = {  # how the modules of the group run after the blocks
    "once": lambda m, tokens, x: m.head(m.norm(x)),
    "no head": lambda m, tokens, x: x,
    "twice": lambda m, tokens, x: m.head(m.norm(m.norm(x) + m.embed(tokens))),
    "again": lambda m, tokens, x: m.head(m.norm(x)) + m.head(m.norm(m.embed(tokens))),
    "checkpoint": lambda m, tokens, x: checkpoint(lambda y: m.head(m.norm(y)), x, use_reentrant=False),
    "first in checkpoint": lambda m, tokens, x: m.head(m.norm(x + checkpoint(m.embed, tokens, use_reentrant=False))),
    "embed without gradients": lambda m, tokens, x: m.head(m.norm(x)),
}


class Model(nn.Module):
    """A language model, of which embedding, norm and head are a group."""

    def __init__(self, way="once", tied=False, log=None):
        super().__init__()
        self.embed, self.norm, self.head = Embed(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Residual() for _ in range(3))
        self.way, self.embed.log = way, log
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.way != "embed without gradients"):
            x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.embed.log is not None:
            self.embed.log.between = self.embed.log.alive()
        return {**WAYS, "raises": raises}[self.way](self, tokens, x)


GROUP = [["embed", "norm", "head"], "blocks.*"]


def made(**options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Model(**options).double()


def tokens(rank):
    return torch.randint(0, WORDS, (3, 5), generator=torch.Generator().manual_seed(rank))


@pytest.mark.nightly(one_in=2)
@crossed(world=[2, GRID], strategy=["full_shard", "shard_grad_op", "no_shard"], tied=[False, True])
def test_a_group_trains_as_unsharded_and_its_collectives_are_the_predicted_ones(world, strategy, tied):
    for call in check_equal(made(tied=tied), tokens, GROUP, world, strategy=strategy):
        assert call.events == call.predicted()
        kinds = [event.kind for event in call.events if event.unit == NAME and event.axis == "shard"]
        times = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0}[strategy]
        assert kinds == ["all_gather"] * times + ["all_reduce" if strategy == "no_shard" else "reduce_scatter"]


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_modules_of_a_group_are_called_in_any_way(way, strategy):
    for call in check_equal(made(way=way), tokens, ["blocks.*", GROUP[0]], strategy=strategy):
        if way in ("once", "no head", "twice", "again"):
            assert call.events == call.predicted()


@pytest.mark.parametrize("prefetch", ["pre", "post", None])
def test_a_group_is_gathered_ahead_as_the_schedule_says(prefetch):
    units = [["blocks.0.norm", "blocks.2.up", "head"], "blocks.*", "embed"]
    functional = fs.make_functional(made())
    order = ["embed", "blocks.0", "blocks.0.norm+blocks.2.up+head", "blocks.1", "blocks.2"]
    schedule = fs.make_schedule(fs.make_plan(functional[1], 2, units=units), order, backward_prefetch=prefetch, limit=2)
    for call in calls_on(2, functional, tokens, units, how={"schedule": schedule}):
        assert call.events == call.predicted()


@pytest.mark.parametrize("remat", [[], ["norm"], [NAME]], ids=str)
@pytest.mark.parametrize("way", ["once", "raises", "no head"])
@on_ranks(2)
def test_a_group_is_held_between_its_modules_and_free_after_the_last_of_them(mesh, way, remat):
    log, out = Log(), None
    _, sharded, shards = of_module(mesh, made(way=way, log=log), GROUP, how={"remat": remat})
    with contextlib.suppress(KeyError):
        out = sharded(shards, {}, tokens(0))
    assert (log.between, log.alive()) == (1, 0)
    del out


REMAT = {
    "one": (["norm"], [NAME]),
    "two": (["embed", "head"], [NAME]),
    "all": (True, [NAME, "blocks.0", "blocks.1", "blocks.2"]),
}


@pytest.mark.nightly(one_in=3)
@crossed(again=REMAT, way=["once", "twice", "again", "checkpoint"], strategy=["full_shard", "shard_grad_op"])
def test_modules_of_a_group_are_computed_again_from_leaves_that_are_gathered_once(strategy, way, again):
    functional, (remat, recomputed) = fs.make_functional(made(way=way)), again
    plain, again = (
        calls_on(2, functional, tokens, ["blocks.*", GROUP[0]], strategy=strategy, how={"remat": each})
        for each in ((), remat)
    )
    for call, other in zip(plain, again, strict=True):
        same_bits(other[:2], call[:2])
        if way == "checkpoint":  # the modules inside it gather the group for themselves
            continue
        assert [event for event in other.events if event.unit == NAME] == [e for e in call.events if e.unit == NAME]
        assert other.events == other.predicted(recomputed=recomputed)


@pytest.mark.filterwarnings("ignore:ignored_classes of the precision hold LayerNorm")
def test_a_group_computes_in_its_precision_and_ignored_classes_leave_it():
    precision = fs.MixedPrecision(param_dtype=torch.float32, ignored_classes=(nn.LayerNorm,))
    low, full = (calls_on(2, fs.make_functional(made()), tokens, GROUP, **each) for each in ({"precision": precision}, {}))
    for call, other in zip(low, full, strict=True):
        assert call.plan.units["norm"].full_precision
        assert call.plan.units[NAME].members == ("embed", "head")
        assert call.events == call.predicted()
        assert {event.dtype for event in call.events if event.unit == NAME} == {"float32"}
        torch.testing.assert_close(call.loss.double(), other.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(call.grads, other.grads, rtol=1e-4, atol=1e-5)


class Caller(nn.Linear):
    """A module that runs another one of its group without gradients, between two uses of its weight."""

    def forward(self, x, other):
        x = super().forward(x).sin()
        with torch.no_grad():
            constant = other(x)
        return super().forward(x).sin() @ self.weight + constant


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_module_of_a_group_may_call_another_one_without_gradients(strategy):
    module = Runs(lambda m, x: m.other(m.caller(x, m.other)), caller=Caller(WIDTH, WIDTH), other=nn.Linear(WIDTH, WIDTH))
    check_equal(module, torch.ones(2, WIDTH), [["caller", "other"]], strategy=strategy)


def test_a_call_without_gradients_may_return_an_input_that_needs_one():
    module = Runs(lambda m, x: (x, m.inner(x)), inner=nn.Linear(2, 2))
    _, sharded, shards = of_module(fs.Mesh(), module, ["inner"])
    x = torch.ones(1, 2, requires_grad=True)
    with torch.no_grad():
        assert torch.equal(sharded(shards, {}, x)[0], x)


class AnyNames(nn.Module):
    """A layer whose keyword arguments have names that the library may use, as torch_geometric's ``index``."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x, *, index, path, forward, module, region, call, args, kwargs):
        return self.inner(x) * index

    def other(self, x, *, module, args, name):
        return self.inner(x) * name


def by_any_name(net, x):
    for layer in net.layers:
        x = layer(x, index=2, path=0, forward=0, module=0, region=0, call=0, args=0, kwargs=0)
        x = x + layer.other(x, module=0, args=0, name=3)
    return x


def test_keyword_arguments_may_have_any_name():
    functional = apply, params, _ = fs.make_functional(Runs(by_any_name, layers=nn.ModuleList([AnyNames(), AnyNames()])))
    x, methods = torch.ones(1, 2), {"layers.0": ["other"], "layers.1": ["other"]}
    for options in ({}, {"remat": True}, {"compiler": lambda f: f}):
        plan, sharded, shards = of_module(fs.Mesh(), functional, [*methods], how={"methods": methods, **options})
        assert torch.equal(sharded(shards, {}, x), apply(params, {}, x))
    profile = fs.profile(apply, params, {}, x, loss=torch.sum)
    for options in ({}, {"remat": True}):
        assert fs.estimate(profile, plan, **options).peak > 0


class Adds(torch.autograd.Function):
    """Pass a tensor on, and give a weight a gradient."""

    @staticmethod
    def forward(x, weight):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones(3, 3)


def hooked(m, x):
    m.second.weight.register_hook(torch.neg)
    return m.second(m.first(x))


LOST = {
    "Function": lambda m, x: m.second(Adds.apply(m.first(x), m.second.weight)),
    "Function of an input": lambda m, x: m.second(m.first(x)) + Adds.apply(x, m.second.weight),
    "register_hook": hooked,
}
DERIVATIVES = {
    "value_and_grad": fs.value_and_grad,
    "grad": fs.grad,
    "autograd": lambda loss_fn: lambda shards: torch.autograd.grad(
        loss_fn({name: {key: each.requires_grad_() for key, each in shard.items()} for name, shard in shards.items()}),
        [each for shard in shards.values() for each in shard.values()],
    ),
}  # fmt: skip


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("run", LOST.values(), ids=LOST)
def test_a_gradient_by_a_parameter_outside_of_its_unit_is_an_error(run, derivative):
    """It was lost."""
    apply, params, _ = fs.make_functional(Runs(run, first=nn.Linear(3, 3), second=nn.Linear(3, 3)))
    mesh = fs.Mesh()
    plan = fs.make_plan(params, mesh, units=["first", "second"])
    sharded = fs.fully_shard(apply, plan, mesh)
    with pytest.raises(ValueError, match=r"asks for the gradient of its parameter 'second\.weight'"):
        derivative(lambda shards: sharded(shards, {}, x).sum())(fs.shard(params, plan, mesh))


def test_a_gradient_that_only_a_later_call_would_lose_is_an_error():
    run = lambda m, x: m.second(m.first(x)) + (Adds.apply(x, m.second.weight) if x.sum() > 0 else 0)  # noqa: E731
    module = Runs(run, first=nn.Linear(3, 3), second=nn.Linear(3, 3))
    _, sharded, shards = of_module(fs.Mesh(), module, ["first", "second"])
    evaluate = fs.value_and_grad(lambda shards, x: sharded(shards, {}, x).sum())
    evaluate(shards, -torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"asks for the gradient of its parameter 'second\.weight'"):
        evaluate(shards, torch.ones(2, 3))


class Replaces(nn.Linear):
    def forward(self, x):
        self.weight = nn.Parameter(2 * self.weight.detach())
        return super().forward(x)


def replaced(m, x):
    m.second.weight = nn.Parameter(torch.ones(3, 3))
    return m.second(m.first(x))


REPLACED = {
    "inside": (lambda m, x: m.second(m.first(x)), Replaces),
    "outside": (replaced, nn.Linear),
    "functional_call": (
        lambda m, x: torch.func.functional_call(m.second, {"weight": m.first(x)[:3]}, m.first(x)),
        nn.Linear,
    ),
}


@pytest.mark.parametrize("units", [[], ["second"]], ids=["root", "unit"])
@pytest.mark.parametrize(("run", "cls"), REPLACED.values(), ids=REPLACED)
def test_another_tensor_in_place_of_a_parameter_is_an_error(run, cls, units):
    """It was computed with, and lost; or it was left out, as the argument of functional_call."""
    net = Runs(run, first=nn.Linear(3, 3), second=cls(3, 3))
    if units or "functional_call" not in run.__code__.co_names:
        with pytest.raises(RuntimeError, match=r"put another tensor in place of parameter 'second\.weight'"):
            check_equal(net, x, units, 1)
    else:
        check_equal(net, x, units, 1)
