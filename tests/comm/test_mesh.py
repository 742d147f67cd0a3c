"""Meshes: positions and parts by name, from a shape, a process group or a device mesh, and reshaped."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import funcshard as fs
from funcshard.comm import Op, Topology
from funcshard.comm.agreement import check_all_same
from funcshard.comm.group import LocalGroup
from funcshard.comm.mesh import neighbours
from funcshard.testing import DelayedGroup, delayed
from tests.collective_oracle import line
from tests.ranks import on_ranks, run_ranks, run_simulated

LINE, GRID, NAMED = {"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}
CUBE = {"replicate": 2, "shard": 2, "tensor": 2}


def along(mesh: fs.Mesh, axis: Any, rank: int) -> int:
    """Return the sum of powers of two over the ranks along an axis, which tells which ranks they are."""
    return int(fs.psum(torch.tensor(2**rank), mesh, axis=axis))


@contextlib.contextmanager
def process_group(rank: int, world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_one_local_rank_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = fs.Mesh()
    assert (mesh.rank, mesh.world_size, mesh.shape, mesh.axes) == (0, 1, {"replicate": 1, "shard": 1}, ())
    assert mesh.device == torch.device("cpu")
    assert mesh.reshaped({"shard": 1}) == mesh
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert fs.init_mesh(device="cpu") == fs.init_mesh({"replicate": 1, "shard": 1}, device="cpu") == mesh
    assert not dist.is_initialized()


def test_a_device_mesh_of_one_rank_needs_no_communication() -> None:
    of_two_axes = (None, ("replicate", "shard"), ("shard", "replicate"), ("dp_replicate", "dp_shard"))
    names_by_size = {(1,): (None, ("dp",), ("dp_replicate",)), (1, 1): of_two_axes}
    with process_group(0, 1):
        for sizes, names in [(sizes, names) for sizes, several in names_by_size.items() for names in several]:
            mesh = fs.Mesh.from_device_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names))
            assert mesh == fs.Mesh()
            assert isinstance(mesh.shard, LocalGroup)


def test_a_mesh_has_as_many_ranks_as_the_process_group() -> None:
    for rank, size in ((0, 1), (4, 6)):
        with process_group(rank, size):
            with pytest.raises(ValueError, match=rf"mesh shape .*'shard': 4.* must have as many ranks as the world: {size}"):
                fs.init_mesh(LINE, device="cpu")
            assert fs.init_mesh(device="cpu").shape == {"replicate": 1, "shard": size}


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
def test_a_device_mesh_that_does_not_name_its_axes_is_an_error(sizes: tuple, names: Any, ours: Any, words: str) -> None:
    match = f"device_mesh has {len(sizes)} axes named .*: {re.escape(words)}; pass .*names="
    with process_group(0, 1), pytest.raises(ValueError, match=match):
        fs.Mesh.from_device_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names), names=ours)


DEVICE_MESHES = [
    # sizes and names of a device mesh, our names for them, and the shape of the mesh
    ((6,), None, None, {"replicate": 1, "shard": 6}),
    ((2, 3), None, None, {"replicate": 2, "shard": 3}),
    ((2, 3), ("dp_shard", "tp"), None, {"replicate": 1, "shard": 2, "tp": 3}),
    ((2, 3), ("dp_replicate", "dp_shard"), None, {"replicate": 2, "shard": 3}),
    ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), {"tp": "tensor"}, {"replicate": 2, "shard": 2, "tensor": 2}),
    ((2, 2, 2), ("pp", "dp", "tp"), {"dp": "shard"}, {"replicate": 1, "pp": 2, "shard": 2, "tp": 2}),
    ((8,), ("tp",), {"tp": "tensor"}, {"replicate": 1, "shard": 1, "tensor": 8}),
    ((8,), ("tp",), None, {"replicate": 1, "shard": 8}),
]


@pytest.mark.parametrize(("sizes", "names", "ours", "shape"), DEVICE_MESHES, ids=str)
def test_a_device_mesh_gives_its_axes_by_name(sizes: tuple, names: Any, ours: Any, shape: dict) -> None:
    size = torch.Size(sizes).numel()
    rank = size - 2
    with process_group(rank, size):
        mesh = fs.Mesh.from_device_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names), names=ours)
        assert list(mesh.shape.items()) == list(shape.items())
        assert mesh.rank == rank
        place = [*itertools.product(*map(range, shape.values()))][rank]
        assert mesh.position == dict(zip(shape, place, strict=True)) == fs.init_mesh(shape, device="cpu").position
        assert [axis for axis, _ in mesh.axes] == [axis for axis in reversed(shape) if shape[axis] > 1]


@on_ranks(CUBE)
def test_a_part_of_a_mesh_holds_the_neighbours_along_its_axes(mesh: fs.Mesh) -> None:
    for axes in ("tensor", "shard", ("shard", "tensor"), ("replicate", "tensor"), tuple(mesh.shape)):
        part, names = mesh[axes], mesh.names(axes)
        ranks = sum(2**rank for rank in line(mesh.rank, CUBE, axes))
        assert along(part, tuple(part.shape), mesh.rank) == along(mesh, axes, mesh.rank) == ranks
        assert part.rank == fs.axis_index(mesh, axis=names)
        assert {axis: size for axis, size in part.shape.items() if size > 1} == dict.fromkeys(names, 2)
        assert part.position == {**dict.fromkeys(part.shape, 0), **{axis: mesh.position[axis] for axis in names}}
        assert part.device == mesh.device
    assert mesh["tensor", "shard"] == mesh["shard", "tensor"]  # the axes keep the order of the mesh
    assert mesh[tuple(mesh.shape)] == mesh


SHAPES = (GRID, LINE, {"replicate": 4}, NAMED, {"tensor": 2, "shard": 2}, {"tensor": 4}, {"replicate": 2, "expert": 2}, LINE)


def reshape_again_and_again(mesh: fs.Mesh, shapes: Sequence[dict[str, int]] = SHAPES) -> None:
    rank = mesh.rank
    for shape in shapes:
        mesh = mesh.reshaped(shape)
        assert mesh.rank == rank
        assert {axis: size for axis, size in mesh.shape.items() if axis in shape or size > 1} == shape
        for axis in shape:
            assert along(mesh, axis, rank) == sum(2**other for other in line(rank, shape, axis)), (shape, axis)
        assert along(mesh, tuple(shape), rank) == 15


def test_a_reshaped_mesh_has_the_same_ranks_in_other_groups() -> None:
    run_simulated(reshape_again_and_again, 4)


def make_in_several_ways(mesh: fs.Mesh) -> None:
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    named = fs.Mesh.from_device_mesh(device_mesh, names={"dp": "shard", "tp": "tensor"})
    for made in (mesh, fs.init_mesh(NAMED, device="cpu"), named):
        assert list(made.shape.items()) == [("replicate", 1), ("shard", 2), ("tensor", 2)]
        assert made.rank == dist.get_rank()
        assert made.position == {"replicate": 0, "shard": made.rank // 2, "tensor": made.rank % 2}
        for axis, part in (("tensor", made), ("shard", made), ("tensor", made["tensor"])):
            assert along(part, axis, made.rank) == sum(2**other for other in line(made.rank, NAMED, axis))
    for names in (("dp_replicate", "dp_shard"), ("shard", "replicate")):
        made = fs.Mesh.from_device_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
        for axis in ("shard", "replicate"):
            assert along(made, axis, made.rank) == sum(2**other for other in line(made.rank, dict(made.shape), axis))
        params, plan = {"w": torch.ones(5)}, fs.make_plan({"w": torch.ones(5)}, made)
        for src in (0, 1):  # counts as mesh.rank does
            shards = fs.shard({"w": params["w"] + made.rank}, plan, made, src=src)
            assert torch.equal(fs.gather(shards, plan, made)["w"], params["w"] + src)
        again = made.reshaped(LINE)
        assert again.rank == made.rank == dist.get_rank()
        assert along(again, "shard", again.rank) == 15
    reshape_again_and_again(mesh, (LINE, GRID))


@pytest.mark.slow
def test_a_job_of_processes_has_named_axes_in_any_order_of_its_device_mesh() -> None:
    run_ranks(make_in_several_ways, 4, shape=NAMED)


@pytest.mark.parametrize("world", [{"shard": 3}, {"replicate": 3}, GRID], ids=["cut", "repeated", "both"])
def test_every_rank_raises_if_one_text_differs_and_none_waits(world: dict) -> None:
    def main(mesh: fs.Mesh, odd: int) -> str:
        try:
            check_all_same(mesh, {"the plan": "odd" if mesh.rank == odd else "even"})
        except ValueError as error:
            return str(error)
        return "nothing noticed"

    for odd in (0, 1, 2):
        pair = "rank 0 has odd and rank 1 has even" if odd == 0 else f"rank 0 has even and rank {odd} has odd"
        words = f"the plan must be the same on every rank; {pair}: build it from the same arguments everywhere"
        assert set(fs.simulate(lambda mesh, odd=odd: main(mesh, odd), world)) == {words}
    assert set(fs.simulate(lambda mesh: main(mesh, -1), world)) == {"nothing noticed"}


@on_ranks(4)
def test_a_slow_mesh_stays_slow_when_it_is_reshaped(mesh: fs.Mesh) -> None:
    tensor = torch.ones(1)
    work = delayed(mesh, "all_reduce", 0.01).reshaped(GRID).replicate.start(Op("all_reduce", "", tensor))
    assert tensor.isnan()
    work.wait()
    assert tensor.item() == 2.0


def with_plain_functions(mesh: fs.Mesh) -> fs.Mesh:
    return fs.with_collectives(mesh, "shard", all_reduce=lambda tensor, plain: plain.all_reduce(tensor).wait)


@on_ranks(4)
def test_meshes_made_from_one_share_what_ranks_have_agreed_on(mesh: fs.Mesh) -> None:
    for made in (mesh["shard"], with_plain_functions(mesh), delayed(with_plain_functions(mesh), "all_reduce", 0.0)):
        assert made.memo is mesh.memo
    assert mesh.reshaped(GRID).memo is not mesh.memo  # other axes


@on_ranks(4)
def test_the_parts_of_a_delayed_row_are_slow_and_those_of_the_row_are_not(mesh: fs.Mesh) -> None:
    slow = delayed(with_plain_functions(mesh), "all_gather", 0.001)
    for meshes in ((mesh, slow), (slow, mesh)):
        for used in meshes:
            assert isinstance(neighbours(used, 2).shard, DelayedGroup) == (used is slow)
        mesh.memo.clear()


@on_ranks({"tensor": 2, "replicate": 2, "shard": 2})
def test_reductions_run_along_shard_then_replicate_then_the_other_axes_whatever_the_order_of_the_mesh(mesh: fs.Mesh) -> None:
    plan = fs.make_plan({"w": torch.ones(8)}, mesh)
    with fs.record_events() as events:
        unit = fs.unshard(lambda leaves: leaves["w"].sum(), plan.units[""], mesh)
        fs.value_and_grad(lambda s: unit(s[""]))(fs.shard({"w": torch.ones(8)}, plan, mesh))
    assert [axis for axis, _ in Topology(mesh, sharded=False).repeated] == ["shard", "replicate", "tensor"]
    assert [event.axis for event in events] == ["shard", "shard", "replicate", "tensor"]
