"""torchrun --nproc-per-node 2 examples/pinn.py --steps 200

Solve a differential equation with a network: Raissi, Perdikaris and Karniadakis, "Physics-informed
neural networks", 2019. The equation is Poisson's, -Δu = f on a square, with u = 0 on its boundary.
The example shows:

- a Laplacian by the inputs of a sharded model, in forward mode; one gather serves both directions;
- its gradient by the parameters, inside `make_train_step`;
- `fs.lbfgs` for the last digits, on a fixed set of points, as in the paper.

The solution is known here, so the program prints how far the network is from it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import funcshard as fs

WIDTH, SAMPLES = 32, 256


def make_model() -> nn.Module:
    """Return the network; every rank makes the same one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def solution(points: torch.Tensor) -> torch.Tensor:
    """Return the solution u at points of shape [n, 2]; then f is 2 π² u."""
    return (torch.pi * points).sin().prod(dim=1)


def batches(mesh: fs.Mesh, steps: int, seed: int) -> Any:
    """Yield this rank's points of the square."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        points = torch.rand(SAMPLES, 2, generator=generator)
        yield points.chunk(mesh.world_size)[mesh.rank].to(mesh.device)


def laplacian(u: Any, points: torch.Tensor) -> torch.Tensor:
    """Return the Laplacian of a function that maps each of the points by itself."""

    def second(direction: torch.Tensor) -> torch.Tensor:
        along = direction.expand_as(points)
        slope = lambda points: torch.func.jvp(u, (points,), (along,))[1]  # noqa: E731
        return torch.func.jvp(slope, (points,), (along,))[1]

    return torch.vmap(second)(torch.eye(2, device=points.device, dtype=points.dtype)).sum(0)


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train, and return the last loss and the relative error of the solution."""
    apply, params, _ = fs.make_functional(make_model())
    plan = fs.make_plan(params, mesh, units=["0", "2", "4"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def u(shards: Any, points: torch.Tensor) -> torch.Tensor:
        # The factor is 0 on the boundary, so that the solution is.
        return sharded(shards, {}, points).squeeze(1) * (points * (1 - points)).prod(dim=1)

    def loss_fn(shards: Any, _buffers: Any, points: torch.Tensor) -> torch.Tensor:
        residual = laplacian(lambda points: u(shards, points), points) + 2 * torch.pi**2 * solution(points)
        return residual.square().mean()

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.Adam, lr=1e-2), plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), {})
    for number, points in enumerate(batches(mesh, steps, seed=1)):
        state, metrics = step(state, points)
        if mesh.rank == 0 and (number % 40 == 0 or number == steps - 1):
            print(f"step {number}: loss {metrics['loss'].item():.4f}")

    (fixed,) = batches(mesh, 1, seed=3)
    shards, info = fs.lbfgs(lambda shards: loss_fn(shards, {}, fixed), state.shards, plan, mesh, max_iter=steps // 2)
    loss = fs.pmean(loss_fn(shards, {}, fixed), mesh).item()

    (points,) = batches(mesh, 1, seed=2)
    with torch.no_grad():
        errors = (u(shards, points) - solution(points)).square().mean()
    error = (fs.pmean(errors, mesh) / fs.pmean(solution(points).square().mean(), mesh)).sqrt().item()
    if mesh.rank == 0:
        print(f"L-BFGS: loss {loss:.4f} after {info['n_iter']} steps")
        print(f"relative error of the solution {error:.4f}")
    return {"loss": loss, "error": error}


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
