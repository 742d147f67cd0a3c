"""Leaves that ranks hold in slices are whole in state dicts, and restore under any degree of tensor parallelism."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import funcshard as fs
from funcshard._utils import tree
from funcshard.checkpoint.resharding import Run, copy_run
from funcshard.plan import Box
from tests.ranks import on_ranks
from tests.slices import make_params, plan_on, ranks, slices_at
from tests.states import equal

MESHES: dict[str, dict[str, int]] = {
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "replicate 2, shard 2, tensor 2": {"replicate": 2, "shard": 2, "tensor": 2},
    "tensor 4": {"tensor": 4},
    "tensor before shard 3": {"tensor": 2, "shard": 3},
    "expert 2, tensor 2": {"expert": 2, "shard": 1, "tensor": 2},
    "one rank of tensor": {"shard": 2, "tensor": 1},
    "no model axis": {"shard": 3},
}
meshes = pytest.mark.parametrize("world", MESHES.values(), ids=MESHES)
PARAMS = make_params()
NAMES = dict(zip(*tree.describe(PARAMS)[:0:-1], strict=True))  # every leaf by its path


def at(mesh: fs.Mesh) -> dict[str, Any]:
    return slices_at(PARAMS, mesh.position, mesh.shape)


@pytest.mark.nightly(one_in=2)
@meshes
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks()
def test_state_dicts_and_files_are_the_whole_models(mesh: fs.Mesh, world: Any, strategy: str, tmp_path: Path) -> None:
    plan = plan_on(mesh.shape, PARAMS, strategy=strategy)
    shards = fs.shard(at(mesh), plan, mesh)
    assert equal(fs.to_state_dict(shards, plan, mesh), NAMES)
    first = fs.to_state_dict(shards, plan, mesh, rank0_only=True, offload=True)
    assert equal(first, NAMES) if mesh.rank == 0 else first == {}
    assert equal(fs.gather(shards, plan, mesh), at(mesh))
    for src in (0, mesh.world_size - 1):
        given = NAMES if mesh.rank == src else {}
        own = fs.from_state_dict(fs.to_state_dict(shards, plan, mesh, sharded=True), plan, mesh)
        for again in (fs.from_state_dict(NAMES, plan, mesh), fs.from_state_dict(given, plan, mesh, src=src), own):
            assert equal(again, shards)
    fs.export_safetensors(tmp_path / "model.safetensors", shards, plan, mesh)
    assert equal(load_file(tmp_path / "model.safetensors"), NAMES)
    assert equal(fs.to_state_dict(fs.import_safetensors(tmp_path, plan, mesh), plan, mesh), NAMES)


@pytest.mark.nightly(one_in=2)
@meshes
def test_pieces_say_which_elements_of_the_whole_tensor_they_hold_and_load_on_another_mesh(world: dict[str, int]) -> None:
    def cut(mesh: fs.Mesh) -> dict[str, fs.Piece]:
        plan = plan_on(mesh.shape, PARAMS)
        return fs.to_state_dict(fs.shard(at(mesh), plan, mesh), plan, mesh, sharded=True)

    by_rank = ranks(cut, world)
    pieces = {name: [own[name] for own in by_rank] for name in NAMES}
    for name, whole in NAMES.items():
        held = torch.zeros_like(whole)
        for piece in pieces[name]:
            assert piece.shape == whole.shape
            run = whole[piece.slices].ravel()[piece.offset : piece.offset + len(piece.tensor)]
            assert torch.equal(piece.tensor, run)
            if piece.copy == 0:
                index = torch.arange(whole.numel()).view(whole.shape)[piece.slices].ravel()
                held.view(-1)[index[piece.offset : piece.offset + len(piece.tensor)]] += 1
        assert held.eq(1).all(), f"copies 0 of {name} must hold every element once"

    def load(mesh: fs.Mesh) -> dict[str, Any]:
        plan = plan_on(mesh.shape, PARAMS)
        return fs.to_state_dict(fs.from_state_dict(pieces, plan, mesh), plan, mesh)

    others = [*MESHES.values()]
    for number in (1, 3):
        assert all(equal(found, NAMES) for found in ranks(load, others[(others.index(world) + number) % len(others)]))


@pytest.mark.parametrize("world", [2, {"replicate": 2, "shard": 2}], ids=str)
@on_ranks()
def test_a_slice_along_a_data_axis_is_joined_too(mesh: fs.Mesh, world: Any) -> None:
    """A leaf may be cut along ``shard`` itself, as an embedding that each rank looks up alone."""
    whole = torch.arange(24.0).view(6, 4)

    mine = {"w": whole.chunk(2)[mesh.shard.rank], "b": torch.ones(3)}
    plan = fs.make_plan(mine, mesh, local={"w": {"shard": 0}})
    shards = fs.shard(mine, plan, mesh)
    found = fs.to_state_dict(shards, plan, mesh, rank0_only=True)
    assert mesh.rank or torch.equal(found["w"], whole)
    again = fs.from_state_dict({"w": whole, "b": torch.ones(3)} if mesh.rank == 1 else {}, plan, mesh, src=1)
    assert torch.equal(fs.gather(again, plan, mesh)["w"], mine["w"])


@on_ranks({"shard": 2, "tensor": 2})
def test_local_leaves_stay_each_ranks_own_beside_slices(mesh: fs.Mesh) -> None:
    column, rank = mesh.position["tensor"], float(mesh.rank)
    mine = {
        "up": torch.arange(8.0).chunk(2)[column],
        "own": torch.full((3,), rank),
        "row": torch.full((5,), 1.0 * column),
    }
    plan = fs.make_plan(mine, mesh, local={"up": {"tensor": 0}, "own": ("shard", "tensor"), "row": "tensor"})
    shards = fs.shard(mine, plan, mesh)
    found, pieces = fs.to_state_dict(shards, plan, mesh), fs.to_state_dict(shards, plan, mesh, sharded=True)
    assert equal(found, {**mine, "up": torch.arange(8.0)})
    for form in (found, pieces):
        assert equal(fs.gather(fs.from_state_dict(form, plan, mesh), plan, mesh), mine)
    words = r"'own' is local to each rank, and a state dict or file of rank 0 .* with rank0_only=False or sharded=True"
    with pytest.raises(ValueError, match=words):
        fs.to_state_dict(shards, plan, mesh, rank0_only=True)
    with pytest.raises(ValueError, match="leaf 'own' is local to each rank"):
        fs.from_state_dict({}, plan, mesh, src=0)
    with pytest.raises(ValueError, match="must hold this rank's own piece of it; found 2 pieces"):
        fs.from_state_dict({**pieces, "own": [pieces["own"], pieces["own"]]}, plan, mesh)


@on_ranks({"shard": 2, "tensor": 2})
def test_wrong_shapes_are_said_with_the_function_that_takes_them(mesh: fs.Mesh) -> None:
    whole = {"up": torch.zeros(8, 4)}
    mine = {"up": whole["up"].chunk(2)[mesh.position["tensor"]]}
    plan = fs.make_plan(mine, mesh, local={"up": {"tensor": 0}})
    piece = fs.to_state_dict(fs.shard(mine, plan, mesh), plan, mesh, sharded=True)["up"]
    load = lambda wrong: lambda: fs.from_state_dict({"up": wrong}, plan, mesh)  # noqa: E731
    other_rows = ((4 - 4 * mesh.position["tensor"], 4), (0, 4))
    for call, words in (
        (load(mine["up"]), r"must have shape \(8, 4\), that of the whole tensor.*pass whole"),
        (lambda: fs.shard(whole, plan, mesh), r"must have shape \(4, 4\), that of this rank's slice.*from_state_dict"),
        (lambda: fs.init_shards(lambda unit: mine, plan, mesh), r"must have shape \(8, 4\), that of the whole"),
        (load(piece._replace(shape=(4, 4))), r"must be 1-D, of shape \(8, 4\)"),
        (load(piece._replace(within=((6, 4), (0, 4)))), r"must lie inside its slice of shape \(8, 4\)"),
        (load(piece._replace(offset=12)), "found 8 elements at offset 12 within"),
        (load(piece._replace(within=other_rows)), r"of its slice at .* no piece holds"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


# --- other degrees of tensor parallelism --------------------------------------------------------

# Every mesh once as the old one and once as the new one, and the degrees 2 -> none -> 4 -> 2.
MOVES = [*itertools.pairwise([*MESHES, "shard 2, tensor 2", "tensor 4", "shard 2, tensor 2"])]


def state_of(mesh: fs.Mesh, plan: fs.Plan) -> dict[str, Any]:
    """Return a state with parameters, moments that differ from them, counters and values of each rank's own."""
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    shards = fs.shard(slices_at(PARAMS, mesh.position, mesh.shape), plan, mesh)
    grads = tree.map(lambda leaf: leaf * leaf, shards)
    _, opt_state = optimizer.step(grads, optimizer.init(shards), fs.copy(shards))
    return {"shards": shards, "opt": opt_state, "step": 3, "own": fs.PerRank(mesh.rank)}


