"""Collectives as linear maps: values, exact adjoints, and every transform of torch.func."""

from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.comm.topology import Topology
from funcshard.core.buffer_comm import BufferComm, start_reduce
from funcshard.core.flat_buffer import LeavesToShard, ShardToLeaves, leaf_views
from funcshard.plan.unit_plan import BufferPlan, LeafSpec
from tests.pairwise import crossed

# The first use of forward-mode AD makes torch import a file that calls a deprecated function of
# torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

MESHES = [1, 2, 3, {"replicate": 2}, {"replicate": 2, "shard": 2}, {"replicate": 3, "shard": 2}]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def comm_of(mesh: fs.Mesh, sharded: bool) -> BufferComm:
    return BufferComm(Topology(mesh, sharded), "unit", "float64")


def _buffer(comm: BufferComm, n: int, dtype: torch.dtype) -> BufferPlan:
    """Return a buffer of one leaf, of which each rank holds ``n`` elements."""
    ranks = comm.mesh.shard.size if comm.topology.cut else 1
    name = str(dtype).removeprefix("torch.")
    return BufferPlan(name, name, True, (LeafSpec("leaf", (n * ranks,), 0, 0),), ranks)


def gathered(shard: torch.Tensor, comm: BufferComm) -> torch.Tensor:
    """Gather ``[n]`` of every rank, differentiably, into ``[n * ranks]``."""
    buffer = _buffer(comm, shard.shape[0], shard.dtype)
    (whole,) = ShardToLeaves.apply(shard, buffer, leaf_views(buffer), comm, None, None, False)
    return whole


def reduced(full: torch.Tensor, comm: BufferComm) -> torch.Tensor:
    """Sum ``[n * ranks]``, differentiably, into each rank's ``[n]``."""
    ranks = comm.mesh.shard.size if comm.topology.cut else 1
    return LeavesToShard.apply(_buffer(comm, full.shape[0] // ranks, full.dtype), comm, full.device, full)


@pytest.mark.parametrize("world", MESHES, ids=str)
@pytest.mark.parametrize("sharded", [True, False])
def test_values_are_those_of_the_whole_world(world: Any, sharded: bool) -> None:
    def main(mesh: fs.Mesh) -> None:
        comm, (_, shard) = comm_of(mesh, sharded), mesh.shape.items()
        cut = shard[1] if sharded else 1
        expected = [random(rank, 3) for rank in range(cut)] if cut > 1 else [random(mesh.shard.rank, 3)]
        assert torch.equal(gathered(random(mesh.shard.rank, 3), comm), torch.cat(expected))
        total = sum(random(rank, 3 * cut) for rank in range(mesh.world_size))
        mine = total.chunk(cut)[mesh.shard.rank if cut > 1 else 0]
        torch.testing.assert_close(reduced(random(mesh.rank, 3 * cut), comm), mine)

    fs.simulate(main, world)


@crossed(donated=[True, False], world=MESHES, sharded=[True, False])
def test_a_reduction_overwrites_its_input_only_when_it_is_donated(world: Any, sharded: bool, donated: bool) -> None:
    def main(mesh: fs.Mesh) -> None:
        cut = mesh.shard.size if sharded else 1
        full = random(mesh.rank, 2 * cut)
        before = full.clone()
        start_reduce(full, comm_of(mesh, sharded), donated=donated).finish()
        assert donated or torch.equal(full, before)

    fs.simulate(main, world)


def test_tensors_need_not_be_contiguous() -> None:
    def main(mesh: fs.Mesh) -> None:
        x = random(mesh.rank, 12)[::2]
        comm = comm_of(mesh, True)
        assert torch.equal(gathered(x, comm), gathered(x.contiguous(), comm))
        assert torch.equal(reduced(x, comm), reduced(x.contiguous(), comm))
        assert torch.equal(fs.psum(x, mesh), fs.psum(x.contiguous(), mesh))

    fs.simulate(main, 2)


@pytest.mark.parametrize(
    ("x", "words"),
    [(1.5, "found float: make it one"), ({"n": [torch.ones(1), 3]}, r"found int at 'n\.1': make it one with torch.tensor")],
    ids=["a number", "a number in a tree"],
)
def test_what_is_no_tensor_is_not_added_up(x: Any, words: str) -> None:
    for f in (fs.psum, fs.pmean):
        with pytest.raises(TypeError, match=f"psum and pmean take a tensor, or a tree of tensors; {words}"):
            f(x, fs.Mesh())
