"""``per_sample_grad`` equals a loop over samples on the whole parameters."""

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests import slices
from tests.core.units import by_hand, of_module
from tests.pairwise import crossed
from tests.ranks import on_ranks
from tests.slices import meshes
from tests.storages import Alive, Log

HYBRID = {"replicate": 2, "shard": 2}
CASES = [("full_shard", HYBRID), ("full_shard", 2), ("shard_grad_op", 1), ("no_shard", 4), ("no_shard", HYBRID)]


def ids(x):
    return str(x).replace("'", "")


class Net(nn.Module):
    """A module with a unit used twice, a tied leaf, a frozen leaf, and a leaf in the root."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(3))
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.last(torch.tanh(self.first(self.first(x)) * self.scale))))


def build():
    torch.manual_seed(0)
    return Net().double()


def data(n=8):
    generator = torch.Generator().manual_seed(1)
    return {"x": 3 * torch.randn(n, 3, generator=generator).double(), "y": torch.randn(n, 2, generator=generator).double()}


def setup(mesh, strategy="full_shard"):
    """Return ``(loss of one sample, shards, plan)``."""
    plan, run, shards = of_module(mesh, build(), ["head"], strategy=strategy)
    loss = lambda shards, sample: (run(shards, {}, sample["x"]) - sample["y"]).square().sum()  # noqa: E731
    return loss, shards, plan


def reference(batch, max_norm=None, batch_size=None):
    """Return losses, norms and the mean clipped gradient (Abadi et al., algorithm 1)."""
    net = build()
    trainable = {name: p for name, p in net.named_parameters() if p.requires_grad}
    losses, norms, total = [], [], {name: torch.zeros_like(p) for name, p in trainable.items()}
    for x, y in zip(batch["x"], batch["y"], strict=True):
        loss = (net(x) - y).square().sum()
        grads = torch.autograd.grad(loss, list(trainable.values()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for name, g in zip(trainable, grads, strict=True):
            total[name] += g / max(1.0, norm.item() / (max_norm or float("inf")))
        losses.append(loss.detach())
        norms.append(norm)
    size = batch_size or len(losses)
    return torch.stack(losses), torch.stack(norms), {name: g / size for name, g in total.items()}


def own(batch, mesh):
    return {key: value.chunk(mesh.world_size)[mesh.rank] for key, value in batch.items()}


def whole(grads, plan, mesh):
    """Return the whole gradients of the trainable leaves."""
    return {path: g for path, g in fs.gather(grads, plan, mesh).items() if g is not None}


def evaluated(mesh, strategy, options):
    loss, shards, plan = setup(mesh, strategy)
    (losses, norms), grads = fs.per_sample_grad(loss, plan, mesh, **options)(shards, own(data(), mesh))
    assert grads[""]["float64.frozen"] is None
    sizes = {"chunk_size": options.get("chunk_size")}
    close(fs.per_sample_norms(loss, plan, mesh, **sizes)(shards, own(data(), mesh)), (losses, norms))
    return losses, norms, whole(grads, plan, mesh)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def check(results, max_norm=None, batch_size=None):
    losses, norms, grads = reference(data(), max_norm, batch_size)
    close(torch.cat([result[0] for result in results]), losses)
    close(torch.cat([result[1] for result in results]), norms)
    for result in results:
        close(result[2], grads)


OPTIONS = {
    "plain": {},
    "clipped": {"max_norm": 2.0},
    "in chunks": {"max_norm": 2.0, "chunk_size": 3},
    "one by one": {"chunk_size": 1, "batch_size": 5.0},
}


@pytest.mark.slow
@crossed(options=OPTIONS, strategy=["full_shard", "shard_grad_op", "no_shard"], world=[1, 2, 4, HYBRID])
def test_it_is_the_mean_of_clipped_gradients_of_every_sample(strategy, world, options):
    norms = reference(data())[1]
    assert 0 < (norms > 2.0).sum() < len(norms)  # the bound cuts some and spares others
    results = fs.simulate(lambda mesh: evaluated(mesh, strategy, options), world)
    check(results, options.get("max_norm"), options.get("batch_size"))


def product(leaves, x):
    return (leaves["w"] * x).sum()


def one_unit(mesh, params, apply=product, **options):
    """Return ``(function of shards, shards, plan)`` of a model of one unit."""
    plan, f, shards = by_hand(mesh, params, apply, how=fs.reshard, **options)
    return (lambda shards, x: f(shards[""], x)), shards, plan


@pytest.mark.parametrize("numbers", [(5, 0, 2, 1), (0, 0, 0, 0)], ids=ids)
def test_ranks_may_have_different_numbers_of_samples(numbers):
    def main(mesh):
        loss, shards, plan = setup(mesh)
        batch = {key: value.split(numbers)[mesh.rank] for key, value in data(sum(numbers)).items()}
        (losses, norms), grads = fs.per_sample_grad(loss, plan, mesh, max_norm=2.0, chunk_size=2)(shards, batch)
        return losses, norms, whole(grads, plan, mesh)

    results = fs.simulate(main, 4)
    if sum(numbers):
        check(results, 2.0)
    else:
        assert all(not any(g.any() for g in grads.values()) and losses.shape == (0,) for losses, _, grads in results)


@on_ranks(2)
def test_noise_depends_on_the_seed_and_goes_on_from_step_to_step(mesh):
    f, shards, plan = one_unit(mesh, {"w": torch.zeros(9)})
    noises = []
    for seed in (0, 1):
        noise = {"noise_multiplier": 1.0, "generator": torch.Generator().manual_seed(seed)}
        run = fs.per_sample_grad(f, plan, mesh, max_norm=2.0, **noise)
        noises += [run(shards, torch.zeros(2, 1))[1][""]["float32"] for _ in range(2)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(noises, 2))


@pytest.mark.parametrize(("strategy", "world"), CASES, ids=ids)
def test_noise_has_the_deviation_asked_for_and_is_the_same_for_any_number_of_ranks(strategy, world):
    def main(mesh, strategy="full_shard"):
        f, shards, plan = one_unit(mesh, {"w": torch.zeros(4001)}, strategy=strategy)
        noise = {"noise_multiplier": 1.5, "generator": torch.Generator().manual_seed(0)}
        run = fs.per_sample_grad(f, plan, mesh, max_norm=4.0, batch_size=10, **noise)
        grads = run(shards, torch.zeros(2, 1))[1]
        return fs.gather(grads, plan, mesh)["w"], grads[""]["float32"]

    ((alone, _),) = fs.simulate(main, 1)
    assert abs(alone.std().item() / (1.5 * 4.0 / 10) - 1) < 0.05
    assert abs(alone.mean().item()) < 0.05
    assert abs(torch.corrcoef(alone[:4000].view(4, 1000)).fill_diagonal_(0)).max() < 0.12
    results = fs.simulate(lambda mesh: main(mesh, strategy), world)
    for noise, _ in results:
        torch.testing.assert_close(noise, alone, rtol=0, atol=0)
    if strategy == "full_shard":  # which pads the last of two shards
        assert not torch.cat([shard for _, shard in results[:2]])[4001:].any()


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("chunk_size", [None, 1])
@pytest.mark.parametrize(("strategy", "world"), CASES, ids=ids)
@on_ranks()
def test_each_unit_is_gathered_once_and_reduced_once(mesh, strategy, world, chunk_size):
    loss, shards, plan = setup(mesh, strategy)
    run = fs.per_sample_grad(loss, plan, mesh, max_norm=2.0, chunk_size=chunk_size, batch_size=8)
    with fs.record_events() as events:
        run(shards, own(data(), mesh))
    kept = strategy if strategy == "no_shard" else "shard_grad_op"
    expected = fs.predict_events(setup(mesh, kept)[2])
    assert sorted(map(str, events)) == sorted(map(str, expected))
    units = [(event.kind == "all_gather", event.unit) for event in events]
    assert [unit for gathered, unit in units if gathered] == [unit for gathered, unit in sorted(units) if gathered]
    with fs.record_events() as counted:
        fs.per_sample_grad(loss, plan, mesh, max_norm=2.0, chunk_size=chunk_size)(shards, own(data(), mesh))
    assert [event for event in counted if event.unit is not None] == events
    count = [(event.kind, event.bytes) for event in counted if event.unit is None]
    assert count == [("all_reduce", 4)] * len(mesh.axes)


@pytest.mark.parametrize("chunk_size", [1, 4])
@on_ranks(2)
def test_one_chunk_of_gradients_exists_at_a_time(mesh, chunk_size):
    loss, shards, plan = setup(mesh)
    log, alive, sizes = Log(), [], set()

    def look(unit, grads):
        if unit == "head":
            alive.append(log.alive())  # gradients of earlier chunks
        sizes.update(grad.shape[0] for grad in grads.values())
        log(next(iter(grads.values())))

    fs.per_sample_grad(loss, plan, mesh, chunk_size=chunk_size, on_grads=look)(shards, own(data(), mesh))
    assert len(alive) == 4 // chunk_size
    assert sizes == {chunk_size}
    # At most one is alive: the other unit of the same chunk, if on_grads was called for it first.
    assert max(alive) <= 1
    assert log.alive() == 0


@on_ranks(2)
def test_gradients_can_be_seen_and_changed_before_norms_are_taken(mesh):
    net, batch, seen = build(), own(data(), mesh), {}
    loss, shards, plan = setup(mesh)

    def per_layer(unit, grads):
        for path, grad in grads.items():
            seen[path] = unit, grad.clone()
            if path == "head.bias":
                grad.zero_()

    (_, norms), grads = fs.per_sample_grad(loss, plan, mesh, on_grads=per_layer)(shards, batch)
    assert {unit for unit, _ in seen.values()} == {"", "head"}
    assert not whole(grads, plan, mesh)["head.bias"].any()
    named = {name: p for name, p in net.named_parameters() if p.requires_grad}
    for i, (x, y) in enumerate(zip(batch["x"], batch["y"], strict=True)):
        expected = dict(zip(named, torch.autograd.grad((net(x) - y).square().sum(), [*named.values()]), strict=True))
        close({path: grad[i] for path, (_, grad) in seen.items()}, expected)
        close(norms[i], torch.cat([g.flatten() for name, g in expected.items() if name != "head.bias"]).norm())


@on_ranks(2)
def test_another_models_units_are_gathered_as_usual(mesh):
    """A teacher has units of the same names, but its shards are not differentiated."""
    params, other, x = {"w": torch.rand(3)}, {"w": torch.rand(3)}, torch.rand(4, 3)
    f, shards, plan = one_unit(mesh, params)
    teacher = fs.shard(other, plan, mesh)
    _, grads = fs.per_sample_grad(lambda s, x: (f(s, x) - f(teacher, x)).square(), plan, mesh)(shards, x)
    expected = torch.func.grad(lambda w: ((x @ w) - (x @ other["w"])).square().mean())(params["w"])
    torch.testing.assert_close(fs.gather(grads, plan, mesh)["w"], expected)


@on_ranks(1)
def test_random_operations_differ_from_sample_to_sample(mesh):
    dropped = lambda leaves, x: nn.functional.dropout(leaves["w"] * x, 0.5).sum()  # noqa: E731
    f, shards, plan = one_unit(mesh, {"w": torch.ones(50)}, dropped)
    masks = []
    keep = lambda _, grads: masks.append(grads["w"].clone())  # noqa: E731
    fs.per_sample_grad(f, plan, mesh, on_grads=keep)(shards, torch.ones(2, 50))
    assert not torch.equal(masks[0][0], masks[0][1])


@on_ranks(2)
def test_mixed_precision_adds_samples_up_in_the_dtype_of_the_shards(mesh):
    """A thousand small gradients, computed in bfloat16, still count beside a large one."""
    precision = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    f, shards, plan = one_unit(mesh, {"w": torch.ones(2)}, precision=precision)
    seen = set()
    see = lambda _, grads: seen.add(grads["w"].dtype)  # noqa: E731
    run = fs.per_sample_grad(f, plan, mesh, batch_size=1, chunk_size=64, on_grads=see)
    _, grads = run(shards, torch.cat([torch.full((1, 2), 4096.0), torch.ones(1023, 2)]))
    assert seen == {torch.bfloat16}
    assert grads[""]["float32"].tolist() == [2 * (4096.0 + 1023.0)]


ANOTHER_WAY = r"'float32' of unit '\(root\)' by another way, such as a penalty on the shard itself or remat around the unit"
NO_GRADIENT = r"depends on a trainable shard of its argument.*found one without a gradient"
LOSSES = {  # of the model, its shards, the shards around the loss and the sample
    "a shard computed from another": (lambda f, s, around, x: f({"": {"float32": 2 * s[""]["float32"]}}, x), ANOTHER_WAY),
    "remat": (lambda f, s, around, x: fs.remat(f)(s, x), ANOTHER_WAY),
    "the shards around it": (lambda f, s, around, x: f(around, x), NO_GRADIENT),
    "the sample alone": (lambda f, s, around, x: x.sum(), NO_GRADIENT),
}


@pytest.mark.parametrize(("loss", "words"), LOSSES.values(), ids=LOSSES)
@on_ranks(2)
def test_a_loss_whose_gradients_go_another_way_or_nowhere_is_an_error(mesh, loss, words):
    f, shards, plan = one_unit(mesh, {"w": torch.rand(3)})
    run = fs.per_sample_grad(lambda s, x: loss(f, s, shards, x), plan, mesh)
    with pytest.raises(ValueError, match=words):
        run(shards, torch.rand(2, 3))


def most_gradients_of_a_layer(layers):
    """Return the most gradients of eight samples by one layer's weight that exist at a time."""
    torch.manual_seed(0)
    plan, run, shards = of_module(fs.Mesh(), nn.Sequential(*(nn.Linear(20, 20) for _ in range(layers))), ["*"])
    evaluate = fs.per_sample_norms(lambda shards, x: run(shards, {}, x).sin().sum(), plan, fs.Mesh())
    size = 8 * 20 * 20 * 4
    with Alive(lambda nbytes: nbytes == size) as alive:
        evaluate(shards, torch.ones(8, 20))
    return alive.most_of[size]


