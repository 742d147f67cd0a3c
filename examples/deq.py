"""torchrun --nproc-per-node 2 examples/deq.py --steps 40

Train a network of one layer that repeats until nothing changes: Bai, Kolter and Koltun, "Deep
equilibrium models", 2019. The example shows:

- implicit differentiation: the gradient needs the fixed point z = f(z, x), and none of the steps to
  it. A hook solves the same kind of equation for the gradient, y = Jᵀ y + g;
- loops whose length depends on data, on ranks that have other data: the ranks agree on when to stop
  with `fs.agree`, because each step gathers the layer, and all ranks have to take part.

Memory doesn't grow with the number of steps: each of them gathers the layer and frees it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

FEATURES, WIDTH, CLASSES, SAMPLES = 8, 32, 3, 192


class Layer(nn.Module):
    """One step to the fixed point; its slope by z is below one, so that there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer = nn.Linear(FEATURES, WIDTH)

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight = self.inner.weight
        # No larger than 0.9 as a map: the norm of Frobenius is at least the largest singular value.
        return torch.tanh(0.9 * F.linear(z, weight / weight.norm().clamp(min=1.0)) + self.outer(x))


class Equilibrium(nn.Module):
    """The layer and the head that reads its fixed point."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.head = nn.Linear(WIDTH, CLASSES)


def solve(f: Callable[[torch.Tensor], torch.Tensor], z: torch.Tensor, mesh: fs.Mesh, tolerance: float) -> Any:
    """Return a point that ``f`` leaves as it is, and the number of steps to it."""
    number, changes = 0, True
    while changes:
        new, number = f(z), number + 1
        changes = fs.agree((new - z).abs().max(), mesh) > tolerance * fs.agree(new.abs().max(), mesh)
        z = new
    return z, number


def batches(mesh: fs.Mesh, steps: int, seed: int) -> Any:
    """Yield this rank's points, and which of three sums is the largest."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(SAMPLES, FEATURES, generator=generator)
        y = torch.stack([x[:, 0] * x[:, 1], x[:, 2], x[:, 3] * x[:, 4]]).argmax(0)
        yield tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in (x, y))


def train(mesh: fs.Mesh, steps: int, tolerance: float = 1e-4) -> dict[str, Any]:
    """Train, and return the losses, and the steps of the last forward and backward."""
    torch.manual_seed(0)  # every rank makes the same model
    apply, params, buffers = fs.make_functional(Equilibrium())
    plan = fs.make_plan(params, mesh, units=["layer", "head"])
    layer = fs.fully_shard(apply.method(lambda module, z, x: module.layer(z, x)), plan, mesh)
    head = fs.fully_shard(apply.method(lambda module, z: module.head(z)), plan, mesh)
    counts = {"forward": 0, "backward": 0}

    def fixed_point(shards: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            start = torch.zeros(len(x), WIDTH, device=mesh.device)
            z, counts["forward"] = solve(lambda z: layer(shards, buffers, z, x), start, mesh, tolerance)
        z = layer(shards, buffers, z, x)  # one step with a graph: by the parameters, and by x
        before = z.detach().requires_grad_()
        detached = {unit: {key: shard.detach() for key, shard in buffer.items()} for unit, buffer in shards.items()}
        after = layer(detached, buffers, before, x)  # and one by z, for products with J

        def implicit(grad: torch.Tensor) -> torch.Tensor:
            step = lambda y: torch.autograd.grad(after, before, y, retain_graph=True)[0] + grad  # noqa: E731
            y, counts["backward"] = solve(step, grad, mesh, tolerance)
            return y

        if z.requires_grad:
            z.register_hook(implicit)
        return z

    def loss_fn(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(head(shards, buffers, fixed_point(shards, x)), y)

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.Adam, lr=1e-2), plan, mesh)
    state, losses = step.init(fs.shard(params, plan, mesh), {}), []
    for number, batch in enumerate(batches(mesh, steps, seed=1)):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            print(
                f"step {number}: loss {losses[-1]:.4f}, {counts['forward']} steps forward and {counts['backward']} backward"
            )
    return {"losses": losses, **counts}


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
