"""torchrun --nproc-per-node 2 examples/hypergradients.py --steps 20

Learn the learning rates and the weight decay of a training run by gradient descent through it:
Maclaurin, Duvenaud and Adams, "Gradient-based hyperparameter optimization through reversible
learning", 2015. The example shows:

- an inner loop of gradient steps on shards, and a gradient through all of it;
- `fs.broadcast_to_shards`: a number that all ranks hold, on its way to each rank's shards;
- its gradient, whose parts the ranks add up with `fs.psum`.

The rate of each inner step has its own logarithm, which the outer loop changes so that the loss on
other data falls.
"""

from __future__ import annotations

import argparse
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

FEATURES, SAMPLES, INNER_STEPS = 12, 64, 8


def make_model() -> nn.Module:
    """Return the network; every rank makes the same one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))


def make_data(mesh: fs.Mesh, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's samples of a noisy function."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = torch.sin(x[:, :1] + x[:, 1:2]) + 0.3 * torch.randn(SAMPLES, 1, generator=generator)
    return tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in (x, y))


def train(mesh: fs.Mesh, steps: int) -> dict[str, Any]:
    """Learn the hyperparameters, and return them with the first and the last loss on other data."""
    apply, params, buffers = fs.make_functional(make_model())
    plan = fs.make_plan(params, mesh, units=["0", "2"])
    sharded = fs.fully_shard(apply, plan, mesh)
    training, validation = make_data(mesh, seed=1), make_data(mesh, seed=2)
    first = optree.tree_map(lambda shard: shard.requires_grad_(), fs.shard(params, plan, mesh))

    def loss_on(shards: Any, samples: Any) -> torch.Tensor:
        x, y = samples
        return F.mse_loss(sharded(shards, buffers, x), y)

    def outer(hyper: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return this rank's loss on other data, after the inner steps."""
        shards, decay = first, hyper["log_decay"].exp()
        for log_rate in hyper["log_rates"]:
            leaves, form = optree.tree_flatten(shards)
            # The sum over ranks of this gradient is that of the mean over all samples.
            inner = loss_on(shards, training) / mesh.world_size
            grads = form.unflatten(torch.autograd.grad(inner, leaves, create_graph=True))
            rates = fs.broadcast_to_shards(-log_rate.exp(), plan, mesh)
            shrunk = fs.broadcast_to_shards(1 - log_rate.exp() * decay, plan, mesh)
            shards = fs.axpy(rates, grads, optree.tree_map(torch.mul, shrunk, shards))
        return loss_on(shards, validation)

    evaluate = fs.value_and_grad(outer, mesh=mesh)
    hyper = {
        "log_rates": torch.full((INNER_STEPS,), 0.01, device=mesh.device).log(),
        "log_decay": torch.tensor(0.01, device=mesh.device).log(),
    }
    optimizer = fs.torch_optimizer(torch.optim.Adam, lr=0.2)
    opt_state, losses = optimizer.init(hyper), []
    for number in range(steps):
        loss, grads = evaluate(hyper)
        grads = fs.psum(grads, mesh)  # each rank has the part of its shards and samples
        hyper, opt_state = optimizer.step(grads, opt_state, hyper)
        losses.append(fs.pmean(loss, mesh).item())
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            print(f"step {number}: loss on other data {losses[-1]:.4f}")
    result = {name: value.exp().tolist() for name, value in hyper.items()}
    if mesh.rank == 0:
        print(f"learning rates {', '.join(f'{rate:.3f}' for rate in result['log_rates'])}")
        print(f"weight decay {result['log_decay']:.4f}")
    return {"losses": losses, **result}


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
