"""Classes of ``torch.optim``, with and without groups, update flat shards as they update the whole model."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from funcshard.train.optimizer_step import TorchOptimizer, apply_update
from funcshard.train.param_groups import group_leaves
from tests.ranks import run_ranks, run_simulated

O = torch.optim  # noqa: E741
NO_DECAY = {"paths": ["**.bias", "**.norm*"], "weight_decay": 0.0}
FAST = {"paths": ["head.weight"], "lr": 0.3}
Optimizer = tuple[Any, dict[str, Any], list[dict[str, Any]]]  # the class, its options, groups
# Every class, alone and with each of its options, is in tests/zoo/test_torch_tables.py
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD fused": (O.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, []),
    "SGD foreach": (O.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}, []),
    "Adam fused": (O.Adam, {"lr": 0.1, "fused": True}, []),
    "AdamW foreach": (O.AdamW, {"lr": 0.1, "foreach": True}, []),
    "AdamW fused": (O.AdamW, {"lr": 0.1, "fused": True}, []),
    "NAdam foreach": (O.NAdam, {"lr": 0.1, "foreach": True}, []),
    "Adagrad foreach": (O.Adagrad, {"lr": 0.1, "foreach": True}, []),
    "Adagrad fused": (O.Adagrad, {"lr": 0.1, "fused": True}, []),
    "ASGD foreach": (O.ASGD, {"lr": 0.1, "t0": 2.0, "foreach": True}, []),
    **{
        f"{cls.__name__} with a schedule": (cls, {"lr": lambda step: 0.1 / (1 + step)}, [])
        for cls in (O.SGD, O.AdamW, O.NAdam, O.ASGD)
    },
    "AdamW in groups": (O.AdamW, {"lr": 0.1, "weight_decay": 0.1}, [NO_DECAY, FAST]),
    "AdamW fused in groups": (O.AdamW, {"lr": 0.1, "weight_decay": 0.1, "fused": True}, [NO_DECAY, FAST]),
    "AdamW foreach in groups": (O.AdamW, {"lr": 0.1, "weight_decay": 0.1, "foreach": True}, [NO_DECAY]),
    "Adam amsgrad in groups": (O.Adam, {"lr": 0.1, "amsgrad": True}, [FAST]),
    "SGD in groups": (O.SGD, {"lr": 0.1, "weight_decay": 0.1}, [NO_DECAY]),
    "SGD momentum of one group": (O.SGD, {"lr": 0.1, "momentum": 0.9}, [{"paths": ["head"], "momentum": 0.0}]),
    "SGD, a schedule of one group": (O.SGD, {"lr": 0.1}, [{"paths": ["head"], "lr": lambda step: 0.5 * step}]),
    "NAdam in groups": (O.NAdam, {"lr": 0.1, "betas": (0.8, 0.9)}, [{"paths": ["head"], "betas": (0.5, 0.6)}]),
    "ASGD in groups": (O.ASGD, {"lr": 0.1, "t0": 2.0}, [{"paths": ["head"], "lr": 0.02}]),
    "Rprop in groups": (O.Rprop, {"lr": 0.1}, [FAST]),
}
WORLDS = [{"shard": 1}, {"shard": 3}, {"replicate": 2, "shard": 2}]


def example(seed: int = 0) -> dict[str, torch.Tensor]:
    # Every range has a multiple of 32 elements, so that kernels take the same vector instructions
    # for all of them.
    shapes: dict[str, tuple[int, ...]] = {"head.bias": (64,), "head.weight": (64, 65), "empty": (0,)}
    for i in range(2):
        names = {"bias": (64,), "norm1": (64,), "mid.weight": (64, 64)}
        shapes |= {f"blocks.{i}.{name}": shape for name, shape in names.items()}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def at(options: dict[str, Any], step: int) -> dict[str, Any]:
    return {name: value(step) if callable(value) else value for name, value in options.items()}


def on_the_whole(cls: Any, options: dict[str, Any], groups: list[dict[str, Any]], steps: int = 4) -> dict[str, torch.Tensor]:
    params = {name: torch.nn.Parameter(value) for name, value in example().items()}
    group_of, more = group_leaves(fs.make_plan(example(), 1), groups)
    members = [[params[name] for name in params if group_of[name] == number] for number in range(len(more))]
    optimizer = cls([{"params": own, **at(each, 0)} for own, each in zip(members, more, strict=True)], **at(options, 0))
    for step in range(steps):
        for group, each in zip(optimizer.param_groups, more, strict=True):
            group.update(at({**options, **each}, step))
        for name, grad in example(100 + step).items():
            params[name].grad = grad
        optimizer.step()
    return {name: value.detach() for name, value in params.items()}


def on_shards(mesh: fs.Mesh, make: Any, strategy: str = "full_shard", steps: int = 4) -> dict[str, torch.Tensor]:
    """Take steps with ``make(plan, mesh)``, or with an optimizer of the table."""
    plan = fs.make_plan(example(), mesh, units=["blocks.*"], strategy=strategy)
    if isinstance(make, str):
        cls, options, groups = OPTIMIZERS[make]
        optimizer: Any = fs.torch_optimizer(cls, groups=groups, plan=plan, mesh=mesh, **options)
    else:
        optimizer = make(plan, mesh)
    shards = fs.shard(example(), plan, mesh)
    state = optimizer[0](shards)
    structures = set()
    for step in range(steps):
        with fs.record_events() as events:
            arguments = fs.shard(example(100 + step), plan, mesh), state, shards
            is_pair = not isinstance(optimizer, TorchOptimizer)
            shards, state = apply_update(optimizer[1], *arguments) if is_pair else optimizer.step(*arguments)
        assert events == []
        structures.add(str(tree.map(lambda leaf: 0, state)))
    assert len(structures) == 1
    return fs.gather(shards, plan, mesh)


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_on_shards_are_steps_on_the_whole(name: str, world: Any) -> None:
    cls, options, groups = OPTIMIZERS[name]
    expected, plain = on_the_whole(*OPTIMIZERS[name]), on_the_whole(cls, options, [])
    assert bool(groups) != all(torch.equal(expected[path], plain[path]) for path in plain)  # the groups matter
    assert not torch.equal(expected["head.bias"], example()["head.bias"])
    for params in run_simulated(on_shards, math.prod(world.values()), name, shape=world):
        # Without groups a kernel takes vector or scalar instructions by the index of an element, and
        # their last bits differ.
        exact = {"rtol": 0, "atol": 0} if groups else {"rtol": 1e-6, "atol": 1e-7}
        torch.testing.assert_close(params, expected, **exact)


def test_processes_and_unsharded_units_update_groups_too() -> None:
    expected = on_the_whole(*OPTIMIZERS["AdamW in groups"])
    for params in run_ranks(on_shards, 2, "AdamW in groups") + run_simulated(on_shards, 2, "AdamW in groups", "no_shard"):
        torch.testing.assert_close(params, expected, rtol=0, atol=0)


def like_optax(grads: Any, state: int, params: Any = None) -> tuple[Any, int]:
    return tree.map(lambda g: -0.1 * g, grads), state + 1


def like_torchopt(grads: Any, state: int, *, params: Any = None, inplace: bool = True) -> tuple[Any, int]:
    assert not inplace  # updating in place would donate the arguments
    return tree.map(lambda g, p: -0.1 * g + 0 * p, grads, params), state


@pytest.mark.parametrize("update", [like_optax, like_torchopt])
def test_pairs_of_functions_are_called_as_they_are_written(update: Any) -> None:
    for params in fs.simulate(lambda mesh: on_shards(mesh, lambda *_: (lambda params: 0, update)), 2):
        torch.testing.assert_close(params, on_the_whole(O.SGD, {"lr": 0.1}, []), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "options"), [("sgd", {"momentum": 0.9}), ("adamw", {"weight_decay": 0.1})])
def test_torchopt_on_shards_is_torchopt_on_the_whole(name: str, options: dict[str, float]) -> None:
    torchopt = pytest.importorskip("torchopt", reason="an optional dependency of the tests")
    optimizer = getattr(torchopt, name)(0.1, **options)
    whole, state = example(), optimizer.init(example())
    for step in range(4):
        updates, state = optimizer.update(example(100 + step), state, params=whole, inplace=False)
        whole = torchopt.apply_updates(whole, updates, inplace=False)
    for params in fs.simulate(lambda mesh: on_shards(mesh, lambda *_: optimizer), 2):
        torch.testing.assert_close(params, whole, rtol=1e-6, atol=1e-7)


class Eager(O.SGD):
    """A class that makes its state when it is made, as Adagrad of older releases does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.state = {p: {"sum": torch.full_like(p, 0.5)} for p in self.param_groups[0]["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, own in self.state.items():
            p.sub_(self.param_groups[0]["lr"] * p.grad / own["sum"].add_(p.grad.square()).sqrt())


class Counting(O.SGD):
    """A class that counts its steps in its groups, as AdaBelief, Adan and schedule-free do elsewhere."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.turn = 0
        for group in self.param_groups:
            group["even"] = True

    def step(self, closure: Any = None) -> None:
        self.turn = (self.turn + 1) % 3
        for group in self.param_groups:
            group["taken"] = group.get("taken", torch.zeros(())) + 1
            group["even"] = not group["even"]
            assert group["even"] == (group["taken"] % 2 == 0)
            assert self.turn == group["taken"] % 3
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"] / group["taken"].item())


@pytest.mark.parametrize("groups", [[], [FAST]], ids=["alone", "in groups"])
def test_a_class_may_count_its_steps_in_its_groups(groups: Any, tmp_path: Path) -> None:
    expected = on_the_whole(Counting, {"lr": 0.1}, groups)

    def resumed(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(example(), mesh, units=["blocks.*"])
        optimizer = fs.torch_optimizer(Counting, lr=0.1, groups=groups, plan=plan, mesh=mesh)
        shards = fs.shard(example(), plan, mesh)
        state = optimizer.init(shards)
        for step in range(4):
            shards, state = optimizer.step(fs.shard(example(100 + step), plan, mesh), state, shards)
            if step == 1:
                fs.save(tmp_path / "state", state, plan, mesh)
                state = fs.restore(tmp_path / "state", plan, mesh)
            if step == 2:
                state_dict = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
                state = fs.optimizer_from_state_dict(state_dict, optimizer, plan, mesh)
        return fs.gather(shards, plan, mesh)

    for params in fs.simulate(resumed, 2):
        torch.testing.assert_close(params, expected, rtol=1e-6, atol=1e-7)


def test_a_schedule_wins_over_a_rate_that_the_class_changes() -> None:
    class Decaying(O.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            self.param_groups[0]["lr"] /= 2

    def rates(lr: Any) -> list[float]:
        optimizer, params = fs.torch_optimizer(Decaying, lr=lr), {"w": torch.zeros(1)}
        state, taken = optimizer.init(params), []
        for _ in range(3):
            params, state = optimizer.step({"w": -torch.ones(1)}, state, params)
            taken.append(params["w"].item())
        return taken

    assert rates(1.0) == [1.0, 1.5, 1.75]
    assert rates(lambda step: 1.0) == [1.0, 2.0, 3.0]


def test_state_of_all_parameters_together_is_refused() -> None:
    class Shared(O.SGD):
        def step(self, closure: Any = None) -> None:
            self.state["k"] = self.state.get("k", 0) + 1

    with pytest.raises(ValueError, match=r"Shared keeps \['k'\] in its state for all parameters together"):
        fs.torch_optimizer(Shared, lr=0.1)


def test_a_class_may_make_its_state_before_the_first_step() -> None:
    optimizer, grad = fs.torch_optimizer(Eager, elementwise=True, lr=0.2), torch.tensor([1.0, 2.0, 3.0])
    shards, whole = {"w": torch.ones(3)}, torch.nn.Parameter(torch.ones(3))
    theirs, state = Eager([whole], lr=0.2), optimizer.init(shards)
    for _ in range(3):
        whole.grad = grad.clone()
        theirs.step()
        shards, state = optimizer.step({"w": grad.clone()}, state, shards)
        assert torch.equal(shards["w"], whole.detach())
