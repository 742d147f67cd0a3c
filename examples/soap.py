"""torchrun --nproc-per-node 2 examples/soap.py --steps 60

SOAP for one matrix: Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024.
"""

import argparse

import torch

import funcshard as fs

PARAMS = {"first": torch.arange(288.0).sin().view(12, 24) / 4, "second": torch.arange(72.0).cos().view(24, 3) / 4}
RATE, BETA1, BETA2, EVERY = 0.02, 0.9, 0.95, 5


def init(matrix: torch.Tensor) -> dict:
    """Return Adam's averages, and Shampoo's preconditioners with their eigenbases."""
    factors = [torch.zeros(side, side).to(matrix) for side in matrix.shape]
    averages = {"mean": torch.zeros_like(matrix), "square": torch.zeros_like(matrix)}
    return {"step": 0, **averages, "factors": factors, "bases": [*factors]}


def update(gradient: torch.Tensor, state: dict) -> tuple[torch.Tensor, dict]:
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