def test_norms_hold_the_gradients_of_one_leaf_however_many_there_are():
    assert 1 <= most_gradients_of_a_layer(8) == most_gradients_of_a_layer(2) <= 3


@on_ranks(2)
def test_norms_gather_each_unit_once_and_reduce_nothing_and_give_the_clipped_gradient(mesh):
    loss, shards, plan = setup(mesh)
    batch = own(data(), mesh)
    with fs.record_events() as events:
        _, norms = fs.per_sample_norms(loss, plan, mesh)(shards, batch)
    assert {event.kind for event in events} == {"all_gather"}
    assert len(events) == sum(len(unit.buffers) for unit in plan.unit_list)
    factors = (2.0 / norms).clamp(max=1.0)
    weighted = lambda shards: (factors * torch.vmap(loss, (None, 0))(shards, batch)).mean()  # noqa: E731
    _, grads = fs.value_and_grad(weighted)(shards)
    close(whole(grads, plan, mesh), reference(data(), 2.0)[2])
    with pytest.raises(ValueError, match="depends on a trainable shard"):
        fs.per_sample_norms(lambda shards, sample: sample["x"].sum(), plan, mesh)(shards, batch)
    penalised = lambda shards, sample: loss(shards, sample) + shards["head"]["float64"].sum()  # noqa: E731
    with pytest.raises(ValueError, match="per_sample_norms differentiates gathered units only"):
        fs.per_sample_norms(penalised, plan, mesh)(shards, batch)


