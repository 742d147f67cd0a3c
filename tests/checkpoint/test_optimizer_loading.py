"""Optimizer state comes from one rank, and fits models of which other leaves were trained then."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.checkpoint.test_optimizer_state import close, optax_momentum, pair_of, torchs, train_shards, train_whole
from tests.ranks import on_ranks
from tests.states import equal

O = torch.optim  # noqa: E741
THAWED = ("1.bias", "2.weight", "2.bias")


def make_net(frozen: tuple[str, ...]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(3, 2))
    for name, leaf in net.named_parameters():
        leaf.requires_grad_(name not in frozen)
    return net


OWN_GROUP = [{"paths": ["1.bias"]}]
# A class, its options, its groups, and the leaves that are frozen at first.
CASES: dict[str, tuple[Any, dict[str, Any], list[dict[str, Any]], tuple[str, ...]]] = {
    "AdamW, a unit": (O.AdamW, {"lr": 0.02}, [], THAWED[1:]),
    "AdamW, a leaf": (O.AdamW, {"lr": 0.02}, OWN_GROUP, THAWED),
    "Adagrad, a leaf": (O.Adagrad, {"lr": 0.02, "initial_accumulator_value": 0.5}, OWN_GROUP, THAWED),
    "Rprop, a leaf": (O.Rprop, {"lr": 0.02}, OWN_GROUP, THAWED),
    "SGD, a leaf": (O.SGD, {"lr": 0.02, "momentum": 0.9}, [], THAWED),
    "SGD with dampening, a unit": (O.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.3}, [], THAWED[1:]),
    "Muon": (None, {"lr": 0.02}, [{"paths": ["1.bias"]}], THAWED),
}


def train_thawed(case: str) -> dict[str, torch.Tensor]:
    """Return torch's parameters after two steps without the frozen leaves, and two with them."""
    net = make_net(())
    optimizers = torchs(net, case, CASES)
    for name, leaf in net.named_parameters():
        leaf.requires_grad_(name not in CASES[case][3])
    train_whole(net, optimizers, 0, 2)
    net.requires_grad_(True)
    train_whole(net, optimizers, 2, 4)
    return {name: leaf.detach() for name, leaf in net.named_parameters()}


def plan_of(mesh: fs.Mesh, frozen: tuple[str, ...] = ()) -> fs.Plan:
    """Return a plan of three units."""
    return fs.make_plan(fs.make_functional(make_net(frozen))[1], mesh, units=["0", "1", "2"])


def setting(mesh: fs.Mesh, case: str, frozen: tuple[str, ...] = ()) -> tuple[Any, fs.Plan]:
    plan = plan_of(mesh, frozen)
    return pair_of(case, plan, mesh, CASES), plan


def saved(mesh: fs.Mesh, case: str, frozen: tuple[str, ...] | None = None, flatten: bool = False) -> tuple[Any, Any]:
    """Return parameters and optimizer state by name after two steps without the frozen leaves."""
    frozen = CASES[case][3] if frozen is None else frozen
    optimizer, plan = setting(mesh, case, frozen)
    shards = fs.from_state_dict(make_net(frozen).state_dict(), plan, mesh)
    shards, opt_state = train_shards(mesh, plan, optimizer, shards, None, 0, 2, lambda: make_net(frozen))
    by_name = fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh)
    return fs.to_state_dict(shards, plan, mesh), fs.flatten_optimizer_state_dict(by_name) if flatten else by_name


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("case", CASES)
def test_thawed_leaves_begin_as_in_torch_and_the_others_go_on(case: str) -> None:
    wanted = train_thawed(case)

    def main(mesh: fs.Mesh) -> Any:
        params, by_name = saved(mesh, case)
        optimizer, plan = setting(mesh, case, ())
        opt_state = fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh, strict=False, steps=2)
        again = fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh)
        shards = fs.from_state_dict(params, plan, mesh)
        shards, _ = train_shards(mesh, plan, optimizer, shards, opt_state, 2, 4, lambda: make_net(()))
        return by_name, again, fs.to_state_dict(shards, plan, mesh)

    for before, after, found in fs.simulate(main, {"replicate": 2, "shard": 2}):
        close(found, wanted, case)
        for name, own in before["state"].items():
            assert all(torch.equal(after["state"][name][key], value) for key, value in own.items())
        for name in after["state"].keys() - before["state"].keys():
            assert set(after["state"][name]) == {"momentum_buffer"}, "only zeros, for classes that count no steps"
            assert not after["state"][name]["momentum_buffer"].any()


@on_ranks(3)
def test_the_leaves_of_a_pair_begin_with_the_values_of_its_init(mesh: fs.Mesh) -> None:
    optimizer = optax_momentum(0.1, torch.ones_like)
    then, now = (plan_of(mesh, frozen) for frozen in (THAWED, ()))
    state = optimizer[0](fs.shard(fs.make_functional(make_net(THAWED))[1], then, mesh))
    state = {"count": 2, "mu": tree.map(lambda leaf: leaf + 1, state["mu"])}
    by_name = fs.optimizer_to_state_dict(state, optimizer, then, mesh)
    state = fs.optimizer_from_state_dict(by_name, optimizer, now, mesh, strict=False)
    moments = fs.optimizer_to_state_dict(state, optimizer, now, mesh)["state"]
    assert state["count"] == 2
    assert {name: own["mu"].unique().tolist() for name, own in moments.items()} == {
        name: [1.0 if name in THAWED else 2.0] for name, _ in make_net(()).named_parameters()
    }


