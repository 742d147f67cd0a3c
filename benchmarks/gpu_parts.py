"""The parts of the GPU battery, on a GPU or dry.

A part is a function of the folder of the battery and ``dry``, whether there is no GPU. It returns
tables, and whether its goals are met. It runs in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import funcshard as fs
from benchmarks import cuda, measured
from benchmarks.dry.cases import CASES
from benchmarks.dry.device import prepare
from benchmarks.dry.running import run_all
from benchmarks.results import Table

ROOT = Path(__file__).parents[1]
HIDDEN, MEMORY = 0.9, 0.02  # the least share of hidden gathers, and the largest error of memory
Result = tuple[list[Table], bool]


class Part(NamedTuple):
    """A part of the battery.

    Attributes:
        expected: seconds that it is expected to take on an H100.
        seconds: the time after which it is stopped.
        dry: whether it can run without a GPU.
    """

    title: str
    expected: int
    seconds: int
    run: Callable[[Path, bool], Result]
    dry: bool = True


def suite(out: Path, dry: bool) -> Result:
    """Run the tests of CUDA; dry, all cases on fake tensors."""
    if dry:
        prepare()
        found = run_all(list(CASES), [])
        (out / "dry_cases.json").write_text(json.dumps(found, indent=1))
        rows = [["cases", str(len(found))], ["accesses checked", str(sum(case["accesses"] for case in found.values()))]]
        wrong = {name: "; ".join(case["found"]) for name, case in found.items()}
        return _checked("Devices, waits and streams", rows, wrong)
    files = ["tests/promises/test_cuda.py", "tests/promises/test_memory_reuse.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (out / "suite.log").write_text(done.stdout + done.stderr)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    return [Table(" and ".join(files), ["result"], [[last]])], done.returncode == 0 and "passed" in last


def programs(out: Path, dry: bool) -> Result:
    """Run the programs of the dry cases with data, and compare their losses with the CPU's; dry, a few on the CPU."""
    names = ["full_shard", "checkpoint", "graph"] if dry else list(CASES)
    end = time.monotonic() + PARTS["programs"].seconds - 10
    found = {}
    for name in names:
        in_time = time.monotonic() < end
        found[name] = compare("cpu" if dry else "cuda", name) if in_time else "not run: the time was over"
    (out / "programs.json").write_text(json.dumps(found, indent=1))
    return _checked("Programs with data", [["programs", str(len(found))]], found)


def compare(device: str, name: str) -> str:
    """Run a dry case with data on a device and on the CPU; return what is wrong, in words."""
    losses = {}
    for kind in (device, "cpu"):
        try:
            losses[kind] = _losses(name, kind)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            first = str(error).partition("\n")[0][:300]
            return f"on {kind}: {type(error).__name__}: {first} ({place.filename}:{place.lineno})"
    if "dropout" in name:  # each device has random numbers of its own
        return ""
    # muon multiplies in bfloat16
    limit = 3e-2 if any(word in name for word in ("float16", "autocast", "muon")) else 1e-3
    for found, expected in zip(losses[device], losses["cpu"], strict=True):
        if not abs(found - expected) <= limit * abs(expected):  # also if one is NaN
            return f"a loss is {found:.6g}; on the CPU it is {expected:.6g}"
    return ""


def _losses(name: str, device: str) -> list[float]:
    """Return the losses of all ranks, which are simulated, if the case trains."""
    case = CASES[name]

    def main(mesh: fs.Mesh) -> list[float]:
        result: Any = case.run(mesh)
        return [float(loss) for loss in result[0].losses] if isinstance(result, tuple) else []

    matmul = torch.backends.cuda.matmul
    usual, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        return [loss for losses in fs.simulate(main, dict(case.shape), device=device) for loss in losses]
    finally:
        matmul.allow_tf32 = usual


def _checked(title: str, rows: list[list[str]], wrong: Mapping[str, str]) -> Result:
    """Return a table that names what is wrong, by case."""
    faults = [["wrong", f"{name}: {words}"] for name, words in wrong.items() if words]
    return [Table(title, ["what", "found"], [*rows, *(faults or [["wrong", "none"]])])], not faults


def race(name: str, goals: Mapping[str, float], out: Path, dry: bool) -> Result:
    """Run a race of ``benchmarks.cuda``; a goal is the largest ratio of our time to a peer's."""
    table = cuda.race_table(name)
    times = {row[0]: float(row[1]) for row in table.rows}
    ours = times[cuda.TITLES["full_shard"]]
    ratios = {peer: ours / times[cuda.TITLES[peer]] for peer in goals}
    rows = [[cuda.TITLES[peer], f"{ratios[peer]:.2f}", f"{goal:.2f}"] for peer, goal in goals.items()]
    reached = all(ratios[peer] <= goal for peer, goal in goals.items())
    return [table, Table("full_shard ÷", ["peer", "ratio", "goal"], rows)], reached


def overlap(out: Path, dry: bool) -> Result:
    """Measure the share of slow gathers that holds no kernel up, from a trace."""
    table, hidden = cuda.overlap_table(out / "trace.json")
    return [table], hidden >= HIDDEN


def memory(out: Path, dry: bool) -> Result:
    """Compare the peak of steps of Hugging Face models with the estimate."""
    steps = [measured.measure_step(step) for step in measured.read_steps()]
    measured.write_steps(steps, out / "measured.json")
    table, worst = measured.steps_table(steps)
    return [table], worst <= MEMORY


def _race(title: str, name: str, goals: Mapping[str, float], expected: int = 15, seconds: int = 25) -> Part:
    return Part(f"(b) {title}", expected, seconds, partial(race, name, goals), dry=False)


# Why these seconds: together they are less than the eight minutes of the whole.
PARTS: dict[str, Part] = {
    "suite": Part("(a) Tests on CUDA", 25, 50, suite),
    "programs": Part("(a) Programs on CUDA, with the losses of the CPU", 45, 60, programs),
    "race": _race("Race in bfloat16", "bfloat16", {"none": 1.03, "fsdp2": 0.95}),
    "race_large": _race("Race with a large batch", "large", {"none": 1.03, "fsdp2": 1.0}),
    "race_float32": _race("Race in float32", "float32", {"none": 1.03, "fsdp2": 0.95}),
    "race_remat": _race("Race with layers computed again", "remat", {"none": 1.03, "fsdp2": 0.95}),
    "race_offload": _race("Race with offload", "offload", {"fsdp2": 0.95}, 20, 30),
    "race_compiled": _race("Race, compiled", "compiled", {"fsdp2": 1.0}, 45, 70),
    "overlap": Part("(c) Gathers under compute", 15, 25, overlap, dry=False),
    "memory": Part("(d) Memory", 50, 70, memory, dry=False),
}