# --- leaves that are cut along model axes ---------------------------------------------------------


def sliced(mesh: fs.Mesh, strategy: str = "full_shard") -> Any:
    """Return ``(loss of one sample, shards, plan)`` of the model in slices."""
    plan, shards, loss_fn = slices.setup(mesh, strategy)
    return (lambda shards, x: loss_fn(shards, x.unsqueeze(0))), shards, plan


@pytest.mark.nightly(one_in=4)
@meshes
@pytest.mark.parametrize(("strategy", "max_norm", "chunk_size"), [("full_shard", 8.0, None), ("no_shard", 15.0, 2)])
def test_samples_are_clipped_as_by_the_whole_model(
    shape: dict[str, int], strategy: str, max_norm: float, chunk_size: int | None
) -> None:
    """In all ways; tests of the whole model alone compare it with a loop over samples."""

    def main(mesh: fs.Mesh, strategy: str = "full_shard", chunk_size: int | None = None) -> Any:
        loss_fn, shards, plan = sliced(mesh, strategy)
        seen, options = [], {"max_norm": max_norm, "chunk_size": chunk_size}
        run = fs.per_sample_grad(loss_fn, plan, mesh, on_grads=lambda unit, grads: seen.append(unit), **options)
        x = slices.batch(mesh.position, mesh.shape)
        values, grads = run(shards, x)
        torch.testing.assert_close(fs.per_sample_norms(loss_fn, plan, mesh, chunk_size=chunk_size)(shards, x), values)
        assert seen
        return fs.axis_index(mesh), *values, slices.whole(grads, plan, mesh)

    ((_, losses, norms, mean),) = slices.ranks(main, slices.WHOLE)
    assert (norms > max_norm).any()
    assert (norms < max_norm).any()
    for index, own_losses, *rest in slices.ranks(main, shape, strategy, chunk_size):
        mine = slice(len(own_losses) * index, len(own_losses) * (index + 1))
        torch.testing.assert_close((own_losses, *rest), (losses[mine], norms[mine], mean))


