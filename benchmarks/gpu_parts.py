"""The parts of the GPU battery; each is a function that returns tables, on a GPU or dry.

A part gets the folder of the battery and ``dry``, whether there is no GPU. It returns
``{"tables": [...], "ok": whether its goals are met}``. It runs in a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import funcshard as fs
from benchmarks import cuda, measured, poison
from benchmarks.dry.cases import CASES, QUICK
from benchmarks.dry.device import prepare
from benchmarks.dry.mode import dry_cuda
from benchmarks.dry.running import run_all
from benchmarks.dry.steps import train
from benchmarks.fake_ranks import fake_mesh
from benchmarks.memory_truth import STRATEGIES, Case, make_step, measure
from benchmarks.memory_truth import prepare as prepare_case
from benchmarks.real import run_cases
from benchmarks.trace import pretended
from funcshard.estimate import Runtime

__all__ = ["PARTS", "Part", "peaks"]

ROOT = Path(__file__).parents[1]
_LIMITS = {"hidden": 0.9, "memory": 0.02}
# A Llama for dry races: their operations are those of the large one, layer by layer.
SMALL = {**cuda.SIZES, "num_hidden_layers": 4, "vocab_size": 4096}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the battery.

    Attributes:
        title: a heading for its tables.
        expected: seconds that it is expected to take on an H100.
        seconds: the time after which it is stopped.
        run: ``run(out, dry)``.
        dry: whether it can run without a GPU.
    """

    title: str
    expected: int
    seconds: int
    run: Callable[[Path, bool], dict[str, Any]]
    dry: bool = True


def suite(out: Path, dry: bool) -> dict[str, Any]:
    """Run the tests of CUDA; dry, all cases on fake tensors."""
    if dry:
        prepare()
        found = run_all(list(CASES), [])
        (out / "dry_cases.json").write_text(json.dumps(found, indent=1))
        bad = {name: each["found"] for name, each in found.items() if each["found"]}
        rows = [["cases", str(len(found))], ["accesses checked", str(sum(each["accesses"] for each in found.values()))]]
        rows += [["wrong", f"{name}: {each}"] for name, every in bad.items() for each in every] or [["wrong", "none"]]
        return {
            "tables": [{"title": "Devices, waits and streams", "header": ["what", "found"], "rows": rows}],
            "ok": not bad,
        }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/promises/test_cuda.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (out / "suite.log").write_text(done.stdout + done.stderr)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    table = {"title": "tests/promises/test_cuda.py", "header": ["result"], "rows": [[last]]}
    return {"tables": [table], "ok": done.returncode == 0 and "passed" in last}


def ranks(out: Path, dry: bool) -> dict[str, Any]:
    """Train on two processes, and compare with one; dry over gloo, else over NCCL on one device."""
    kind = "cpu" if dry else "cuda"
    with tempfile.TemporaryDirectory(prefix="gpu-") as directory:
        try:
            mp.spawn(_one_of_two, (directory, kind), nprocs=2)
            found = [json.loads((Path(directory) / f"losses.{rank}").read_text()) for rank in range(2)]
        except Exception as error:
            if dry:
                raise
            # Two ranks on one device: NCCL refuses them in most versions.
            with pretended("cuda", 0.0) as mesh:
                train(mesh, steps=3)
            first = str(error).strip().splitlines()[-1][:200]
            rows = [["two NCCL ranks on one device", first], ["one rank of two, on real streams", "three steps ran"]]
            return {"tables": [{"title": "Ranks", "header": ["what", "found"], "rows": rows}], "ok": True}
    alone = _losses(fs.Mesh(device=torch.device(kind)))
    worst = max(abs(a - b) / abs(b) for losses in found for a, b in zip(losses, alone, strict=True))
    way = "gloo" if dry else "NCCL"
    rows = [[f"two ranks over {way}, largest relative difference to one", f"{worst:.1e}"]]
    return {"tables": [{"title": "Ranks", "header": ["what", "found"], "rows": rows}], "ok": worst < 1e-4}


