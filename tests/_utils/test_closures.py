"""The objects that walks yield, and those they don't enter; functions whose caches a trace empties."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils.closures import captured, reachable
from tests.core.units import forward_mode
from tests.strange_objects import NO_COPY, STRANGE, RaisingDict, RaisingList, RaisingTuple

WALKS = pytest.mark.parametrize("walk", [captured, reachable])


class Marker:
    """An object for a walk to find, compared by identity."""


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self) -> None: ...


def closure(value: Any) -> Callable[[], Any]:
    return lambda: value


def finds(walk: Callable[[Any], Iterator[Any]], start: Any, marker: Any) -> bool:
    return any(found is marker for found in walk(start))


def attribute_of(outer: Any, value: Any) -> Any:
    outer.held = value
    return outer


# An object from which a walk starts, and whether ``captured`` and ``reachable`` find the marker there.
FOUND = {
    "the object itself": (lambda marker: marker, True, True),
    "a closure": (closure, True, True),
    "a default": (lambda marker: lambda held=marker: held, True, True),
    "a positional argument of a partial": (lambda marker: functools.partial(print, marker), True, True),
    "a keyword argument of a partial": (lambda marker: functools.partial(print, held=marker), True, True),
    "containers in a closure": (lambda marker: closure(({"key": [marker]},)), True, True),
    "a tuple that does not iterate": (lambda marker: RaisingTuple([marker]), True, True),
    "a list that does not iterate": (lambda marker: RaisingList([marker]), True, True),
    "a dictionary that does not iterate": (lambda marker: RaisingDict(a=marker), True, True),
    "an attribute": (Holder, False, True),
    "the object of a method": (lambda marker: Holder(marker).method, False, True),
    "a key of a dictionary": (lambda marker: {marker: 1}, False, True),
    "a set": (lambda marker: {marker}, False, True),
    "a weak reference": (lambda marker: closure(weakref.ref(marker)), False, True),
    "a module": (lambda marker: closure(attribute_of(torch.nn.Module(), marker)), False, False),
    "a tensor": (lambda marker: closure(attribute_of(torch.ones(1), marker)), False, False),
    "a class": (lambda marker: closure(type("Annotated", (), {"held": marker})), False, False),
}


@pytest.mark.parametrize(("make", "by_captured", "by_reachable"), FOUND.values(), ids=FOUND)
def test_captured_follows_what_a_programmer_writes_and_reachable_all_references(make, by_captured, by_reachable):
    marker = Marker()
    start = make(marker)
    assert (finds(captured, start, marker), finds(reachable, start, marker)) == (by_captured, by_reachable)
    assert not any(finds(walk, make(Marker()), marker) for walk in (captured, reachable))


GLOBALS: dict[str, Any] = {"torch": torch, "other": len}


def in_a_file(source: str, **values: Any) -> Any:
    """Return ``f`` as ``source`` defines it in a file with these global variables."""
    names = {**GLOBALS, **values}
    exec(source, names)
    return names["f"]


def named() -> tuple[torch.nn.Module, dict[str, Any]]:
    module = torch.nn.Linear(1, 1)
    again = in_a_file("f = lambda x: inner(x)", inner=module)  # a function of another file
    return module, {"net": module, "old": module.forward, "again": again, "held": [module]}


NAMED = {
    "a module": ("f = lambda x: net(x)", True),
    "a bound method": ("f = lambda x: old(x)", True),
    "a function of the file": ("def g(x): return old(x)\nf = lambda x: g(x)", True),
    "an attribute of that name": ("f = lambda x: x.old + x.net", False),
    "a local variable of that name": ("def f(x, net): return net(x)", False),
    "a container": ("f = lambda x: held[0](x)", False),
    "a global variable of a function of another file": ("f = lambda x: again(x)", False),
}


@pytest.mark.parametrize(("source", "found"), NAMED.values(), ids=NAMED)
def test_reachable_follows_the_callables_in_global_variables_that_code_names(source, found):
    module, values = named()
    f = in_a_file(source, **values)
    assert finds(reachable, f, module) == found
    assert finds(reachable, [{"f": f}], module) == found
    assert not finds(captured, f, module)


@WALKS
def test_a_walk_ends_on_a_cycle_and_yields_each_object_once(walk):
    def recursive() -> Any:
        return recursive, both

    shared: list[Any] = []
    both = [shared, shared, recursive]
    shared.append(both)
    found = [id(each) for each in walk(recursive)]
    assert len(found) == len(set(found))
    assert {id(recursive), id(both), id(shared)} <= set(found)


@WALKS
def test_an_empty_cell_is_no_error(walk):
    def outer() -> Callable[[], Any]:
        def inner() -> Any:
            return later

        list(walk(inner))  # ``later`` has no value yet
        later = 1
        return inner

    assert 1 in list(walk(outer()))


@WALKS
@pytest.mark.parametrize("make", [*STRANGE.values(), *NO_COPY.values()], ids=[*STRANGE, *NO_COPY])
def test_a_walk_survives_objects_that_raise_when_looked_at(walk, make):
    marker = Marker()
    strange = make()
    for start in (strange, closure(strange), [strange, marker], {"strange": strange, "marker": marker}):
        list(walk(start))
    assert finds(walk, [strange, marker], marker)
    assert finds(walk, [marker, strange], marker)


# --- caches of functions --------------------------------------------------------------------------


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a cached function in a wrapper, as transformers does it."""
    cached = functools.lru_cache(maxsize=2)(function)
    return functools.wraps(function)(lambda *args: cached(*args))


