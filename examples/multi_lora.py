"""torchrun --nproc-per-node 2 examples/multi_lora.py --steps 40

Train several low-rank adapters of one frozen Llama at once, each on its own data and with its own
learning rate, as in Ye et al., "mLoRA: fine-tuning LoRA adapters via highly-efficient pipeline
parallelism in multiple GPUs", 2023. The example shows:

- `torch.vmap` over adapters: the frozen model is gathered once for all of them, and each unit's
  gradients are reduced once for all of them;
- a state, a rate and a checkpoint for each adapter. Call the program again, with more ranks, steps
  or rates: each adapter continues from its own checkpoint, and new ones begin;
- the way back to peft: `PeftModel.from_pretrained(model, out / "0" / "peft")`.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import optree
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import funcshard as fs

TOKENS, CONTEXT, SAMPLES = 64, 32, 8


def make_model(number: int) -> Any:
    """Return the frozen model, the same for each number, with the adapter of this number."""
    torch.manual_seed(0)  # every rank draws the same values
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    torch.manual_seed(1 + number)
    adapters = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
        modules_to_save=["lm_head"],  # a random head has to be trained as well
    )  # fmt: skip
    return get_peft_model(model, adapters)


def make_batch(number: int, step: int) -> torch.Tensor:
    """Return texts ``[samples, tokens]`` for a step of an adapter, which learns to count."""
    first = torch.randint(TOKENS, (SAMPLES, 1), generator=torch.Generator().manual_seed(step))
    return (first + (2 * number + 1) * torch.arange(CONTEXT + 1)) % TOKENS


def train(mesh: fs.Mesh, steps: int, rates: list[float], out: Path) -> list[tuple[list[float], list[Any]]]:
    """Train an adapter for each rate, and return the losses and the events of each step."""
    net = make_model(0)
    apply, params, buffers = fs.make_functional(net)
    buffers = {name: buffer.to(mesh.device) for name, buffer in buffers.items()}
    plan = fs.make_plan(params, mesh, units=["base_model.model.model.layers.*"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def split(shards: Any, trainable: bool) -> Any:
        """Return the shards of the adapter, or those of the frozen model."""
        return {
            unit.name: {b.key: shards[unit.name][b.key] for b in unit.buffers if b.trainable == trainable}
            for unit in plan.unit_list
        }

    def join(adapter: Any, base: Any) -> Any:
        return {unit: {**base[unit], **adapter[unit]} for unit in base}

    base = split(fs.shard(params, plan, mesh), trainable=False)

    def loss_fn(adapter: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = sharded(join(adapter, base), buffers, input_ids=ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def total_and_losses(adapters: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses = torch.vmap(loss_fn)(adapters, ids)
        return losses.sum(), losses  # the sum, so that no adapter's gradient depends on others

    optimizers = [fs.torch_optimizer(torch.optim.AdamW, lr=rate) for rate in rates]

    def begin(number: int) -> fs.TrainState:
        """Return the state of an adapter: that of its newest checkpoint, if it has one."""
        if path := fs.latest(out / str(number)):
            return fs.restore(path, plan, mesh)
        drawn = fs.make_functional(make_model(number))[1]
        adapter = split(fs.shard(drawn, plan, mesh), trainable=True)
        return fs.TrainState(adapter, {}, optimizers[number].init(adapter), step=0)

    states, history = [begin(number) for number in range(len(rates))], []
    for number in range(steps):
        batch = torch.stack([make_batch(i, state.step) for i, state in enumerate(states)])
        ids = batch.chunk(mesh.world_size, 1)[mesh.rank].to(mesh.device)
        adapters: list[Any] = [state.shards for state in states]
        stack = optree.tree_map(lambda *shards: torch.stack(shards), *adapters)
        with fs.record_events() as events:
            (_, losses), grads = fs.value_and_grad(total_and_losses, has_aux=True)(stack, ids)
        for i, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
            of_adapter = optree.tree_map(lambda grad, i=i: grad[i], grads)
            adapter, opt_state = optimizer.step(of_adapter, state.opt_state, state.shards)
            states[i] = fs.TrainState(adapter, {}, opt_state, state.step + 1)
        history.append((fs.pmean(losses, mesh).tolist(), events))
        if mesh.rank == 0 and number == 0:
            kinds = Counter(event.kind for event in events)
            print(f"a step of {len(rates)} adapters:", ", ".join(f"{kinds[kind]} {kind}" for kind in kinds))
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            print(f"step {number}: losses {' '.join(f'{loss:.3f}' for loss in history[-1][0])}")

    for number, state in enumerate(states):
        fs.save(out / str(number) / f"step-{state.step}", state, plan, mesh, keep=1)
        whole = fs.to_state_dict(join(state.shards, base), plan, mesh, rank0_only=True, offload=True)
        if mesh.rank == 0:
            net.save_pretrained(out / str(number) / "peft", state_dict=whole)
    return history


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-2, 1e-2, 3e-3], help="one for each adapter")
    parser.add_argument("--out", type=Path, default=Path("out-multi-lora"))
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps, options.rates, options.out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
