"""Per-sample gradients of leaves that are cut along model axes equal those of the unsharded model."""

from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import on_ranks
from tests.slices import WHOLE, batch, meshes, ranks, setup, whole


def one_by_one(max_norm: float | None) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return losses, norms and the mean of clipped gradients from a loop over all samples of the whole model."""

    def main(mesh: fs.Mesh) -> Any:
        plan, shards, loss_fn = setup(mesh)
        losses, norms, total = [], [], None
        for sample in batch({}, {}):
            loss, grads = fs.value_and_grad(loss_fn)(shards, sample.unsqueeze(0))
            norm = fs.global_norm(grads, plan, mesh)
            scale = min(1.0, (max_norm or float("inf")) / norm.item())
            clipped = tree.map(lambda grad, scale=scale: grad * scale, grads)
            total = clipped if total is None else tree.map(torch.add, total, clipped)
            losses.append(loss)
            norms.append(norm)
        mean = tree.map(lambda grad: grad / len(losses), total)
        return torch.stack(losses), torch.stack(norms), whole(mean, plan, mesh)

    return ranks(main, WHOLE)[0]


@pytest.mark.nightly(one_in=4)
@meshes
@pytest.mark.parametrize(("strategy", "max_norm", "chunk_size"), [("full_shard", 8.0, None), ("no_shard", 15.0, 2)])
def test_samples_are_clipped_as_by_the_whole_model(
    shape: dict[str, int], strategy: str, max_norm: float, chunk_size: int | None
) -> None:
    losses, norms, mean = one_by_one(max_norm)
    assert (norms > max_norm).any()
    assert (norms < max_norm).any()

    def main(mesh: fs.Mesh) -> None:
        plan, shards, loss_fn = setup(mesh, strategy)
        seen = []
        run = fs.per_sample_grad(
            lambda shards, sample: loss_fn(shards, sample.unsqueeze(0)), plan, mesh, max_norm=max_norm,
            chunk_size=chunk_size, on_grads=lambda unit, grads: seen.append(unit),
        )  # fmt: skip
        x = batch(mesh.position, mesh.shape)
        (own_losses, own_norms), grads = run(shards, x)
        mine = slice(len(x) * (data_rank(mesh)), len(x) * (data_rank(mesh) + 1))
        torch.testing.assert_close(own_losses, losses[mine])
        torch.testing.assert_close(own_norms, norms[mine])
        without = fs.per_sample_norms(lambda shards, x: loss_fn(shards, x.unsqueeze(0)), plan, mesh, chunk_size=chunk_size)
        torch.testing.assert_close(without(shards, x), (own_losses, own_norms))
        torch.testing.assert_close(whole(grads, plan, mesh), mean)
        assert seen

    ranks(main, shape)


def data_rank(mesh: fs.Mesh) -> int:
    return mesh.position["replicate"] * mesh.shard.size + mesh.position["shard"]


@pytest.mark.slow
def test_noise_is_one_draw_for_each_element_whatever_the_degree() -> None:
    def main(mesh: fs.Mesh) -> Any:
        plan, shards, loss_fn = setup(mesh)
        options = {"max_norm": 0.3, "noise_multiplier": 500.0, "generator": torch.Generator().manual_seed(4)}
        run = fs.per_sample_grad(lambda shards, x: 0 * loss_fn(shards, x.unsqueeze(0)), plan, mesh, **options)
        return whole(run(shards, batch(mesh.position, mesh.shape))[1], plan, mesh)

    noise, *others = (
        found
        for shape in ({"tensor": 1}, {"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}, {"tensor": 4})
        for found in ranks(main, shape)
    )
    for other in others:
        torch.testing.assert_close(other, noise)
    for name in ("blocks.0.up", "blocks.0.down"):  # slices of one tensor have draws of their own
        one, two = noise[name].chunk(2, 0 if name.endswith("up") else 1)
        assert not torch.isclose(one, two).any()
    drawn = 12 * torch.cat([values.ravel() for values in noise.values()])
    assert 0.85 * 150 < drawn.std().item() < 1.15 * 150


@on_ranks({"shard": 2, "expert": 2})
def test_leaves_of_a_ranks_own_along_a_model_axis_count_on_every_rank(mesh: fs.Mesh) -> None:
    """Experts of a rank's own: their gradients count in the norm on every rank, and have noise of their own."""
    params = {"own": torch.full((3,), 1.0 + mesh.position["expert"], dtype=torch.float64)}
    plan = fs.make_plan(params, mesh, local={"own": "expert"})
    shards = fs.shard(params, plan, mesh)
    f = fs.unshard(lambda leaves, x: leaves["own"] @ x, plan.units[""], mesh)
    run = fs.per_sample_grad(lambda shards, x: 2 * f(shards[""], x), plan, mesh, max_norm=1.0)
    x = torch.tensor([[3.0, 0.0, 4.0]], dtype=torch.float64)
    (_, norms), grads = run(shards, x)
    # The sample's loss is the mean of two ranks' losses, of which each depends on its own leaf.
    torch.testing.assert_close(norms, torch.tensor([5.0 * 2**0.5], dtype=torch.float64))
    without = fs.per_sample_norms(lambda shards, x: 2 * f(shards[""], x), plan, mesh)
    torch.testing.assert_close(without(shards, x)[1], norms)
    torch.testing.assert_close(fs.gather(grads, plan, mesh)["own"], x[0] / norms)
    noisy = fs.per_sample_grad(
        lambda shards, x: f(shards[""], x), plan, mesh, max_norm=1.0, noise_multiplier=9.0, generator=torch.Generator()
    )
    own = fs.gather(noisy(shards, x)[1], plan, mesh)["own"]
    assert not torch.isclose(own, fs.ppermute(own, mesh, [(0, 1), (1, 0)], axis="expert")).any()


