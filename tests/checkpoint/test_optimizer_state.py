"""Optimizer state by name equals torch's, and training continues from it in another world."""

from typing import Any

import pytest
import torch
import torchopt
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import funcshard as fs
from funcshard._utils import tree
from funcshard.train.param_groups import group_leaves

O = torch.optim  # noqa: E741
NO_DECAY = {"paths": ["**.bias", "norm"], "weight_decay": 0.0}
DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
            self.tied, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.last.weight = self.tied.weight
            self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.tied(self.frozen(self.norm(self.first(x))))))


CASES: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]]]] = {
    "AdamW": (O.AdamW, {"lr": 0.02, "weight_decay": 0.1}, []),
    "AdamW groups": (O.AdamW, {"lr": 0.02, "weight_decay": 0.1}, [NO_DECAY]),
    "Adam amsgrad fused": (O.Adam, {"lr": 0.02, "amsgrad": True, "fused": True}, []),
    "SGD": (O.SGD, {"lr": 0.02, "momentum": 0.9}, []),
    "SGD without state": (O.SGD, {"lr": 0.02}, []),
    "NAdam groups": (O.NAdam, {"lr": 0.02}, [{"paths": ["last.bias"], "betas": (0.5, 0.9)}]),
    "Rprop": (O.Rprop, {"lr": 0.02}, []),
    "Muon": (None, {"lr": 0.02}, [{"paths": ["**.bias"], "weight_decay": 0.0}]),
}
WORLDS = [3, {"replicate": 2, "shard": 2}]
cases = pytest.mark.parametrize("case", CASES)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out - 1).square().mean()


def torchs(net: nn.Module, case: str, cases: Any = CASES) -> list[O.Optimizer]:
    """Return torch's optimizers of the unsharded module, with the parameter groups of the case."""
    cls, options, groups, *_ = cases[case]
    params = dict(net.named_parameters())
    plan = fs.make_plan({name: leaf.detach() for name, leaf in params.items()}, 1)
    group_of, more = group_leaves(plan, groups)

    def members(names: list[str]) -> list[dict[str, Any]]:
        return [
            {"params": [params[name] for name in names if group_of[name] == number], **more[number]}
            for number in range(len(groups) + 1)
        ]

    names = [name for name, leaf in params.items() if leaf.requires_grad]
    if cls is not None:
        return [cls(members(names), **options)]
    muon = O.Muon([params[name] for name in names if params[name].ndim == 2], **options)
    return [muon, O.AdamW(members([name for name in names if params[name].ndim != 2]))]


def train_whole(net: nn.Module, optimizers: list[O.Optimizer], begin: int, end: int) -> None:
    for step in range(begin, end):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(net(DATA.roll(step, 0)[:12])).backward()
        for optimizer in optimizers:
            optimizer.step()


def pair_of(case: str, plan: fs.Plan, mesh: fs.Mesh, cases: Any = CASES) -> Any:
    cls, options, groups, *_ = cases[case]
    if cls is None:
        return fs.muon(plan, mesh, adamw={"groups": groups}, **options)
    return fs.torch_optimizer(cls, groups=groups, plan=plan, mesh=mesh, **options)


def train_shards(mesh: fs.Mesh, plan: fs.Plan, optimizer: Any, shards, opt_state, begin: int, end: int, make=Net) -> Any:
    apply, _, buffers = fs.make_functional(make())
    sharded = fs.fully_shard(apply, plan, mesh)
    step = fs.make_train_step(lambda s, b, x: loss_of(sharded(s, b, x)), optimizer, plan, mesh)
    state = step.init(shards, buffers)
    state = state._replace(opt_state=state.opt_state if opt_state is None else opt_state)
    for number in range(begin, end):
        state, _ = step(state, DATA.roll(number, 0)[:12].chunk(mesh.world_size)[mesh.rank])
    return state.shards, state.opt_state


def close(ours: Any, theirs: Any, case: str) -> None:
    # Muon computes in bfloat16, so rounding errors are larger
    tolerance = {"rtol": 0.05, "atol": 2e-3} if case == "Muon" else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(ours, theirs, **tolerance)


def state_of(net: nn.Module, optimizers: list[O.Optimizer], **options: Any) -> dict[str, Any]:
    # clones, because torch returns the optimizer's own tensors
    found = get_optimizer_state_dict(net, optimizers, options=StateDictOptions(full_state_dict=True, **options))
    return tree.map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, found)


