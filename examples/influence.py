"""torchrun --nproc-per-node 2 examples/influence.py --steps 20

Which training documents explain what a language model does? Influence functions, by Koh and Liang,
"Understanding black-box predictions via influence functions", 2017, with the Gauss-Newton matrix of
Grosse et al., "Studying large language model generalization with influence functions", 2023. The
example shows:

- `fs.gnvp`, a product with the Gauss-Newton matrix of a sharded GPT: no rank holds a whole vector;
- `fs.linalg.cg`, which solves with that matrix, and stops at the same step on all ranks;
- with `--solver lissa`, LiSSA (Agarwal et al., 2017), with other documents in each product;
- `torch.func.jvp` of the losses of all documents: one forward gives all of their influences.

The documents are of several kinds, each with its own step from a letter to the next. A document of
the same kind as the query should explain it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs

LETTERS, LENGTH, KINDS, DOCUMENTS, WIDTH, HEADS = 11, 12, 4, 64, 32, 2


class Block(nn.Module):
    """Attention and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        # Under transforms the library replaces torch's kernel, which lacks their derivatives.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A language model from letters to the logits of the next letter."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(LETTERS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.token(letters) + self.position.weight[: letters.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_documents() -> tuple[torch.Tensor, torch.Tensor]:
    """Return documents of letters, and the kind of each; none begins with letter 0."""
    generator = torch.Generator().manual_seed(1)
    kinds = torch.randint(KINDS, (DOCUMENTS, 1), generator=generator)
    starts = torch.randint(1, LETTERS, (DOCUMENTS, 1), generator=generator)
    return (starts + (kinds + 1) * torch.arange(LENGTH)) % LETTERS, kinds[:, 0]


def losses_of(logits: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each document."""
    return F.cross_entropy(logits.transpose(1, 2), documents[:, 1:], reduction="none").mean(1)


def lissa(multiply: Any, b: Any, plan: fs.Plan, mesh: fs.Mesh, repeats: int) -> Any:
    """Return the sum of (1 - A / s)^j b / s, which tends to the solution of A x = b."""
    scale = 1.5 * fs.linalg.power_iteration(multiply, b, plan, mesh, maxiter=10)[0]
    x = b = fs.axpy(1 / scale - 1, b, b)
    for _ in range(repeats):
        x = fs.axpy(-1 / scale, multiply(x), fs.axpy(1.0, b, x))
    return x


def train(mesh: fs.Mesh, steps: int, solver: str = "cg", damping: float = 0.1) -> dict[str, Any]:
    """Train, and return the influence of each training document on the loss of a query."""
    torch.manual_seed(0)  # every rank makes the same model
    apply, params, buffers = fs.make_functional(GPT())
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded = fs.fully_shard(apply, plan, mesh)
    documents, kinds = make_documents()
    own = documents.chunk(mesh.world_size)[mesh.rank].to(mesh.device)

    def outputs(shards: Any, documents: torch.Tensor) -> torch.Tensor:
        return sharded(shards, buffers, documents[:, :-1])

    def loss_fn(shards: Any, _buffers: Any, documents: torch.Tensor) -> torch.Tensor:
        return losses_of(outputs(shards, documents), documents).mean()

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=1e-2), plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    for number in range(steps):
        state, metrics = step(state, own)
        if mesh.rank == 0 and (number % 10 == 0 or number == steps - 1):
            print(f"step {number}: loss {metrics['loss'].item():.3f}")
    shards = state.shards
    query = 2 * torch.arange(LENGTH, device=mesh.device)[None] % LETTERS  # of kind 1, not in documents
    _, gradient = fs.value_and_grad(loss_fn, mesh=mesh)(shards, buffers, query)
    generator = torch.Generator().manual_seed(2)  # in the same state on every rank

    def multiply(v: Any) -> Any:
        """Return (G + damping) v, with the Gauss-Newton matrix G of the training documents."""
        some = own
        if solver == "lissa":
            drawn = documents[torch.randperm(DOCUMENTS, generator=generator)[: DOCUMENTS // 2]]
            some = drawn.chunk(mesh.world_size)[mesh.rank].to(mesh.device)
        loss_of = lambda logits: losses_of(logits, some).mean()  # noqa: E731
        return fs.axpy(damping, v, fs.gnvp(lambda s: outputs(s, some), loss_of, (shards,), (v,), mesh=mesh))

    # What the parameters would become if the query were a training document.
    if solver == "lissa":
        answer = lissa(multiply, gradient, plan, mesh, repeats=5 * steps)
    else:
        answer, _ = fs.linalg.cg(multiply, gradient, plan, mesh, rtol=1e-3, maxiter=200)
    _, influences = torch.func.jvp(lambda shards: losses_of(outputs(shards, own), own), (shards,), (answer,))
    influences = fs.all_gather(influences, mesh, tiled=True)  # each rank has those of its documents
    best = influences.argsort(descending=True)[:10].cpu()
    same = (kinds[best] == 1).sum().item()
    if mesh.rank == 0:
        print(f"query {query[0].tolist()}")
        for index in best[:3].tolist():
            print(f"influence {influences[index].item():.3f} of {documents[index].tolist()}")
        print(f"{same} of the 10 most influential documents are of the query's kind")
    return {"influences": influences, "same": same}


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--solver", choices=["cg", "lissa"], default="cg")
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps, options.solver)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
