"""torchrun --nproc-per-node 2 examples/shampoo.py --steps 60

Shampoo (Gupta et al., "Shampoo: preconditioned stochastic tensor optimization", 2018, algorithm 1),
written for one matrix. On shards, `fs.per_matrix` runs it for each matrix on one rank.
"""

import argparse

import torch

import funcshard as fs

PARAMS = {"first": torch.arange(288.0).sin().view(12, 24) / 4, "second": torch.arange(72.0).cos().view(24, 3) / 4}

Factors = tuple[torch.Tensor, torch.Tensor]


def init(matrix: torch.Tensor) -> Factors:
    """Return the preconditioners of rows and columns."""
    rows, columns = matrix.shape
    return 1e-2 * torch.eye(rows).to(matrix), 1e-2 * torch.eye(columns).to(matrix)


def update(gradient: torch.Tensor, state: Factors) -> tuple[torch.Tensor, Factors]:
    """Return the change of a matrix, and its new preconditioners."""
    left, right = state[0] + gradient @ gradient.T, state[1] + gradient.T @ gradient
    return -0.2 * inverse_root(left) @ gradient @ inverse_root(right), (left, right)


def inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    """Return the power -1/4 of a positive definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.pow(-0.25) @ vectors.T


def loss_of(params: dict[str, torch.Tensor], rank: int, step: int) -> torch.Tensor:
    """Return the loss on a rank's part of a batch."""
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(1000 * step + rank))
    return torch.nn.functional.mse_loss(torch.tanh(x @ params["first"]) @ params["second"], x[:, :3].sin())


def train(mesh: fs.Mesh, steps: int) -> dict[str, torch.Tensor]:
    """Train on shards, and return the whole parameters."""
    plan = fs.make_plan(PARAMS, mesh)
    f = fs.unshard(loss_of, plan.units[""], mesh)
    optimizer = fs.per_matrix(init, update, plan, mesh)
    step = fs.make_train_step(lambda s, _, number: f(s[""], mesh.rank, number), optimizer, plan, mesh)
    state = step.init(fs.shard(PARAMS, plan, mesh), {})
    for number in range(steps):
        state, metrics = step(state, number)
        if mesh.rank == 0 and (number % 20 == 0 or number == steps - 1):
            print(f"step {number}: loss {metrics['loss'].item():.4f}")
    return fs.gather(state.shards, plan, mesh)


def train_whole(ranks: int, steps: int) -> dict[str, torch.Tensor]:
    """Train without shards on the batches of all ranks, and return the parameters."""
    params, states = {**PARAMS}, {name: init(leaf) for name, leaf in PARAMS.items()}
    for number in range(steps):
        grads = [torch.func.grad(loss_of)(params, rank, number) for rank in range(ranks)]
        for name in params:
            change, states[name] = update(sum(grad[name] for grad in grads) / ranks, states[name])
            params[name] = params[name] + change
    return params


def main() -> None:
    """Train on torchrun's ranks; the parameters have the bits of a run without shards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps, mesh = parser.parse_args().steps, fs.init_mesh(device="cpu")
    torch.testing.assert_close(train(mesh, steps), train_whole(mesh.world_size, steps), rtol=0, atol=0)


if __name__ == "__main__":
    main()
