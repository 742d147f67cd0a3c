"""torchrun --nproc-per-node 2 examples/moe.py --steps 60

Train a mixture of experts whose experts live on different ranks. The mesh has the axes shard ×
expert, and each rank has samples of its own along both. The example shows:

- leaves that differ along a model axis: `make_plan(local=...)` names the experts' weights, which
  are never gathered along `expert`. All other leaves are sharded over `shard` and equal along
  `expert`, and the library adds up their gradients;
- `fs.all_to_all`, which sends tokens to their experts and back, and sends gradients the other way;
- `has_aux`: the share of tokens that found a place, as a metric.

Run it with four processes and `--experts-over 2` for two ranks along each axis.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.nn.functional as F

import funcshard as fs

WIDTH, HIDDEN, EXPERTS, GROUP = 32, 64, 8, 64  # tokens are routed in groups of GROUP
PLACES = 2 * GROUP // EXPERTS  # of each group at each expert: twice an even share


def make_params() -> dict[str, torch.Tensor]:
    """Return the whole parameters; every rank makes the same ones."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    return {
        "inward": draw(WIDTH, 8),
        "router": draw(EXPERTS, WIDTH),
        "up": draw(EXPERTS, HIDDEN, WIDTH),
        "down": draw(EXPERTS, WIDTH, HIDDEN),
        "outward": draw(1, WIDTH),
    }


def mixture(leaves: dict[str, torch.Tensor], x: torch.Tensor, mesh: fs.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of the experts and the share of tokens that found a place.

    ``x`` has the shape [group, token, width]. ``place`` is one-hot: it says which place at which
    expert a token has. A token without a place is skipped.
    """
    weight, choice = F.linear(x, leaves["router"]).softmax(-1).max(-1)
    chosen = F.one_hot(choice, EXPERTS)
    queue = ((chosen.cumsum(1) * chosen).sum(-1) - 1).clamp(max=PLACES)
    place = (chosen[..., None] * F.one_hot(queue, PLACES + 1)[..., None, :PLACES]).to(x)

    messages = torch.einsum("gtep,gtw->egpw", place, x)  # all experts, this rank's groups
    arrived = fs.all_to_all(messages, mesh, axis="expert", split_dim=0, concat_dim=1, tiled=True)
    hidden = F.gelu(torch.einsum("egpw,ehw->egph", arrived, leaves["up"]))  # this rank's experts, all groups
    results = torch.einsum("egph,ewh->egpw", hidden, leaves["down"])
    back = fs.all_to_all(results, mesh, axis="expert", split_dim=1, concat_dim=0, tiled=True)
    return weight[..., None] * torch.einsum("gtep,egpw->gtw", place, back), place.sum() / choice.numel()


def model(leaves: dict[str, torch.Tensor], x: torch.Tensor, mesh: fs.Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    """Return predictions for inputs of the shape [group, token, 8]."""
    x = torch.tanh(x @ leaves["inward"].T)
    out, placed = mixture(leaves, x, mesh)
    return ((x + out) @ leaves["outward"].T).squeeze(-1), placed


def batches(mesh: fs.Mesh, steps: int, groups: int = 8) -> Any:
    """Yield this rank's samples: a function that is another one in each half-space."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(groups, GROUP, 8, generator=generator)
        y = torch.where(x[..., 0] > 0, x[..., 1] * x[..., 2], x[..., 3].square() - 1)
        both = (x.chunk(mesh.world_size)[mesh.rank], y.chunk(mesh.world_size)[mesh.rank])
        yield tuple(part.to(mesh.device) for part in both)


def train(mesh: fs.Mesh, steps: int) -> list[float]:
    """Train, and return the loss of each step."""
    local = {"up": {"expert": 0}, "down": {"expert": 0}}  # the expert axis cuts dim 0 of both
    index, ranks = fs.axis_index(mesh, axis="expert"), mesh.shape["expert"]
    params = {name: leaf.chunk(ranks)[index] if name in local else leaf for name, leaf in make_params().items()}
    plan = fs.make_plan(params, mesh, local=local)
    run = fs.unshard(model, plan.units[""], mesh)  # gathers the one unit around the model

    def loss_fn(shards: Any, _buffers: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = batch
        predicted, placed = run(shards[""], x, mesh)
        return F.mse_loss(predicted, y), placed

    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-2)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, has_aux=True, max_norm=1.0)
    state, losses = step.init(fs.shard(params, plan, mesh), {}), []
    if mesh.rank == 0:
        print(plan)
    for number, batch in enumerate(batches(mesh, steps)):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
        # An aux is this rank's own. Every rank takes part in the mean.
        placed = fs.pmean(metrics["aux"], mesh, axis=("shard", "expert")).item()
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            print(f"step {number}: loss {losses[-1]:.3f}, {placed:.0%} of the tokens found a place")
    return losses


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--experts-over", type=int, default=2, metavar="RANKS", help="size of the expert axis")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    train(fs.init_mesh({"shard": ranks // options.experts_over, "expert": options.experts_over}), options.steps)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
