"""torchrun --nproc-per-node 2 examples/sam.py --steps 100

Train with sharpness-aware minimisation: Foret et al., "Sharpness-aware minimization for efficiently
improving generalization", 2021, algorithm 1. The example shows:

- two gradients in a step, the second one at other shards: `fs.value_and_grad` is a function;
- a step of length rho along the gradient of the whole model, with `fs.norm` and `fs.axpy`;
- `fs.linalg.power_iteration`, which measures what the method is for: the sharpness of the minimum.

The paper has each rank step along the gradient of its own samples. Here all ranks step along one.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

FEATURES, CLASSES, SAMPLES = 10, 3, 240


def make_model() -> nn.Module:
    """Return the classifier; every rank makes the same one."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def make_data(mesh: fs.Mesh, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's points, and labels of which some are wrong."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = x[:, :CLASSES].argmax(1)
    wrong = torch.rand(SAMPLES, generator=generator) < 0.1
    y = torch.where(wrong, torch.randint(CLASSES, (SAMPLES,), generator=generator), y)
    return tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in (x, y))


def train(mesh: fs.Mesh, steps: int, rho: float = 0.1) -> dict[str, Any]:
    """Train with Adam alone and with SAM, and return loss and sharpness of each."""
    apply, params, buffers = fs.make_functional(make_model())
    plan = fs.make_plan(params, mesh, units=["0", "2", "4"])
    sharded = fs.fully_shard(apply, plan, mesh)
    x, y = make_data(mesh, seed=1)

    def loss_fn(shards: Any) -> torch.Tensor:
        return (sharded(shards, buffers, x) - F.one_hot(y, CLASSES)).square().mean()

    evaluate = fs.value_and_grad(loss_fn, mesh=mesh)
    optimizer = fs.torch_optimizer(torch.optim.Adam, lr=1e-2)
    results = {}
    for name, radius in (("Adam", 0.0), ("SAM", rho)):
        shards = fs.shard(params, plan, mesh)
        opt_state = optimizer.init(shards)
        for number in range(steps):
            loss, grads = evaluate(shards)
            if radius:
                climbed = fs.axpy(radius / fs.norm(grads, plan, mesh), grads, shards)
                _, grads = evaluate(climbed)
            shards, opt_state = optimizer.step(grads, opt_state, shards)
            loss = fs.pmean(loss, mesh)
            if mesh.rank == 0 and (number % 20 == 0 or number == steps - 1):
                print(f"{name}, step {number}: loss {loss.item():.4f}")

        def multiply(v: Any, shards: Any = shards) -> Any:
            return fs.hvp(loss_fn, (shards,), (v,), mesh=mesh)

        start = fs.randn_like(shards, plan, mesh, generator=torch.Generator().manual_seed(2))
        sharpness, _, _ = fs.linalg.power_iteration(multiply, start, plan, mesh, tol=5e-2)
        results[name] = {"loss": loss.item(), "sharpness": sharpness.item()}
        if mesh.rank == 0:
            print(f"{name}: largest eigenvalue of the Hessian {sharpness.item():.3f}")
    return results


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
