"""torchrun --nproc-per-node 2 examples/dmd.py --steps 400

Distill a diffusion model into a generator: Yin et al., "One-step diffusion with distribution
matching distillation", 2024, without its regression loss. The example shows:

- three models of one plan, which run by one function: a frozen teacher, the generator, and a model
  of the generator's own points, from here on "fake";
- two optimizers in alternating steps; the step of one model takes the shards of the others as part
  of its batch;
- a gradient that is no derivative of a loss: the difference of two predictions.

Noise is mixed into points at an angle t from 0 to π/2: x cos t + z sin t. A model predicts the
velocity of this path, so x cos t - F(x, t) sin t is the point that it sees behind the noise.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

WIDTH, SAMPLES, FAKE_STEPS = 96, 256, 3


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


def ring(samples: int, generator: torch.Generator) -> torch.Tensor:
    """Return points of six clusters on a ring, with a variance of about 1."""
    angle = torch.randint(6, (samples, 1), generator=generator) * (torch.pi / 3)
    points = 1.4 * torch.cat([angle.cos(), angle.sin()], dim=1)
    return points + 0.1 * torch.randn(samples, 2, generator=generator)


def batches(mesh: fs.Mesh, seed: int) -> Any:
    """Yield this rank's points, the generator's noise, the noise to mix in, and its angle."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        z, noise = (torch.randn(SAMPLES, 2, generator=generator) for _ in range(2))
        t = 0.03 + (torch.pi / 2 - 0.06) * torch.rand(SAMPLES, 1, generator=generator)
        parts = (ring(SAMPLES, generator), z, noise, t)
        yield tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in parts)


def energy_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the energy distance of two sets of points, which is 0 for equal distributions."""
    return (2 * torch.cdist(a, b).mean() - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train all three; return the last losses, and the energy distances of one step to the data."""
    torch.manual_seed(0)  # every rank makes the same model
    apply, params, _ = fs.make_functional(Velocity())
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    model = fs.fully_shard(apply, plan, mesh)

    def diffusion(shards: Any, x: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        velocity = t.cos() * noise - t.sin() * x
        return F.mse_loss(model(shards, {}, t.cos() * x + t.sin() * noise, t), velocity)

    def generated(shards: Any, z: torch.Tensor) -> torch.Tensor:
        return -model(shards, {}, z, torch.full_like(z[:, :1], torch.pi / 2))

    def teacher_loss(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        x, _, noise, t = batch
        return diffusion(shards, x, noise, t)

    def fake_loss(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        (_, z, noise, t), student = batch
        with torch.no_grad():
            x = generated(student, z)
        return diffusion(shards, x, noise, t)

    def student_loss(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        (_, z, noise, t), teacher, fake = batch
        x = generated(shards, z)
        with torch.no_grad():
            noisy = t.cos() * x + t.sin() * noise
            real_x, fake_x = (t.cos() * noisy - t.sin() * model(one, {}, noisy, t) for one in (teacher, fake))
            slope = (fake_x - real_x) / ((x - real_x).abs().mean(dim=1, keepdim=True) + 0.1)
        # Its gradient by x is the slope, times 2 / x.numel().
        return F.mse_loss(x, x.detach() - slope)

    def stepped(loss_fn: Any, shards: Any, lr: float) -> tuple[Any, fs.TrainState]:
        step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.Adam, lr=lr, betas=(0.5, 0.99)), plan, mesh)
        # Why a copy: a step updates the shards that it gets in place.
        return step, step.init(fs.copy(shards), {})

    def report(name: str, number: int, metrics: Any) -> None:
        if mesh.rank == 0 and (number % 80 == 0 or number == steps - 1):
            print(f"{name}, step {number}: loss {metrics['loss'].item():.4f}")

    step, state = stepped(teacher_loss, fs.shard(params, plan, mesh), 3e-3)
    stream = batches(mesh, seed=1)
    for number in range(steps):
        state, metrics = step(state, next(stream))
        report("teacher", number, metrics)
    teacher = state.shards

    student_step, student = stepped(student_loss, teacher, 5e-4)
    fake_step, fake = stepped(fake_loss, teacher, 1e-3)
    for number in range(steps):
        for _ in range(FAKE_STEPS):
            fake, fake_metrics = fake_step(fake, (next(stream), student.shards))
        student, metrics = student_step(student, (next(stream), teacher, fake.shards))
        report("student", number, metrics)

    result = {"student": metrics["loss"].item(), "fake": fake_metrics["loss"].item()}
    x, z, _, _ = next(stream)
    for name, shards in (("teacher", teacher), ("student", student.shards)):
        with torch.no_grad():
            points = [fs.all_gather(part, mesh, tiled=True) for part in (generated(shards, z), x)]
        result[f"distance of the {name}"] = energy_distance(*points)
        if mesh.rank == 0:
            print(f"one step of the {name}: energy distance to the data {energy_distance(*points):.4f}")
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
