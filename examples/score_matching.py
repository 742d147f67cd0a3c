"""torchrun --nproc-per-node 2 examples/score_matching.py --steps 200

Learn the gradient of a density's logarithm from samples: Song, Garg, Shi and Ermon, "Sliced score
matching", 2019, after Hyvärinen, "Estimation of non-normalized statistical models by score
matching", 2005. The example shows:

- a divergence by the inputs of a sharded model, by Hutchinson's estimate v · ∂(s · v), in one
  forward pass: each unit is gathered once for the value and the derivative;
- its gradient by the parameters, a gradient of a derivative.

The data are normal here, with a score that is known: the program prints how far the model is.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import funcshard as fs

FEATURES, WIDTH, SAMPLES = 3, 32, 512


def make_model() -> nn.Module:
    """Return the network; every rank makes the same one."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH), nn.Softplus(), nn.Linear(WIDTH, FEATURES)]
    return nn.Sequential(*layers)


def covariance() -> torch.Tensor:
    """Return the covariance matrix of the data."""
    factor = torch.tensor([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [-0.3, 0.2, 0.9]])
    return factor @ factor.T


def batches(mesh: fs.Mesh, steps: int, seed: int) -> Any:
    """Yield this rank's samples, and the random signs for the divergence."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.linalg.cholesky(covariance())
    for _ in range(steps):
        x = torch.randn(SAMPLES, FEATURES, generator=generator) @ factor.T
        signs = torch.randn(SAMPLES, FEATURES, generator=generator).sign()
        yield tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in (x, signs))


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train, and return the last loss and the relative error of the score."""
    apply, params, _ = fs.make_functional(make_model())
    plan = fs.make_plan(params, mesh, units=["0", "2", "4"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        x, signs = batch
        score, slope = torch.func.jvp(lambda x: sharded(shards, {}, x), (x,), (signs,))
        return (0.5 * score.square() + signs * slope).sum(1).mean()

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.Adam, lr=5e-3), plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), {})
    for number, batch in enumerate(batches(mesh, steps, seed=1)):
        state, metrics = step(state, batch)
        if mesh.rank == 0 and (number % 40 == 0 or number == steps - 1):
            print(f"step {number}: loss {metrics['loss'].item():.4f}")

    ((x, _),) = batches(mesh, 1, seed=2)
    score = -torch.linalg.solve(covariance().to(mesh.device), x.T).T
    with torch.no_grad():
        wrong = (sharded(state.shards, {}, x) - score).square().mean()
    error = (fs.pmean(wrong, mesh) / fs.pmean(score.square().mean(), mesh)).sqrt().item()
    if mesh.rank == 0:
        print(f"relative error of the score {error:.3f}")
    return {"loss": metrics["loss"].item(), "error": error}


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
