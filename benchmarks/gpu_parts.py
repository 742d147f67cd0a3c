"""The parts of the GPU battery; each is a function that returns tables, on a GPU or dry.

A part gets the folder of the battery and ``dry``, whether there is no GPU. It returns
``{"tables": [...], "ok": whether its goals are met}``. It runs in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import funcshard as fs
from benchmarks import cuda
from benchmarks.dry.device import prepare
from benchmarks.dry.mode import dry_cuda
from benchmarks.dry.running import run_all
from benchmarks.dry.steps import CASES, QUICK, train
from benchmarks.fake_ranks import fake_mesh
from benchmarks.memory_truth import STRATEGIES, Case, make_step, measure
from benchmarks.memory_truth import prepare as prepare_case
from benchmarks.trace import pretended
from funcshard.estimate import Runtime

__all__ = ["PARTS", "Part", "peaks"]

ROOT = Path(__file__).parents[1]
_LIMITS = {"eager": 1.03, "FSDP2": 0.95, "under compute": 0.9, "memory": 0.05}


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the battery.

    Attributes:
        title: a heading for its tables.
        seconds: the time after which it is stopped.
        run: ``run(out, dry)``.
        dry: whether it can run without a GPU.
    """

    title: str
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
    return {"tables": [table], "ok": done.returncode == 0 and "skipped" not in last}


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


def race(out: Path, dry: bool) -> dict[str, Any]:
    """Race a Llama of 1.2 G parameters against plain eager and FSDP2; dry, run it on fake tensors."""
    if dry:
        table = cuda.dry_table()
        return {"tables": [table], "ok": all(row[1] == "none" for row in table["rows"])}
    table = cuda.tables()[0]
    ratios = {row[0]: float(row[2]) for row in table["rows"]}
    ours = ratios[cuda.TITLES["full_shard"]]
    ok = ours <= _LIMITS["eager"] and ours / ratios[cuda.TITLES["fsdp2"]] <= _LIMITS["FSDP2"]
    return {"tables": [table], "ok": ok}


def overlap(out: Path, dry: bool) -> dict[str, Any]:
    """Measure the share of slow gathers that lies under compute kernels, from a trace."""
    table = cuda.overlap_table(out / "overlap.json")
    share = re.search(r"(\d+) %", table["rows"][0][-1])
    return {"tables": [table], "ok": share is not None and int(share[1]) >= 100 * _LIMITS["under compute"]}


def memory(out: Path, dry: bool) -> dict[str, Any]:
    """Compare the peak of a step with the estimate: of the allocator; dry, of fake storages."""
    if dry:
        prepare()
    rows, worst = [], 0.0
    for strategy in STRATEGIES:
        for mixed in (False, True):
            case = Case("gpt", strategy, mixed=mixed, device="cuda")
            measured, estimated = peaks(case, dry=dry)
            error = estimated / measured - 1
            worst = max(worst, abs(error))
            rows.append([case.name, f"{measured:,}", f"{estimated:,}", f"{100 * error:+.1f} %"])
    what = "fake storages" if dry else "allocator, active"
    header = ["step", f"peak bytes, {what}", "estimate", "error"]
    return {"tables": [{"title": "Memory", "header": header, "rows": rows}], "ok": worst <= _LIMITS["memory"]}


def peaks(case: Case, *, dry: bool) -> tuple[int, int]:
    """Return the measured and the estimated peak of a case on CUDA, in bytes."""
    mesh = fake_mesh(STRATEGIES[case.strategy][0], "cuda")
    with dry_cuda() if dry else contextlib.nullcontext():
        measured = measure(case, mesh).peak if dry else _allocated(case, mesh)
    return measured, _estimated(case)


def _allocated(case: Case, mesh: fs.Mesh) -> int:
    """Return the allocator's peak of the second step, without the memory from before."""
    before = torch.cuda.memory_allocated()
    setup = prepare_case(case, mesh)
    step, state = make_step(setup)
    batch = setup.batch
    del setup
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        state, _ = step(state, batch)
    return torch.cuda.max_memory_allocated() - before


def _estimated(case: Case) -> int:
    """Return the estimated peak; profiles are made on the CPU's kernels."""
    setup = prepare_case(Case("gpt", case.strategy, mixed=case.mixed))
    inputs, targets = setup.batch
    given = setup.apply, setup.params, setup.buffers, inputs
    profile = fs.profile(*given, loss=setup.model.loss, targets=targets, precision=setup.plan)
    report = fs.estimate(profile, setup.plan, optimizer="adamw_single", runtime=Runtime(accelerator=True))
    return int(report.peak)


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


PARTS: dict[str, Part] = {
    "suite": Part("(a) Tests on CUDA", 150, suite),
    "ranks": Part("(b) Two ranks", 60, ranks),
    "race": Part("(c) Race", 150, race),
    "overlap": Part("(d) Gathers under compute", 60, overlap, dry=False),
    "memory": Part("(e) Memory", 60, memory),
    "waits": Part("(f) Waits of the host", 60, waits),
}
