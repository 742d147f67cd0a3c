"""Changes that a function of a module drops: those of calls, and those of the module later."""

from __future__ import annotations

import gc
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import funcshard as fs
from tests.core.units import of_module
from tests.module.law import Runs, outputs_on
from tests.strange_objects import Raises

x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def own(do: Any, persistent: bool = True, seen: torch.Tensor | None = None) -> nn.Module:
    """Return a module that treats its buffer as ``do`` says."""
    module = Runs(lambda m, x: (do(m, x), m.lin(x))[1], lin=nn.Linear(3, 3), spread=torch.full((3,), torch.nan))
    module.register_buffer("seen", torch.zeros(3) if seen is None else seen, persistent=persistent)
    return module


def adds(module: Any, x: torch.Tensor) -> None:
    module.seen.add_(x.detach().mean(0))


def assigns(module: Any, x: torch.Tensor) -> None:
    module.seen = module.seen + 1


# name -> (module, names in the warning)
WARN: dict[str, tuple[Any, str]] = {
    "BatchNorm": (lambda: nn.BatchNorm1d(3), "'running_mean', 'running_var', 'num_batches_tracked'"),
    "two BatchNorms": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)), "'1.running_mean' and 2 more"),
    "a new tensor": (lambda: own(assigns), "'seen'"),
    "in place": (lambda: own(adds), "'seen'"),
    "one element of a column": (lambda: own(assigns, seen=torch.zeros(1, 4)[:, 2]), "'seen'"),
    "another shape": (lambda: own(lambda m, x: setattr(m, "seen", torch.ones(5))), "'seen'"),
    "statistics that no version counts": (
        lambda: own(lambda m, x: F.batch_norm(x.detach(), m.seen, torch.ones(3), training=True)), "'seen'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "names"), WARN.values(), ids=WARN)
def test_the_first_call_that_throws_a_change_away_warns_and_names_buffers_and_remedy(make, names) -> None:
    torch.manual_seed(0)
    apply, params, buffers = fs.make_functional(make())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for function in (apply, apply, apply.train()):  # the last one shares the state
            function(params, buffers, x)
    (warning,) = said
    assert re.search(rf"buffers of the module \(.*{names}\), and the call threw the changes away: use", str(warning.message))
    assert "mutable=True), whose calls return the new buffers, or apply.eval() if" in str(warning.message)
    assert warning.filename == __file__


QUIET: dict[str, tuple[Any, Any]] = {
    "evaluation": (lambda: nn.Sequential(nn.BatchNorm1d(3)), lambda f: f.eval()),
    "no running statistics": (lambda: nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)), lambda f: f),
    "no buffers": (lambda: nn.Sequential(nn.Linear(3, 3)), lambda f: f),
    "a buffer that is not saved": (lambda: own(adds, persistent=False), lambda f: f),
    "a write of the same values": (lambda: own(lambda m, x: m.seen.zero_()), lambda f: f),
    "buffers that are NaN": (lambda: own(lambda m, x: None), lambda f: f),
}


@pytest.mark.parametrize(("make", "change"), QUIET.values(), ids=QUIET)
def test_a_call_that_throws_nothing_away_does_not_warn(make, change) -> None:
    apply, params, buffers = fs.make_functional(make())
    for _ in range(2):
        change(apply)(params, buffers, x)  # warnings are errors here


def test_a_change_in_a_later_call_is_seen() -> None:
    apply, params, buffers = fs.make_functional(own(lambda module, x: adds(module, x) if x.sum() > 0 else None))
    apply(params, buffers, -torch.ones(2, 3))
    with pytest.warns(UserWarning, match=r"changed buffers of the module \('seen'\)"):
        apply(params, buffers, torch.ones(2, 3))


def test_where_versions_and_values_cannot_be_read_the_call_is_silent() -> None:
    apply, params, buffers = fs.make_functional(nn.BatchNorm1d(3))
    params = {name: value.detach() for name, value in params.items()}
    with torch.inference_mode():
        apply(params, buffers, x)  # warnings are errors here
    torch.func.grad(lambda p: apply(p, buffers, x).square().sum())(params)
    meta = lambda tensors: {name: value.to("meta") for name, value in tensors.items()}  # noqa: E731
    apply(meta(params), meta(buffers), x.to("meta"))
    with pytest.warns(UserWarning, match="threw the changes away"):
        apply(params, buffers, x)


