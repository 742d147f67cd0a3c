"""A state of another optimizer, plan or world is refused before a step changes anything."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import same_bits

O = torch.optim  # noqa: E741
PARAMS = {"a": torch.ones(4, 3), "b": {"w": torch.ones(3, 3), "c": torch.ones(3)}}


def plan_of(ranks: Any = 1, units: tuple[str, ...] = ("a", "b")) -> fs.Plan:
    return fs.make_plan(PARAMS, ranks, units=units)


PLAN, MESH = plan_of(), fs.Mesh()


def grouped(cls: Any, *groups: dict[str, Any], **options: Any) -> Any:
    return fs.torch_optimizer(cls, groups=groups, plan=PLAN, mesh=MESH, **options)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: fs.torch_optimizer(O.SGD, lr=0.1),
    "SGD momentum": lambda: fs.torch_optimizer(O.SGD, lr=0.1, momentum=0.9),
    "AdamW": lambda: fs.torch_optimizer(O.AdamW, lr=0.1),
    "AdamW amsgrad": lambda: fs.torch_optimizer(O.AdamW, lr=0.1, amsgrad=True),
    "NAdam": lambda: fs.torch_optimizer(O.NAdam, lr=0.1),
    "Adamax": lambda: fs.torch_optimizer(O.Adamax, lr=0.1),
    "Adadelta": lambda: fs.torch_optimizer(O.Adadelta, lr=0.1),
    "Adagrad": lambda: fs.torch_optimizer(O.Adagrad, lr=0.1),
    "RMSprop": lambda: fs.torch_optimizer(O.RMSprop, lr=0.1),
    "RMSprop centered": lambda: fs.torch_optimizer(O.RMSprop, lr=0.1, centered=True),
    "Rprop": lambda: fs.torch_optimizer(O.Rprop, lr=0.1),
    "ASGD": lambda: fs.torch_optimizer(O.ASGD, lr=0.1),
    "AdamW in groups": lambda: grouped(O.AdamW, {"paths": ["**.c"], "weight_decay": 0.0}),
    "AdamW in three groups": lambda: grouped(O.AdamW, {"paths": ["**.c"]}, {"paths": ["a"]}),
    "muon": lambda: fs.muon(PLAN, MESH, lr=0.1),
    "muon of one matrix": lambda: fs.muon(PLAN, MESH, matrices=["a"], lr=0.1),
}


def shards() -> Any:
    return fs.shard(PARAMS, PLAN, MESH)


def after_a_step(optimizer: Any, params: Any = None, gradient: Any = None) -> Any:
    params = shards() if params is None else params
    return optimizer.step(shards() if gradient is None else gradient, optimizer.init(params), params)[1]


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("maker", OPTIMIZERS)
def test_a_state_is_taken_by_its_own_optimizer_only(maker: str) -> None:
    words = r"found .*make a new one with optimizer\.init\(shards\), or keep the optimizer, plan and mesh"
    for taker in OPTIMIZERS:
        state, optimizer, params = after_a_step(OPTIMIZERS[maker]()), OPTIMIZERS[taker](), shards()
        # SGD without momentum keeps nothing, so every other class takes its state for a fresh one.
        if maker == taker or (maker == "SGD" and "muon" not in taker):
            assert optimizer.step(shards(), state, params)[1]["steps"] == 2
            continue
        before = copy.deepcopy((params, state))
        with pytest.raises(ValueError, match=words):
            optimizer.step(shards(), state, params)
        same_bits((params, state), before)  # nothing has changed


def with_leaves(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda state: {**state, "leaves": change(state["leaves"])}


LONGER = r"'a\.float32' is not one of torch_optimizer\(AdamW\): its 'exp_avg' must have shape \(12,\); found .*24"
STRANGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no state": (lambda state: None, r"step takes \(grads, state, params\), and a state of .*; found NoneType: make"),
    "the leaves alone": (lambda state: state["leaves"], r"holds \['leaves', 'steps'\]; found \['a', 'b'\]: make"),
    "a unit less": (with_leaves(lambda own: {"a": own["a"]}), r"must be a tree like the parameters: .*'b'.*; make"),
    "a buffer more": (with_leaves(lambda own: {**own, "b": {**own["b"], "float16": {}}}), "'float16'"),
    "tensors": (with_leaves(lambda own: {"a": torch.ones(12), "b": torch.ones(12)}), "like the parameters: .*tensor"),
    "a longer entry": (with_leaves(lambda own: tree.map(lambda x: torch.cat([x, x]) if x.ndim else x, own)), LONGER),
}


@pytest.mark.parametrize(("change", "words"), STRANGE.values(), ids=STRANGE)
def test_a_state_of_another_structure_is_refused(change: Callable[[Any], Any], words: str) -> None:
    optimizer = OPTIMIZERS["AdamW"]()
    with pytest.raises(ValueError, match=words):
        optimizer.step(shards(), change(after_a_step(optimizer)), shards())


GRADIENTS: dict[str, tuple[Any, str]] = {
    "a unit less": ({"a": {"float32": torch.ones(12)}}, r"like the parameters: .*'b'.*; pass the gradients that"),
    "longer": (
        {"a": {"float32": torch.ones(13)}, "b": {"float32": torch.ones(12)}},
        r"a gradient must have the shape of its leaf, \(12,\); found a tensor of shape \(13,\): pass the grad",
    ),
}


@pytest.mark.parametrize("name", ["AdamW", "AdamW in groups"])
@pytest.mark.parametrize(("given", "words"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_of_another_tree_are_refused(name: str, given: Any, words: str) -> None:
    optimizer, params = OPTIMIZERS[name](), shards()
    with pytest.raises(ValueError, match=words):
        optimizer.step(given, optimizer.init(params), params)


def test_a_leaf_without_a_gradient_stays_as_it_is() -> None:
    optimizer, params = OPTIMIZERS["AdamW"](), shards()
    new, state = optimizer.step({**shards(), "b": {"float32": None}}, optimizer.init(params), params)
    assert torch.equal(new["b"]["float32"], shards()["b"]["float32"])
    assert not torch.equal(new["a"]["float32"], shards()["a"]["float32"])
    assert state["leaves"]["b"]["float32"] == {}
    optimizer.step(shards(), state, new)  # the state of one leaf is fresh, that of the other is not


class Late(O.SGD):
    """A class that keeps a further tensor from its second step on, and draws a random number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.rand(())
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["late" if "count" in state else "count"] = torch.zeros(())


