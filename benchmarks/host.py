"""Measure the host time of a unit: forward, backward and reduction of 100 tiny units on one rank.

The units compute next to nothing, one rank has no other rank to communicate with, and no optimizer
runs. The time that remains is the library's own work for each unit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import funcshard as fs
from benchmarks.peers import OURS, sharded_by_fsdp2

__all__ = ["UNITS", "host_runs", "timed"]

UNITS = 100
PEERS = ("none", "ddp", "fsdp2", "fsdp2_kept", *OURS)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(UNITS)])


def _eager(module: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    def run() -> None:
        module.zero_grad(set_to_none=True)
        module(x).sum().backward()

    return run


def _ours(strategy: str, x: torch.Tensor) -> Callable[[], object]:
    apply, params, buffers = fs.make_functional(_net())
    mesh = fs.init_mesh(device="cpu")
    plan = fs.make_plan(params, mesh, units=["*"], strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh)
    shards = fs.shard(params, plan, mesh)
    value_and_grad = fs.value_and_grad(lambda shards: sharded(shards, buffers, x).sum())
    return lambda: value_and_grad(shards)


def host_runs(peers: list[str]) -> dict[str, Callable[[], object]]:
    """Return a function for each peer that runs forward and backward; needs a process group."""
    x = torch.randn(2, 4)
    make: dict[str, Callable[[], Callable[[], object]]] = {
        "none": lambda: _eager(_net(), x),
        "ddp": lambda: _eager(DistributedDataParallel(_net()), x),
        "fsdp2": lambda: _eager(sharded_by_fsdp2(_net(), nn.Linear), x),
        "fsdp2_kept": lambda: _eager(sharded_by_fsdp2(_net(), nn.Linear, reshard=False), x),
        **{strategy: lambda strategy=strategy: _ours(strategy, x) for strategy in OURS},
    }
    return {peer: make[peer]() for peer in PEERS if peer in peers}


def timed(run: Callable[[], object], number: int) -> float:
    """Return the mean seconds of one unit in one step, over ``number`` steps."""
    start = time.perf_counter()
    for _ in range(number):
        run()
    return (time.perf_counter() - start) / number / UNITS