def _one_of_two(rank: int, directory: str, kind: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(directory) / "store"), 2)
    dist.init_process_group("gloo" if kind == "cpu" else "nccl", store=store, rank=rank, world_size=2)
    if kind == "cuda":
        torch.cuda.set_device(0)
    losses = _losses(fs.init_mesh(device=kind))
    (Path(directory) / f"losses.{rank}").write_text(json.dumps(losses))
    dist.destroy_process_group()


def _losses(mesh: fs.Mesh) -> list[float]:
    """Train a small model for three steps on one batch, and return the losses."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["0", "2"])
    sharded = fs.fully_shard(apply, plan, mesh)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-2)
    loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).to(mesh.device)
    losses = []
    for _ in range(3):
        state, metrics = step(state, x)
        losses.append(float(metrics["loss"]))
    return losses


def programs(out: Path, dry: bool) -> dict[str, Any]:
    """Run the programs of the dry cases with data, and compare their losses with the CPU's; dry, a few on the CPU."""
    names = ["one rank", "full_shard", "checkpoint", "graph"] if dry else list(CASES)
    found = dict(run_cases("cpu" if dry else "cuda", names, PARTS["programs"].seconds - 10))
    (out / "programs.json").write_text(json.dumps(found, indent=1))
    bad = {name: words for name, words in found.items() if words}
    rows = [
        ["programs", str(len(found))],
        *([["wrong", f"{name}: {words}"] for name, words in bad.items()] or [["wrong", "none"]]),
    ]
    return {"tables": [{"title": "Programs with data", "header": ["what", "found"], "rows": rows}], "ok": not bad}


def race(name: str, goals: Mapping[str, float], out: Path, dry: bool) -> dict[str, Any]:
    """Race a Llama of 1.2 G parameters against plain torch and FSDP2; dry, run it on fake tensors.

    Arguments:
        name: a race of ``benchmarks.cuda``.
        goals: by peer, the largest ratio of our time to that peer's.
        out, dry: see ``Part``.
    """
    if dry:
        table = cuda.dry_table(name, SMALL)
        return {"tables": [table], "ok": all(row[1] == "none" for row in table["rows"])}
    if cuda.missing():
        raise RuntimeError(f"the race needs more: {cuda.missing()}")
    table = cuda.race_table(name)
    times = {row[0]: float(row[1]) for row in table["rows"]}
    ours = times[cuda.TITLES["full_shard"]]
    reached = {peer: ours / times[cuda.TITLES[peer]] for peer in goals}
    rows = [[cuda.TITLES[peer], f"{reached[peer]:.2f}", f"{goals[peer]:.2f}"] for peer in goals]
    compared = {"title": "full_shard ÷", "header": ["peer", "ratio", "goal"], "rows": rows}
    return {"tables": [table, compared], "ok": all(reached[peer] <= goals[peer] for peer in goals)}


def reuse(out: Path, dry: bool) -> dict[str, Any]:
    """Overwrite the memory of freed tensors, and compare the bits of steps; dry, on the CPU."""
    table, ok = poison.table("cpu" if dry else "cuda")
    return {"tables": [table], "ok": ok}


def overlap(out: Path, dry: bool) -> dict[str, Any]:
    """Measure the share of slow gathers that holds no kernel up, from a trace."""
    table = cuda.overlap_table(out / "trace.json")
    share = re.search(r"(\d+) %", table["rows"][0][-1])
    return {"tables": [table], "ok": share is not None and int(share[1]) >= 100 * _LIMITS["hidden"]}


def memory(out: Path, dry: bool) -> dict[str, Any]:
    """Compare the peak of steps with the estimate: of Hugging Face models; dry, of a small one on fake storages."""
    if not dry:
        steps = [measured.measure_step(step) for step in measured.read_steps()]
        measured.write_steps(steps, out / "measured.json")
        table, worst = measured.steps_table(steps)
        return {"tables": [table], "ok": worst <= _LIMITS["memory"]}
    prepare()
    rows, worst = [], 0.0
    for strategy in STRATEGIES:
        for mixed in (False, True):
            case = Case("gpt", strategy, mixed=mixed, device="cuda")
            peak, estimated = peaks(case)
            error = estimated / peak - 1
            worst = max(worst, abs(error))
            rows.append([case.name, f"{peak:,}", f"{estimated:,}", f"{100 * error:+.1f} %"])
    header = ["step", "peak bytes, fake storages", "estimate", "error"]
    return {"tables": [{"title": "Memory", "header": header, "rows": rows}], "ok": worst <= _LIMITS["memory"]}


