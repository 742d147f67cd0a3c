"""torchrun --nproc-per-node 2 examples/actor_critic.py --steps 40

Balance poles on carts with an actor and a critic: Schulman et al., "Proximal policy optimization
algorithms", 2017, with generalized advantage estimates. The example shows:

- two models as one tree with one plan; groups of the optimizer give the critic its own rate;
- a sharded actor that acts under `torch.no_grad()`, with carts on every rank;
- advantages with the mean and deviation of all ranks, by `fs.pmean`;
- several updates from the same samples, with clipped ratios.
"""

from __future__ import annotations

import argparse
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

CARTS, TURNS, UPDATES, CLIP = 64, 64, 4, 0.2
DISCOUNT, SMOOTHING, LONGEST = 0.98, 0.95, 200


class ActorCritic(nn.Module):
    """Logits of pushes to the left and right, and the value of a cart's state."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.actor, self.critic = (
            nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out))
            for out in (2, 1)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x), self.critic(x)[..., 0]


class Turns(NamedTuple):
    """What carts did, each [samples, ...]."""

    states: torch.Tensor
    pushes: torch.Tensor
    log_probs: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor


def push(state: torch.Tensor, pushes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next states of carts, and which of them failed (Barto et al., 1983)."""
    _, speed, angle, turn = state.unbind(1)
    force = 20.0 * pushes - 10.0
    pull = (force + 0.05 * turn.square() * angle.sin()) / 1.1
    spin = (9.8 * angle.sin() - angle.cos() * pull) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
    slide = pull - 0.05 * spin * angle.cos() / 1.1
    state = state + 0.02 * torch.stack([speed, slide, turn, spin], 1)
    return state, (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > math.radians(12))


class Carts:
    """This rank's carts, and random numbers that don't depend on the number of ranks."""

    def __init__(self, mesh: fs.Mesh, seed: int) -> None:
        self.mesh, self.generator = mesh, torch.Generator().manual_seed(seed)
        self.state, self.age = self.random(4), self.random(1)[:, 0] * 0

    def random(self, size: int) -> torch.Tensor:
        """Return numbers from 0 to 1 for this rank's carts."""
        numbers = torch.rand(CARTS, size, generator=self.generator)
        return numbers.chunk(self.mesh.world_size)[self.mesh.rank].to(self.mesh.device)

    @torch.no_grad()
    def play(self, model: Any, shards: Any) -> tuple[Turns, torch.Tensor]:
        """Let the actor play, and return what it did and the mean age of the carts."""
        rows = []
        for _ in range(TURNS):
            state = self.state
            logits, values = model(shards, {}, state)
            pushes = (logits - (-self.random(2).log()).log()).argmax(1)  # a sample, by Gumbel's trick
            self.state, failed = push(state, pushes)
            self.age += 1
            over = failed | (self.age >= LONGEST)
            log_probs = logits.log_softmax(1).gather(1, pushes[:, None])[:, 0]
            rows.append((state, pushes, log_probs, values, 1 - failed.to(values.dtype), over))
            self.state = torch.where(over[:, None], 0.1 * self.random(4) - 0.05, self.state)
            self.age = torch.where(over, 0.0, self.age)
        states, pushes, log_probs, values, rewards, over = (torch.stack(column) for column in zip(*rows, strict=True))
        later, advantage, advantages = model(shards, {}, self.state)[1], torch.zeros_like(values[0]), []
        for turn in reversed(range(TURNS)):
            goes_on = 1 - over[turn].to(values.dtype)
            surprise = rewards[turn] + DISCOUNT * goes_on * later - values[turn]
            advantage = surprise + DISCOUNT * SMOOTHING * goes_on * advantage
            advantages.insert(0, advantage)
            later = values[turn]
        advantages = torch.stack(advantages)
        returns = advantages + values
        mean = fs.pmean(advantages.mean(), self.mesh)
        deviation = fs.pmean((advantages - mean).square().mean(), self.mesh).sqrt()
        turns = (states, pushes, log_probs, (advantages - mean) / (deviation + 1e-6), returns)
        return Turns(*(part.flatten(0, 1) for part in turns)), fs.pmean(self.age.mean(), self.mesh)


def train(mesh: fs.Mesh, steps: int) -> dict[str, float]:
    """Train both models, and return the last loss and the mean age of the carts."""
    torch.manual_seed(0)  # every rank makes the same model
    apply, params, _ = fs.make_functional(ActorCritic())
    plan = fs.make_plan(params, mesh, units=["actor", "critic"])
    model = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, _buffers: Any, turns: Turns) -> torch.Tensor:
        logits, values = model(shards, {}, turns.states)
        log_probs = logits.log_softmax(1)
        ratio = (log_probs.gather(1, turns.pushes[:, None])[:, 0] - turns.log_probs).exp()
        gain = torch.minimum(ratio * turns.advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * turns.advantages)
        entropy = -(log_probs.exp() * log_probs).sum(1)
        return F.mse_loss(values, turns.returns) - gain.mean() - 0.01 * entropy.mean()

    groups = [{"paths": ["critic.**"], "lr": 1e-2}]
    optimizer = fs.torch_optimizer(torch.optim.Adam, lr=3e-3, groups=groups, plan=plan, mesh=mesh)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
    state, carts = step.init(fs.shard(params, plan, mesh), {}), Carts(mesh, seed=1)
    for number in range(steps):
        turns, age = carts.play(model, state.shards)
        for _ in range(UPDATES):
            state, metrics = step(state, turns)
        if mesh.rank == 0 and (number % 5 == 0 or number == steps - 1):
            print(
                f"step {number}: loss {metrics['loss'].item():.4f}, carts are {age.item():.2f} turns old"
            )  # 100: none fails
    return {"loss": metrics["loss"].item(), "age": age.item()}


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
