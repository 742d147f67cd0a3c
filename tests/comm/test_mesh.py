"""Meshes of a local rank and of process groups, reshaped meshes, and checks between ranks."""

import copy
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import funcshard as fs
from funcshard.comm.agreement import check_same
from funcshard.comm.group import LocalGroup
from funcshard.comm.mesh import neighbours
from funcshard.testing import DelayedGroup, delayed
from tests.ranks import run_ranks, run_simulated


def test_one_local_rank_needs_no_process_group() -> None:
    mesh = fs.Mesh()
    assert (mesh.rank, mesh.world_size, mesh.shape, mesh.axes) == (0, 1, {"replicate": 1, "shard": 1}, ())
    assert mesh.device == torch.device("cpu")
    assert not dist.is_initialized()
    assert mesh.reshaped({"shard": 1}) == mesh


def test_init_mesh_outside_torchrun_is_one_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    mesh = fs.init_mesh(device="cpu")
    assert mesh == fs.Mesh()
    assert fs.init_mesh({"replicate": 1, "shard": 1}, device="cpu") == fs.Mesh()
    assert not dist.is_initialized()


@pytest.mark.parametrize("shape", [{"replicate": 1, "shard": 4}, {"replicate": 2, "shard": 3}, {"replicate": 3, "shard": 1}])
def test_axes_are_those_with_more_than_one_rank_the_shard_axis_first(shape: dict) -> None:
    for mesh_shape, axes in fs.simulate(lambda mesh: (mesh.shape, [name for name, _ in mesh.axes]), shape):
        assert mesh_shape == shape
        assert axes == [name for name in ("shard", "replicate") if shape[name] > 1]


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((1,), None),
        ((1,), ("dp",)),
        ((1,), ("dp_replicate",)),
        ((1, 1), None),
        ((1, 1), ("replicate", "shard")),
        ((1, 1), ("shard", "replicate")),
        ((1, 1), ("dp_replicate", "dp_shard")),
    ],
)
def test_a_device_mesh_of_one_rank_needs_no_communication(sizes: tuple, names: Any) -> None:
    mesh = fs.Mesh.from_device_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    assert mesh == fs.Mesh()
    assert isinstance(mesh.shard, LocalGroup)


@pytest.mark.usefixtures("gloo")
def test_init_mesh_covers_an_initialised_process_group() -> None:
    mesh = fs.init_mesh(device="cpu")
    assert mesh.world_size == 1
    with pytest.raises(ValueError, match="have as many ranks as the world: 1"):
        fs.init_mesh({"shard": 2}, device="cpu")


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(
    ("sizes", "names", "ours", "words"),
    [
        ((1, 1), ("dp", "tp"), None, "one of several axes must be 'shard' or 'replicate'; found ['dp', 'tp']"),
        ((1, 1), ("dp", "tp"), {"dq": "shard"}, "names must be of its axes; found 'dq' in names"),
        ((1, 1), ("dp", "tp"), {"dp": "shard", "tp": "shard"}, "no two axes may have one name; found ['shard', 'shard']"),
        ((1, 1), ("dp_shard", "shard"), None, "no two axes may have one name; found ['shard', 'shard']"),
        ((1, 1, 1), None, None, "three axes or more need names"),
    ],
)
def test_a_device_mesh_that_does_not_name_its_axes_is_refused(sizes: tuple, names: Any, ours: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"device_mesh has {len(sizes)} axes named .*: {re.escape(words)}; pass .*names="):
        fs.Mesh.from_device_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names), names=ours)


@pytest.fixture
def rank_4_of_6() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", store=FakeStore(), rank=4, world_size=6)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_4_of_6")
@pytest.mark.parametrize(
    ("sizes", "names", "shape", "position"),
    [
        ((6,), None, {"replicate": 1, "shard": 6}, (0, 4)),
        ((2, 3), None, {"replicate": 2, "shard": 3}, (1, 1)),
        ((2, 3), ("replicate", "shard"), {"replicate": 2, "shard": 3}, (1, 1)),
        ((2, 3), ("shard", "replicate"), {"shard": 2, "replicate": 3}, (1, 1)),
        ((2, 3), ("dp_shard", "tp"), {"replicate": 1, "shard": 2, "tp": 3}, (0, 1)),
        ((2, 3), ("dp_replicate", "dp_shard"), {"replicate": 2, "shard": 3}, (1, 1)),
        ((2, 3), ("dp_shard", "dp_replicate"), {"shard": 2, "replicate": 3}, (1, 1)),
        ((6, 1), ("replicate", "shard"), {"replicate": 6, "shard": 1}, (4, 0)),
    ],
)
def test_a_device_mesh_gives_its_axes_by_name(sizes: tuple, names: Any, shape: dict, position: tuple[int, int]) -> None:
    mesh = fs.Mesh.from_device_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names))
    assert list(mesh.shape.items()) == list(shape.items())
    assert (mesh.replicate.rank, mesh.shard.rank) == position
    assert mesh.rank == dist.get_rank()


