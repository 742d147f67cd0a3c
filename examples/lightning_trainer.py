"""torchrun --nproc-per-node 2 examples/lightning_trainer.py --steps 6

Train a sharded model inside `lightning.Trainer`; `--plain` trains it by Lightning's DDP.
"""

import argparse
import os
from typing import Any

import lightning
import torch

import funcshard as fs


class ShardedStrategy(lightning.pytorch.strategies.DDPStrategy):
    """Lightning's ranks and samplers of DDP, with no DDP around the module."""

    def configure_ddp(self) -> None: ...  # the step reduces gradients

    def model_to_device(self) -> None: ...  # the shards are on the device


class Plain(lightning.LightningModule):
    """A module for Lightning's loop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)  # every rank makes the same module
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))

    def training_step(self, batch: Any) -> Any:
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.print(f"step {self.global_step}: loss {self.trainer.callback_metrics['loss']:.6f}")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Plain):
    """The same module, with a step of ``fs.make_train_step``."""

    def setup(self, stage: str) -> None:
        self.automatic_optimization = False
        apply, params, buffers = fs.make_functional(self.net)
        mesh = fs.init_mesh(device=self.trainer.strategy.root_device)  # Lightning's ranks
        plan = fs.make_plan(params, mesh, units=["0", "2"])
        sharded = fs.fully_shard(apply, plan, mesh)

        def loss_fn(shards: Any, buffers: Any, batch: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(sharded(shards, buffers, batch[0]), batch[1])

        adamw = fs.torch_optimizer(torch.optim.AdamW, lr=lambda _: self.optimizers().param_groups[0]["lr"])
        self.step = fs.make_train_step(loss_fn, adamw, plan, mesh)
        self.sharded_state = self.step.init(fs.shard(params, plan, mesh), buffers)

    def training_step(self, batch: Any) -> None:
        self.sharded_state, metrics = self.step(self.sharded_state, batch)
        self.optimizers().step()  # Lightning counts these
        self.log("loss", metrics["loss"])

    def configure_optimizers(self) -> Any:  # of nothing, for a rate that schedules set
        return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader([*zip(x, x.square().sum(1, keepdim=True), strict=True)], 16, shuffle=True)
    module, strategy = (Plain(), "ddp") if options.plain else (Sharded(), ShardedStrategy())
    writes_nothing = {"logger": False, "enable_checkpointing": False}
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    lightning.Trainer(max_steps=options.steps, strategy=strategy, devices=devices, **writes_nothing).fit(module, loader)
