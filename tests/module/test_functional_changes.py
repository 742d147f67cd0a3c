"""Changes that a function of a module drops: those of calls, and those of the module later."""

from __future__ import annotations

import pickle
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


class Keeps(Runs):
    """A module whose forward leaves what ``do`` leaves, beside what it had before."""

    of_class = 0

    def __init__(self, do: Any) -> None:
        super().__init__(lambda m, x: (do(m, x), m.inner.lin(x))[1], inner=nn.ModuleDict({"lin": nn.Linear(3, 3)}))
        self.n, self.name, self.cache, self.masks, self.rate = 0, "first", None, {}, float("nan")
        self.keys, self.layers, self.last = torch.zeros(2, 2**14), [{"keys": torch.zeros(3)}], torch.zeros(3)
        self.noise, self.inner.n = torch.Generator().manual_seed(1), 0
        self.inner.when = Raises()


def count(module: Any, x: torch.Tensor) -> None:
    module.n += 1


def keeps(do: Any) -> Any:
    return lambda: Keeps(do)


# name -> (module, what it changes, and the names)
CHANGED_BUFFERS: dict[str, tuple[Any, str]] = {
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
SET_ATTRIBUTES: dict[str, tuple[Any, str]] = {
    "a counter": (keeps(count), "'n'"),
    "a counter of an inner module": (keeps(lambda m, x: setattr(m.inner, "n", m.inner.n + 1)), "'inner.n'"),
    "a counter of the class": (keeps(lambda m, x: setattr(m, "of_class", m.of_class + 1)), "'of_class'"),
    "a choice": (keeps(lambda m, x: setattr(m, "name", "second")), "'name'"),
    "random numbers": (keeps(lambda m, x: torch.rand(2, generator=m.noise)), "'noise'"),
    "a tensor in place of a number": (keeps(lambda m, x: setattr(m, "n", x)), "'n'"),
    "keys": (keeps(lambda m, x: m.keys[0].fill_(1)), "'keys'"),
    "keys of a layer": (keeps(lambda m, x: m.layers[0]["keys"].add_(x.detach().mean(0))), "'layers'"),
    "through data": (keeps(lambda m, x: m.last.data.add_(1)), "'last'"),
    "another parameter": (
        keeps(lambda m, x: setattr(m.inner.lin, "weight", nn.Parameter(torch.ones(3, 3)))), "'inner.lin.weight'",
    ),
}  # fmt: skip
MADE_PARAMETERS: dict[str, tuple[Any, str]] = {
    "a module": (keeps(lambda m, x: setattr(m, "cache", nn.Linear(3, 2))), "'cache'"),
    "a module under a new name": (
        keeps(lambda m, x: m.inner.add_module("head", nn.Sequential(nn.Linear(3, 2)))), "'inner.head'",
    ),
    "a parameter": (keeps(lambda m, x: setattr(m.inner.lin, "scale", nn.Parameter(torch.ones(3)))), "'inner.lin.scale'"),
}  # fmt: skip
THROWN_AWAY = {
    name: (make, kind, names)
    for kind, table in (
        ("changed buffers of the module", CHANGED_BUFFERS),
        ("set attributes of the module", SET_ATTRIBUTES),
        ("made parameters", MADE_PARAMETERS),
    )
    for name, (make, names) in table.items()
}
# What a forward may compute again at any time, and what it does not keep.
HARMLESS: dict[str, Any] = {
    "evaluation": lambda: nn.Sequential(nn.BatchNorm1d(3)),
    "no running statistics": lambda: nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False)),
    "no buffers": lambda: nn.Sequential(nn.Linear(3, 3)),
    "a buffer that is not saved": lambda: own(adds, persistent=False),
    "a write of the same values": lambda: own(lambda m, x: m.seen.zero_()),
    "buffers that are NaN": lambda: own(lambda m, x: None),
    "nothing": keeps(lambda m, x: None),
    "a cache": keeps(lambda m, x: setattr(m, "cache", torch.ones(3))),
    "a dictionary of masks": keeps(lambda m, x: m.masks.update({len(x): torch.ones(len(x))})),
    "a new attribute": keeps(lambda m, x: setattr(m, "last", x)),
    "an equal value": keeps(lambda m, x: setattr(m, "name", "fir" + "st")),
    "another tensor": keeps(lambda m, x: setattr(m, "last", x.detach().mean(0))),
    "the same values": keeps(lambda m, x: m.keys.zero_()),
    "a module without parameters": keeps(lambda m, x: m.add_module("drop", nn.Dropout())),
    "a hook": keeps(lambda m, x: m.inner.lin.register_forward_hook(lambda *args: None)),
    "a buffer that no state dict has": keeps(lambda m, x: m.register_buffer("mask", x, persistent=False)),
}


def warned(*functions: Any) -> list[list[str]]:
    """Return what the calls of functions with different inputs say."""
    messages = []
    for number, function in enumerate(functions):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            function(x * (1.0 - number))
        assert all(each.filename == __file__ for each in said)
        messages.append([str(each.message) for each in said])
    return messages


@pytest.mark.parametrize("how", ["whole", "mutable", "sharded"])
@pytest.mark.parametrize(("make", "kind", "names"), THROWN_AWAY.values(), ids=THROWN_AWAY)
def test_the_first_call_that_throws_something_away_names_it(make: Any, kind: str, names: str, how: str) -> None:
    module = make()
    functional = apply, params, buffers = fs.make_functional(module, mutable=how == "mutable")
    functions = (apply, apply, apply.train())  # the last one shares what was said
    if how == "sharded":
        _, sharded, params = of_module(fs.Mesh(), functional, ["inner.lin"] * isinstance(module, Keeps))
        functions = (sharded,) * 3
    if how == "sharded" and names == "'inner.lin.weight'":
        with pytest.raises(RuntimeError, match="put another tensor in place"):
            sharded(params, buffers, x)
        return
    first, *later = warned(*(lambda x, function=function: function(params, buffers, x) for function in functions))
    assert later == [[], []]
    if how == "mutable" and "buffers" in kind:  # a call returns them
        assert first == []
        return
    (said,) = first
    assert f"{kind} (" in said
    assert f"{names}), and the call threw " in said
    if "buffers" in kind:
        assert "mutable=True), whose calls return the new buffers, or apply.eval() if" in said


@pytest.mark.parametrize(("name", "make"), HARMLESS.items(), ids=HARMLESS)
def test_a_call_that_throws_nothing_away_says_nothing(name: str, make: Any) -> None:
    apply, params, buffers = fs.make_functional(make())
    apply = apply.eval() if name == "evaluation" else apply
    assert warned(*[lambda x: apply(params, buffers, x)] * 3) == [[], [], []]


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


def test_state_lasts_while_a_function_of_the_module_runs() -> None:
    module = Keeps(count)

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


def test_functions_of_a_module_that_is_gone_and_pickled_ones_know_no_changes() -> None:
    _, apply, plan = made()  # tests/module/test_functional_modules.py: nothing keeps the module
    again = pickle.loads(pickle.dumps(apply))
    assert again.late_changes is None
    for function in (apply, again):
        fs.fully_shard(function, plan, MESH)  # warnings are errors here


def test_a_module_that_drops_its_values_to_free_memory_is_no_mistake() -> None:
    net, apply, plan = made()
    net.to("meta")
    fs.fully_shard(apply, plan, MESH)
    net, apply, plan = made()
    net.to("meta").eval()
    with pytest.warns(UserWarning, match=r"copied it: train\(\) or eval\(\) was called\. Neither"):
        fs.fully_shard(apply, plan, MESH)
