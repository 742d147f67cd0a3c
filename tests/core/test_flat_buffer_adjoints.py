"""Collectives as linear maps: values, exact adjoints, and every transform of torch.func."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcshard as fs
from funcshard.comm.topology import Topology
from funcshard.core.buffer_comm import BufferComm, start_gather, start_reduce
from funcshard.core.flat_buffer import LeavesToShard, ShardToLeaves, leaf_views
from funcshard.plan.unit_plan import BufferPlan, LeafSpec
from tests.pairwise import crossed

# The first use of forward-mode AD makes torch import a file that calls a deprecated function of
# torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

MESHES = [1, 2, 3, {"replicate": 2}, {"replicate": 2, "shard": 2}, {"replicate": 3, "shard": 2}]
SIMPLE = settings(deadline=None, derandomize=True, max_examples=40)
meshes = st.one_of(
    st.integers(1, 5), st.builds(lambda r, s: {"replicate": r, "shard": s}, st.integers(1, 3), st.integers(1, 3))
)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum()


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


@pytest.mark.slow
@SIMPLE
@given(meshes, st.booleans(), st.integers(0, 9))
def test_gathering_and_reducing_are_adjoint(world: Any, sharded: bool, n: int) -> None:
    """Copies along the replicate axis are one value: a slice counts once, and every rank gathers the whole."""

    def main(mesh: fs.Mesh) -> tuple[float, float, float]:
        comm = comm_of(mesh, sharded)
        cut = mesh.shard.size if sharded else 1
        x = random(mesh.shard.rank if sharded else 0, n)  # equal on all ranks that hold a copy
        y = random(100 + mesh.rank, n * cut)
        whole, total = gathered(x, comm), reduced(y, comm)
        assert whole.shape == y.shape
        assert total.shape == x.shape
        first_copy = mesh.replicate.rank == 0 and (sharded or mesh.shard.rank == 0)
        return dot(whole, y).item(), dot(x, total).item() * first_copy, y.abs().sum().item()

    left, right, size = (sum(values) for values in zip(*fs.simulate(main, world), strict=True))
    assert abs(left - right) <= 1e-13 * (1 + size)


@pytest.mark.slow
@SIMPLE
@given(meshes, st.booleans(), st.integers(0, 7))
def test_the_backward_of_each_is_the_other(world: Any, sharded: bool, n: int) -> None:
    def main(mesh: fs.Mesh) -> None:
        comm = comm_of(mesh, sharded)
        cut = mesh.shard.size if sharded else 1
        x = random(mesh.rank, n).requires_grad_()
        y = random(100 + mesh.rank, n * cut).requires_grad_()
        (gx,) = torch.autograd.grad(gathered(x, comm), x, y.detach())
        assert torch.equal(gx, reduced(y.detach(), comm))
        (gy,) = torch.autograd.grad(reduced(y, comm), y, x.detach())
        assert torch.equal(gy, gathered(x.detach(), comm))

    fs.simulate(main, world)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.bool])
def test_gathering_keeps_every_dtype_to_the_bit(dtype: torch.dtype) -> None:
    def main(mesh: fs.Mesh) -> None:
        piece = (torch.arange(4) * (mesh.rank + 1) % 3).to(dtype)
        out = start_gather(piece, comm_of(mesh, True)).finish()
        assert torch.equal(out, torch.cat([(torch.arange(4) * (r + 1) % 3).to(dtype) for r in range(3)]))

    fs.simulate(main, 3)


@crossed(donated=[True, False], world=MESHES, sharded=[True, False])
def test_a_reduction_overwrites_its_input_only_when_it_is_donated(world: Any, sharded: bool, donated: bool) -> None:
    def main(mesh: fs.Mesh) -> None:
        cut = mesh.shard.size if sharded else 1
        full = random(mesh.rank, 2 * cut)
        before = full.clone()
        start_reduce(full, comm_of(mesh, sharded), donated=donated).finish()
        assert donated or torch.equal(full, before)

    fs.simulate(main, world)


@pytest.mark.parametrize("world", [1, 2, {"replicate": 2, "shard": 2}], ids=str)
def test_psum_and_pmean_of_a_tree_are_those_of_its_leaves(world: Any) -> None:
    def main(mesh: fs.Mesh) -> None:
        x = {"b": [random(mesh.rank, 3), random(mesh.rank, 2, 2)], "a": (random(mesh.rank), None)}
        for f in (fs.psum, fs.pmean):
            expected = {"b": [f(leaf, mesh) for leaf in x["b"]], "a": (f(x["a"][0], mesh), None)}
            torch.testing.assert_close(f(x, mesh), expected, rtol=0, atol=0)
            total = lambda tree, f=f: sum(leaf.sum() for leaf in f(tree, mesh)["b"])  # noqa: E731
            found = torch.func.grad(total)({"b": x["b"]})["b"]
            wanted = mesh.world_size if f is fs.psum else 1
            assert all(torch.equal(grad, torch.full_like(grad, wanted)) for grad in found)

    fs.simulate(main, world)


@pytest.mark.parametrize(
    ("x", "words"),
    [(1.5, "found float: make it one"), ({"n": [torch.ones(1), 3]}, r"found int at 'n\.1': make it one with torch.tensor")],
    ids=["a number", "a number in a tree"],
)
def test_what_is_no_tensor_is_not_added_up(x: Any, words: str) -> None:
    for f in (fs.psum, fs.pmean):
        with pytest.raises(TypeError, match=f"psum and pmean take a tensor, or a tree of tensors; {words}"):
            f(x, fs.Mesh())


def test_psum_of_integers_is_an_integer() -> None:
    totals = fs.simulate(lambda mesh: fs.psum(torch.tensor(mesh.rank), mesh), 4)
    assert [(t.item(), t.dtype) for t in totals] == [(6, torch.int64)] * 4


def plain(x: torch.Tensor, world: int) -> torch.Tensor:
    """Compute on the whole vector what ``check_transforms`` computes on slices; every rank contributes the same."""
    return x.sin() ** 2 * world


def check_transforms(mesh: fs.Mesh, sharded: bool) -> None:
    """Compare transforms of gather, compute, reduce on this rank's slice with those of plain torch on the whole.

    Copies are one value, so a gradient counts that value once, and not once for each copy.
    """
    comm, n = comm_of(mesh, sharded), mesh.world_size
    x, v, batch = random(0, 4), random(1, 4), random(2, 3, 4)

    def f(shard: torch.Tensor) -> torch.Tensor:
        return reduced(gathered(shard, comm).sin() ** 2, comm)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return plain(x, n)

    def mine(x: torch.Tensor) -> torch.Tensor:
        return x.chunk(mesh.shard.size, -1)[mesh.shard.rank].clone() if sharded else x

    def gradient(function: Any) -> Any:
        return torch.func.grad(lambda x: function(x).sum())

    def grad_of_grad(function: Any) -> Any:
        return torch.func.grad(lambda x: gradient(function)(x).sum())

    close = torch.testing.assert_close
    for transform in (lambda f: f, gradient, grad_of_grad):
        close(transform(f)(mine(x)), mine(transform(whole)(x)))
        close(torch.vmap(transform(f))(mine(batch)), mine(torch.vmap(transform(whole))(batch)))
    close(torch.vmap(f, in_dims=1, out_dims=1)(mine(batch).t()).t(), mine(whole(batch)))
    stacked = random(3, 2, 3, 4)
    close(torch.vmap(torch.vmap(f))(mine(stacked)), mine(whole(stacked)))
    for transform in (lambda f: f, gradient):
        ours = torch.func.jvp(transform(f), (mine(x),), (mine(v),))
        for got, expected in zip(ours, torch.func.jvp(transform(whole), (x,), (v,)), strict=True):
            close(got, mine(expected))


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("sharded", [True, False])
def test_every_transform_gives_what_plain_torch_gives(world: Any, sharded: bool) -> None:
    fs.simulate(lambda mesh: check_transforms(mesh, sharded), world)


def test_events_say_what_moved() -> None:
    def main(mesh: fs.Mesh) -> list[tuple]:
        with fs.record_events() as events:
            comm = comm_of(mesh, True)
            reduced(gathered(random(0, 3), comm), comm)
            fs.psum(torch.ones(2), mesh)
            gathered(random(0, 0), comm)
        return [(e.kind, e.unit, e.buffer, e.dtype, e.bytes, e.axis, e.ranks) for e in events]

    expected = [
        ("all_gather", "unit", "float64", "float64", 48, "shard", 2),
        ("reduce_scatter", "unit", "float64", "float64", 48, "shard", 2),
        ("all_reduce", "unit", "float64", "float64", 24, "replicate", 2),
        ("all_reduce", None, "", "float32", 8, "shard", 2),
        ("all_reduce", None, "", "float32", 8, "replicate", 2),
    ]
    assert fs.simulate(main, {"replicate": 2, "shard": 2}) == [expected] * 4