@pytest.mark.slow
def test_noise_is_one_draw_for_each_element_whatever_the_degree() -> None:
    def main(mesh: fs.Mesh) -> Any:
        loss_fn, shards, plan = sliced(mesh)
        options = {"max_norm": 0.3, "noise_multiplier": 500.0, "generator": torch.Generator().manual_seed(4)}
        run = fs.per_sample_grad(lambda shards, x: 0 * loss_fn(shards, x), plan, mesh, **options)
        return slices.whole(run(shards, slices.batch(mesh.position, mesh.shape))[1], plan, mesh)

    noise, *others = (
        found
        for shape in ({"tensor": 1}, {"shard": 2, "tensor": 2}, {"replicate": 2, "tensor": 2}, {"tensor": 4})
        for found in slices.ranks(main, shape)
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
    f, shards, plan = one_unit(mesh, params, lambda leaves, x: leaves["own"] @ x, local={"own": "expert"})
    twice = lambda shards, x: 2 * f(shards, x)  # noqa: E731
    run = fs.per_sample_grad(twice, plan, mesh, max_norm=1.0)
    x = torch.tensor([[3.0, 0.0, 4.0]], dtype=torch.float64)
    (_, norms), grads = run(shards, x)
    # The sample's loss is the mean of two ranks' losses, of which each depends on its own leaf.
    torch.testing.assert_close(norms, torch.tensor([5.0 * 2**0.5], dtype=torch.float64))
    without = fs.per_sample_norms(twice, plan, mesh)
    torch.testing.assert_close(without(shards, x)[1], norms)
    torch.testing.assert_close(fs.gather(grads, plan, mesh)["own"], x[0] / norms)
    noisy = fs.per_sample_grad(f, plan, mesh, max_norm=1.0, noise_multiplier=9.0, generator=torch.Generator())
    own = fs.gather(noisy(shards, x)[1], plan, mesh)["own"]
    assert not torch.isclose(own, fs.ppermute(own, mesh, [(0, 1), (1, 0)], axis="expert")).any()


@on_ranks({"shard": 2, "tensor": 2})
def test_per_sample_mistakes_along_model_axes_are_said(mesh: fs.Mesh) -> None:
    loss_fn, shards, plan = sliced(mesh)
    run = fs.per_sample_grad(loss_fn, plan, mesh, max_norm=1.0)
    x = slices.batch(mesh.position, mesh.shape)
    with pytest.raises(ValueError, match=r"ranks along 'tensor' must pass the same samples.*split the batch along the"):
        run(shards, x[: len(x) - mesh.position["tensor"]])
    with pytest.raises(ValueError, match="found 6 in chunks of 2 on rank 0 and 6 in chunks of 3 on rank 1"):
        fs.per_sample_grad(loss_fn, plan, mesh, chunk_size=2 + mesh.position["tensor"])(shards, x)
    own = fs.make_plan({"w": torch.zeros(4)}, mesh, local={"w": {"shard": 0}})
    words = r"has trainable leaves that are local to a rank, 'w' first.*or local along model axes only"
    with pytest.raises(ValueError, match=words):
        fs.per_sample_grad(loss_fn, own, mesh)


@on_ranks({"shard": 1, "tensor": 2})
def test_a_parameter_without_dimensions_has_a_gradient_along_a_model_axis(mesh: fs.Mesh) -> None:
    f, shards, plan = one_unit(mesh, {"scale": torch.tensor(2.0)}, lambda leaves, x: leaves["scale"] * x)
    (_, norms), grads = fs.per_sample_grad(f, plan, mesh)(shards, torch.tensor([1.0, 3.0]))
    assert norms.tolist() == [1.0, 3.0]
    assert fs.gather(grads, plan, mesh)["scale"].item() == 2.0
