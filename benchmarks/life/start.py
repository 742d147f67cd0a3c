"""Import the library, construct the model of a job, and take the first step.

Each side imports its library inside its functions: a fresh rank loads no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.models import build, by_fsdp2, sample

__all__ = ["CASES"]

# --- import ---------------------------------------------------------------------------------------

_IMPORT = """
import torch, time
start, worked = time.perf_counter(), time.process_time()
{}
print(time.perf_counter() - start, time.process_time() - worked)
"""


def _importing(statement: str, place: Place) -> Turn:
    """Return a turn that imports a library in a new interpreter that has imported torch.

    Both sides have their compiled files, as after an installation: the first turn writes them.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(place.directory)

    def turn() -> None:
        if place.tiny:
            with place.timed():
                exec(statement, {})
        elif place.rank == 0:
            command = [sys.executable, "-c", _IMPORT.format(statement)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            seconds, processor = map(float, done.stdout.split())
            place.record(seconds, processor)

    return turn


def _our_import(place: Place) -> Turn:
    return _importing("import funcshard", place)


def _their_import(place: Place) -> Turn:
    return _importing("from torch.distributed.fsdp import fully_shard", place)


# --- construction ---------------------------------------------------------------------------------


def _units(place: Place) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(10 if place.tiny else 1000)])


def _our_construction(place: Place) -> Turn:
    import funcshard as fs

    mesh = fs.init_mesh(device="cpu")

    def turn() -> int:
        module = _units(place)
        with place.timed():
            apply, params, _ = fs.make_functional(module)
            plan = fs.make_plan(params, mesh, units=["*"])
            fs.fully_shard(apply, plan, mesh)
        return sum(leaf.numel for leaf in plan.leaves)

    return turn


def _their_construction(place: Place) -> Turn:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (place.size,))

    def turn() -> int:
        module = _units(place)
        with place.timed():
            for child in module:
                fully_shard(child, mesh=mesh)
            fully_shard(module, mesh=mesh)
        return sum(p.numel() for p in module.parameters())

    return turn


# --- the first step -------------------------------------------------------------------------------


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _our_step(place: Place) -> Turn:
    import funcshard as fs

    module, batch = build(11, place), sample(11, place)
    mesh = fs.init_mesh(device="cpu")
    apply, params, buffers = fs.make_functional(module)
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded = fs.fully_shard(apply, plan, mesh)
    loss_fn: Any = lambda shards, buffers, batch: _loss(sharded(shards, buffers, batch[0]), batch[1])  # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, fused=True), plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)

    def turn() -> float:
        nonlocal state
        with place.timed():
            state, metrics = step(state, batch)
        return float(metrics["local_loss"])

    return turn


def _their_step(place: Place) -> Turn:
    module, batch = by_fsdp2(build(11, place), place.size), sample(11, place)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)

    def turn() -> float:
        with place.timed():
            loss = _loss(module(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return turn


CASES = (
    Case("import", "import the library, after torch", "FSDP2", 1.0, _our_import, _their_import, ranks=(1,)),
    Case("construct", "construct: 1,000 units on meta", "FSDP2", 0.25, _our_construction, _their_construction),
    Case("first-step", "first step of a process: GPT, 11 M", "FSDP2", 0.5, _our_step, _their_step, fresh=True),
)
