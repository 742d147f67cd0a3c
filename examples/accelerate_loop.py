"""torchrun --nproc-per-node 2 examples/accelerate_loop.py --steps 6

Train a sharded model in a loop of Accelerate, which keeps its ranks, data loading and trackers.
`accelerator.prepare` returns a training step as it is. `--plain` trains the same model with
Accelerate's DDP: the losses are the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator

import funcshard as fs


def plain(accelerator: Accelerator, net: torch.nn.Module) -> Callable[[Any], torch.Tensor]:
    """Return what takes a step with a batch, and returns the loss of all ranks."""
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

    def train(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(net(batch[0]), batch[1])
        accelerator.backward(loss)
        optimizer.step()
        return accelerator.reduce(loss.detach(), reduction="mean")

    return train


def sharded(accelerator: Accelerator, net: torch.nn.Module) -> Callable[[Any], torch.Tensor]:
    """Return the same for a sharded model."""
    apply, params, buffers = fs.make_functional(net)
    mesh = fs.init_mesh(device=accelerator.device)  # the ranks that Accelerate has joined
    plan = fs.make_plan(params, mesh, units=["0", "2"])
    model = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(shards, buffers, batch[0]), batch[1])

    # prepare changes modules, optimizers, schedulers and loaders, and returns all else as it is.
    adamw = fs.torch_optimizer(torch.optim.AdamW, lr=1e-2)
    step = accelerator.prepare(fs.make_train_step(loss_fn, adamw, plan, mesh))
    state = step.init(fs.shard(params, plan, mesh), buffers)

    def train(batch: Any) -> torch.Tensor:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics["loss"]

    return train


def main() -> None:
    """Read the options and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)  # every rank makes the same model
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, x.square().sum(1, keepdim=True))
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))
    train = plain(accelerator, net) if options.plain else sharded(accelerator, net)
    for number, batch in zip(range(1, options.steps + 1), loader, strict=False):
        accelerator.print(f"step {number}: loss {train(batch):.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
