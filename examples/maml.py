"""torchrun --nproc-per-node 2 examples/maml.py --steps 100

Learn an initialisation from which a few gradient steps fit a new sine wave: MAML, by Finn, Abbeel
and Levine, "Model-agnostic meta-learning", 2017. The example shows:

- second derivatives through sharded parameters: the outer gradient goes through the inner steps;
- an inner step that is arithmetic on shards: no optimizer object, no clone of a module;
- the rule for gradients: the inner gradient, by `fs.grad`, and the outer one, of the step, are both
  of the mean over ranks.

All ranks work on one task at a time, each on its own part of the task's samples.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

INNER_RATE, INNER_STEPS, SAMPLES = 0.02, 3, 20


def make_model() -> nn.Module:
    """Return the network of the paper, with a smooth activation; every rank makes the same one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))


def tasks(mesh: fs.Mesh, number: int, seed: int) -> Any:
    """Yield tasks: this rank's samples to adapt to, and its samples to be judged by."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        amplitude, phase = (torch.rand(2, generator=generator) * torch.tensor([4.9, math.pi])).tolist()
        x = 10 * torch.rand(2 * SAMPLES, 1, generator=generator) - 5
        y = (0.1 + amplitude) * torch.sin(x - phase)
        parts = [part.chunk(2) for part in (x.to(mesh.device), y.to(mesh.device))]
        yield [tuple(part[half].chunk(mesh.world_size)[mesh.rank] for part in parts) for half in (0, 1)]


def train(mesh: fs.Mesh, steps: int, tasks_a_step: int = 4) -> dict[str, float]:
    """Train, and return the loss on new tasks before and after adapting to them."""
    apply, params, buffers = fs.make_functional(make_model())
    plan = fs.make_plan(params, mesh, units=["0", "2", "4"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_on(shards: Any, samples: Any) -> torch.Tensor:
        x, y = samples
        return F.mse_loss(sharded(shards, buffers, x), y)

    def adapt(shards: Any, samples: Any) -> Any:
        """Return the shards after the inner steps; a gradient goes through all of them."""
        for _ in range(INNER_STEPS):
            shards = fs.axpy(-INNER_RATE, fs.grad(loss_on)(shards, samples), shards)
        return shards

    def outer(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        losses = [loss_on(adapt(shards, support), query) for support, query in batch]
        return torch.stack(losses).mean()

    optimizer = fs.torch_optimizer(torch.optim.Adam, lr=5e-3)
    step = fs.make_train_step(outer, optimizer, plan, mesh, max_norm=10.0)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    stream = tasks(mesh, steps * tasks_a_step, seed=1)
    for number in range(steps):
        state, metrics = step(state, [next(stream) for _ in range(tasks_a_step)])
        if mesh.rank == 0 and (number % 20 == 0 or number == steps - 1):
            print(f"step {number}: loss after adapting {metrics['loss'].item():.3f}")

    result = {"before": 0.0, "after": 0.0}
    new = list(tasks(mesh, 20, seed=2))
    for support, query in new:
        for when, shards in {"before": state.shards, "after": adapt(state.shards, support)}.items():
            with torch.no_grad():
                result[when] += fs.pmean(loss_on(shards, query), mesh).item() / len(new)
    if mesh.rank == 0:
        print(f"20 new tasks: loss {result['before']:.3f} before and {result['after']:.3f} after {INNER_STEPS} inner steps")
    return result


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