@functools.lru_cache
def positions(size: int) -> torch.Tensor:
    rows = torch.arange(size)
    rows[1:] += 1  # in place, and of whole numbers, which a trace computes
    return rows[1:] - 2


@functools.lru_cache
def settings() -> dict[str, float]:
    """Return the one object of its kind, which a trace leaves in its cache."""
    return {"scale": 1.0}


class Cached(torch.nn.Module):
    """A model whose functions cache a table, as BEiT's, or one of real numbers, as DINOv3's."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = torch.nn.Linear(4, 4)

    @staticmethod
    @wrapped
    def weights(size: int) -> torch.Tensor:
        return torch.linspace(0.0, 1.0, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.lin(x)[:, positions(5)] * self.weights(4) * settings()["scale"]).square().mean()


def recorded(mesh: fs.Mesh, apply: Any, params: Any) -> None:
    plan = fs.make_plan(params, mesh)
    sharded = fs.fully_shard(apply, plan, mesh)
    step = fs.make_train_step(lambda s, b, x: sharded(s, b, x), fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), {})
    loss = step(state, torch.ones(2, 4))[1]["loss"]
    state = step.init(fs.shard(params, plan, mesh), {})
    assert torch.equal(fs.trace(step, state, torch.ones(2, 4))(state, torch.ones(2, 4))[1]["loss"], loss)


def estimated(mesh: fs.Mesh, apply: Any, params: Any) -> None:
    profile = fs.profile(apply, params, {}, torch.ones(2, 4))
    fs.estimate(profile, fs.make_plan(params, 2), transform="hvp")


@forward_mode
@pytest.mark.parametrize("verb", [recorded, estimated])
def test_a_model_that_caches_tensors_is_the_same_before_and_after_a_trace(verb: Callable[..., Any]) -> None:
    apply, params, _ = fs.make_functional(Cached())
    same_settings = settings()
    x = torch.ones(2, 4)
    expected = ((x @ params["lin.weight"].T + params["lin.bias"]) * torch.linspace(0.0, 1.0, 4)).square().mean()
    for _ in range(3):
        verb(fs.Mesh(), apply, params)
        torch.testing.assert_close(apply(params, {}, x), expected)
        verb(fs.Mesh(), apply, params)
    assert settings() is same_settings
