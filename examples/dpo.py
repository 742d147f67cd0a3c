"""torchrun --nproc-per-node 2 examples/dpo.py --steps 30

Train a language model on preferences between two answers (DPO): Rafailov et al., "Direct preference
optimization", 2023. The example shows:

- a reference that costs no second model: its log-probabilities are computed once, from the shards
  before the first step, and are part of the batches;
- answers of unequal lengths: each rank pads its own batch, and the mean is over pairs;
- metrics of each rank, such as the accuracy, as `aux`.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers

import funcshard as fs

LETTERS, PROMPT, LONGEST, PAIRS, BATCH = 16, 4, 8, 64, 16  # a batch of the world
BETA, PAD = 0.5, 0


class Pairs(NamedTuple):
    """Prompts with two answers each, padded at the end."""

    chosen: torch.Tensor  # tokens of prompts and answers, [pairs, PROMPT + LONGEST]
    rejected: torch.Tensor
    reference: torch.Tensor  # by how much the reference prefers the chosen answers, [pairs]


def make_policy() -> Any:
    """Return a small Llama; every rank makes the same one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=LETTERS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=PROMPT + LONGEST, bos_token_id=1, eos_token_id=1, pad_token_id=PAD,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def make_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return chosen answers, which count upwards, and rejected ones, which count downwards."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, LETTERS, (PAIRS, PROMPT), generator=generator)
    ramp, answers = torch.arange(1, LONGEST + 1), []
    for step in (1, -1):
        lengths = torch.randint(2, LONGEST + 1, (PAIRS, 1), generator=generator)
        letters = (prompts[:, -1:] - 1 + step * ramp) % (LETTERS - 1) + 1
        answers.append(torch.cat([prompts, letters.where(ramp <= lengths, PAD)], 1))
    return answers[0], answers[1]


def log_probs(policy: Any, shards: Any, buffers: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each answer, without its padding."""
    mask = tokens != PAD
    logits = policy(shards, buffers, tokens, attention_mask=mask, use_cache=False).logits
    letters = logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return (letters * mask[:, 1:])[:, PROMPT - 1 :].sum(1)


def preference(policy: Any, shards: Any, buffers: Any, pairs: Pairs) -> torch.Tensor:
    """Return by how much the policy prefers the chosen answers; both run in one forward."""
    both = log_probs(policy, shards, buffers, torch.cat([pairs.chosen, pairs.rejected]))
    chosen, rejected = both.chunk(2)
    return chosen - rejected


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train the policy, and return the last loss and the share of pairs in the right order."""
    apply, params, buffers = fs.make_functional(make_policy())
    plan = fs.make_plan(params, mesh, units=["model.layers.*"])
    policy, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
        margins = BETA * (preference(policy, shards, buffers, pairs) - pairs.reference)
        return -F.logsigmoid(margins).mean(), (margins > 0).float().mean()

    batches = []
    for chosen, rejected in zip(*(answers.split(BATCH) for answers in make_pairs()), strict=True):
        mine = [part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in (chosen, rejected)]
        pairs = Pairs(*mine, reference=torch.empty(0, device=mesh.device))
        with torch.no_grad():
            batches.append(pairs._replace(reference=preference(policy, shards, buffers, pairs)))

    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=3e-3)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, has_aux=True)
    state = step.init(shards, buffers)
    for number in range(steps):
        state, metrics = step(state, batches[number % len(batches)])
        loss, right = metrics["loss"].item(), fs.pmean(metrics["aux"], mesh).item()
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            print(f"step {number}: loss {loss:.3f}, {right:.1%} of {BATCH} pairs right")
    return {"loss": loss, "right": right}


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
