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
        self.plan = fs.make_plan(self.params, mesh, units=["*"])

    def sharded(self, **options: Any) -> object:
        return fs.fully_shard(self.apply, self.plan, self.mesh, **options)

    def step(self, cls: Any = SGD, plan: Any = None, **options: Any) -> object:
        names = ("lr", "momentum", "weight_decay", "groups")
        inner = {"lr": 0.1} | {name: options.pop(name) for name in names if name in options}
        if "groups" in inner:
            inner |= {"plan": self.plan, "mesh": self.mesh}
        optimizer = fs.torch_optimizer(cls, **inner)
        return fs.make_train_step(lambda shards, buffers, batch: 0.0, optimizer, plan or self.plan, self.mesh, **options)

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


def schedule(s: Setup) -> fs.Schedule:
    return fs.make_schedule(s.plan, order=["0", "1"])


def precise(s: Setup) -> fs.Plan:
    return fs.make_plan(s.params, s.mesh, units=["*"], precision=fs.MixedPrecision(torch.bfloat16))


# What a rank calls with equal arguments, what rank 1 calls in its place, and words of the error.
DIFFERENCES: dict[str, tuple[Callable[[Setup], object], Callable[[Setup], object], str]] = {
    "remat": (lambda s: s.sharded(), lambda s: s.sharded(remat=["0"]),
     "remat must be the same on every rank; rank 0 has [] and rank 1 has ['0']"),
    "schedule": (lambda s: s.sharded(), lambda s: s.sharded(schedule=schedule(s)),
     "the schedule must be the same on every rank; rank 0 has None and rank 1 has Schedule"),
    "compiler": (lambda s: s.sharded(), lambda s: s.sharded(compiler=torch.compile),
     "compiler must be the same on every rank; rank 0 has None and rank 1 has torch.compile"),
    "options of the compiler": (lambda s: s.sharded(compiler=functools.partial(torch.compile, dynamic=False)),
     lambda s: s.sharded(compiler=functools.partial(torch.compile, dynamic=True)),
     "rank 0 has torch.compile(dynamic=False) and rank 1 has torch.compile(dynamic=True)"),
    "cast": (lambda s: s.sharded(), lambda s: s.sharded(cast=lambda unit, buffer: None),
     "cast must be the same on every rank; rank 0 has None and rank 1 has a function"),
    "methods": (lambda s: s.sharded(methods={"0": ["forward"]}), lambda s: s.sharded(),
     "methods must be the same on every rank; rank 0 has {'0': ['forward']} and rank 1 has {}"),
    "precision": (lambda s: s.sharded(), lambda s: fs.fully_shard(s.apply, precise(s), s.mesh),
     "the plan must be the same on every rank; rank 0 has"),
    "plan of a step": (lambda s: s.step(), lambda s: s.step(plan=precise(s)),
     "the plan must be the same on every rank; rank 0 has"),
    "optimizer": (lambda s: s.step(SGD), lambda s: s.step(ADAMW),
     "the optimizer must be the same on every rank; rank 0 has torch.optim.sgd.SGD and rank 1 has torch.optim.adamw"),
    "learning rate": (lambda s: s.step(lr=0.1), lambda s: s.step(lr=0.2),
     "lr of the optimizer must be the same on every rank; rank 0 has 0.1 and rank 1 has 0.2"),
    "a schedule on one rank": (lambda s: s.step(lr=decay), lambda s: s.step(lr=0.1),
     "lr of the optimizer must be the same on every rank; rank 0 has tests.promises.test_equal_arguments.decay and"),
    "momentum on one rank": (lambda s: s.step(), lambda s: s.step(momentum=0.9),
     "momentum of the optimizer must be the same on every rank; rank 0 has nothing and rank 1 has 0.9"),
    "options of a group": (lambda s: s.step(groups=[{"paths": ["**.bias"], "weight_decay": 0.0}]),
     lambda s: s.step(groups=[{"paths": ["**.bias"], "weight_decay": 0.1}]),
     "weight_decay of group 1 of the optimizer must be the same on every rank; rank 0 has 0.0 and rank 1 has 0.1"),
    "leaves of a group": (lambda s: s.step(groups=[{"paths": ["**.bias"], "weight_decay": 0.0}]),
     lambda s: s.step(groups=[{"paths": ["0.bias"], "weight_decay": 0.0}]),
     "the group of leaf '1.bias' must be the same on every rank; rank 0 has 1 and rank 1 has 0"),
    "matrices of muon": (lambda s: s.muon(), lambda s: s.muon(matrices=["0"]),
     "the optimizer of matrix '1.weight' must be the same on every rank; rank 0 has muon and rank 1 has nothing"),
    "matrices of per_matrix": (lambda s: s.per_matrix(), lambda s: s.per_matrix(matrices=["0"]),
     "the optimizer of matrix '1.weight' must be the same on every rank; rank 0 has per_matrix and rank 1 has nothing"),
    "others of per_matrix": (lambda s: s.per_matrix(), lambda s: s.per_matrix(lr=0.2),
     "lr of the optimizer, for other leaves must be the same on every rank; rank 0 has 0.1 and rank 1 has 0.2"),
    "options of muon": (lambda s: s.muon(momentum=0.9), lambda s: s.muon(momentum=0.8),
     "momentum of muon must be the same on every rank; rank 0 has 0.9 and rank 1 has 0.8"),
    **{
        name: (lambda s: s.step(), lambda s, name=name, value=value: s.step(**{name: value}), words)
        for name, value, words in (
            ("accumulate", 2, "accumulate must be the same on every rank; rank 0 has 1 and rank 1 has 2"),
            ("donate", False, "donate must be the same on every rank; rank 0 has True and rank 1 has False"),
            ("has_aux", True, "has_aux must be the same on every rank; rank 0 has False and rank 1 has True"),
            ("mutable", True, "mutable must be the same on every rank; rank 0 has False and rank 1 has True"),
            ("weighted", True, "weighted must be the same on every rank; rank 0 has False and rank 1 has True"),
            ("max_norm", 1.0, "max_norm must be the same on every rank; rank 0 has None and rank 1 has 1.0"),
            ("divisor", 1, "divisor must be the same on every rank; rank 0 has None and rank 1 has 1"),
            ("reduce", {"0": "once"}, "reduce must be the same on every rank; rank 0 has 'each' and rank 1 has {'0':"),
            ("scaler", fs.GradScaler(8.0), "scaler must be the same on every rank; rank 0 has None and rank 1 has Grad"),
        )
    },
    "divisor of value_and_grad": (lambda s: s.grad(), lambda s: s.grad(divisor=1),
     "divisor must be the same on every rank; rank 0 has None and rank 1 has 1.0"),
    "micro-batches": (lambda s: s.accumulate(2), lambda s: s.accumulate(4),
     "micro_batches must be the same on every rank; rank 0 has 2 and rank 1 has 4"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENCES)
def test_every_rank_raises_the_first_difference(case: str) -> None:
    usual, odd, words = DIFFERENCES[case]

    def main(mesh: fs.Mesh) -> str:
        setup = Setup(mesh)
        with pytest.raises(ValueError, match="must be the same on every rank") as raised:
            (odd if mesh.rank == 1 else usual)(setup)
        return str(raised.value)

    for message in fs.simulate(main, 2):
        assert words in message
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
