"""torchrun --nproc-per-node 2 examples/vision.py --steps 60

Train a small residual network with BatchNorm to tell shapes apart, and evaluate the average of its
weights over time. The example shows:

- buffers that change: with `mutable=True` the running statistics are a result of each call, and
  the step keeps them in its state;
- an average of the weights (EMA): a second tree of shards, updated without any collective;
- evaluation: `apply.eval()` under the same plan, in mixed precision or not;
- `torch.utils.data` with a part of the samples for each rank.
"""

from __future__ import annotations

import argparse
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import funcshard as fs

SIZE, CLASSES = 16, 3  # pixels a side; filled squares, hollow squares, crosses


class Block(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


def make_model(width: int = 16, blocks: int = 3) -> nn.Module:
    """Return the network; every rank makes the same one."""
    torch.manual_seed(0)
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(
        *stem, *[Block(width) for _ in range(blocks)], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
    )


def make_images(number: int, seed: int) -> TensorDataset:
    """Return noisy images of shapes at random places, with their classes."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.5 * torch.randn(number, 1, SIZE, SIZE, generator=generator)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    corners = torch.randint(SIZE - 7, (number, 2), generator=generator).tolist()
    for image, label, (top, left) in zip(images[:, 0], labels.tolist(), corners, strict=True):
        field = image[top : top + 7, left : left + 7]
        if label == 2:
            field[3, :] += 1.5
            field[:, 3] += 1.5
        else:
            field += 1.5
            field[1:-1, 1:-1] -= 1.5 * label
    return TensorDataset(images, labels)


def train(mesh: fs.Mesh, steps: int, batch: int = 32) -> dict[str, float]:
    """Train, and return the accuracy of the trained weights and of their average."""
    # mutable=True: a call of the function returns (output, new buffers).
    apply, params, buffers = fs.make_functional(make_model(), mutable=True)
    plan = fs.make_plan(params, mesh, units=["3", "4", "5"])  # the blocks
    sharded = fs.fully_shard(apply, plan, mesh)
    buffers = {name: buffer.to(mesh.device) for name, buffer in buffers.items()}

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> tuple[torch.Tensor, Any]:
        images, labels = batch
        logits, buffers = sharded(shards, buffers, images)
        return F.cross_entropy(logits, labels, label_smoothing=0.1), buffers

    lr = lambda step: 0.05 * min(1.0, (step + 1) / 5) * (1 - step / steps)  # noqa: E731
    optimizer = fs.torch_optimizer(torch.optim.SGD, lr=lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, mutable=True)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    average = fs.copy(state.shards)  # the step updates its own shards in place

    data = make_images(2048, seed=1)
    sampler: Any = DistributedSampler(data, mesh.world_size, mesh.rank, seed=0)
    loader, epoch = DataLoader(data, batch // mesh.world_size, sampler=sampler, drop_last=True), 0
    while state.step < steps:
        sampler.set_epoch(epoch)  # another order in each epoch
        for images, labels in loader:
            state, metrics = step(state, (images.to(mesh.device), labels.to(mesh.device)))
            # Elementwise, so each rank averages its own shards.
            average = optree.tree_map(lambda mean, now: mean.lerp_(now, 0.1), average, state.shards)
            loss = metrics["loss"].item()
            if mesh.rank == 0 and state.step % 20 == 0:
                print(f"step {state.step}: loss {loss:.3f}")
            if state.step == steps:
                break
        epoch += 1

    evaluated = fs.fully_shard(apply.eval(), plan, mesh)
    images, labels = (part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in make_images(512, 2).tensors)
    accuracy = {}
    for name, shards in {"last weights": state.shards, "average": average}.items():
        with torch.no_grad():  # each unit is gathered for its forward, and freed
            logits, _ = evaluated(shards, state.buffers, images)
        right = (logits.argmax(1) == labels).float().mean()
        accuracy[name] = fs.pmean(right, mesh).item()
        if mesh.rank == 0:
            print(f"{name}: {accuracy[name]:.1%} of 512 images right")
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
