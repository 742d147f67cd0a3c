"""Norms of sharded and of whole gradients are equal, on every mesh and for every strategy."""

import math
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from funcshard.train.clipping import PIECE, norm_of_rows
from tests.pairwise import crossed
from tests.ranks import on_ranks

WORLDS = [1, 2, 3, {"replicate": 2, "shard": 2}, {"replicate": 2}]
NORMS = [1.0, 2.0, 3.0, 0.5, math.inf]
PLANS: dict[str, dict[str, Any]] = {
    "full_shard": {"units": ["a"]},
    "shard_grad_op": {"units": ["a"], "strategy": "shard_grad_op"},
    "no_shard": {"units": ["a"], "strategy": "no_shard"},
    "mixed": {"units": {"a": {"strategy": "no_shard"}, "c": {"strategy": "shard_grad_op"}, "d": {}}},
}


def example(rank: int = 0) -> dict[str, Any]:
    """Return leaves of two dtypes, an empty one, one that differs between ranks, and two that are not trained."""
    generator, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(9 + rank)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    params = {"a": {"w": normal(3, 3), "b": normal(1)}, "c": normal(5), "e": torch.zeros(0), "d": normal(2).double()}
    params["own"] = torch.randn(2, 4, generator=own)
    frozen = {"frozen": torch.full((4,), 9.0), "n": torch.ones(2).long()}
    return {**tree.map(lambda t: t.requires_grad_(), params), **frozen}


def as_gradients(params: Any, plan: fs.Plan, mesh: fs.Mesh) -> Any:
    """Return shards as a gradient holds them, with ``None`` for frozen buffers."""
    shards = fs.shard(params, plan, mesh)
    return {u.name: {b.key: shards[u.name][b.key] if b.trainable else None for b in u.buffers} for u in plan.unit_list}


@pytest.mark.slow
@crossed(world=WORLDS, options=PLANS, norm_type=NORMS, max_norm=[0.1, 1000.0])
def test_clipping_is_that_of_torch_on_the_whole_model(world: Any, options: dict, norm_type: float, max_norm: float) -> None:
    size = world if isinstance(world, int) else math.prod(world.values())
    by_rank = [example(rank) for rank in range(size)]
    shared = [leaf for name, leaf in by_rank[0].items() if name != "own"]
    whole = [leaf for leaf in tree.leaves([shared, [params["own"] for params in by_rank]]) if leaf.requires_grad]
    whole = [leaf for leaf in whole if leaf.numel()]  # torch refuses infinity norms of leaves without elements
    for leaf in whole:
        leaf.grad = leaf.detach().clone()
    expected_norm = torch.nn.utils.clip_grad_norm_(whole, max_norm, norm_type)

    def main(mesh: fs.Mesh) -> torch.Tensor:
        params = {**by_rank[0], "own": by_rank[mesh.rank]["own"]}
        plan = fs.make_plan(params, mesh, local=["own"], **options)
        grads = as_gradients(params, plan, mesh)
        before = tree.map(torch.clone, grads)
        clipped, norm = fs.clip_by_global_norm(grads, plan, mesh, max_norm, norm_type)
        assert torch.equal(norm, fs.global_norm(grads, plan, mesh, norm_type))
        torch.testing.assert_close(grads, before, rtol=0, atol=0)
        gathered = dict(zip(*tree.describe(fs.gather(clipped, plan, mesh))[:0:-1], strict=True))
        for path, leaf in zip(*tree.describe(params)[:0:-1], strict=True):
            wanted = leaf if leaf.requires_grad and leaf.grad is None else leaf.grad
            torch.testing.assert_close(gathered.get(path), wanted)
        return norm

    norms = fs.simulate(main, world)
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    assert (norms[0].shape, norms[0].dtype) == ((), torch.float64)
    torch.testing.assert_close(norms[0], expected_norm.double())


