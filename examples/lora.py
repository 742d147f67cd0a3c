"""torchrun --nproc-per-node 2 examples/lora.py --steps 40

Train low-rank adapters (LoRA) of a frozen Llama, made by Hugging Face's peft, and write them as
peft does. The example shows:

- frozen parameters: the plan puts them into buffers of their own, in bfloat16. They are gathered,
  never reduced, and the optimizer keeps no state for them;
- the traffic of a step: the gradients of the adapters are a small part of it;
- the way back: `PeftModel.from_pretrained(model, folder)` loads the adapters.

Pass `--model DIR` for a Llama in a local directory of Hugging Face, and `--nf4` for QLoRA: ranks
then store and gather the frozen weights in 4.5 bits an element. On GPUs, run the same command with
one process for each GPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import funcshard as fs

CONTEXT = 64


def make_model(path: str | None) -> Any:
    """Return a frozen model in bfloat16 with trainable adapters in float32."""
    torch.manual_seed(0)  # every rank draws the same values
    if path:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    else:  # a small one, whose tokens are bytes
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=CONTEXT, use_cache=False,
        )  # fmt: skip
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    adapters = LoraConfig(
        r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM",
        modules_to_save=None if path else ["lm_head"],  # a random head has to be trained as well
    )  # fmt: skip
    return get_peft_model(model, adapters, autocast_adapter_dtype=True)


def batches(mesh: fs.Mesh, steps: int, samples: int) -> Any:
    """Yield this rank's part of each batch: bytes of the library's own source."""
    source = "".join(path.read_text() for path in sorted(Path(fs.__file__).parent.glob("core/*.py")))
    text = torch.tensor(list(source.encode()))
    generator = torch.Generator().manual_seed(1)  # the same on every rank, which then takes its part
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (samples,), generator=generator).tolist()
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
        yield batch.chunk(mesh.world_size)[mesh.rank].to(mesh.device)


def train(mesh: fs.Mesh, steps: int, out: Path, model: str | None = None, nf4: bool = False) -> list[float]:
    """Train the adapters, write them to a folder, and return the loss of each step."""
    net = make_model(model)
    apply, params, buffers = fs.make_functional(net)
    # A parameter with requires_grad=False stays frozen: the plan records it.
    storage = {"**": fs.nf4(), "**.*norm": None} if nf4 else None
    units = ["base_model.model.model.layers.*"]
    plan = fs.make_plan(params, mesh, units=units, storage=storage)
    sharded = fs.fully_shard(apply, plan, mesh)
    buffers = {name: buffer.to(mesh.device) for name, buffer in buffers.items()}

    def loss_fn(shards: Any, buffers: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = sharded(shards, buffers, input_ids=ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=1e-2), plan, mesh, max_norm=1.0)
    state, losses = step.init(fs.shard(params, plan, mesh), buffers), []
    for number, ids in enumerate(batches(mesh, steps, samples=16)):
        with fs.record_events() as events:
            state, metrics = step(state, ids)
        losses.append(metrics["loss"].item())
        if mesh.rank == 0 and number == 0:
            sizes = Counter[str]()
            for event in events:
                sizes[event.kind] += event.bytes
            print("bytes of a step:", ", ".join(f"{kind} {size:,}" for kind, size in sizes.items()))
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            print(f"step {number}: loss {losses[-1]:.3f}")

    # peft picks the adapters out of the state dict, and writes them with their configuration.
    state_dict = fs.to_state_dict(state.shards, plan, mesh, rank0_only=True, offload=True)
    if mesh.rank == 0:
        net.save_pretrained(out, state_dict=state_dict)
        print(f"wrote {', '.join(sorted(path.name for path in out.iterdir()))} to {out}")
    return losses


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--model", help="a directory of Hugging Face; by default a small random model")
    parser.add_argument("--out", type=Path, default=Path("out-lora"))
    parser.add_argument("--nf4", action="store_true", help="store the frozen weights in 4.5 bits an element")
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps, options.out, options.model, options.nf4)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
