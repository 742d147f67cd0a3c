"""torchrun --nproc-per-node 2 examples/distill.py --steps 60

Distil a sharded teacher into a smaller sharded student: Hinton, Vinyals and Dean, "Distilling the
knowledge in a neural network", 2015. The example shows:

- two models in one step: the teacher has a plan, shards and a function of its own;
- a second tree of shards as part of the batch: the step takes any pytree and keeps no reference;
- `torch.no_grad()` around the teacher: each of its units is gathered for its forward and freed, so
  no rank ever holds the whole teacher;
- a student that begins as a part of the teacher: state dicts are dictionaries.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

FEATURES, WIDTH, CLASSES, TEMPERATURE = 16, 48, 8, 2.0


class Classifier(nn.Module):
    """A stack of residual blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inward = nn.Linear(FEATURES, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.outward = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.outward(x)


def batches(mesh: fs.Mesh, steps: int, seed: int, samples: int = 256) -> Any:
    """Yield this rank's inputs and labels: the octant of three sums of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(samples, FEATURES, generator=generator)
        bits = torch.stack([x[:, :4].sum(1), x[:, 4:8].prod(1), x[:, 8:12].sum(1)]) > 0
        y = (bits * torch.tensor([[1], [2], [4]])).sum(0)
        yield tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in (x, y))


def sharded_model(depth: int, mesh: fs.Mesh) -> tuple[Any, fs.Plan, Any]:
    """Return a classifier's function, its plan and its shards."""
    torch.manual_seed(0)  # every rank draws the same values
    apply, params, _ = fs.make_functional(Classifier(depth))
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    return fs.fully_shard(apply, plan, mesh), plan, fs.shard(params, plan, mesh)


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train the teacher, then the student, and return the accuracy of both."""
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=3e-3)
    teacher, plan, shards = sharded_model(6, mesh)

    def supervised(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(teacher(shards, {}, x), y)

    step = fs.make_train_step(supervised, optimizer, plan, mesh)
    state = step.init(shards, {})
    for batch in batches(mesh, steps, seed=1):
        state, _ = step(state, batch)
    teacher_shards = state.shards

    student, small_plan, small_shards = sharded_model(2, mesh)
    # The student takes the teacher's first two blocks. Every rank passes the full tensors, and
    # keeps its shards of them.
    whole = fs.to_state_dict(teacher_shards, plan, mesh)
    small_shards = fs.from_state_dict({name: whole[name] for name in small_plan.names}, small_plan, mesh)

    def distilled(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        x, teacher_shards = batch
        with torch.no_grad():
            targets = F.softmax(teacher(teacher_shards, {}, x) / TEMPERATURE, dim=1)
        logits = student(shards, {}, x) / TEMPERATURE
        return TEMPERATURE**2 * F.cross_entropy(logits, targets)

    step = fs.make_train_step(distilled, optimizer, small_plan, mesh)
    state = step.init(small_shards, {})
    for number, (x, _) in enumerate(batches(mesh, steps, seed=2)):
        state, metrics = step(state, (x, teacher_shards))
        loss = metrics["loss"].item()
        if mesh.rank == 0 and (number % 20 == 0 or number == steps - 1):
            print(f"step {number}: loss {loss:.3f}")

    accuracy = {}
    for name, model, shards in (("teacher", teacher, teacher_shards), ("student", student, state.shards)):
        ((x, y),) = batches(mesh, 1, seed=3, samples=2048)
        with torch.no_grad():
            right = (model(shards, {}, x).argmax(1) == y).float().mean()
        accuracy[name] = fs.pmean(right, mesh).item()
        if mesh.rank == 0:
            print(f"{name}: {accuracy[name]:.1%} of 2048 new samples right")
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
