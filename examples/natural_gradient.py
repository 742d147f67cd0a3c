"""torchrun --nproc-per-node 2 examples/natural_gradient.py --steps 10

Train with natural gradients, by Amari, "Natural gradient works efficiently in learning", 1998, in
the form of Martens, "Deep learning via Hessian-free optimization", 2010. The example shows:

- a step that solves (G + damping) x = gradient, with `fs.gnvp` and `fs.linalg.cg`. For a classifier
  with cross-entropy, the Gauss-Newton matrix G is the Fisher matrix;
- a solution that starts from the last step's, so that few iterations suffice;
- damping by the rule of Levenberg and Marquardt: it falls while the quadratic model is right.

The same number of steps of AdamW, at its best rate for this task, gives the loss to beat.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

FEATURES, WIDTH, CLASSES, SAMPLES = 8, 24, 4, 512


def make_model() -> nn.Module:
    """Return the classifier; every rank makes the same one."""
    torch.manual_seed(0)
    layers = [nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)]
    return nn.Sequential(*layers)


def make_data(mesh: fs.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's points, on badly scaled axes, and their quadrant in two products."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    y = 2 * (x[:, 0] * x[:, 1] > 0) + (x[:, 2] * x[:, 3] > 0)
    x = x * torch.logspace(0, -1.5, FEATURES)
    return tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in (x, y.long()))


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train in both ways, and return the losses."""
    apply, params, buffers = fs.make_functional(make_model())
    plan = fs.make_plan(params, mesh, units=["0", "2", "4"])
    sharded = fs.fully_shard(apply, plan, mesh)
    x, y = make_data(mesh)

    def outputs(shards: Any) -> torch.Tensor:
        return sharded(shards, buffers, x)

    def of_outputs(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, y)

    def loss_fn(shards: Any) -> torch.Tensor:
        return of_outputs(outputs(shards))

    def loss_at(shards: Any) -> float:
        with torch.no_grad():
            return fs.pmean(loss_fn(shards), mesh).item()

    evaluate = fs.value_and_grad(loss_fn, mesh=mesh)
    shards = fs.shard(params, plan, mesh)
    move, damping, loss = None, 0.1, loss_at(shards)
    for number in range(steps):
        _, grads = evaluate(shards)

        def multiply(v: Any, shards: Any = shards, damping: float = damping) -> Any:
            return fs.axpy(damping, v, fs.gnvp(outputs, of_outputs, (shards,), (v,), mesh=mesh))

        move, info = fs.linalg.cg(multiply, grads, plan, mesh, x0=move, rtol=1e-2, maxiter=30)
        # The model of the loss, L - g·x + x·(G + damping) x / 2, promises a fall; how much came?
        promised = (fs.vdot(grads, move, plan, mesh) - fs.vdot(move, multiply(move), plan, mesh) / 2).item()
        moved = fs.axpy(-1.0, move, shards)
        reached = loss_at(moved)
        ratio = (loss - reached) / promised
        damping *= 2 / 3 if ratio > 0.75 else 1.5 if ratio < 0.25 else 1.0
        if reached < loss:
            shards, loss = moved, reached
        if mesh.rank == 0:
            print(
                f"step {number}: loss {loss:.4f}, damping {damping:.3f}, {'solved' if info == 0 else f'{info} iterations'}"
            )

    step = fs.make_train_step(lambda shards, *_: loss_fn(shards), fs.torch_optimizer(torch.optim.AdamW, lr=3e-2), plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    for _ in range(steps):
        state, _ = step(state, None)
    adamw = loss_at(state.shards)
    if mesh.rank == 0:
        print(f"{steps} steps of AdamW: loss {adamw:.4f}")
    return {"natural": loss, "adamw": adamw}


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
