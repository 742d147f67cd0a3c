"""Recipes with transforms over shards: ensembles, and gradients that are the same on every mesh.

docs/transforms.md compares learning to learn, and docs/linalg.md solving with the Hessian.
"""

import pytest
import torch
import torchopt
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import mlp, of_module, random
from tests.ranks import run_simulated

pytestmark = pytest.mark.slow


def setup(mesh, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    plan, sharded, shards = of_module(mesh, net, ["0", "2"])
    x, y = random(1 + mesh.rank, 4, 3), random(3 + mesh.rank, 4, 1)
    return plan, shards, lambda shards: (sharded(shards, {}, x) - y).square().mean()


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


@pytest.mark.parametrize("rounds", [True, False])
def test_gradients_of_blocks_on_one_grid_add_up_to_the_same_bits_on_every_mesh(rounds):
    def round_grads(_, grads):
        for grad in grads.values():
            grad.copy_((grad * 2.0**44).round() * 2.0**-44)

    def gradients(mesh):
        exact = fs.MixedPrecision(reduce_dtype=torch.float64, keep_low_precision_grads=True)
        _, sharded, shards = of_module(mesh, mlp(4, 16, 1, dtype=torch.float32), precision=exact)

        def loss_fn(shards, block):
            return sharded(shards, {}, block).square().mean().double(), 1.0

        hook = round_grads if rounds else None
        f = fs.accumulate(loss_fn, 12 // mesh.world_size, weighted=True, on_grads=hook)
        # Blocks whose gradients differ so much that float64 cannot hold their sum.
        sizes = torch.logspace(-11, 0, 24, dtype=torch.float64)[:, None]
        batch = (random(5, 24, 4) * sizes).float().chunk(mesh.world_size)[mesh.rank]
        return f(shards, batch)[1][""]["float32"]

    alone = gradients(fs.Mesh())
    assert alone.dtype == torch.float64
    same_bits = [torch.equal(torch.cat(fs.simulate(gradients, ranks))[: alone.numel()], alone) for ranks in (2, 3, 4, 6)]
    # Without the grid, float64 rounds its sums in the order of the ranks.
    assert all(same_bits) == rounds
