"""torchrun --nproc-per-node 2 examples/mean_flow.py --steps 200

Train a model that samples in one step: Geng et al., "Mean flows for one-step generative modeling",
2025, algorithm 1. The example shows:

- `torch.func.jvp` by the *inputs* of a sharded model, inside `make_train_step`. It needs no finite
  differences and no special kernels, and gathers each unit once, as the forward alone does;
- a stop-gradient: the target holds the derivative, and no gradient goes through it;
- sampling: one call of the model from noise to data.

The model gives the mean velocity u(z, r, t) from time r to time t. Its identity is u = v - (t - r)
du/dt, with the velocity v of the path and the derivative du/dt along that path.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

WIDTH, SAMPLES = 96, 512


class Velocity(nn.Module):
    """The mean velocity of points between two times."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.inward = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.outward = nn.Linear(WIDTH, 2)

    def forward(self, z: torch.Tensor, r: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x = self.inward(torch.cat([z, t, t - r], dim=1))
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.outward(x)


def moons(samples: int, generator: torch.Generator) -> torch.Tensor:
    """Return points of two half circles."""
    angle = torch.pi * torch.rand(samples, 1, generator=generator)
    upper = torch.rand(samples, 1, generator=generator) < 0.5
    x = torch.where(upper, angle.cos() - 0.5, 0.5 - angle.cos())
    y = torch.where(upper, angle.sin() - 0.25, 0.25 - angle.sin())
    return torch.cat([x, y], dim=1) + 0.03 * torch.randn(samples, 2, generator=generator)


def batches(mesh: fs.Mesh, steps: int, seed: int) -> Any:
    """Yield this rank's data, noise and times; a quarter of the samples has r < t."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        noise = torch.randn(SAMPLES, 2, generator=generator)
        times = torch.rand(SAMPLES, 2, generator=generator).sort(dim=1).values
        r, t = times[:, :1], times[:, 1:]
        r = torch.where(torch.rand(SAMPLES, 1, generator=generator) < 0.25, r, t)
        parts = (moons(SAMPLES, generator), noise, r, t)
        yield tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in parts)


def energy_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the energy distance of two sets of points, which is 0 for equal distributions."""
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train, sample in one step, and return the last loss and the energy distance to the data."""
    torch.manual_seed(0)  # every rank makes the same model
    apply, params, _ = fs.make_functional(Velocity())
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        x, noise, r, t = batch
        z, velocity = (1 - t) * x + t * noise, noise - x
        mean_velocity, change = torch.func.jvp(
            lambda z, r, t: sharded(shards, {}, z, r, t),
            (z, r, t),
            (velocity, torch.zeros_like(r), torch.ones_like(t)),
        )
        target = velocity - (t - r) * change
        return F.mse_loss(mean_velocity, target.detach())

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.Adam, lr=3e-3), plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), {})
    for number, batch in enumerate(batches(mesh, steps, seed=1)):
        state, metrics = step(state, batch)
        if mesh.rank == 0 and (number % 40 == 0 or number == steps - 1):
            print(f"step {number}: loss {metrics['loss'].item():.4f}")

    ((x, noise, _, _),) = batches(mesh, 1, seed=2)
    zeros, ones = torch.zeros(len(noise), 1, device=mesh.device), torch.ones(len(noise), 1, device=mesh.device)
    with torch.no_grad():
        samples = noise - sharded(state.shards, {}, noise, zeros, ones)
    x, noise, samples = (fs.all_gather(part, mesh, tiled=True) for part in (x, noise, samples))
    result = {"loss": metrics["loss"].item(), "samples": energy_distance(samples, x), "noise": energy_distance(noise, x)}
    if mesh.rank == 0:
        print(f"energy distance to the data {result['samples']:.3f}, that of the noise {result['noise']:.3f}")
    return result


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
