"""Recipes with transforms over shards: ensembles, and products with the Hessian in little memory.

docs/transforms.md compares learning to learn, and docs/linalg.md solving with the Hessian.
"""

import pytest
import torch
import torchopt
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.ranks import run_simulated
from tests.storages import Alive

# The first use of forward-mode AD makes torch import a file that calls a deprecated function of torch.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


def random(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def setup(mesh, seed):
    torch.manual_seed(seed)
    apply, params, _ = fs.make_functional(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double())
    plan = fs.make_plan(params, mesh, units=["0", "2"])
    sharded = fs.fully_shard(apply, plan, mesh)
    x, y = random(1 + mesh.rank, 4, 3), random(3 + mesh.rank, 4, 1)
    return plan, fs.shard(params, plan, mesh), lambda shards: (sharded(shards, {}, x) - y).square().mean()


OPTIMIZERS = {
    "torch_optimizer": lambda: fs.torch_optimizer(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "torchopt": lambda: torchopt.adam(0.05),
}


def ensemble(mesh, optimizer):
    """Train three models at once and one after another, and compare them."""
    make, steps, alone = OPTIMIZERS[optimizer], 4, []
    for seed in range(3):
        plan, shards, loss = setup(mesh, seed)
        step = fs.make_train_step(lambda shards, _, __, loss=loss: loss(shards), make(), plan, mesh)
        state = step.init(shards, {})
        for _ in range(steps):
            state, metrics = step(state, None)
        alone.append((state.shards, metrics["loss"]))

    def of_all(stack, _, __):
        losses = torch.vmap(loss)(stack)
        return losses.sum(), losses

    step = fs.make_train_step(of_all, make(), plan, mesh, has_aux=True)
    state = step.init(tree.map(lambda *shards: torch.stack(shards), *(setup(mesh, seed)[1] for seed in range(3))), {})
    with fs.record_events() as events:
        for _ in range(steps):
            state, metrics = step(state, None)
    for i, (shards, last) in enumerate(alone):
        one = tree.map(lambda stacked, i=i: stacked[i], state.shards), fs.pmean(metrics["aux"][i], mesh)
        torch.testing.assert_close(one, (shards, last), rtol=1e-10, atol=1e-10)
    # Each collective serves all three models.
    once = [("all_gather", "0"), ("all_gather", "2"), ("reduce_scatter", "2"), ("reduce_scatter", "0")]
    assert [(event.kind, event.unit) for event in events if event.unit] == once * steps


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_ensemble_is_trained_at_once_as_one_by_one(optimizer):
    run_simulated(ensemble, 2, optimizer)


def forward_over_reverse(loss, shards, v):
    return torch.func.jvp(torch.func.grad(loss), (shards,), (v,))[1]


def reverse_over_reverse(loss, shards, v):
    def along(s):
        return sum((a * b).sum() for a, b in zip(tree.leaves(torch.func.grad(loss)(s)), tree.leaves(v), strict=True))

    return torch.func.grad(along)(shards)


def most_of_a_units_size(product_of, units, wrap, numel=64):
    """Return the largest number of tensors of a whole unit's size on a rank during a product with the Hessian."""
    params = {f"u{i:02}": {"w": random(i, numel)} for i in range(units)}

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["u*"])
        shards = fs.shard(params, plan, mesh)
        use = lambda leaves, x: torch.tanh(leaves["w"] * x).mean() + x  # noqa: E731
        runs = {name: wrap(fs.unshard(use, unit, mesh)) for name, unit in plan.units.items()}

        def loss(s):
            x = torch.ones((), dtype=torch.float64)
            for name, run in runs.items():
                x = run(s[name], x)
            return x.square()

        v = tree.map(torch.ones_like, shards)
        with Alive(lambda nbytes: nbytes >= numel * 8) as alive:
            hv = product_of(loss, shards, v)
        assert {leaf.numel() for leaf in tree.leaves(hv)} == {numel // mesh.world_size}
        return alive.most

    return max(fs.simulate(main, 4))


@pytest.mark.nightly
@pytest.mark.parametrize("product_of", [forward_over_reverse, reverse_over_reverse])
def test_a_product_with_remat_holds_units_in_use_only_however_many_there_are(product_of):
    few, many = (most_of_a_units_size(product_of, units, fs.remat) for units in (4, 12))
    assert few == many
    assert many < most_of_a_units_size(product_of, 12, lambda f: f) / 5


@pytest.mark.parametrize("rounds", [True, False])
def test_gradients_of_blocks_on_one_grid_add_up_to_the_same_bits_on_every_mesh(rounds):
    def round_grads(_, grads):
        for grad in grads.values():
            grad.copy_((grad * 2.0**44).round() * 2.0**-44)

    def gradients(mesh):
        torch.manual_seed(0)
        apply, params, _ = fs.make_functional(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
        exact = fs.MixedPrecision(reduce_dtype=torch.float64, keep_low_precision_grads=True)
        plan = fs.make_plan(params, mesh, precision=exact)
        sharded = fs.fully_shard(apply, plan, mesh)

        def loss_fn(shards, block):
            return sharded(shards, {}, block).square().mean().double(), 1.0

        hook = round_grads if rounds else None
        f = fs.accumulate(loss_fn, 12 // mesh.world_size, weighted=True, on_grads=hook)
        # Blocks whose gradients differ so much that float64 cannot hold their sum.
        sizes = torch.logspace(-11, 0, 24, dtype=torch.float64)[:, None]
        batch = (random(5, 24, 4) * sizes).float().chunk(mesh.world_size)[mesh.rank]
        return f(fs.shard(params, plan, mesh), batch)[1][""]["float32"]

    alone = gradients(fs.Mesh())
    assert alone.dtype == torch.float64
    same_bits = [torch.equal(torch.cat(fs.simulate(gradients, ranks))[: alone.numel()], alone) for ranks in (2, 3, 4, 6)]
    # Without the grid, float64 rounds its sums in the order of the ranks.
    assert all(same_bits) == rounds
