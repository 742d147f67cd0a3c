"""Meshes with model axes: positions, parts of a mesh by name, and the same on processes and device meshes."""

import copy
import itertools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import funcshard as fs
from tests.ranks import run_ranks

CUBE = {"replicate": 2, "shard": 2, "tensor": 2}
GRID = {"shard": 2, "tensor": 2}


def sum_along(mesh, axis, value):
    return int(fs.psum(torch.tensor(value), mesh, axis=axis))


@pytest.mark.parametrize("shape", [CUBE, {"tensor": 2, "replicate": 2, "shard": 2}, {"stage": 2, "shard": 3}], ids=str)
def test_ranks_are_numbered_row_by_row_and_the_last_axis_joins_neighbours(shape):
    def main(mesh):
        several = [axis for axis, size in mesh.shape.items() if size > 1]
        return (
            mesh.rank,
            [mesh.position[axis] for axis in several],
            [axis for axis, _ in mesh.axes],
            fs.axis_index(mesh, axis=several),
        )

    places = itertools.product(*map(range, shape.values()))
    for number, (place, (rank, position, axes, index)) in enumerate(zip(places, fs.simulate(main, shape), strict=True)):
        assert rank == index == number
        assert tuple(position) == place
        assert axes == list(reversed(shape))  # innermost first


def test_a_part_of_a_mesh_holds_the_neighbours_along_its_axes():
    def main(mesh):
        found = {}
        for axes in ("tensor", "shard", ("shard", "tensor"), ("replicate", "tensor"), tuple(mesh.shape)):
            part = mesh[axes]
            names = mesh.names(axes)
            # Sums of powers of two tell which ranks are in a group.
            assert sum_along(part, tuple(part.shape), 2**mesh.rank) == sum_along(mesh, axes, 2**mesh.rank)
            assert part.rank == fs.axis_index(mesh, axis=names)
            assert {axis: size for axis, size in part.shape.items() if size > 1} == dict.fromkeys(names, 2)
            assert part.position == {**dict.fromkeys(part.shape, 0), **{axis: mesh.position[axis] for axis in names}}
            assert part.device == mesh.device
            found[axes] = sum_along(part, tuple(part.shape), 2**mesh.rank)
        assert mesh["tensor", "shard"] == mesh["shard", "tensor"]  # the axes keep the order of the mesh
        assert mesh[tuple(mesh.shape)] == mesh
        return found

    for rank, found in enumerate(fs.simulate(main, CUBE)):
        assert found["tensor"] == 2 ** (rank - rank % 2) * 3
        assert found["shard", "tensor"] == 15 << (rank - rank % 4)
        assert found[tuple(CUBE)] == 255


@pytest.mark.parametrize(
    "axes", ["expert", (), ("shard", "shard"), ("shard", "expert"), 1, None, (["shard"],), {"shard"}], ids=str
)
def test_names_that_are_no_axes_are_refused(axes):
    words = f"axis must name one axis of the mesh, or several different ones in a tuple; found {axes!r}: the mesh has "
    for call in (lambda mesh: mesh[axes], lambda mesh: mesh.names(axes)):
        with pytest.raises(ValueError, match=re.escape(words)):
            fs.simulate(call, GRID)


def reshaped(mesh):
    """Return the neighbours along each axis, of a mesh that takes the given shapes one after the other."""
    found = []
    for shape in ({"shard": 4}, GRID, {"tensor": 2, "shard": 2}, {"tensor": 4}, {"replicate": 2, "expert": 2}, {"shard": 4}):
        mesh = mesh.reshaped(shape)
        along = {axis: sum_along(mesh, axis, 2**mesh.rank) for axis in shape}
        found.append((list(mesh.shape.items()), mesh.rank, along))
    return found


def check_reshaped(results):
    for rank, found in enumerate(results):
        row, column = 3 << (rank - rank % 2), 5 << rank % 2
        wanted = [{"shard": 15}, {"shard": column, "tensor": row}, {"tensor": column, "shard": row}, {"tensor": 15},
                  {"replicate": column, "expert": row}, {"shard": 15}]  # fmt: skip
        assert [along for _, _, along in found] == wanted
        assert {number for _, number, _ in found} == {rank}


def test_a_mesh_is_reshaped_to_model_axes_and_back():
    check_reshaped(fs.simulate(reshaped, GRID))


def test_a_copy_of_a_mesh_is_the_mesh():
    def main(mesh):
        module = torch.nn.Linear(2, 2)
        module.mesh = mesh
        return copy.deepcopy(module).mesh is mesh

    assert all(fs.simulate(main, GRID))


@pytest.fixture
def rank_5_of_8():
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("rank_5_of_8")
@pytest.mark.parametrize(
    ("sizes", "names", "ours", "shape"),
    [
        ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), None, {"replicate": 2, "shard": 2, "tp": 2}),
        ((2, 2, 2), ("dp_replicate", "dp_shard", "tp"), {"tp": "tensor"}, {"replicate": 2, "shard": 2, "tensor": 2}),
        ((2, 2, 2), ("pp", "dp", "tp"), {"dp": "shard"}, {"replicate": 1, "pp": 2, "shard": 2, "tp": 2}),
        ((2, 4), ("dp", "tp"), {"dp": "shard", "tp": "tensor"}, {"replicate": 1, "shard": 2, "tensor": 4}),
        ((8,), ("tp",), {"tp": "tensor"}, {"replicate": 1, "shard": 1, "tensor": 8}),
        ((8,), ("tp",), None, {"replicate": 1, "shard": 8}),
    ],
    ids=str,
)
def test_the_axes_of_a_device_mesh_may_have_other_names(sizes, names, ours, shape):
    mesh = fs.Mesh.from_device_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names), names=ours)
    assert list(mesh.shape.items()) == list(shape.items())
    assert mesh.rank == 5
    assert fs.init_mesh(shape, device="cpu").position == mesh.position


def on_processes(mesh):
    """Return the neighbours along each axis of the mesh of a job, made in three ways."""
    device_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for made in (
        mesh,
        fs.init_mesh(GRID, device="cpu"),
        fs.Mesh.from_device_mesh(device_mesh, names={"dp": "shard", "tp": "tensor"}),
    ):
        assert list(made.shape.items()) == [("replicate", 1), ("shard", 2), ("tensor", 2)]
        assert made.rank == dist.get_rank()
        assert made.position == {"replicate": 0, "shard": made.rank // 2, "tensor": made.rank % 2}
        assert sum_along(made, "tensor", 2**made.rank) == 3 << (made.rank - made.rank % 2)
        assert sum_along(made, "shard", 2**made.rank) == 5 << made.rank % 2
        assert sum_along(made["tensor"], "tensor", 2**made.rank) == 3 << (made.rank - made.rank % 2)
    return reshaped(mesh)


@pytest.mark.slow
def test_a_job_of_processes_has_named_axes():
    check_reshaped(run_ranks(on_processes, 4, shape=GRID))