def test_a_class_of_your_own_may_keep_more_from_step_to_step() -> None:
    torch.manual_seed(0)
    expected = torch.rand(())
    torch.manual_seed(0)
    optimizer = fs.torch_optimizer(Late, lr=0.1)
    assert torch.equal(torch.rand(()), expected)  # learning what the class keeps drew none of the caller's numbers
    assert optimizer.step.known == {"count": False}
    state = after_a_step(optimizer)
    for _ in range(2):
        _, state = optimizer.step(shards(), state, shards())
    assert sorted(state["leaves"]["a"]["float32"]) == ["count", "late"]
    with pytest.raises(ValueError, match=r"it must hold \['count'\]; found \['exp_avg', 'exp_avg_sq', 'step'\]"):
        optimizer.step(shards(), after_a_step(OPTIMIZERS["AdamW"]()), shards())


class OnlyElsewhere(O.SGD):
    """A class that fails on the CPU."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("not on this device")


def test_of_a_class_that_cannot_run_here_nothing_is_known() -> None:
    assert fs.torch_optimizer(OnlyElsewhere, lr=0.1).step.known is None


def test_a_schedule_of_momentum_may_begin_and_end_at_zero() -> None:
    optimizer = fs.torch_optimizer(O.SGD, lr=0.1, momentum=lambda step: 0.9 if step == 1 else 0.0)
    state = after_a_step(optimizer)
    for _ in range(3):
        _, state = optimizer.step(shards(), state, shards())
    assert state["steps"] == 4


def test_groups_with_and_without_momentum_keep_one_form() -> None:
    optimizer = grouped(O.SGD, {"paths": ["a"], "momentum": 0.0}, lr=0.1, momentum=0.9)
    state = after_a_step(optimizer)
    _, state = optimizer.step(shards(), state, shards())
    with pytest.raises(ValueError, match=r"it must hold \['momentum_buffer'\]; found \['exp_avg', 'exp_avg_sq', 'step'\]"):
        optimizer.step(shards(), after_a_step(OPTIMIZERS["AdamW in groups"]()), shards())


WHERE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "all": ("lr", lambda schedule: fs.torch_optimizer(O.SGD, lr=schedule)),
    "group": ("lr", lambda schedule: grouped(O.SGD, {"paths": ["a"], "lr": schedule}, lr=0.1)),
    "weight decay": ("weight_decay", lambda schedule: fs.torch_optimizer(O.SGD, lr=0.1, weight_decay=schedule)),
    "muon": ("lr", lambda schedule: fs.muon(PLAN, MESH, lr=schedule)),
    "momentum": ("momentum", lambda schedule: fs.torch_optimizer(O.SGD, lr=0.1, momentum=schedule)),
    "momentum of a group": (
        "momentum", lambda schedule: grouped(O.SGD, {"paths": ["a"], "momentum": schedule}, lr=0.1, momentum=0.9),
    ),
}  # fmt: skip
# Why two: a NaN is equal to nothing, and only math.nan is the same object as math.nan.
VALUES = {"NaN": math.nan, "another NaN": float("nan"), "negative": -0.1, "infinite": math.inf, "None": None, "true": True}
WRONG_AT = [(where, value) for where in WHERE for value in VALUES if "NaN" in value or "momentum" not in where]


@pytest.mark.parametrize(("where", "value"), WRONG_AT)
def test_a_schedule_that_goes_wrong_is_refused_at_that_step(where: str, value: str) -> None:
    name, make = WHERE[where]
    optimizer = make(lambda step: 0.1 if step < 2 else VALUES[value])
    params, state = shards(), optimizer.init(shards())
    for _ in range(2):
        params, state = optimizer.step(shards(), state, params)
    before = copy.deepcopy((params, state))
    rule = "a number.*; found .*nan.*" if name == "momentum" else "a finite number, at least 0; found .*"
    with pytest.raises((TypeError, ValueError), match=rf"{name} at step 2 must be {rule}: pass"):
        optimizer.step(shards(), state, params)
    same_bits((params, state), before)


@pytest.mark.parametrize("lr", [torch.tensor(0.1), torch.tensor([0.1])], ids=["[]", "[1]"])
def test_a_schedule_may_return_a_tensor(lr: torch.Tensor) -> None:
    results = []
    for rate in (lr, 0.1):
        optimizer = fs.torch_optimizer(O.SGD, lr=lambda step, rate=rate: rate)
        results.append(optimizer.step(shards(), optimizer.init(shards()), shards())[0])
    same_bits(*results)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "momentum NaN": (lambda: fs.torch_optimizer(O.SGD, momentum=math.nan), ValueError, "momentum must be a number.*nan"),
    "a typo for muon": (lambda: fs.muon(PLAN, MESH, lamb=1.0), TypeError, "Muon does not take the options: .*'lamb'"),
    "a group's typo for a class of one's own": (
        lambda: grouped(Late, {"paths": ["a"], "mometum": 0.9}), TypeError, "the options of group 1: .*'mometum'",
    ),
    "torch's own rule": (lambda: fs.torch_optimizer(O.AdamW, betas=(2.0, 0.9)), ValueError, "Invalid beta parameter"),
    "a group's betas": (
        lambda: grouped(O.AdamW, {"paths": ["a"], "betas": (2.0, 0.9)}), ValueError,
        r"AdamW does not take the options of group 1: Invalid beta parameter",
    ),
    "shards of another plan, with muon": (
        lambda: fs.muon(plan_of(1, ()), MESH).init(shards()), ValueError, "shards must hold the units of the plan",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_an_optimizer_that_cannot_be_is_refused_when_it_is_made(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_shards_of_another_size_than_the_groups_were_laid_out_for_are_refused() -> None:
    optimizer = OPTIMIZERS["AdamW in groups"]()
    larger = {"a": torch.ones(5, 3), "b": PARAMS["b"]}
    params = fs.shard(larger, fs.make_plan(larger, 1, units=["a", "b"]), MESH)
    words = r"shard 'float32' of unit 'a' must have shape \(12,\), as in the optimizer's plan; found a tensor of shape \(15,"
    with pytest.raises(ValueError, match=words):
        optimizer.step(params, optimizer.init(params), params)