@on_ranks(2)
def test_state_of_leaves_that_are_frozen_now_is_left_out(mesh: fs.Mesh) -> None:
    for flatten in (False, True):
        _, by_name = saved(mesh, "AdamW, a unit", (), flatten)
        optimizer, plan = setting(mesh, "AdamW, a unit", THAWED)
        words = r"must hold state of the trainable leaves only; found state of .*1\.bias.*: strict=False leaves it out"
        with pytest.raises(ValueError, match=words):
            fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh)
        state = fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh, strict=False)
        found = fs.flatten_optimizer_state_dict(fs.optimizer_to_state_dict(state, optimizer, plan, mesh))
        _, whole = saved(mesh, "AdamW, a unit", (), flatten=True)
        wanted = {name: value for name, value in whole.items() if not any(f".{leaf}." in name for leaf in THAWED)}
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[n], v) for n, v in wanted.items() if isinstance(v, torch.Tensor))


BESIDE = {
    "AdamW, a unit": r"leaf '1\.bias' has no state, but it shares .* with '1\.weight', .* groups=\[\{'paths': \[.1\.",
    "SGD with dampening, a unit": r"leaf '1\.bias' has no state, .* without dampening, a separate group",
}


@pytest.mark.parametrize("case", BESIDE)
@on_ranks(2)
def test_a_leaf_that_cannot_begin_beside_others_is_an_error(mesh: fs.Mesh, case: str) -> None:
    _, by_name = saved(mesh, case, THAWED)
    optimizer, plan = setting(mesh, case, ())
    if "dampening" not in case:  # a class that counts no steps may keep nothing of some leaves
        with pytest.raises(ValueError, match=r"missing: .*; or the leaves were frozen then: strict=False"):
            fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh)
    with pytest.raises(ValueError, match=BESIDE[case]):
        fs.optimizer_from_state_dict(by_name, optimizer, plan, mesh, strict=False)


def load_from_rank(mesh: fs.Mesh, case: str, src: int) -> None:
    """Load state that only ``src`` holds, in each form, and compare it with that of all ranks."""
    optimizer, plan = setting(mesh, case, ())
    for flatten in (False, True):
        _, full = saved(mesh, case, (), flatten=flatten)
        mine = copy.deepcopy(full) if mesh.rank == src else {}
        options = {"strict": False, "steps": 2} if flatten else {}
        state = fs.optimizer_from_state_dict(mine, optimizer, plan, mesh, src=src, **options)
        found = fs.flatten_optimizer_state_dict(fs.optimizer_to_state_dict(state, optimizer, plan, mesh))
    assert found.keys() == full.keys()
    assert tree.describe(state)[0] == tree.describe(fs.optimizer_from_state_dict(full, optimizer, plan, mesh))[0]
    found, meant = ({n: v for n, v in of.items() if isinstance(v, torch.Tensor)} for of in (found, full))
    assert meant
    assert equal(found, meant)


@pytest.mark.nightly(one_in=7)
@pytest.mark.parametrize("case", CASES)
def test_the_state_of_one_rank_is_that_of_all(case: str) -> None:
    for world, src in ((3, 0), ({"shard": 2, "tensor": 2}, 3)):
        fs.simulate(lambda mesh, src=src: load_from_rank(mesh, case, src), world)


@on_ranks(3)
def test_a_pairs_own_values_come_along(mesh: fs.Mesh) -> None:
    optimizer, plan = optax_momentum(0.1, torch.ones_like), plan_of(mesh)
    shards = fs.from_state_dict(make_net(()).state_dict(), plan, mesh)
    state = {**optimizer[0](shards), "count": torch.tensor(7, dtype=torch.int32)}
    by_name = fs.optimizer_to_state_dict(state, optimizer, plan, mesh)
    loaded = fs.optimizer_from_state_dict(by_name if mesh.rank == 1 else {}, optimizer, plan, mesh, src=1)
    for one, other in zip(tree.flatten(loaded["mu"])[0], tree.flatten(state["mu"])[0], strict=True):
        assert one.any()
        assert torch.equal(one, torch.where(one == 0, one, other)), "all but the padding"
    assert (loaded["count"].dtype, loaded["count"].item()) == (torch.int32, 7)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {  # what the state dict of the one holds of 0.bias
    "a piece": ({"exp_avg": fs.Piece(torch.ones(1), 0, (5,))}, r"Piece for 'exp_avg' of leaf '0\.bias': leave src out"),
    "another shape": ({"exp_avg": torch.ones(4, 2)}, r"leaf '0\.bias' of 'exp_avg' of .* must have shape \(5,\)"),
    "nothing": ({}, r"if rank0_only left it empty, pass src=0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@on_ranks(2)
def test_every_rank_raises_for_a_fault_of_the_one(mesh: fs.Mesh, fault: str) -> None:
    change, words = FAULTS[fault]
    _, found = saved(mesh, "AdamW, a unit", ())
    optimizer, plan = setting(mesh, "AdamW, a unit", ())
    found["state"]["0.bias"].update(change)
    with pytest.raises(ValueError, match=words):
        fs.optimizer_from_state_dict(found if mesh.rank == 0 and change else {}, optimizer, plan, mesh, src=0)