@on_ranks({"shard": 2, "tensor": 2})
def test_per_sample_mistakes_along_model_axes_are_said(mesh: fs.Mesh) -> None:
    plan, shards, loss_fn = setup(mesh)
    run = fs.per_sample_grad(lambda shards, x: loss_fn(shards, x.unsqueeze(0)), plan, mesh, max_norm=1.0)
    x = batch(mesh.position, mesh.shape)
    with pytest.raises(ValueError, match=r"ranks along 'tensor' must pass the same samples.*split the batch along the"):
        run(shards, x[: len(x) - mesh.position["tensor"]])
    with pytest.raises(ValueError, match="found 6 in chunks of 2 on rank 0 and 6 in chunks of 3 on rank 1"):
        fs.per_sample_grad(
            lambda shards, x: loss_fn(shards, x.unsqueeze(0)), plan, mesh, chunk_size=2 + mesh.position["tensor"]
        )(shards, x)
    own = fs.make_plan({"w": torch.zeros(4)}, mesh, local={"w": {"shard": 0}})
    words = r"has trainable leaves that are local to a rank, 'w' first.*or local along model axes only"
    with pytest.raises(ValueError, match=words):
        fs.per_sample_grad(loss_fn, own, mesh)


@on_ranks({"shard": 1, "tensor": 2})
def test_a_parameter_without_dimensions_has_a_gradient_along_a_model_axis(mesh: fs.Mesh) -> None:
    params = {"scale": torch.tensor(2.0)}
    plan = fs.make_plan(params, mesh)
    scaled = fs.unshard(lambda leaves, x: leaves["scale"] * x, plan.units[""], mesh)
    run = fs.per_sample_grad(lambda shards, x: scaled(shards[""], x), plan, mesh)
    (_, norms), grads = run(fs.shard(params, plan, mesh), torch.tensor([1.0, 3.0]))
    assert norms.tolist() == [1.0, 3.0]
    assert fs.gather(grads, plan, mesh)["scale"].item() == 2.0