def on_device_meshes(_: fs.Mesh) -> None:
    """Train a step on the meshes of device meshes, and compare with the step on all samples at once."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 3)
    apply, params, _ = fs.make_functional(net)
    data = torch.randn(4, 3)
    (wanted,) = torch.autograd.grad(net(data).square().mean(), net.weight)
    for names in (("dp_replicate", "dp_shard"), ("dp_shard", "dp_replicate"), ("shard", "replicate"), None):
        mesh = fs.Mesh.from_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        assert mesh.rank == dist.get_rank()
        plan = fs.make_plan(params, mesh)
        found = [fs.shard(params, plan, mesh), fs.shard(params, plan, mesh, src=1)]
        assert all(torch.equal(fs.gather(shards, plan, mesh)["weight"], params["weight"]) for shards in found)
        own = {name: value + mesh.rank for name, value in params.items()}
        from_1 = fs.gather(fs.shard(own, plan, mesh, src=1), plan, mesh)  # src counts as mesh.rank does
        assert torch.equal(from_1["weight"], params["weight"] + 1)
        sharded = fs.fully_shard(apply, plan, mesh)
        loss_fn = lambda shards, sharded=sharded, mesh=mesh: sharded(shards, {}, data[mesh.rank, None]).square().mean()  # noqa: E731
        _, grads = fs.value_and_grad(loss_fn)(found[0])
        torch.testing.assert_close(fs.gather(grads, plan, mesh)["weight"], wanted)
        again = mesh.reshaped({"shard": 4})
        assert again.rank == mesh.rank
        plan = fs.make_plan(params, again)
        assert torch.equal(fs.gather(fs.shard(params, plan, again), plan, again)["weight"], params["weight"])


@pytest.mark.slow
def test_the_order_of_the_axes_of_a_device_mesh_changes_no_result() -> None:
    run_ranks(on_device_meshes, 4)


@pytest.mark.usefixtures("rank_4_of_6")
def test_init_mesh_shapes_an_initialised_process_group() -> None:
    assert fs.init_mesh(device="cpu").shape == {"replicate": 1, "shard": 6}
    assert fs.init_mesh({"replicate": 3, "shard": 2}, device="cpu").shape == {"replicate": 3, "shard": 2}
    with pytest.raises(ValueError, match=r"mesh shape \{'shard': 4\} must have as many ranks as the world: 6"):
        fs.init_mesh({"shard": 4}, device="cpu")


def test_a_text_that_is_the_same_on_every_rank_passes() -> None:
    def main(mesh: fs.Mesh) -> None:
        check_same(mesh, "text", "the plan")

    fs.simulate(main, {"replicate": 2, "shard": 2})
    check_same(fs.Mesh(), "text", "the plan")


@pytest.mark.parametrize(
    "world", [{"shard": 3}, {"replicate": 3}, {"replicate": 2, "shard": 2}], ids=["cut", "repeated", "both"]
)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_every_rank_raises_if_one_text_differs_and_none_waits(world: dict, odd: int) -> None:
    def main(mesh: fs.Mesh) -> str:
        try:
            check_same(mesh, "odd" if mesh.rank == odd else "even", "the plan")
        except ValueError as error:
            return str(error)
        return "nothing noticed"

    for words in fs.simulate(main, world):
        assert words.startswith("the plan must be the same on every rank; ")
        assert "odd" in words
        assert "even" in words
        assert words.endswith(": build it from the same arguments everywhere")


def test_the_rank_that_differs_is_named() -> None:
    def main(mesh: fs.Mesh) -> None:
        check_same(mesh, f"v{mesh.rank // 2}", "the plan")

    words = "rank 0 has v0 and rank 2 has v1: build it from the same arguments everywhere"
    with pytest.raises(ValueError, match=words):
        fs.simulate(main, 3)


def reshape_there_and_back(mesh: fs.Mesh, shape: dict[str, int]) -> list[Any]:
    """Reshape a mesh three times.

    Returns:
        Each time: the shape, this rank, the sums of ranks along the axes, and the number of ranks.
    """
    found = []
    for sizes in (shape, {"shard": 4}, shape):
        mesh = mesh.reshaped(sizes)
        along = []
        for group in (mesh.shard, mesh.replicate):
            total = torch.tensor(float(mesh.rank))
            group.all_reduce(total).wait()
            along.append(total.item())
        found.append((mesh.shape, mesh.rank, along, fs.psum(torch.tensor(1.0), mesh).item()))
    return found


@pytest.mark.parametrize(
    ("shape", "run"),
    [
        ({"replicate": 2, "shard": 2}, run_ranks),
        ({"replicate": 2, "shard": 2}, run_simulated),
        ({"replicate": 4, "shard": 1}, run_simulated),
        ({"replicate": 1, "shard": 4}, run_simulated),
    ],
)
def test_a_reshaped_mesh_has_the_same_ranks_in_other_groups(shape: dict, run: Any) -> None:
    sizes = [shape, {"replicate": 1, "shard": 4}, shape]
    for rank, found in enumerate(run(reshape_there_and_back, 4, shape)):
        assert [mesh_shape for mesh_shape, *_ in found] == sizes
        for mesh_shape, number, along, count in found:
            outer, inner = divmod(rank, mesh_shape["shard"])
            row = [r for r in range(4) if r // mesh_shape["shard"] == outer]
            column = [r for r in range(4) if r % mesh_shape["shard"] == inner]
            assert (number, along, count) == (rank, [float(sum(row)), float(sum(column))], 4.0)


def test_a_slow_mesh_stays_slow_when_it_is_reshaped() -> None:
    def main(mesh: fs.Mesh) -> tuple[bool, float]:
        slow = delayed(mesh, "all_reduce", 0.01).reshaped({"replicate": 2, "shard": 2})
        tensor = torch.ones(1)
        work = slow.replicate.all_reduce(tensor)
        early = tensor.isnan().item()
        work.wait()
        return early, tensor.item()

    assert fs.simulate(main, 4) == [(True, 2.0)] * 4


def test_a_copy_of_a_mesh_is_the_mesh() -> None:
    mesh = fs.Mesh()
    assert copy.copy(mesh) is copy.deepcopy(mesh) is mesh
    holder = SimpleNamespace(mesh=mesh)
    assert copy.copy(holder).mesh is copy.deepcopy(holder).mesh is mesh


def with_plain_functions(mesh: fs.Mesh) -> fs.Mesh:
    return fs.with_collectives(mesh, "shard", all_reduce=lambda tensor, plain: plain.all_reduce(tensor).wait)


CHANGES = {"delayed": lambda mesh: delayed(mesh, "all_reduce", 0.001), "with_collectives": with_plain_functions}


def change_a_used_mesh(mesh: fs.Mesh, change: str) -> list[float]:
    """Take steps on a mesh that all ranks have used, and one of them has changed since."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["0", "2"], reshard_after_forward=2)
    found = []
    for used in (mesh, CHANGES[change](mesh) if mesh.rank == 1 else mesh):
        sharded = fs.fully_shard(apply, plan, used)
        loss_fn = lambda shards: sharded(shards, buffers, torch.ones(2, 4)).square().mean()  # noqa: B023, E731
        loss, _ = fs.value_and_grad(loss_fn)(fs.shard(params, plan, used))
        _, grad = fs.value_and_grad(lambda w: (w * w).sum(), mesh=used)(torch.ones(2))
        found += [loss.item(), grad.sum().item()]
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_one_rank_may_change_a_mesh_that_all_have_used(change: str) -> None:
    found = run_simulated(change_a_used_mesh, 4, change)
    assert found[0][:2] == found[0][2:]
    assert found == [found[0]] * 4


