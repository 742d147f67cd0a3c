"""torchrun --nproc-per-node 2 examples/finetune_llama.py --steps 30

Fine-tune a causal language model of Hugging Face, from its files to its files. The example shows:

- `from_pretrained` and `save_pretrained`: each rank reads its own part of the files, and no rank
  ever holds the whole model;
- mixed precision: bfloat16 in forward and backward, float32 shards, sums and optimizer;
- activation checkpointing by layer, accumulation, clipping, warm-up and a cosine of the rate;
- a progress bar, and `make_meter` for log lines;
- `DataLoader` and `DistributedSampler`, whose position is in the checkpoint: after a kill the same
  command goes on with the next batch, on the same or another number of GPUs;
- evaluation on all ranks, and an export that `AutoModelForCausalLM.from_pretrained` loads.

`--model DIR` names a local folder of Hugging Face; without it, the model is small, begins at random
values, and its tokens are bytes. `--text FILE` names a text to train on.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import funcshard as fs


def load_text(options: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Return blocks of tokens to train on, and others to evaluate on."""
    if options.text:
        text = options.text.read_text()
    else:
        text = "".join(path.read_text() for path in sorted(Path(fs.__file__).parent.rglob("*.py")))
    if options.model:
        tokens = AutoTokenizer.from_pretrained(options.model)(text, return_tensors="pt").input_ids[0]
    else:
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    blocks = tokens[: len(tokens) // (options.context + 1) * (options.context + 1)].view(-1, options.context + 1)
    last = max(1, len(blocks) // 20)
    return TensorDataset(blocks[:-last]), TensorDataset(blocks[-last:])


def load_model(options: argparse.Namespace, mesh: fs.Mesh) -> Any:
    """Return the model's function, shards, buffers and plan."""
    folder = options.model or options.out / "random"
    if not options.model:
        if mesh.rank == 0 and not folder.exists():
            config = LlamaConfig(
                vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=options.context, use_cache=False,
            )  # fmt: skip
            torch.manual_seed(0)
            LlamaForCausalLM(config).save_pretrained(folder)
        fs.psum(torch.zeros((), device=mesh.device), mesh).item()  # all ranks wait for the files
    precision = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    # Each layer is a unit. Each rank reads its own part of the files.
    return fs.from_pretrained(folder, mesh, dtype=torch.float32, precision=precision)


def rate(step: int, options: argparse.Namespace) -> float:
    """Return the learning rate of a step: a linear warm-up, then half a cosine down to a tenth."""
    warm_up = max(1, options.steps // 10)
    if step < warm_up:
        return options.lr * (step + 1) / warm_up
    done = (step - warm_up) / max(1, options.steps - warm_up)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(mesh: fs.Mesh, options: argparse.Namespace) -> None:
    """Train, evaluate, save and export, on every rank."""
    apply, shards, buffers, plan = load_model(options, mesh)
    layers = [unit for unit in plan.units if unit]
    sharded = fs.fully_shard(apply.train(), plan, mesh, remat=layers)  # keeps each layer's input alone

    def loss_fn(shards: Any, buffers: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = sharded(shards, buffers, input_ids=ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    optimizer = fs.torch_optimizer(
        torch.optim.AdamW, lr=lambda step: rate(step, options), betas=(0.9, 0.95), weight_decay=0.1
    )
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=1.0, accumulate=options.accumulate)
    state, epoch, done = step.init(shards, buffers), 0, 0  # done: batches of this epoch
    if (last := fs.latest(options.out / "checkpoints")) is not None:
        stored = fs.restore(last, plan, mesh)
        state, epoch, done = stored["train"], stored["epoch"], stored["done"]

    data, held_out = load_text(options)
    sampler: Any = DistributedSampler(data, mesh.world_size, mesh.rank, seed=0)
    saving, size = None, options.batch * options.accumulate
    meter = fs.make_meter(mesh, tokens=size * options.context, step=state.step)
    bar = tqdm(total=options.steps, initial=state.step, unit="step", disable=mesh.rank != 0)
    while state.step < options.steps:
        sampler.set_epoch(epoch)
        mine = list(sampler)[done * size :]  # the indices that this rank has not seen in this epoch
        for (ids,) in DataLoader(data, size, sampler=mine, drop_last=True):
            state, metrics = step(state, ids.to(mesh.device))
            done += 1
            line = meter(state, metrics)  # plain numbers, for a logger such as wandb.log(line)
            bar.update()
            if mesh.rank == 0:
                bar.write(
                    "step {step}: loss {loss:.3f}, gradient norm {grad_norm:.2f}, rate {lr:.1e}, "
                    "{tokens_per_second:,.0f} tokens/s".format(**line)
                )
            if state.step % options.save_every == 0:
                path, what = options.out / "checkpoints" / f"step-{state.step}", {"epoch": epoch, "done": done}
                saving = fs.save(path, {"train": state, **what}, plan, mesh, wait=False, after=saving, keep=2)
            if state.step == options.steps:
                break
        else:
            epoch, done = epoch + 1, 0
    if saving is not None:
        saving.wait()  # the last checkpoint is written in the background
    bar.close()

    evaluated, mine = fs.fully_shard(apply, plan, mesh), held_out.tensors[0].chunk(mesh.world_size)
    with torch.no_grad():
        ids = mine[mesh.rank][: options.batch].to(mesh.device)
        logits = evaluated(state.shards, state.buffers, input_ids=ids[:, :-1]).logits
        loss = fs.pmean(F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()), mesh).item()
    fs.save_pretrained(options.out / "model", apply, state, plan, mesh)
    if mesh.rank == 0:
        print(f"loss on held-out text {loss:.3f}; exported to {options.out / 'model'}")


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a local directory of Hugging Face")
    parser.add_argument("--text", type=Path, help="a text file; by default funcshard's own source")
    parser.add_argument("--out", type=Path, default=Path("out-finetune"))
    for name, default in {"steps": 30, "batch": 4, "accumulate": 2, "context": 64, "save-every": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    train(fs.init_mesh(), parser.parse_args())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