def check_state(state: dict[str, Any], plan: fs.Plan, mesh: fs.Mesh) -> None:
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
    found = fs.to_state_dict(state["shards"], plan, mesh)
    by_name = fs.optimizer_to_state_dict(state["opt"], optimizer, plan, mesh)
    for name, whole in NAMES.items():
        assert torch.equal(found[name], whole)
        torch.testing.assert_close(by_name["state"][name]["exp_avg"], 0.1 * whole * whole)
        assert by_name["state"][name]["step"] == 1
    assert state["step"] == 3
    pieces = fs.optimizer_to_state_dict(state["opt"], optimizer, plan, mesh, sharded=True)
    of_one = by_name if mesh.rank == mesh.world_size - 1 else {}
    for form, options in ((by_name, {}), (pieces, {}), (of_one, {"src": mesh.world_size - 1})):
        again = fs.optimizer_from_state_dict(form, optimizer, plan, mesh, **options)
        torch.testing.assert_close(again, state["opt"], rtol=0, atol=0)


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize(("before", "after"), MOVES)
def test_states_restore_under_another_degree(before: str, after: str, tmp_path: Path) -> None:
    def begin(mesh: fs.Mesh) -> dict[str, Any]:
        plan = plan_on(mesh.shape, PARAMS)
        state = state_of(mesh, plan)
        fs.save(tmp_path / "last", state, plan, mesh)
        return state

    def go_on(mesh: fs.Mesh, replanned: list[Any]) -> None:
        plan = plan_on(mesh.shape, PARAMS, units=["blocks.0"], strategy="shard_grad_op")
        state = fs.restore(tmp_path / "last", plan, mesh)
        check_state(state, plan, mesh)
        own, same = state.pop("own"), replanned[mesh.rank].copy()
        assert own == same.pop("own") == fs.PerRank(mesh.rank % math.prod(MESHES[before].values()))
        torch.testing.assert_close(state, same, rtol=0, atol=0)

    states = ranks(begin, MESHES[before])
    table = str(fs.restore(tmp_path / "last"))
    assert f" {sum(leaf.numel() for leaf in NAMES.values())} " in table.replace(",", ""), "it shows whole tensors"
    old = plan_on(MESHES[before], PARAMS)
    new = plan_on(MESHES[after], PARAMS, units=["blocks.0"], strategy="shard_grad_op")
    replanned = fs.replan(states, old, new)
    ranks(go_on, MESHES[after], replanned)
    back = fs.replan(replanned, new, old)
    for one, other in zip(states, back, strict=True):
        assert tree.map(torch.equal, one["shards"], other["shards"]) == tree.map(lambda leaf: True, one["shards"])


@pytest.mark.parametrize("within", [Box((0, 0, 0), (3, 4, 5)), Box((1, 1, 2), (2, 2, 3)), Box((0, 2, 0), (3, 2, 4))])
def test_a_run_of_a_slice_gets_its_elements_from_runs_of_any_other_slice(within: Box) -> None:
    whole = torch.arange(60).view(3, 4, 5)
    flat = whole[within.slices].ravel()
    for begin, end in itertools.combinations(range(0, within.numel + 1, 5), 2):
        target, out = Run(begin, end - begin, within), torch.full((end - begin,), -1)
        for cut in range(0, 61, 7):
            runs = [Run(0, cut, Box((0, 0, 0), (3, 4, 5))), Run(cut, 60 - cut, Box((0, 0, 0), (3, 4, 5)))]
            copied = [copy_run(out, target, whole.ravel()[run.begin : run.begin + run.numel], run) for run in runs]
            assert sum(copied) == end - begin
            assert torch.equal(out, flat[begin:end])
