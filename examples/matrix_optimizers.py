"""torchrun --nproc-per-node 2 examples/matrix_optimizers.py --steps 60

Optimizers written for one matrix. On shards, `fs.per_matrix` runs them for each matrix on one rank:

- `shampoo`: Gupta et al., "Shampoo: preconditioned stochastic tensor optimization", 2018;
- `soap`: Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024;
- `kron`: Pooladzandi and Li, "Curvature-informed SGD via general purpose Lie-group
  preconditioners", 2024. Its noise depends on the step alone.
"""

import argparse

import torch

import funcshard as fs

PARAMS = {"first": torch.arange(288.0).sin().view(12, 24) / 4, "second": torch.arange(72.0).cos().view(24, 3) / 4}
RATE, BETA1, BETA2, EVERY, FACTOR_RATE = 0.02, 0.9, 0.95, 5, 0.2

Factors = tuple[torch.Tensor, torch.Tensor]


def init_shampoo(matrix: torch.Tensor) -> Factors:
    """Return the preconditioners of rows and columns."""
    rows, columns = matrix.shape
    return 1e-2 * torch.eye(rows).to(matrix), 1e-2 * torch.eye(columns).to(matrix)


def shampoo(gradient: torch.Tensor, state: Factors) -> tuple[torch.Tensor, Factors]:
    """Return the change of a matrix, and its new preconditioners."""
    left, right = state[0] + gradient @ gradient.T, state[1] + gradient.T @ gradient
    return -0.2 * inverse_root(left) @ gradient @ inverse_root(right), (left, right)


def inverse_root(matrix: torch.Tensor) -> torch.Tensor:
    """Return the power -1/4 of a positive definite matrix."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.pow(-0.25) @ vectors.T


def init_soap(matrix: torch.Tensor) -> dict:
    """Return Adam's averages, and Shampoo's preconditioners with their eigenbases."""
    factors = [torch.zeros(side, side).to(matrix) for side in matrix.shape]
    averages = {"mean": torch.zeros_like(matrix), "square": torch.zeros_like(matrix)}
    return {"step": 0, **averages, "factors": factors, "bases": [*factors]}


def soap(gradient: torch.Tensor, state: dict) -> tuple[torch.Tensor, dict]:
    """Return the change of a matrix: Adam's, in the eigenbases of Shampoo's preconditioners."""
    step, (left, right), (rows, columns) = state["step"], state["bases"], state["factors"]
    factors = [rows.lerp(gradient @ gradient.T, 1 - BETA2), columns.lerp(gradient.T @ gradient, 1 - BETA2)]
    if step == 0:  # as in the authors' code, it only finds the eigenbases
        bases = [torch.linalg.eigh(factor).eigenvectors.contiguous() for factor in factors]
        return torch.zeros_like(gradient), {**state, "step": 1, "factors": factors, "bases": bases}
    mean = state["mean"].lerp(gradient, 1 - BETA1)
    square = state["square"].lerp((left.T @ gradient @ right).square(), 1 - BETA2)
    root = (square / (1 - BETA2**step)).sqrt() + 1e-8
    change = -RATE * left @ ((left.T @ mean @ right) / (1 - BETA1**step) / root) @ right.T
    state = {**state, "step": step + 1, "mean": mean, "square": square, "factors": factors}
    if step % EVERY == 0:  # one step of power iteration
        state["bases"] = [torch.linalg.qr(factors[0] @ left).Q, torch.linalg.qr(factors[1] @ right).Q]
    return change, state


def init_kron(matrix: torch.Tensor) -> dict:
    """Return momentum, and the triangular factors of the preconditioner."""
    factors = [torch.eye(side).to(matrix) for side in matrix.shape]
    return {"step": 0, "momentum": torch.zeros_like(matrix), "factors": factors}


def kron(gradient: torch.Tensor, state: dict) -> tuple[torch.Tensor, dict]:
    """Return the change of a matrix, and the new state."""
    step, (left, right) = state["step"] + 1, state["factors"]
    momentum = state["momentum"].lerp(gradient, 1 - BETA1)
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(step)).to(gradient)
    white = left @ momentum @ right.T
    inverse = torch.linalg.solve_triangular(left.T, noise, upper=False)
    inverse = torch.linalg.solve_triangular(right, inverse, upper=True, left=False)
    for_rows, for_columns = [(x @ x.T, y @ y.T) for x, y in ((white, inverse), (white.T, inverse.T))]
    left, right = factors = [  # after one relative step each, which keeps them triangular
        factor - FACTOR_RATE * (p - q).triu() @ factor / torch.linalg.matrix_norm(p + q, 2)
        for factor, (p, q) in ((left, for_rows), (right, for_columns))
    ]
    change = -RATE * left.T @ left @ momentum @ right.T @ right
    return change, {"step": step, "momentum": momentum, "factors": factors}


OPTIMIZERS = {"shampoo": (init_shampoo, shampoo), "soap": (init_soap, soap), "kron": (init_kron, kron)}


def loss_of(params: dict[str, torch.Tensor], rank: int, step: int) -> torch.Tensor:
    """Return the loss on a rank's part of a batch."""
    x = torch.randn(32, 12, generator=torch.Generator().manual_seed(1000 * step + rank))
    return torch.nn.functional.mse_loss(torch.tanh(x @ params["first"]) @ params["second"], x[:, :3].sin())


def train(mesh: fs.Mesh, name: str, steps: int) -> dict[str, torch.Tensor]:
    """Train on shards, and return the whole parameters."""
    plan = fs.make_plan(PARAMS, mesh)
    f = fs.unshard(loss_of, plan.units[""], mesh)
    optimizer = fs.per_matrix(*OPTIMIZERS[name], plan, mesh)
    step = fs.make_train_step(lambda s, _, number: f(s[""], mesh.rank, number), optimizer, plan, mesh)
    state = step.init(fs.shard(PARAMS, plan, mesh), {})
    for number in range(steps):
        state, metrics = step(state, number)
        if mesh.rank == 0 and (number % 20 == 0 or number == steps - 1):
            print(f"step {number}: loss {metrics['loss'].item():.4f}")
    return fs.gather(state.shards, plan, mesh)


def train_whole(ranks: int, name: str, steps: int) -> dict[str, torch.Tensor]:
    """Train without shards on the batches of all ranks, and return the parameters."""
    init, update = OPTIMIZERS[name]
    params, states = {**PARAMS}, {path: init(leaf) for path, leaf in PARAMS.items()}
    for number in range(steps):
        grads = [torch.func.grad(loss_of)(params, rank, number) for rank in range(ranks)]
        for path in params:
            change, states[path] = update(sum(grad[path] for grad in grads) / ranks, states[path])
            params[path] = params[path] + change
    return params


def main() -> None:
    """Train on torchrun's ranks; the parameters have the bits of a run without shards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="shampoo")
    options, mesh = parser.parse_args(), fs.init_mesh(device="cpu")
    whole = train_whole(mesh.world_size, options.optimizer, options.steps)
    torch.testing.assert_close(train(mesh, options.optimizer, options.steps), whole, rtol=0, atol=0)


if __name__ == "__main__":
    main()
