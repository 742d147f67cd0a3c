"""torchrun --nproc-per-node 2 examples/wgan_gp.py --steps 120

Train a generator against a critic: Gulrajani et al., "Improved training of Wasserstein GANs", 2017,
algorithm 1. The example shows:

- two models, each with its plan, its shards and its optimizer; the step of one takes the shards of
  the other as part of its batch;
- the gradient penalty: a gradient by parameters of a gradient by inputs, under `full_shard`;
- `--penalty first` or `last`: the order of the critic's calls changes nothing here. FSDP2 loses a
  gradient without an error in one of the two orders (`docs/from-fsdp2.md`).
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import nn

import funcshard as fs

NOISE, WIDTH, SAMPLES, CRITIC_STEPS, PENALTY = 4, 64, 128, 3, 0.1


def make_model(inward: int, outward: int, seed: int) -> nn.Module:
    """Return a network; every rank makes the same one."""
    torch.manual_seed(seed)
    layers = [nn.Linear(inward, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, outward)]
    return nn.Sequential(*layers)


def sharded_model(inward: int, outward: int, seed: int, mesh: fs.Mesh) -> tuple[Any, fs.Plan, Any]:
    """Return a network's function, its plan and its shards."""
    apply, params, _ = fs.make_functional(make_model(inward, outward, seed))
    plan = fs.make_plan(params, mesh, units=["0", "2", "4"])
    return fs.fully_shard(apply, plan, mesh), plan, fs.shard(params, plan, mesh)


def batches(mesh: fs.Mesh, seed: int) -> Any:
    """Yield this rank's data, which are a ring of clusters, its noise, and the mix of the two."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        angles = torch.randint(8, (SAMPLES,), generator=generator) * (math.pi / 4)
        real = torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(SAMPLES, 2, generator=generator)
        noise = torch.randn(SAMPLES, NOISE, generator=generator)
        mix = torch.rand(SAMPLES, 1, generator=generator)
        yield tuple(part.chunk(mesh.world_size)[mesh.rank].to(mesh.device) for part in (real, noise, mix))


def train(mesh: fs.Mesh, steps: int, penalty: str = "last") -> dict[str, float]:
    """Train both, and return the critic's last loss and the mean radius of generated points."""
    generator, generator_plan, generator_shards = sharded_model(NOISE, 2, 0, mesh)
    critic, critic_plan, critic_shards = sharded_model(2, 1, 1, mesh)

    def critic_loss(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        (real, noise, mix), generator_shards = batch
        with torch.no_grad():
            fake = generator(generator_shards, {}, noise)
        between = (mix * real + (1 - mix) * fake).requires_grad_()

        def gradient_penalty() -> torch.Tensor:
            (slope,) = torch.autograd.grad(critic(shards, {}, between).sum(), between, create_graph=True)
            return PENALTY * (slope.norm(dim=1) - 1).square().mean()

        def distance() -> torch.Tensor:
            return critic(shards, {}, real).mean() - critic(shards, {}, fake).mean()

        if penalty == "first":
            return gradient_penalty() - distance()
        return -distance() + gradient_penalty()

    def generator_loss(shards: Any, _buffers: Any, batch: Any) -> torch.Tensor:
        (_, noise, _), critic_shards = batch
        return -critic(critic_shards, {}, generator(shards, {}, noise)).mean()

    optimizer = fs.torch_optimizer(torch.optim.Adam, lr=2e-3, betas=(0.5, 0.9))
    critic_step = fs.make_train_step(critic_loss, optimizer, critic_plan, mesh)
    generator_step = fs.make_train_step(generator_loss, optimizer, generator_plan, mesh)
    critic_state = critic_step.init(critic_shards, {})
    generator_state = generator_step.init(generator_shards, {})
    stream, result = batches(mesh, seed=1), {}
    for number in range(steps):
        for _ in range(CRITIC_STEPS):
            critic_state, metrics = critic_step(critic_state, (next(stream), generator_state.shards))
        loss = metrics["loss"].item()
        generator_state, _ = generator_step(generator_state, (next(stream), critic_state.shards))
        if mesh.rank == 0 and (number % 20 == 0 or number == steps - 1):
            print(f"step {number}: loss of the critic {loss:.4f}")
    _, noise, _ = next(stream)
    with torch.no_grad():
        radii = generator(generator_state.shards, {}, noise).norm(dim=1)
    result = {"critic": loss, "radius": fs.pmean(radii.mean(), mesh).item()}
    if mesh.rank == 0:
        print(f"the generator's points are at radius {result['radius']:.3f}, those of the data at 1")
    return result


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--penalty", choices=("first", "last"), default="last")
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps, options.penalty)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