def test_meshes_made_from_one_share_what_ranks_have_agreed_on() -> None:
    def main(mesh: fs.Mesh) -> None:
        for made in (mesh["shard"], with_plain_functions(mesh), delayed(with_plain_functions(mesh), "all_reduce", 0.0)):
            assert made.memo is mesh.memo
        assert mesh.reshaped({"replicate": 2, "shard": 2}).memo is not mesh.memo  # other axes

    run_simulated(main, 4)


def test_the_parts_of_a_delayed_row_are_slow_and_those_of_the_row_are_not() -> None:
    def main(mesh: fs.Mesh) -> list[bool]:
        slow = delayed(with_plain_functions(mesh), "all_gather", 0.001)
        found = []
        for first, made in ((mesh, slow), (slow, mesh)):
            found += [isinstance(neighbours(used, 2).shard, DelayedGroup) for used in (first, made)]
            first.memo.parts.clear()
        return found

    assert run_simulated(main, 4) == [[False, True, True, False]] * 4


def make_and_drop(_: fs.Mesh) -> list[int]:
    """Return how many process groups there are after each of four meshes, of which none stays."""
    counts = []
    for _ in range(4):
        fs.init_mesh({"replicate": 1, "shard": 2}, device="cpu")
        gc.collect()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts


@pytest.mark.slow
def test_meshes_that_are_gone_leave_no_process_group_also_of_axes_of_one_rank() -> None:
    for counts in run_ranks(make_and_drop, 2):
        assert counts[-1] == counts[1], counts
