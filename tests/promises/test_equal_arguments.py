"""Ranks that pass different arguments to a constructor all raise there, and read the first difference."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.ranks import run_ranks

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


class Setup:
    """A model on one rank, and the calls that ranks have to make with equal arguments."""

    def __init__(self, mesh: fs.Mesh) -> None:
        self.mesh = mesh
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.apply, self.params, self.buffers = fs.make_functional(net)
        self.plan, self.precise = (
            fs.make_plan(self.params, mesh, units=["*"], precision=precision)
            for precision in (None, fs.MixedPrecision(torch.bfloat16))
        )

    def sharded(self, precise: bool = False, **options: Any) -> object:
        return fs.fully_shard(self.apply, self.precise if precise else self.plan, self.mesh, **options)

    def step(self, cls: Any = SGD, precise: bool = False, **options: Any) -> object:
        names = ("lr", "momentum", "weight_decay", "groups")
        inner = {"lr": 0.1} | {name: options.pop(name) for name in names if name in options}
        if "groups" in inner:
            inner |= {"plan": self.plan, "mesh": self.mesh}
        optimizer = fs.torch_optimizer(cls, **inner)
        plan = self.precise if precise else self.plan
        return fs.make_train_step(lambda shards, buffers, batch: 0.0, optimizer, plan, self.mesh, **options)

    def muon(self, **options: Any) -> object:
        optimizer = fs.muon(self.plan, self.mesh, **{"lr": 0.1, **options})
        return fs.make_train_step(lambda shards, buffers, batch: 0.0, optimizer, self.plan, self.mesh)

    def per_matrix(self, **options: Any) -> object:
        others = fs.torch_optimizer(torch.optim.SGD, lr=options.pop("lr", 0.1))
        optimizer = fs.per_matrix(id, lambda grad, state: (grad, state), self.plan, self.mesh, others=others, **options)
        return fs.make_train_step(lambda shards, buffers, batch: 0.0, optimizer, self.plan, self.mesh)

    def grad(self, **options: Any) -> object:
        return fs.value_and_grad(lambda shards: 0.0, mesh=self.mesh, **options)

    def accumulate(self, micro_batches: int = 2, **options: Any) -> object:
        return fs.accumulate(lambda shards, batch: 0.0, micro_batches, mesh=self.mesh, **options)


def decay(step: int) -> float:
    return 0.1


def no_cast(unit: object, buffer: object) -> None:
    return None


def unchanged(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


STATIC, DYNAMIC = functools.partial(torch.compile, dynamic=False), functools.partial(torch.compile, dynamic=True)
BIASES, ONE_BIAS = [{"paths": ["**.bias"], "weight_decay": 0.0}], [{"paths": ["0.bias"], "weight_decay": 0.0}]
STRONGER = [{"paths": ["**.bias"], "weight_decay": 0.1}]
FORWARD = {"0": ["forward"]}
# What all ranks call, the options of rank 0 and of rank 1, and what each of them reads: the argument and its two values.
DIFFERENCES: list[tuple[str, dict[str, Any], dict[str, Any], str, str, str]] = [
    ("sharded", {}, {"remat": ["0"]}, "remat", "[]", "['0']"),
    ("sharded", {}, {"schedule": fs.Schedule(("0", "1"), True, "pre", 1)}, "the schedule", "None", "Schedule"),
    ("sharded", {}, {"compiler": torch.compile}, "compiler", "None", "torch.compile"),
    ("sharded", {"compiler": STATIC}, {"compiler": DYNAMIC}, "compiler",
     "torch.compile(dynamic=False)", "torch.compile(dynamic=True)"),
    ("sharded", {}, {"cast": no_cast}, "cast", "None", "tests.promises.test_equal_arguments.no_cast"),
    ("sharded", {"methods": FORWARD}, {}, "methods", str(FORWARD), "{}"),
    ("sharded", {}, {"precise": True}, "the plan", "", ""),
    ("step", {}, {"precise": True}, "the plan", "", ""),
    ("step", {"cls": SGD}, {"cls": ADAMW}, "the optimizer", "torch.optim.sgd.SGD", "torch.optim.adamw"),
    ("step", {"lr": 0.1}, {"lr": 0.2}, "lr of the optimizer", "0.1", "0.2"),
    ("step", {"lr": decay}, {"lr": 0.1}, "lr of the optimizer", "tests.promises.test_equal_arguments.decay", "0.1"),
    ("step", {}, {"momentum": 0.9}, "momentum of the optimizer", "nothing", "0.9"),
    ("step", {"groups": BIASES}, {"groups": STRONGER}, "weight_decay of group 1 of the optimizer", "0.0", "0.1"),
    ("step", {"groups": BIASES}, {"groups": ONE_BIAS}, "the group of leaf '1.bias'", "1", "0"),
    ("muon", {}, {"matrices": ["0"]}, "the optimizer of matrix '1.weight'", "muon", "nothing"),
    ("muon", {"momentum": 0.9}, {"momentum": 0.8}, "momentum of muon", "0.9", "0.8"),
    ("per_matrix", {}, {"matrices": ["0"]}, "the optimizer of matrix '1.weight'", "per_matrix", "nothing"),
    ("per_matrix", {}, {"lr": 0.2}, "lr of the optimizer, for other leaves", "0.1", "0.2"),
    ("step", {}, {"accumulate": 2}, "accumulate", "1", "2"),
    ("step", {}, {"donate": False}, "donate", "True", "False"),
    ("step", {}, {"has_aux": True}, "has_aux", "False", "True"),
    ("step", {}, {"mutable": True}, "mutable", "False", "True"),
    ("step", {}, {"weighted": True}, "weighted", "False", "True"),
    ("step", {}, {"max_norm": 1.0}, "max_norm", "None", "1.0"),
    ("step", {}, {"divisor": 1}, "divisor", "None", "1"),
    ("step", {}, {"reduce": {"0": "once"}}, "reduce", "'each'", "{'0':"),
    ("step", {}, {"scaler": fs.GradScaler(8.0)}, "scaler", "None", "Grad"),
    ("grad", {}, {"divisor": 1}, "divisor", "None", "1.0"),
    ("accumulate", {"micro_batches": 2}, {"micro_batches": 4}, "micro_batches", "2", "4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "usual", "odd", "argument", "first", "second"), DIFFERENCES)
def test_every_rank_raises_the_first_difference(
    name: str, usual: dict[str, Any], odd: dict[str, Any], argument: str, first: str, second: str
) -> None:
    def main(mesh: fs.Mesh) -> str:
        call = getattr(Setup(mesh), name)
        with pytest.raises(ValueError, match="must be the same on every rank") as raised:
            call(**(odd if mesh.rank == 1 else usual))
        return str(raised.value)

    for message in fs.simulate(main, 2):
        assert message.startswith(f"{argument} must be the same on every rank; rank 0 has {first}")
        assert f"and rank 1 has {second}" in message
        assert message.endswith(": build it from the same arguments everywhere")


# What ranks may pass in different ways: functions without a name of their own, and orders of sets.
ALIKE: dict[str, Callable[[Setup], object]] = {
    "lambdas": lambda s: s.sharded(cast=(lambda unit, buffer: None) if s.mesh.rank else no_cast),
    "compilers": lambda s: s.sharded(compiler=(lambda forward: forward) if s.mesh.rank else unchanged),
    "schedules": lambda s: s.step(lr=(lambda step: 0.1) if s.mesh.rank else decay),
    "orders of names": lambda s: s.sharded(remat=["0", "1"] if s.mesh.rank else ["1", "0"]),
    "tensors": lambda s: s.step(ADAMW, lr=torch.tensor(0.1, dtype=torch.float64)),
    "scalers": lambda s: s.step(scaler=fs.GradScaler(8.0)),
    "ignored parameters": lambda s: s.sharded(ignored_params=["none.*"] if s.mesh.rank else []),
    "hooks": lambda s: s.step(on_grads=(lambda unit, grads: None) if s.mesh.rank else None),
}


@pytest.mark.parametrize("case", ALIKE)
def test_arguments_that_may_differ_are_no_alarm(case: str) -> None:
    fs.simulate(lambda mesh: ALIKE[case](Setup(mesh)), 2)


def count_exchanges(mesh: fs.Mesh) -> tuple[list[int], list[int]]:
    """Return how many exchanges of texts each constructor makes, and how many each of three steps."""
    setup, counted = Setup(mesh), []
    sharded: Any = setup.sharded()
    detector = type(mesh.shard.desync)  # type: ignore[attr-defined]
    inner = detector.all_gather_text

    def counting(self: Any, text: str, label: str = "") -> list[str]:
        counted.append(label)
        return inner(self, text, label)

    def exchanges(action: Callable[[], Any]) -> int:
        counted.clear()
        action()
        return len(counted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(detector, "all_gather_text", counting)
        made = [exchanges(setup.sharded), exchanges(setup.step), exchanges(setup.grad), exchanges(setup.grad)]
        made += [exchanges(lambda: fs.value_and_grad(lambda shards: 0.0, mesh=mesh["shard"])) for _ in range(2)]
        loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
        step = fs.make_train_step(loss_fn, fs.torch_optimizer(SGD, lr=0.1), setup.plan, mesh, accumulate=2)
        state = [step.init(fs.shard(setup.params, setup.plan, mesh), setup.buffers)]
        take = lambda: state.append(step(state.pop(), torch.ones(2, 4))[0])  # noqa: E731
        return made, [exchanges(take) for _ in range(3)]


def test_a_constructor_makes_one_exchange_and_a_step_none() -> None:
    for made, run in run_ranks(count_exchanges, 2, timeout=30):
        assert made == [1, 1, 1, 0, 0, 0]  # the last ones have agreed on their options before
        assert run[1:] == [0, 0]  # the first one learns the order of the units
