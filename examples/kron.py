"""torchrun --nproc-per-node 2 examples/kron.py --steps 60

PSGD Kron for one matrix: Pooladzandi and Li, "Curvature-informed SGD via general purpose Lie-group
preconditioners", 2024. Its noise depends on the step alone.
"""

import argparse

import torch

import funcshard as fs

PARAMS = {"first": torch.arange(288.0).sin().view(12, 24) / 4, "second": torch.arange(72.0).cos().view(24, 3) / 4}
RATE, RATE_OF_FACTORS, BETA = 0.02, 0.2, 0.9


def init(matrix: torch.Tensor) -> dict:
    """Return momentum, and the triangular factors of the preconditioner."""
    factors = [torch.eye(side).to(matrix) for side in matrix.shape]
    return {"step": 0, "momentum": torch.zeros_like(matrix), "factors": factors}


def update(gradient: torch.Tensor, state: dict) -> tuple[torch.Tensor, dict]:
    """Return the change of a matrix, and the new state."""
    step, (left, right) = state["step"] + 1, state["factors"]
    momentum = state["momentum"].lerp(gradient, 1 - BETA)
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(step)).to(gradient)
    white = left @ momentum @ right.T
    inverse = torch.linalg.solve_triangular(left.T, noise, upper=False)
    inverse = torch.linalg.solve_triangular(right, inverse, upper=True, left=False)
    for_rows, for_columns = [(x @ x.T, y @ y.T) for x, y in ((white, inverse), (white.T, inverse.T))]
    left, right = factors = [  # after one relative step each, which keeps them triangular
        factor - RATE_OF_FACTORS * (p - q).triu() @ factor / torch.linalg.matrix_norm(p + q, 2)
        for factor, (p, q) in ((left, for_rows), (right, for_columns))
    ]
    change = -RATE * left.T @ left @ momentum @ right.T @ right
    return change, {"step": step, "momentum": momentum, "factors": factors}


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
