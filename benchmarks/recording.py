"""How the time to record and compile a step grows: ``python -m benchmarks.recording``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import nn

import funcshard as fs

__all__ = ["main"]

WIDTH = 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the seconds of the command line's numbers of units."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recording", description=__doc__.split("\n")[0])
    parser.add_argument("--units", type=int, nargs="+", default=[50, 100], help="numbers of units (default %(default)s)")
    parser.add_argument("--backend", default="inductor", help="backend of compile (default %(default)s)")
    options = parser.parse_args(arguments)
    _seconds(2, options.backend)  # imports, and the code of the regions, which all depths share
    for units in options.units:
        recording, compiling = _seconds(units, options.backend)
        print(f"{units} units: trace {recording:.1f} s, compile {compiling:.1f} s of processor time")


def _seconds(units: int, backend: str) -> tuple[float, float]:
    """Return the processor time of ``trace`` and of ``compile``, on one rank."""
    net = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(units)])
    apply, params, buffers = fs.make_functional(net)
    x = torch.ones(4, WIDTH)

    def run(mesh: fs.Mesh) -> tuple[float, float]:
        plan = fs.make_plan(params, mesh, units=["*"])
        sharded = fs.fully_shard(apply, plan, mesh)
        optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
        step = fs.make_train_step(lambda shards, own, x: sharded(shards, own, x).square().mean(), optimizer, plan, mesh)
        state = step.init(fs.shard(params, plan, mesh), buffers)
        begin = time.process_time()
        traced = fs.trace(step, state, x)
        middle = time.process_time()
        traced.compile(backend)
        return middle - begin, time.process_time() - middle

    return fs.simulate(run, 1)[0]


if __name__ == "__main__":
    main()