def test_buffers_cast_by_the_plan_are_compared_in_their_dtype_during_the_call() -> None:
    functional = fs.make_functional(own(lambda module, x: None))
    buffers = {**functional[2], "seen": torch.full((3,), 1 / 3)}  # not a number in bfloat16
    precision = fs.MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    _, sharded, shards = of_module(fs.Mesh(), functional, precision=precision)
    sharded(shards, buffers, x)  # warnings are errors here


class Keeps(Runs):
    """A module whose forward leaves what ``do`` leaves, beside what it had before."""

    of_class = 0

    def __init__(self, do: Any) -> None:
        super().__init__(lambda m, x: (do(m, x), m.inner.lin(x))[1], inner=nn.ModuleDict({"lin": nn.Linear(3, 3)}))
        self.n, self.name, self.cache, self.masks, self.rate = 0, "first", None, {}, float("nan")
        self.keys, self.layers, self.last = torch.zeros(2, 2**14), [{"keys": torch.zeros(3)}], torch.zeros(3)
        self.noise, self.inner.n = torch.Generator().manual_seed(1), 0
        self.inner.when = Raises()


# name -> (what a forward leaves, the attribute)
LEAVES: dict[str, tuple[Any, str]] = {
    "a counter": (lambda m, x: setattr(m, "n", m.n + 1), "'n'"),
    "a counter of an inner module": (lambda m, x: setattr(m.inner, "n", m.inner.n + 1), "'inner.n'"),
    "a counter of the class": (lambda m, x: setattr(m, "of_class", m.of_class + 1), "'of_class'"),
    "a choice": (lambda m, x: setattr(m, "name", "second"), "'name'"),
    "random numbers": (lambda m, x: torch.rand(2, generator=m.noise), "'noise'"),
    "a tensor in place of a number": (lambda m, x: setattr(m, "n", x), "'n'"),
    "keys": (lambda m, x: m.keys[0].fill_(1), "'keys'"),
    "keys of a layer": (lambda m, x: m.layers[0]["keys"].add_(x.detach().mean(0)), "'layers'"),
    "through data": (lambda m, x: m.last.data.add_(1), "'last'"),
    "another parameter": (lambda m, x: setattr(m.inner.lin, "weight", nn.Parameter(torch.ones(3, 3))), "'inner.lin.weight'"),
}
# What a forward may compute again at any time, and what it does not keep.
HARMLESS: dict[str, Any] = {
    "nothing": lambda m, x: None,
    "a cache": lambda m, x: setattr(m, "cache", torch.ones(3)),
    "a dictionary of masks": lambda m, x: m.masks.update({len(x): torch.ones(len(x))}),
    "a new attribute": lambda m, x: setattr(m, "last", x),
    "an equal value": lambda m, x: setattr(m, "name", "fir" + "st"),
    "another tensor": lambda m, x: setattr(m, "last", x.detach().mean(0)),
    "the same values": lambda m, x: m.keys.zero_(),
    "a module without parameters": lambda m, x: m.add_module("drop", nn.Dropout()),
    "a hook": lambda m, x: m.inner.lin.register_forward_hook(lambda *args: None),
    "a buffer that no state dict has": lambda m, x: m.register_buffer("mask", x, persistent=False),
}


def _warned(run: Any) -> list[list[str]]:
    """Return what each of three calls with other inputs says."""
    messages = []
    for number in range(3):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            run(torch.full((2, 3), 1.0 - number))
        messages.append([str(each.message) for each in said])
    return messages


@pytest.mark.parametrize("mutable", [False, True])
@pytest.mark.parametrize(("do", "name"), LEAVES.values(), ids=LEAVES)
def test_state_that_a_call_leaves_in_a_module_is_named_once(do: Any, name: str, mutable: bool) -> None:
    apply, params, buffers = fs.make_functional(Keeps(do), mutable=mutable)
    (said,), *later = _warned(lambda x: apply(params, buffers, x))
    assert f"the forward of Keeps set attributes of the module ({name}), and the call threw them away" in said
    assert later == [[], []]


# name -> (what a forward makes, the parameters)
MAKES: dict[str, tuple[Any, str]] = {
    "a module": (lambda m, x: setattr(m, "cache", nn.Linear(3, 2)), "'cache'"),
    "a module under a new name": (lambda m, x: m.inner.add_module("head", nn.Sequential(nn.Linear(3, 2))), "'inner.head'"),
    "a parameter": (lambda m, x: setattr(m.inner.lin, "scale", nn.Parameter(torch.ones(3))), "'inner.lin.scale'"),
}


