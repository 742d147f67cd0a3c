"""torchrun --nproc-per-node 2 examples/hessian_spectrum.py --steps 40

Draw the spectrum of the Hessian of a small Llama while it trains: Ghorbani, Krishnan and Xiao, "An
investigation into neural net optimization via Hessian eigenvalue density", 2019. The example shows:

- `fs.linearize` of `fs.grad`: the Hessian of a sharded model of Hugging Face as a linear function,
  whose forward runs once for all products;
- `fs.linalg.lanczos_quadrature`, which estimates the density of all eigenvalues, and so their mean;
- `fs.linalg.eigsh`, which finds the largest one.

The option `--out spectrum.svg` draws the figure. The Llama has torch's plain attention, which
has derivatives of any order.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import funcshard as fs

CONTEXT = 16


def make_model() -> nn.Module:
    """Return the model; every rank makes the same one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=CONTEXT, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.get_default_dtype())


def make_text(mesh: fs.Mesh, samples: int = 32) -> torch.Tensor:
    """Return this rank's pieces of this file."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    pieces = text[: samples * (CONTEXT + 1)].view(samples, CONTEXT + 1)
    return pieces.chunk(mesh.world_size)[mesh.rank].to(mesh.device)


def density(nodes: torch.Tensor, weights: torch.Tensor, grid: torch.Tensor, width: float) -> torch.Tensor:
    """Return the density on a grid: a narrow normal distribution in place of each node."""
    bumps = torch.exp(-0.5 * ((grid - nodes[..., None]) / width) ** 2) / (width * (2 * torch.pi) ** 0.5)
    return (weights[..., None] * bumps).sum(1).mean(0)


def draw(spectra: dict[int, tuple[torch.Tensor, torch.Tensor]], path: Path) -> None:
    """Draw the densities of several steps."""
    import matplotlib.pyplot as plt

    ends = torch.cat([nodes.flatten() for nodes, _ in spectra.values()])
    grid = torch.linspace(ends.min().item() - 0.5, ends.max().item() + 0.5, 500, dtype=torch.float64)
    figure, axes = plt.subplots(figsize=(7, 4))
    for step, (nodes, weights) in spectra.items():
        axes.semilogy(grid, density(nodes, weights, grid, width=0.01 * (grid[-1] - grid[0]).item()), label=f"step {step}")
    axes.set(xlabel="eigenvalue of the Hessian", ylabel="density", ylim=(1e-5, 10))
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def train(mesh: fs.Mesh, steps: int, out: Path | None = None) -> dict[int, Any]:
    """Train, and return numbers of the spectrum at the first, middle and last step."""
    apply, params, buffers = fs.make_functional(make_model())
    plan = fs.make_plan(params, mesh, units=["model.layers.*"])
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, ids: torch.Tensor) -> torch.Tensor:
        logits = sharded(shards, buffers, input_ids=ids[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=1e-2), plan, mesh)
    state, ids = step.init(fs.shard(params, plan, mesh), buffers), make_text(mesh)
    spectra, results = {}, {}
    for number in range(steps + 1):
        if number in (0, steps // 2, steps):
            shards = state.shards
            gradient = fs.grad(lambda shards: loss_fn(shards, buffers, ids), mesh=mesh)
            _, multiply = fs.linearize(gradient, shards)
            random = torch.Generator().manual_seed(1)  # in the same state on every rank
            start = fs.randn_like(shards, plan, mesh, generator=random)
            (top,), _, _ = fs.linalg.eigsh(multiply, start, plan, mesh, k=1, which="LA", ncv=12, tol=1e-2)
            nodes, weights = fs.linalg.lanczos_quadrature(
                multiply, shards, plan, mesh, generator=random, ncv=16, num_repeats=2
            )
            mean = (weights * nodes).sum(1).mean().item()
            spectra[number], results[number] = (nodes, weights), (top.item(), mean, nodes.min().item())
            if mesh.rank == 0:
                print(f"step {number}: largest eigenvalue {top:.3f}, mean {mean:.2e}, smallest about {nodes.min():.3f}")
        state, metrics = step(state, ids)
    if mesh.rank == 0:
        print(f"loss {metrics['loss'].item():.3f} after {steps + 1} steps")
        if out is not None:
            draw(spectra, out)
    return results


def main() -> None:
    """Read the options, join torchrun's ranks and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, help="file of the figure, such as spectrum.svg")
    options = parser.parse_args()
    train(fs.init_mesh(), options.steps, options.out)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
