"""torchrun --nproc-per-node 2 examples/consistency.py --steps 400

Distill a diffusion model into one that samples in one step: Lu and Song, "Simplifying, stabilizing
and scaling continuous-time consistency models", 2025, algorithm 1. The example shows:

- the derivative of the student along the teacher's path, by `torch.func.jvp` by the *inputs* of a
  sharded model, inside `make_train_step`;
- a stop-gradient: the target holds this derivative, and no gradient goes through it;
- a teacher and a student that are shards of one plan, and run by the same function.

Noise is mixed into data at an angle t from 0 to π/2: x cos t + z sin t. The teacher F predicts the
velocity of this path. The student's f(x, t) = x cos t - F(x, t) sin t is to be the same all along
a path, and so the path's data.
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
    """The velocity of points at an angle."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.inward = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.outward = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x = self.inward(torch.cat([x, t.cos(), t.sin()], dim=1))
        for block in self.blocks:
            x = x + F.silu(block(x))
        return self.outward(x)


def moons(samples: int, generator: torch.Generator) -> torch.Tensor:
    """Return points of two half circles, with a variance of about 1."""
    angle = torch.pi * torch.rand(samples, 1, generator=generator)
    upper = torch.rand(samples, 1, generator=generator) < 0.5
    x = torch.where(upper, angle.cos() - 0.5, 0.5 - angle.cos())
    y = torch.where(upper, angle.sin() - 0.25, 0.25 - angle.sin())
    return 1.4 * torch.cat([x, y], dim=1) + 0.04 * torch.randn(samples, 2, generator=generator)


def batches(mesh: fs.Mesh, steps: int, seed: int) -> Any:
    """Yield this rank's data, noise and angles."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        noise = torch.randn(SAMPLES, 2, generator=generator)
        t = (1.4 * torch.randn(SAMPLES, 1, generator=generator) - 0.5).exp().atan()
        parts = (moons(SAMPLES, generator), noise, t)
        yield tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in parts)


def energy_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the energy distance of two sets of points, which is 0 for equal distributions."""
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train both, sample in one step, and return the last loss and the energy distances."""
    torch.manual_seed(0)  # every rank makes the same model
    apply, params, _ = fs.make_functional(Velocity())
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def diffusion(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        x, noise, t = batch
        velocity = t.cos() * noise - t.sin() * x
        return F.mse_loss(sharded(shards, {}, t.cos() * x + t.sin() * noise, t), velocity)

    def consistency(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        teacher, (x, noise, t) = batch
        x = t.cos() * x + t.sin() * noise
        with torch.no_grad():
            velocity = sharded(teacher, {}, x, t)
        student, change = torch.func.jvp(lambda x, t: sharded(shards, {}, x, t), (x, t), (velocity, torch.ones_like(t)))
        # The derivative of f along the path, times cos t.
        slope = -t.cos() * (t.cos() * (student - velocity) + t.sin() * (x + change))
        slope = slope / (slope.norm(dim=1, keepdim=True) + 0.1)
        return F.mse_loss(student, (student + slope).detach())

    def fit(loss_fn: Any, shards: Any, data: Any, name: str, lr: float) -> tuple[Any, float]:
        step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.Adam, lr=lr), plan, mesh)
        state = step.init(shards, {})
        for number, batch in enumerate(data):
            state, metrics = step(state, batch)
            if mesh.rank == 0 and (number % 80 == 0 or number == steps - 1):
                print(f"{name}, step {number}: loss {metrics['loss'].item():.4f}")
        return state.shards, metrics["loss"].item()

    teacher, _ = fit(diffusion, fs.shard(params, plan, mesh), batches(mesh, steps, seed=1), "teacher", 3e-3)
    pairs = ((teacher, batch) for batch in batches(mesh, steps, seed=2))
    # Why a copy: a step updates the shards that it gets in place.
    student, loss = fit(consistency, fs.copy(teacher), pairs, "student", 1e-3)

    ((x, noise, _),) = batches(mesh, 1, seed=3)
    result = {"loss": loss}
    for name, shards in (("student", student), ("teacher", teacher)):
        with torch.no_grad():
            samples = -sharded(shards, {}, noise, torch.full_like(noise[:, :1], torch.pi / 2))
        whole = [fs.all_gather(part, mesh, tiled=True) for part in (samples, x)]
        result[name] = energy_distance(*whole)
        if mesh.rank == 0:
            print(f"one step of the {name}: energy distance to the data {result[name]:.4f}")
    return result


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