@pytest.mark.parametrize("units", [None, ("inner.lin",)], ids=["whole", "a unit"])
@pytest.mark.parametrize(("make", "names"), MAKES.values(), ids=MAKES)
def test_parameters_that_a_call_makes_are_named_once(make: Any, names: str, units: Any) -> None:
    functional = fs.make_functional(Keeps(make))
    apply, params, buffers = functional
    if units is not None:
        _, apply, params = of_module(fs.Mesh(), functional, units)
    (said,), *later = _warned(lambda x: apply(params, buffers, x))
    assert f"the forward of Keeps made parameters ({names}), and the call threw them away" in said
    assert later == [[], []]


@pytest.mark.parametrize("do", HARMLESS.values(), ids=HARMLESS)
def test_caches_of_a_call_need_no_word(do: Any) -> None:
    apply, params, buffers = fs.make_functional(Keeps(do))
    assert _warned(lambda x: apply(params, buffers, x)) == [[], [], []]


@pytest.mark.parametrize("units", [(), ("inner.lin",)])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Keeps(LEAVES["a counter"][0]), "n"), (lambda: own(adds), "seen"),
    ],
)  # fmt: skip
def test_a_sharded_call_names_state_and_buffers_too(make: Any, name: str, units: tuple[str, ...]) -> None:
    functional = fs.make_functional(make())
    _, sharded, shards = of_module(fs.Mesh(), functional, units if name != "seen" else ())
    (first,), *later = _warned(lambda x: sharded(shards, functional[2], x))
    assert f"('{name}')" in first
    assert later == [[], []]


def test_state_lasts_while_a_function_of_the_module_runs() -> None:
    module = Keeps(LEAVES["a counter"][0])

    def twice(module: Any, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        first: torch.Tensor = module(x)
        return (first + module(x)) * module.n * scale

    apply, params, buffers = fs.make_functional(module)
    both = apply.method(twice)
    expected = module.inner.lin(x) * 2 * 2 * 0.5
    assert torch.equal(both(params, buffers, x, scale=0.5), expected)
    program = lambda model, x: model(x, scale=0.5)  # noqa: E731
    assert all(
        torch.equal(out, expected) for out in outputs_on(2, (both, params, buffers), x, ["inner.lin"], program=program)
    )
    assert module.n == 0


# --- a module that is changed between make_functional and fully_shard -----------------------------


MESH = fs.Mesh()


def made() -> tuple[nn.Module, Any, fs.Plan]:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    apply, params, _ = fs.make_functional(net)
    return net, apply, fs.make_plan(params, 1)


def trained(net: nn.Module) -> None:
    net(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


CHANGES = {  # tests/misuse/documented.py has more
    "one module in evaluation": (lambda net: net[1].eval(), "train\\(\\) or eval\\(\\) was called"),
    "training": (trained, "its parameters were written"),
    "two changes": (lambda net: net.requires_grad_(False).eval(), "frozen or unfrozen, and train"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_change_that_reaches_nothing_is_told_once(change: Any, words: str) -> None:
    net, apply, plan = made()
    change(net)
    with pytest.warns(UserWarning, match=f"Sequential was changed after make_functional had copied it: .*{words}"):
        fs.fully_shard(apply.eval(), plan, MESH)
    fs.fully_shard(apply, plan, MESH)


def test_a_module_that_stays_or_changes_after_fully_shard_is_no_mistake() -> None:
    net, apply, plan = made()
    net(torch.ones(1, 2))
    net[0].register_forward_hook(lambda *_: None)  # as calls of models by Hugging Face do
    fs.fully_shard(apply, plan, MESH)
    net.eval().requires_grad_(False)
    fs.fully_shard(apply, plan, MESH)


def test_nothing_keeps_the_module_and_a_pickled_function_knows_none() -> None:
    net, apply, plan = made()
    again = pickle.loads(pickle.dumps(apply))
    assert again.late_changes is None
    apply.late_changes.module()  # there still
    del net
    gc.collect()
    assert apply.late_changes.module() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.fully_shard(apply, plan, MESH)
        fs.fully_shard(again, plan, MESH)


def test_a_module_that_drops_its_values_to_free_memory_is_no_mistake() -> None:
    net, apply, plan = made()
    net.to("meta")
    fs.fully_shard(apply, plan, MESH)
    net, apply, plan = made()
    net.to("meta").eval()
    with pytest.warns(UserWarning, match=r"copied it: train\(\) or eval\(\) was called\. Neither"):
        fs.fully_shard(apply, plan, MESH)
