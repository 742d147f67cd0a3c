"""torchrun --nproc-per-node 2 examples/functional_params.py --steps 60

Train a network that is no `nn.Module`: its parameters are nested dictionaries, its forward is a
function, and so is its optimizer. The example shows:

- a plan of any pytree: globs of paths, such as `blocks.*`, say which leaves form a unit;
- `unshard` and `reshard` by hand: gather a unit, run it, free it; backward gathers it again;
- `value_and_grad`: the gradients are shards, so an elementwise optimizer is arithmetic on trees;
- the state of training: the shards and the optimizer's own tree, saved as one pytree.

Lion is from Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import optree
import torch
import torch.nn.functional as F

import funcshard as fs

WIDTH, DEPTH = 64, 4


def make_params() -> dict[str, Any]:
    """Return the whole parameters; every rank makes the same ones."""
    generator = torch.Generator().manual_seed(0)

    def linear(inward: int, outward: int) -> dict[str, torch.Tensor]:
        weight = torch.randn(outward, inward, generator=generator) / inward**0.5
        return {"weight": weight, "bias": torch.zeros(outward)}

    blocks = [
        {"scale": torch.ones(WIDTH), "up": linear(WIDTH, 2 * WIDTH), "down": linear(2 * WIDTH, WIDTH)} for _ in range(DEPTH)
    ]
    return {"inward": linear(2, WIDTH), "blocks": blocks, "outward": linear(WIDTH, 1)}


def linear(leaves: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply one linear layer."""
    return F.linear(x, leaves["weight"], leaves["bias"])


def block(leaves: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    """Apply one block, a function of the leaves of its unit."""
    normed = F.rms_norm(x, (WIDTH,), leaves["scale"])
    return x + linear(leaves["down"], F.silu(linear(leaves["up"], normed)))


def lion(lr: float, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1) -> Any:
    """Return Lion as a pair of pure functions on trees."""

    def init(shards: Any) -> Any:
        return optree.tree_map(torch.zeros_like, shards)

    def step(grads: Any, momentum: Any, shards: Any) -> tuple[Any, Any]:
        def update(shard: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
            return shard - lr * (mean.lerp(grad, 1 - betas[0]).sign() + decay * shard)

        shards = optree.tree_map(update, shards, grads, momentum)
        return shards, optree.tree_map(lambda mean, grad: mean.lerp(grad, 1 - betas[1]), momentum, grads)

    return init, step


def batches(mesh: fs.Mesh, steps: int, samples: int = 256) -> Any:
    """Yield this rank's samples of a spiral."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = 2 * torch.rand(samples, 2, generator=generator) - 1
        y = torch.sin(6 * x.norm(dim=1) + torch.atan2(x[:, 1], x[:, 0]))
        yield tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in (x, y))


def train(mesh: fs.Mesh, steps: int, out: Path | None = None) -> list[float]:
    """Train, save the state, and return the loss of each step."""
    params = make_params()
    plan = fs.make_plan(params, mesh, units=["blocks.*", "outward"])  # "inward" is in the root
    if mesh.rank == 0:
        print(plan)

    # One function of a shard for each unit. reshard frees the leaves after forward.
    inward = fs.unshard(lambda leaves, x: linear(leaves["inward"], x), plan.units[""], mesh)
    blocks = [fs.reshard(fs.unshard(block, plan.units[f"blocks.{i}"], mesh)) for i in range(DEPTH)]
    outward = fs.unshard(linear, plan.units["outward"], mesh)

    def loss_fn(shards: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        x = inward(shards[""], x)
        for i, f in enumerate(blocks):
            x = f(shards[f"blocks.{i}"], x)
        return F.mse_loss(outward(shards["outward"], x).squeeze(-1), y)

    evaluate = fs.value_and_grad(loss_fn, mesh=mesh)
    init, update = lion(lr=3e-4)
    shards = fs.shard(params, plan, mesh)
    momentum, losses = init(shards), []
    for number, batch in enumerate(batches(mesh, steps)):
        loss, grads = evaluate(shards, batch)  # this rank's loss; the gradients of the mean over ranks
        grads, norm = fs.clip_by_global_norm(grads, plan, mesh, max_norm=1.0)
        shards, momentum = update(grads, momentum, shards)
        losses.append(fs.pmean(loss, mesh).item())
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            print(f"step {number}: loss {losses[-1]:.3f}, gradient norm {norm.item():.3f}")

    if out is not None:  # any pytree; the momentum is cut as the shards are
        state = {"shards": shards, "momentum": momentum, "losses": torch.tensor(losses)}
        fs.save(out / "last", state, plan, mesh)
        if mesh.rank == 0:
            print(fs.restore(out / "last"))
    return losses


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("out-functional"))
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps, options.out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
