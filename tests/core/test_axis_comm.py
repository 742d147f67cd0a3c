"""One collective along one mesh axis on plain tensors: what it cannot be part of, and its label."""

import pytest
import torch

import funcshard as fs
from tests.ranks import on_ranks


@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "all_to_all"])
@on_ranks({"shard": 2, "tensor": 2})
def test_the_old_vmap_is_refused_and_the_collective_named(mesh, name):
    x = torch.ones(2, 3, requires_grad=True)
    out = getattr(fs, name)(x, mesh, axis="tensor")
    with pytest.raises(
        RuntimeError, match=r"along 'tensor' on 4 ranks: use torch.vmap over the cotangents of torch.func.vjp"
    ):
        torch.autograd.grad(out, x, torch.ones(3, *out.shape), is_grads_batched=True)


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
