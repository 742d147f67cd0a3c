"""State dicts hold the shards' values under the module's own names, and convert back exactly."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import funcshard as fs
from funcshard._utils import tree
from tests.pairwise import crossed
from tests.storages import Alive


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.emb.weight
        self.again = self.norm
        self.register_buffer("cache", torch.ones(2), persistent=False)


def frozen() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0].requires_grad_(False)
    return net


MODULES = {
    "linear": lambda: nn.Linear(3, 5),
    "tied": Tied,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3)),
    "frozen": frozen,
    "mixed dtypes": lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()),
    "no parameters": lambda: nn.Sequential(nn.BatchNorm1d(3, affine=False)),
    "LSTM": lambda: nn.LSTM(3, 4, 2),
}
settings = crossed(
    make=MODULES,
    world=[2, 3, {"replicate": 2, "shard": 2}],
    strategy=["full_shard", "no_shard"],
    units=["all", "none"],
)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


@pytest.mark.slow
@settings
def test_state_dicts_and_pieces_are_the_modules_and_lead_back_to_the_shards(
    make: Any, world: Any, strategy: str, units: str
) -> None:
    net = make()
    apply, params, buffers = fs.make_functional(net)
    wanted = {name: value.clone() for name, value in net.state_dict().items()}

    def main(mesh: fs.Mesh) -> dict[str, fs.Piece]:
        plan = fs.make_plan(params, mesh, units=fs.wrap.always()(net) if units == "all" else [], strategy=strategy)
        shards = fs.shard(params, plan, mesh)
        kept = apply.persistent(buffers)
        full = fs.to_state_dict(shards, plan, mesh, buffers=kept)
        first = fs.to_state_dict(shards, plan, mesh, buffers=kept, rank0_only=True, offload=True)
        with fs.record_events() as events:
            pieces = fs.to_state_dict(shards, plan, mesh, sharded=True)
        assert events == []
        storages = {leaf.data_ptr() for leaf in tree.leaves(shards)}
        bases = [piece.tensor.untyped_storage().data_ptr() for piece in pieces.values() if piece.tensor.numel()]
        assert storages.issuperset(bases), "pieces are views of the shards"
        pieces = {name: piece._replace(tensor=piece.tensor.clone()) for name, piece in pieces.items()}
        with torch.no_grad():
            loaded = [fs.from_state_dict(form, plan, mesh) for form in (full, net.state_dict())]
            loaded.append(fs.from_state_dict(first, plan, mesh, src=0))
        for again in loaded:
            assert tree.describe(again)[0] == tree.describe(shards)[0]
            assert all(torch.equal(a, b) for a, b in zip(tree.leaves(again), tree.leaves(shards), strict=True))
        for shard in tree.leaves([shards, *loaded]):
            shard.detach().zero_()  # they share no memory with a state dict
        assert same(full, wanted)
        assert same(first, wanted) if mesh.rank == 0 else first == {}
        assert not any(value.requires_grad for value in full.values())
        other = make()
        assert str(other.load_state_dict(full, strict=True)) == "<All keys matched successfully>"
        assert same(dict(other.state_dict()), wanted)
        return pieces

    by_rank = fs.simulate(main, world)
    assert same(dict(net.state_dict()), wanted)
    leaves = dict(net.named_parameters(remove_duplicate=False))
    once: dict[str, list[fs.Piece]] = {name: [] for name in leaves}
    for name, piece in (item for pieces in by_rank for item in pieces.items()):
        assert torch.equal(piece.tensor, leaves[name].flatten()[piece.offset :][: len(piece.tensor)])
        if piece.copy == 0:
            once[name].append(piece)
    for name, pieces in once.items():
        assert sum(len(piece.tensor) for piece in pieces) == leaves[name].numel()

    def load(mesh: fs.Mesh) -> dict[str, torch.Tensor]:
        plan = fs.make_plan(params, mesh, units=fs.wrap.always()(net))
        return fs.gather(fs.from_state_dict(once, plan, mesh), plan, mesh)

    for loaded in fs.simulate(load, 3):
        assert all(torch.equal(loaded[name], leaves[name]) for name in loaded)


@pytest.mark.parametrize("present", [["emb.weight"], ["head.weight"], ["emb.weight", "head.weight"]], ids=str)
def test_a_tied_parameter_may_stand_under_any_of_its_names(present: list[str]) -> None:
    _, params, _ = fs.make_functional(Tied())
    plan = fs.make_plan(params, 1)
    full = fs.to_state_dict(fs.shard(params, plan, fs.Mesh()), plan, fs.Mesh())
    kept = {
        name: value for name, value in full.items() if name in present or not name.endswith(("emb.weight", "head.weight"))
    }
    again = fs.from_state_dict(kept, plan, fs.Mesh())
    assert same(fs.to_state_dict(again, plan, fs.Mesh()), full)


def test_two_trees_of_one_module_do_not_mix_their_tied_names() -> None:
    _, params, _ = fs.make_functional(Tied())
    both = {"student": params, "teacher": {name: value.detach() * 2 for name, value in params.items()}}
    plan = fs.make_plan(both, 1)
    state_dict = fs.to_state_dict(fs.shard(both, plan, fs.Mesh()), plan, fs.Mesh())
    assert {name.partition(".")[0] for name in state_dict} == {"student", "teacher"}


@pytest.mark.parametrize("rank0_only", [False, True], ids=["all ranks", "rank 0"])
def test_one_flat_buffer_exists_in_full_at_a_time(rank0_only: bool) -> None:
    params = {f"blocks.{i}": {"a": torch.ones(3 + i, 5), "b": torch.ones(7), "c": torch.ones(13).double()} for i in range(4)}
    plan = fs.make_plan(params, 2, units=[f"blocks.{i}" for i in range(4)])
    sizes = {buffer.padded_numel * buffer.itemsize for unit in plan.unit_list for buffer in unit.buffers}
    buffers = sum(len(unit.buffers) for unit in plan.unit_list)

    def main(mesh: fs.Mesh) -> tuple[int, int]:
        shards = fs.shard(params, plan, mesh)
        with Alive(sizes.__contains__) as peak:
            fs.to_state_dict(shards, plan, mesh, rank0_only=rank0_only, offload=True)
        with Alive(sizes.__contains__) as several, torch.no_grad():  # which the mode can see
            whole = [fs.unshard(lambda leaves: leaves, unit, mesh)(shards[unit.name]) for unit in plan.unit_list]
        assert len(whole) == 4
        assert several.most > 1
        return peak.made, peak.most

    assert fs.simulate(main, 2) == [(buffers, 1)] * 2


def test_a_module_on_meta_takes_the_state_dict_itself() -> None:
    module = Tied()
    apply, params, buffers = fs.make_functional(module)
    plan = fs.make_plan(params, 1)
    shards = fs.shard(params, plan, fs.Mesh())
    state_dict = fs.to_state_dict(shards, plan, fs.Mesh(), buffers=apply.persistent(buffers))
    with torch.device("meta"):
        other = Tied()
    other.load_state_dict(state_dict, strict=True, assign=True)
    assert other.emb.weight.data_ptr() == other.head.weight.data_ptr() == state_dict["emb.weight"].data_ptr()
    assert all(leaf.requires_grad for leaf in other.parameters())
    assert same(dict(other.state_dict()), dict(module.state_dict()))


def test_pieces_are_not_offloaded() -> None:
    plan = fs.make_plan({"a": torch.ones(2)}, 1)
    with pytest.raises(ValueError, match=r"sharded=True gives each rank the pieces .* leave them out"):
        fs.to_state_dict(fs.shard({"a": torch.ones(2)}, plan, fs.Mesh()), plan, fs.Mesh(), sharded=True, offload=True)
