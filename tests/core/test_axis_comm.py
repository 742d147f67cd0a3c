"""One collective along one mesh axis on plain tensors: adjoints, new memory, and what it cannot be part of."""

import pytest
import torch

import funcshard as fs
from funcshard.core.axis_comm import AxisComm

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

GRID = {"shard": 2, "tensor": 2}
COMMS = {
    "all_gather": lambda mesh: AxisComm("all_gather", mesh, "tensor", "all_gather"),
    "reduce_scatter": lambda mesh: AxisComm("reduce_scatter", mesh, "tensor", "psum_scatter"),
    "exchange": lambda mesh: AxisComm("exchange", mesh, "tensor", "all_to_all", (1, 1), (1, 1), 1),
    # Rank 0 sends three of its rows to rank 1, which sends one back.
    "uneven exchange": lambda mesh: (
        AxisComm("exchange", mesh, "tensor", "ppermute", (1, 3), (1, 1), 3)
        if mesh.position["tensor"] == 0
        else AxisComm("exchange", mesh, "tensor", "ppermute", (1, 0), (3, 0), 3)
    ),
}
ROWS = {"all_gather": (2, 2), "reduce_scatter": (2, 2), "exchange": (2, 2), "uneven exchange": (4, 1)}


@pytest.mark.parametrize("kind", COMMS)
def test_the_adjoint_has_the_same_inner_product(kind):
    def main(mesh):
        comm = COMMS[kind](mesh)
        assert comm.adjoint.adjoint == comm
        g = torch.Generator().manual_seed(mesh.rank)
        x = torch.randn(ROWS[kind][mesh.position["tensor"]], 3, generator=g).double()
        out = comm.run(x)
        y = torch.randn(out.shape, generator=g).double()
        back = comm.adjoint.run(y)
        assert back.shape == x.shape
        return (out * y).sum().item(), (x * back).sum().item()

    left, right = (sum(side) for side in zip(*fs.simulate(main, GRID), strict=True))
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("kind", COMMS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_result_is_new_memory_of_any_further_dimensions(kind, ranks):
    def main(mesh):
        if ranks == 1 and kind == "uneven exchange":
            return
        comm = (
            AxisComm("exchange", mesh, "tensor", "all_to_all", (1,), (1,))
            if ranks == 1 and kind == "exchange"
            else COMMS[kind](mesh)
        )
        x = torch.ones(ROWS[kind][mesh.position["tensor"]] if ranks > 1 else 1, 2, 1, 3).transpose(1, 3)
        before = x.clone()
        out = comm.run(x)
        assert out.shape[-3:] == (3, 1, 2)
        out.fill_(7.0)
        assert torch.equal(x, before)

    fs.simulate(main, {"shard": 2, "tensor": ranks})


@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "all_to_all"])
def test_the_old_vmap_is_refused_and_the_collective_named(name):
    def main(mesh):
        x = torch.ones(2, 3, requires_grad=True)
        out = getattr(fs, name)(x, mesh, axis="tensor")
        with pytest.raises(
            RuntimeError, match=r"along 'tensor' on 4 ranks: use torch.vmap over the cotangents of torch.func.vjp"
        ):
            torch.autograd.grad(out, x, torch.ones(3, *out.shape), is_grads_batched=True)

    fs.simulate(main, GRID)


def test_ranks_with_different_permutations_issue_different_collectives():
    words = r"is all_to_all of float32 of ppermute by \[\(0, 1\)\] along 'tensor' on rank 0 and .* by \[\(1, 0\)\] along"
    with pytest.raises(RuntimeError, match=words):
        fs.simulate(
            lambda mesh: fs.ppermute(torch.ones(1), mesh, [(mesh.rank, 1 - mesh.rank)], axis="tensor"), {"tensor": 2}
        )


def test_a_long_permutation_has_a_short_label():
    def main(mesh):
        ring = [(i, (i + 1) % 12) for i in range(12)]
        fs.ppermute(torch.ones(1), mesh, ring if mesh.rank else ring[::-1], axis="tensor")  # the order means nothing
        fs.ppermute(torch.ones(1), mesh, ring if mesh.rank else ring[:-1], axis="tensor")

    with pytest.raises(
        RuntimeError, match=r"ppermute by \[\(0, 1\), .*\.\.\. \(checksum [0-9a-f]{8}\) along 'tensor' on rank"
    ):
        fs.simulate(main, {"tensor": 12})
