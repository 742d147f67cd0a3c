"""On CUDA, as far as a machine without a GPU can tell: devices, waits of the host, order of streams.

One process runs all cases of ``benchmarks.dry`` on fake CUDA tensors. The first test of a session
that asks for the results starts it.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from benchmarks.dry.cases import QUICK
from benchmarks.dry.device import missing, prepare
from benchmarks.dry.faults import FAULTS
from benchmarks.fake_ranks import fake_mesh
from funcshard.estimate import Runtime
from tests.ranks import forking

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "can run dry"), pytest.mark.slow]
PLANTED = [name for name, fault in FAULTS.items() if fault.quick]


def _run(file: Path) -> None:
    prepare()
    from benchmarks.dry.running import run_all

    torch.set_num_threads(1)
    part = file.with_suffix(".part")
    part.write_text(json.dumps({**run_all(list(QUICK), PLANTED), "memory": {"peaks": _peaks()}}))
    part.rename(file)


def _peaks() -> tuple[int, int]:
    """Return the measured and the estimated peak of a step on fake CUDA tensors, in bytes."""
    from benchmarks.dry.mode import dry_cuda
    from benchmarks.memory_truth import Case, measure, prepare

    with dry_cuda():
        peak = measure(Case("gpt", mixed=True, device="cuda"), fake_mesh({"shard": 4}, "cuda")).peak
    setup = prepare(Case("gpt", mixed=True))
    inputs, targets = setup.batch
    model = setup.apply, setup.params, setup.buffers, inputs
    profile = fs.profile(*model, loss=setup.model.loss, targets=targets, precision=setup.plan)
    report = fs.estimate(profile, setup.plan, optimizer="adamw_single", runtime=Runtime(accelerator=True))
    return peak, int(report.peak)


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> dict[str, Any]:
    """Return the results of all cases and faults, which the workers of a session share."""
    own = tmp_path_factory.getbasetemp()
    file = (own if worker_id == "master" else own.parent) / "dry_cuda.json"
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            process = forking().Process(target=_run, args=(file,))
            process.start()
            process.join(240)
            alive = process.is_alive()
            process.kill()
            process.join()
            assert not alive, "the dry run did not end: two threads wait for each other"
            assert file.exists(), "the dry run ended without a result; python -m benchmarks.dry --quick shows why"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.mark.parametrize("case", QUICK)
def test_no_device_is_wrong_no_wait_of_the_host_is_unknown_and_no_accesses_are_unordered(
    results: dict[str, Any], case: str
) -> None:
    assert results[case]["found"] == []
    assert results[case]["accesses"] or case == "composed by hand, simulated", "streams were recorded"


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(results: dict[str, Any], fault: str) -> None:
    found = results[f"fault: {fault}"]["found"]
    assert any(FAULTS[fault].words in each for each in found), found


@pytest.mark.nightly
def test_the_cases_and_faults_that_take_longer_run_as_the_others_do() -> None:
    done = subprocess.run([sys.executable, "-m", "benchmarks.dry"], capture_output=True, text=True)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if not line.startswith("ok"))


def test_a_step_on_cuda_takes_the_estimated_memory(results: dict[str, Any]) -> None:
    measured, estimated = results["memory"]["peaks"]
    assert estimated == pytest.approx(measured, rel=0.004)