def peaks(case: Case) -> tuple[int, int]:
    """Return the measured and the estimated peak of a case on fake CUDA tensors, in bytes."""
    mesh = fake_mesh(STRATEGIES[case.strategy][0], "cuda")
    with dry_cuda():
        peak = measure(case, mesh).peak
    setup = prepare_case(Case("gpt", case.strategy, mixed=case.mixed))
    inputs, targets = setup.batch
    model = setup.apply, setup.params, setup.buffers, inputs
    profile = fs.profile(*model, loss=setup.model.loss, targets=targets, precision=setup.plan)
    report = fs.estimate(profile, setup.plan, optimizer="adamw_single", runtime=Runtime(accelerator=True))
    return peak, int(report.peak)


def waits(out: Path, dry: bool) -> dict[str, Any]:
    """List the waits of the host in steps; on a GPU, torch's own check looks for them."""
    rows, ok = [], True
    if dry:
        prepare()
        cases: dict[tuple[str, str], list[str]] = {}
        for name, each in run_all(list(QUICK), []).items():
            for found in [found for found in each["found"] if "host waits" in found]:
                ok = False
                cases.setdefault((found, "not allowed"), []).append(name)
            for found in each["waits"]:
                wait, _, why = found.partition(": ")
                cases.setdefault((wait, why), []).append(name)
        rows = [[*key, names[0] if len(names) == 1 else f"{len(names)} of them"] for key, names in cases.items()]
        return {"tables": [{"title": "Waits of the host", "header": ["wait", "why", "cases"], "rows": rows}], "ok": ok}
    for strategy in STRATEGIES:
        case = Case("gpt", strategy, device="cuda", optimizer=("AdamW", {"fused": True}))
        setup = prepare_case(case, fake_mesh(STRATEGIES[strategy][0], "cuda"))
        step, state = make_step(setup)
        for _ in range(2):
            state, _ = step(state, setup.batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(state, setup.batch)
            rows.append([strategy, "", "none"])
        except RuntimeError as error:
            ok = False
            rows.append([strategy, "not allowed", str(error)[:200]])
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"tables": [{"title": "Waits of the host", "header": ["case", "", "wait"], "rows": rows}], "ok": ok}


# Why these seconds: together they are less than the eight minutes of the whole.
PARTS: dict[str, Part] = {
    "suite": Part("(a) Tests on CUDA", 15, 30, suite),
    "programs": Part("(a) Programs on CUDA, with the losses of the CPU", 45, 60, programs),
    "ranks": Part("(b) Two ranks", 20, 40, ranks),
    "race": Part("(c) Race in bfloat16", 15, 25, partial(race, "bfloat16", {"none": 1.03, "fsdp2": 0.95})),
    "race_large": Part("(c) Race with a large batch", 15, 25, partial(race, "large", {"none": 1.03, "fsdp2": 1.0})),
    "race_float32": Part("(c) Race in float32", 15, 25, partial(race, "float32", {"none": 1.03, "fsdp2": 0.95})),
    "race_remat": Part("(c) Race with layers computed again", 15, 25, partial(race, "remat", {"none": 1.03, "fsdp2": 0.95})),
    "race_offload": Part("(c) Race with offload", 20, 30, partial(race, "offload", {"fsdp2": 0.95})),
    "race_compiled": Part("(c) Race, compiled", 45, 70, partial(race, "compiled", {"fsdp2": 1.0})),
    "overlap": Part("(d) Gathers under compute", 15, 25, overlap, dry=False),
    "memory": Part("(e) Memory", 50, 70, memory),
    "waits": Part("(f) Waits of the host", 10, 20, waits),
    "reuse": Part("(g) Memory reuse across streams", 10, 20, reuse),
}
