"""torchrun --nproc-per-node 2 examples/hf_trainer.py --steps 6

Train a sharded model inside `transformers.Trainer`, which keeps its data loading, learning-rate
schedule, logging and callbacks. `--plain` runs the same script with the Trainer's own loop, which
uses DDP: the losses are the same. The example shows the four methods that a subclass replaces.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
from typing import Any

import torch
import transformers

import funcshard as fs

LETTERS, LENGTH = 26, 16


class ShardedTrainer(transformers.Trainer):
    """A Trainer whose step is ``fs.make_train_step``."""

    def __init__(self, *args: Any, mesh: fs.Mesh, units: list[str], **options: Any) -> None:
        super().__init__(*args, **options)
        apply, params, buffers = fs.make_functional(self.model)
        self.mesh, self.plan, self.apply = mesh, fs.make_plan(params, mesh, units=units), apply
        sharded, settings = fs.fully_shard(apply, self.plan, mesh), self.args
        adamw = fs.torch_optimizer(
            torch.optim.AdamW, lr=lambda _: self.optimizer.param_groups[0]["lr"], weight_decay=settings.weight_decay,
            betas=(settings.adam_beta1, settings.adam_beta2), eps=settings.adam_epsilon,
        )  # fmt: skip

        def loss_fn(shards: Any, buffers: Any, batch: Any) -> torch.Tensor:
            # The model divides by the tokens of all ranks; the step takes the mean over ranks.
            return sharded(shards, buffers, **batch).loss * mesh.world_size

        self.step = fs.make_train_step(loss_fn, adamw, self.plan, mesh, max_norm=settings.max_grad_norm or None)
        self.sharded_state = self.step.init(fs.shard(params, self.plan, mesh), buffers)

    def create_optimizer(self, model: Any = None) -> Any:
        """Return an optimizer of nothing, whose rate the Trainer sets and the step reads."""
        self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=self.args.learning_rate)
        return self.optimizer

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Return another module than the Trainer's, so that it makes no DDP of it."""
        return torch.nn.Identity()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Take one step, and return the loss of all ranks."""
        batch = {**self._prepare_inputs(inputs), "num_items_in_batch": num_items_in_batch}
        self.sharded_state, metrics = self.step(self.sharded_state, batch)
        return metrics["loss"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a Hugging Face folder, unit by unit."""
        folder = output_dir or self.args.output_dir
        fs.save_pretrained(folder, self.apply, self.sharded_state, self.plan, self.mesh)


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=LETTERS, **sizes))
    texts = (torch.arange(64)[:, None] + torch.arange(LENGTH)) % LETTERS
    data = [{"input_ids": text, "labels": text} for text in texts]
    with tempfile.TemporaryDirectory() as folder:
        settings = transformers.TrainingArguments(
            folder, max_steps=options.steps, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        make_trainer: Any = transformers.Trainer
        if not options.plain:
            make_trainer = functools.partial(ShardedTrainer, mesh=fs.init_mesh(), units=["model.layers.*"])
        make_trainer(model, settings, train_dataset=data).train()  # prints the losses
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