def plan_of(mesh: fs.Mesh) -> fs.Plan:
    return fs.make_plan(fs.make_functional(Net())[1], mesh, units=["first"])


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("world", WORLDS, ids=str)
@cases
def test_it_is_torchs_and_training_goes_over_and_back(case: str, world: Any) -> None:
    net = Net()
    optimizers = torchs(net, case)
    train_whole(net, optimizers, 0, 2)
    middle, middle_state = {k: v.clone() for k, v in net.state_dict().items()}, state_of(net, optimizers)
    flat = state_of(net, optimizers, flatten_optimizer_state_dict=True) if middle_state["state"] else {}
    train_whole(net, optimizers, 2, 4)
    wanted, wanted_state = {k: v.clone() for k, v in net.state_dict().items()}, state_of(net, optimizers)

    def main(mesh: fs.Mesh) -> tuple[dict, dict]:
        plan = plan_of(mesh)
        optimizer = pair_of(case, plan, mesh)
        opt_state = fs.optimizer_from_state_dict(middle_state, optimizer, plan, mesh, steps=2)
        there = fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh)
        assert there["state"].keys() == middle_state["state"].keys()
        for name, own in middle_state["state"].items():
            assert there["state"][name].keys() == own.keys()
            assert all(torch.equal(there["state"][name][key], value) for key, value in own.items())
        groups = [
            [{**group, "params": sorted(group["params"])} for group in by_name["param_groups"] if group["params"]]
            for by_name in (there, middle_state)
        ]
        assert groups[0] == groups[1]
        ours_flat = fs.flatten_optimizer_state_dict(there)
        assert not flat or {k: type(v) for k, v in ours_flat.items()} == {k: type(v) for k, v in flat.items()}
        first = fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh, rank0_only=True, offload=True)
        assert bool(first) == (mesh.rank == 0)
        shards = fs.from_state_dict(middle, plan, mesh)
        shards, opt_state = train_shards(mesh, plan, optimizer, shards, opt_state, 2, 4)
        ours = fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh)
        return fs.to_state_dict(shards, plan, mesh), ours

    for params, ours in fs.simulate(main, world):
        close(params, {name: wanted[name] for name in params}, case)
        close(ours["state"], wanted_state["state"], case)

    if not ours["state"]:
        return  # torch's own set_optimizer_state_dict refuses an optimizer without state
    other = Net()
    other.load_state_dict(params)
    into = torchs(other, case)
    set_optimizer_state_dict(other, into, ours, options=StateDictOptions(full_state_dict=True))
    loaded = state_of(other, into)
    assert all(torch.equal(loaded["state"][n][k], v) for n, own in ours["state"].items() for k, v in own.items())
    train_whole(other, into, 4, 5)
    train_whole(net, optimizers, 4, 5)
    close(dict(other.state_dict()), dict(net.state_dict()), case)


@cases
def test_before_the_first_step_there_is_no_state(case: str) -> None:
    plan, mesh = plan_of(fs.Mesh()), fs.Mesh()
    optimizer = pair_of(case, plan, mesh)
    shards = fs.from_state_dict(Net().state_dict(), plan, mesh)
    trainable = {u.name: {b.key: shards[u.name][b.key] for b in u.buffers if b.trainable} for u in plan.unit_list}
    state = optimizer.init(trainable)
    found = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
    if case != "Muon":  # Muon's momentum is zeros before the first step
        assert found["state"] == {}
    again = fs.optimizer_from_state_dict(found, optimizer, plan, mesh)
    assert tree.describe(again)[0] == tree.describe(state)[0]


def optax_momentum(lr: float, begin: Any = torch.zeros_like) -> Any:
    """Return an (init, update) pair whose state is a tree like the shards, and a count of steps."""

    def init(params: Any) -> Any:
        return {"count": 0, "mu": tree.map(begin, params)}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        mu = tree.map(lambda m, g: 0.9 * m + g, state["mu"], grads)
        return tree.map(lambda m: -lr * m, mu), {"count": state["count"] + 1, "mu": mu}

    return init, update


PLAIN = lambda plan, mesh: pair_of("AdamW", plan, mesh)  # noqa: E731
UNFIT: dict[str, tuple[Any, Any, str]] = {  # a change of AdamW's state, which optimizer takes it, and words
    "a prefix": (
        lambda s: {**s, "state": {f"module.{path}": own for path, own in s["state"].items()}}, PLAIN,
        r"must hold the state of every trainable leaf; missing: .* carry the prefix 'module\.' .* call torch\.nn",
    ),
    "another step": (
        lambda s: s["state"]["norm.bias"].update(step=torch.tensor(7.0)) or s, PLAIN,
        r"'step' must be the same for all leaves of a flat buffer .* 7\.0 for 'norm\.bias'.*: give one a separate group",
    ),
    "of another class": (lambda s: s, lambda *of: pair_of("Rprop", *of), r"must hold .* of leaf .*; found .*exp_avg_sq"),
    "of a class, for a pair": (lambda s: s, lambda *_: optax_momentum(0.1), r"hold \['mu'\] of leaf .*; found \['exp_avg"),
}  # fmt: skip


@pytest.mark.parametrize("what", UNFIT)
def test_a_state_dict_that_does_not_fit_is_refused(what: str) -> None:
    (change, taker, words), plan, mesh, net = UNFIT[what], plan_of(fs.Mesh()), fs.Mesh(), Net()
    optimizers = torchs(net, "AdamW")
    train_whole(net, optimizers, 0, 1)
    with pytest.raises(ValueError, match=words):
        fs.optimizer_from_state_dict(change(state_of(net, optimizers)), taker(plan, mesh), plan, mesh)


SCALARS = {
    "beside an empty leaf": {"a": torch.ones(()), "b": torch.ones(0)},
    "alone": {"a": torch.ones(())},
    "in a unit of its own": {"a": {"w": torch.ones(())}, "b": {"w": torch.ones(3)}},
}


@pytest.mark.parametrize("where", SCALARS)
def test_a_leaf_without_dimensions_does_not_make_a_count_of_steps_elementwise(where: str) -> None:
    params, mesh, optimizer = SCALARS[where], fs.Mesh(), torchopt.adam(0.1)
    plan = fs.make_plan(params, mesh, units=["b"] if where == "in a unit of its own" else [])
    shards = fs.shard(params, plan, mesh)
    _, state = optimizer.update(fs.copy(shards), optimizer.init(shards), params=shards, inplace=False)
    by_name = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
    again = fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh)
    torch.testing.assert_close(tree.leaves(again), tree.leaves(state), rtol=0, atol=0)