# name -> (the leaf, the axis along which it differs, its norm)
LEAVES: dict[str, tuple[torch.Tensor, str | None, float]] = {
    "complex64 along replicate": (torch.arange(4).to(torch.complex64), "replicate", (2 * 14) ** 0.5),
    "float64 along shard": (torch.arange(4).double(), "shard", (2 * 14) ** 0.5),  # of two equal copies, one counts
    "float16, added in float32": (torch.full((4096,), 0.25, dtype=torch.float16), None, 16.0),
    "absolute values": (torch.tensor([3 + 4j, 0j, 12j]), None, 13.0),
    "NaN on one rank": (torch.tensor([1.0, 1.0, math.nan, 1.0]), None, math.nan),
}


@pytest.mark.parametrize(("leaf", "axis", "expected"), LEAVES.values(), ids=LEAVES)
@on_ranks({"replicate": 2, "shard": 2})
def test_the_norm_of_one_leaf(mesh: fs.Mesh, leaf: torch.Tensor, axis: str | None, expected: float) -> None:
    plan = fs.make_plan({"w": leaf}, mesh, local={"w": axis} if axis else ())
    norm = fs.global_norm(fs.shard({"w": leaf}, plan, mesh), plan, mesh)
    wide = torch.promote_types(torch.float32, leaf.dtype.to_real())
    torch.testing.assert_close(norm, torch.tensor(expected, dtype=wide), rtol=1e-6, atol=0, equal_nan=True)


GRADS = {"": {"float32": torch.ones(2)}}


def test_a_bound_that_is_a_tensor_stays_differentiable() -> None:
    plan, bound = fs.make_plan({"w": torch.ones(2)}, 1), torch.tensor(1.0, requires_grad=True)
    clipped, _ = fs.clip_by_global_norm(GRADS, plan, fs.Mesh(), bound)
    (slope,) = torch.autograd.grad(clipped[""]["float32"].sum(), bound)
    torch.testing.assert_close(slope, torch.tensor(2.0).sqrt())
    clip = lambda bound: fs.clip_by_global_norm(GRADS, plan, fs.Mesh(), bound)[0][""]["float32"]  # noqa: E731
    assert torch.vmap(clip)(torch.tensor([0.1, 1])).shape == (2, 2)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
@on_ranks(2)
def test_donated_gradients_are_clipped_in_place_with_the_same_bits(mesh: fs.Mesh, max_norm: float) -> None:
    params = example()
    plan = fs.make_plan(params, mesh, units=["a"])
    grads = as_gradients(params, plan, mesh)
    given = tree.map(lambda leaf: leaf.clone(), grads)
    memory = [leaf.data_ptr() for leaf in tree.leaves(given)]
    wanted, norm = fs.clip_by_global_norm(grads, plan, mesh, max_norm)
    clipped, norm_again = fs.clip_by_global_norm(given, plan, mesh, max_norm, donate=True)
    torch.testing.assert_close((clipped, norm_again), (wanted, norm), rtol=0, atol=0)
    assert [leaf.data_ptr() for leaf in tree.leaves(clipped)] == memory
    with pytest.raises(RuntimeError, match="was donated to a training step"):
        fs.clip_by_global_norm(given, plan, mesh, max_norm)


# --- norms of long tensors ---

LENGTHS = (1, PIECE, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 1, 1200 * PIECE + 17)


def values(length: int) -> torch.Tensor:
    """Return two rows whose first elements are much larger than the others, as those of gradients can be."""
    x = torch.randn(2, length, generator=torch.Generator().manual_seed(0)).abs_()
    x[:, : 1 + length // 100] *= 100
    return x


@pytest.mark.parametrize("norm_type", [0.5, 1.0, 2.0, 3.0, math.inf])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_norm_is_that_of_float64_up_to_rounding(length: int, norm_type: float) -> None:
    x = values(length)
    wanted = torch.linalg.vector_norm(x.double(), norm_type, dim=-1)
    found = norm_of_rows(x, norm_type, torch.float32)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_infinities_and_nan_reach_the_norm(bad: float) -> None:
    x = values(3 * PIECE)
    x[0, PIECE + 5] = bad
    found = norm_of_rows(x, 2.0, torch.float32)
    assert not found[0].isfinite()
    assert found[1].isfinite()
