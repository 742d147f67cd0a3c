"""torchrun --nproc-per-node 2 examples/dp_sgd.py --steps 60

Train a classifier with differential privacy: DP-SGD, by Abadi et al., "Deep learning with
differential privacy", 2016, algorithm 1. The example shows:

- `fs.per_sample_grad`: the gradient of each sample is clipped before any reduction, then the sum of
  each unit is reduced once, and noise is added to it once;
- Poisson sampling: each sample is in a batch with the same probability, so batches have unequal
  sizes, and a rank may have none;
- an optimizer used as a pair of functions, without `make_train_step`.

The privacy that a run spends is computed by an accountant of its own, such as `dp-accounting` or
Opacus, from the noise multiplier, the sampling rate and the number of steps. The generator of this
example is seeded, so that runs can be compared. A real run needs a cryptographically secure one.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

SAMPLES, FEATURES, CLASSES, RATE = 4096, 32, 4, 1 / 32


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return noisy points around one centre for each class."""
    generator = torch.Generator().manual_seed(1)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return centres[labels] + 1.5 * torch.randn(SAMPLES, FEATURES, generator=generator), labels


def make_model() -> nn.Module:
    """Return the classifier. LayerNorm is allowed, BatchNorm is not: it mixes samples."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, CLASSES))


def train(mesh: fs.Mesh, steps: int, max_norm: float = 1.0, noise: float = 1.0) -> float:
    """Train, and return the share of samples that are classified right."""
    apply, params, buffers = fs.make_functional(make_model())
    plan = fs.make_plan(params, mesh, units=["0", "3"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, sample: Any) -> torch.Tensor:
        x, y = sample  # of one sample: the samples of a batch are mapped by vmap
        return F.cross_entropy(sharded(shards, buffers, x), y)

    evaluate = fs.per_sample_grad(
        loss_fn, plan, mesh,
        max_norm=max_norm, noise_multiplier=noise,
        generator=torch.Generator(mesh.device).manual_seed(2),  # in the same state on every rank
        batch_size=round(RATE * SAMPLES),  # the expected one, as the analysis of privacy requires
        chunk_size=32,  # samples whose gradients are in memory at once
    )  # fmt: skip
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=1.0)
    shards = fs.shard(params, plan, mesh)
    opt_state = optimizer.init(shards)

    inputs, labels = (part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in make_data())
    draws = torch.Generator().manual_seed(100 + mesh.rank)
    for number in range(steps):
        chosen = (torch.rand(len(inputs), generator=draws) < RATE).to(mesh.device)
        (losses, norms), grads = evaluate(shards, (inputs[chosen], labels[chosen]))
        shards, opt_state = optimizer.step(grads, opt_state, shards)
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            # This rank's samples alone, and in the clear: a private run does not print this.
            clipped = (norms > max_norm).float().mean().item()
            print(f"step {number}: {len(losses)} samples, loss {losses.mean():.3f}, {clipped:.0%} of them clipped")

    with torch.no_grad():
        right = (sharded(shards, buffers, inputs).argmax(1) == labels).float().mean()
    accuracy = fs.pmean(right, mesh).item()
    if mesh.rank == 0:
        print(f"{accuracy:.1%} of {SAMPLES} samples right")
    return accuracy


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
