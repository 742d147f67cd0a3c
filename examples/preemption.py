"""torchrun --nproc-per-node 2 examples/preemption.py --steps 60

Train a job that a cluster may stop at any moment, and continue it on another number of ranks. The
example shows:

- SIGTERM and SIGUSR1 as a request: the ranks agree to end after the same step, and save;
- a limit for that save, because the cluster kills the job soon after its signal;
- checkpoints in the background for what sends no signal: `torchrun --max-restarts 3` restarts the
  ranks, and they continue from the last one;
- batches of the world that don't depend on the number of ranks: their position is the step.

torchrun sends SIGTERM on to its ranks, and kills them 30 seconds later. To send on SIGUSR1 as well,
start it with `--signals-to-handle SIGTERM,SIGINT,SIGUSR1`.
"""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import funcshard as fs

SAMPLES, WIDTH, BATCH = 4096, 32, 12  # a batch of the world, for 1, 2, 3, 4, 6 or 12 ranks
SAVE_EVERY, LIMIT = 10, 20.0  # steps, and seconds for the last save


class Blocks(nn.Module):
    """A stack of residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.outward = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.outward(x)


def make_data() -> TensorDataset:
    """Return the samples, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, WIDTH, generator=generator)
    return TensorDataset(x, x.square().mean(1, keepdim=True))


def sample_numbers(first_step: int, last_step: int, mesh: fs.Mesh) -> Iterator[list[int]]:
    """Yield this rank's part of each batch of the world, from ``first_step`` on."""
    per_epoch = SAMPLES // BATCH
    for number in range(first_step, last_step):
        epoch, batch = divmod(number, per_epoch)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        yield order[batch * BATCH : (batch + 1) * BATCH][mesh.rank :: mesh.world_size].tolist()


def train(mesh: fs.Mesh, steps: int, folder: Path, stop: threading.Event) -> list[float]:
    """Train from the last checkpoint to ``steps`` or ``stop``; return the losses of all steps."""
    torch.manual_seed(0)  # every rank draws the same values
    apply, params, buffers = fs.make_functional(Blocks())
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return (sharded(shards, buffers, x) - y).square().mean()

    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-2)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
    state, losses, saving = step.init(fs.shard(params, plan, mesh), buffers), torch.zeros(0), None
    if (last := fs.latest(folder)) is not None:
        restored = fs.restore(last, plan, mesh)
        state, losses = restored["train"], restored["losses"]
        if mesh.rank == 0:
            print(f"continue from {last.name} on {mesh.world_size} ranks", flush=True)

    def save() -> fs.Saving:
        contents = {"train": state, "losses": losses}
        path = folder / f"step-{state.step}"
        return fs.save(path, contents, plan, mesh, wait=False, after=saving, keep=2)

    batches = DataLoader(make_data(), batch_sampler=list(sample_numbers(state.step, steps, mesh)))
    for batch in batches:
        # A signal reaches the ranks at different moments. All of them end after the same step.
        if not fs.agree(not stop.is_set(), mesh):
            break
        state, metrics = step(state, tuple(part.to(mesh.device) for part in batch))
        losses = torch.cat([losses, metrics["loss"].cpu().reshape(1)])
        if mesh.rank == 0 and (state.step % 20 == 0 or state.step == steps):
            print(f"step {state.step}: loss {losses[-1]:.4f}", flush=True)
        if state.step % SAVE_EVERY == 0:
            saving = save()
    if saving is not None:
        saving.wait(timeout=LIMIT)
    save().wait(timeout=LIMIT)
    if mesh.rank == 0 and state.step < steps:
        print(f"saved step {state.step} after a signal", flush=True)
    return losses.tolist()


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"), help="shared by all ranks")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: stop.set())
    train(fs.init_mesh(), options.steps, options.folder, stop)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
