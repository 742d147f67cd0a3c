"""Hessian-vector products of a sharded GPT: attention of any order against torch's MATH backend.

    python -m benchmarks.attention --tokens 1024
    python -m benchmarks.attention --tokens 4096 --layers 2 --ranks 1 --memory

The first takes turns in one process and compares processor time; the second compares the peaks of
two fresh processes, beyond what they held before the product.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import resource
import statistics
import time
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import funcshard as fs
from funcshard.demo.gpt import GPT, GPTConfig

PEERS = ("ours", "math")


def product(peer: str, tokens: int, layers: int, ranks: int) -> tuple[float, float, float]:
    """Return the processor seconds of a product, the bytes at its peak, and its squared norm."""
    torch.manual_seed(0)
    apply, params, buffers = fs.make_functional(GPT(GPTConfig(context=tokens, layers=layers)))
    direction = {name: torch.randn_like(param) for name, param in params.items()}
    text = torch.randint(256, (ranks, tokens + 1))

    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(params, mesh, units=[f"blocks.{i}" for i in range(layers)])
        sharded = fs.fully_shard(apply, plan, mesh)
        mine = text[mesh.rank : mesh.rank + 1]

        def loss(s: Any) -> torch.Tensor:
            return F.cross_entropy(sharded(s, buffers, mine[:, :-1]).flatten(0, 1), mine[0, 1:])

        shards, v = fs.shard(params, plan, mesh), fs.shard(direction, plan, mesh)
        start = time.thread_time()  # simulated ranks are threads
        hv = torch.func.jvp(torch.func.grad(loss), (shards,), (v,))[1]
        return time.thread_time() - start, sum(float(part.square().sum()) for unit in hv.values() for part in unit.values())

    backend = sdpa_kernel(SDPBackend.MATH) if peer == "math" else contextlib.nullcontext()
    held = _peak()
    with backend:
        seconds, norms = zip(*fs.simulate(main, world_size=ranks), strict=True)
    return sum(seconds), _peak() - held, sum(norms)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    """Print both peers' medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = options.tokens, options.layers, options.ranks
    for peer in PEERS:  # once, without counting
        product(peer, 64, 1, options.ranks)
    rows: dict[str, list[tuple[float, float, float]]] = {peer: [] for peer in PEERS}
    if options.memory:
        for peer in PEERS:  # each process holds what this one holds
            with multiprocessing.get_context("fork").Pool(1) as pool:
                rows[peer].append(pool.apply(product, (peer, *work)))
    else:
        for _ in range(options.rounds):
            for peer in PEERS:
                rows[peer].append(product(peer, *work))
    column, unit = (1, 2**20) if options.memory else (0, 1)
    medians = {peer: statistics.median(row[column] / unit for row in rows[peer]) for peer in PEERS}
    for peer in PEERS:
        print(f"{peer}: {medians[peer]:.1f} {'MiB' if options.memory else 's'}, |Hv|^2 = {rows[peer][0][2]:.6g}")
    print(f"ours / math: {medians['ours'] / medians['math']:.2f}")


if __name__ == "__main__":
    main()
