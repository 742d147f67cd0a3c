"""torchrun --nproc-per-node 2 examples/grpo.py --steps 20

Reinforce a language model by the rewards of groups of its own samples (GRPO): Shao et al.,
"DeepSeekMath", 2024. The example shows:

- three roles of one function: the policy that trains, the policy that wrote the samples, and the
  frozen reference are trees of shards of the same plan;
- samples by the sharded policy with a cache of keys and values, under `torch.no_grad()`: the root
  and one unit at a time are gathered;
- advantages, old log-probabilities and the reference's as parts of a batch: the step takes any
  pytree;
- two updates from the same samples, with clipped ratios and a penalty for leaving the reference.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch
import transformers

import funcshard as fs

LETTERS, PROMPT, ANSWER, PROMPTS, GROUP = 16, 4, 6, 8, 8
CLIP, PENALTY, UPDATES = 0.2, 0.02, 2


class Samples(NamedTuple):
    """Prompts with their answers, and what the loss needs to know of the answers."""

    tokens: torch.Tensor  # [samples, PROMPT + ANSWER]
    advantages: torch.Tensor  # [samples]
    old: torch.Tensor  # log-probabilities of the policy that wrote them, [samples, ANSWER]
    reference: torch.Tensor


def make_policy() -> Any:
    """Return a small Llama; every rank makes the same one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=LETTERS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=PROMPT + ANSWER, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rewards_of(answers: torch.Tensor) -> torch.Tensor:
    """Return the share of letters that follow the one before in the alphabet."""
    return (answers[:, 1:] == (answers[:, :-1] + 1) % LETTERS).float().mean(1)


def log_probs(policy: Any, shards: Any, buffers: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of the answers' letters."""
    logits = policy(shards, buffers, tokens, use_cache=False).logits[:, PROMPT - 1 : -1]
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]


@torch.no_grad()
def answer(policy: Any, shards: Any, buffers: Any, prompts: torch.Tensor, gumbel: torch.Tensor) -> torch.Tensor:
    """Return prompts with answers, sampled by noise of shape [samples, ANSWER, LETTERS]."""
    tokens, cache, last = prompts, transformers.DynamicCache(), prompts
    for noise in gumbel.unbind(1):
        output = policy(shards, buffers, last, past_key_values=cache, use_cache=True)
        last, cache = (output.logits[:, -1] + noise).argmax(-1, keepdim=True), output.past_key_values
        tokens = torch.cat([tokens, last], 1)
    return tokens


def draws(mesh: fs.Mesh, seed: int) -> Any:
    """Yield this rank's part of prompts, each ``GROUP`` times, and of noise."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        prompts = torch.randint(LETTERS, (PROMPTS, PROMPT), generator=generator).repeat_interleave(GROUP, 0)
        uniform = torch.rand(PROMPTS * GROUP, ANSWER, LETTERS, generator=generator).clamp(1e-6, 1 - 1e-6)
        parts = prompts, -(-uniform.log()).log()
        yield tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in parts)


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train the policy, and return the mean reward of its last samples."""
    apply, params, buffers = fs.make_functional(make_policy())
    plan = fs.make_plan(params, mesh, units=["model.layers.*"])
    policy, reference_shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, samples: Samples) -> torch.Tensor:
        new = log_probs(policy, shards, buffers, samples.tokens)
        ratios, advantages = (new - samples.old).exp(), samples.advantages[:, None]
        gain = torch.minimum(ratios * advantages, ratios.clamp(1 - CLIP, 1 + CLIP) * advantages)
        distance = samples.reference - new
        return (PENALTY * (distance.exp() - distance - 1) - gain).mean()

    optimizer = fs.torch_optimizer(torch.optim.Adam, lr=3e-3)
    # donate=False: the first update would write to the reference's shards
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=1.0, donate=False)
    state, stream = step.init(reference_shards, buffers), draws(mesh, seed=1)
    for number in range(steps):
        tokens = answer(policy, state.shards, state.buffers, *next(stream))
        rewards = rewards_of(tokens[:, PROMPT - 1 :])
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        with torch.no_grad():
            old = log_probs(policy, state.shards, state.buffers, tokens)
            reference = log_probs(policy, reference_shards, state.buffers, tokens)
        samples = Samples(tokens, advantages.flatten(), old, reference)
        for _ in range(UPDATES):
            state, metrics = step(state, samples)
        reward, loss = fs.pmean(rewards.mean(), mesh).item(), metrics["loss"].item()
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            print(f"step {number}: reward {reward:.3f}, loss {loss:.3f}")
    return {"reward": reward, "loss": loss}


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
