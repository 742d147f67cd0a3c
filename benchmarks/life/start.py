"""Import the library, construct the model of a job, take the first step, and the memory of later steps.

Each side imports its library inside its functions: a fresh rank loads no other.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.life.case import Case, Place, Turn
from benchmarks.life.sides import Ours, Theirs, gpt

_IMPORT = """
import torch, time
start, worked = time.perf_counter(), time.process_time()
{}
print(time.perf_counter() - start, time.process_time() - worked)
"""


def _importing(statement: str) -> Callable[[Place], Turn]:
    """Import a library in a new interpreter that has imported torch.

    Both sides have their compiled files, as after an installation: the first turn writes them.
    """

    def make(place: Place) -> Turn:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(place.directory)

        def turn() -> None:
            command = [sys.executable, "-c", _IMPORT.format(statement)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            place.record(*map(float, done.stdout.split()))

        return place.turn(lambda: exec(statement, {})) if place.tiny else turn

    return make


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


def _our_step(place: Place) -> Turn:
    ours, batch = Ours(gpt(place)), gpt(place).batches(place.rank)[0]
    ours.prepare()
    return place.turn(lambda: ours.train(batch), float)


def _their_step(place: Place) -> Turn:
    theirs, batch = Theirs(gpt(place)), gpt(place).batches(place.rank)[0]
    return place.turn(lambda: theirs.train(batch), float)


def _steady(place: Place, make: Callable[[], Callable[[], Any]]) -> Turn:
    """Return a turn that makes a step, and measures the peak of a few steps after the first ones.

    After these all memory that outlives a step is there. It is what the process has from the system
    while the C library returns freed memory at once, with shared memory counted once for all ranks.
    """

    def run() -> Any:
        step = make()
        for _ in range(3):
            step()
        place.forget_peak()
        return [step() for _ in range(4)][-1]

    return place.turn(run, float)


def _our_peak(strategy: str) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        batch = gpt(place).batches(place.rank)[0]

        def make_step() -> Callable[[], Any]:
            ours = Ours(gpt(place), strategy)
            ours.prepare(max_norm=1.0)
            return lambda: ours.train(batch)

        return _steady(place, make_step)

    return make


def _their_peak(reshard: bool) -> Callable[[Place], Turn]:
    def make(place: Place) -> Turn:
        import benchmarks.peers  # noqa: F401  # whose memory does not count

        batch = gpt(place).batches(place.rank)[0]

        def make_step() -> Callable[[], Any]:
            theirs = Theirs(gpt(place), reshard=reshard)
            return lambda: theirs.train(batch, max_norm=1.0)

        return _steady(place, make_step)

    return make


_PEAK = "peak memory of a step, {}: GPT, 11 M"
CASES = (
    Case(
        "import", "import the library, after torch", "FSDP2", 1.0,
        _importing("import funcshard"), _importing("from torch.distributed.fsdp import fully_shard"), ranks=(1,),
    ),
    Case("construct", "construct: 1,000 units on meta", "FSDP2", 0.25, _our_construction, _their_construction),
    Case("first-step", "first step of a process: GPT, 11 M", "FSDP2", 0.5, _our_step, _their_step, fresh=True),
    Case(
        "peak-full-shard", _PEAK.format("full_shard"), "FSDP2", 0.97,
        _our_peak("full_shard"), _their_peak(True), measure="bytes",
    ),
    Case(
        "peak-shard-grad-op", _PEAK.format("shard_grad_op"), "FSDP2, not resharded", 0.85,
        _our_peak("shard_grad_op"), _their_peak(False), measure="bytes",
    ),
)  # fmt: skip
