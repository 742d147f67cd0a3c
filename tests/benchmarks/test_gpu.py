"""The GPU battery goes on after a failure, keeps results, and says what it could not run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import gpu, poison, real
from benchmarks.gpu_parts import PARTS


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of parts that run, in place of processes; the part "memory" fails."""
    names: list[str] = []

    def run(name: str, out: Path, dry: bool) -> dict[str, Any]:
        names.append(name)
        table = {"title": "T", "header": ["a"], "rows": [["1"]]}
        result = {"error": "it broke"} if name == "memory" else {"tables": [table], "ok": name != "ranks"}
        gpu._write(out / f"{name}.json", {**result, "dry": dry, "seconds": 1.0})
        found: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
        return found

    monkeypatch.setattr(gpu, "_run", run)
    monkeypatch.setattr(gpu, "missing", lambda: "")
    return names


def test_a_failure_stops_no_other_part_and_only_failed_parts_run_again(ran: list[str], tmp_path: Path) -> None:
    can = [name for name, part in PARTS.items() if part.dry]
    assert gpu.main(["--out", str(tmp_path), "--dry"]) == 1
    assert ran == can
    text = (tmp_path / "gpu.md").read_text()
    for words in ("it broke", "a goal is missed, 1 s", "goals met, 1 s", "Not run: it needs a GPU.", "| a |"):
        assert words in text
    del ran[:]
    gpu.main(["--out", str(tmp_path), "--dry"])
    assert ran == ["memory"]


def test_results_of_a_dry_run_are_not_taken_for_those_of_a_gpu(
    ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.main(["--out", str(tmp_path), "--dry", "--parts", "suite"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    gpu.main(["--out", str(tmp_path), "--parts", "suite"])
    assert ran == ["suite", "suite"]
    assert "a GPU" in (tmp_path / "gpu.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--out", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err == "there is no CUDA device here: pass --dry for the parts that need none\n"
    assert not (tmp_path / "no").exists()


def _first_alone(name: str, out: Path, dry: bool) -> None:
    """Stand in for the work of a part: ``suite`` has a result at once, and the others never end."""
    gpu._lead_group()
    (out / f"{name}.pid").touch()
    time.sleep(60 * (name != "suite"))
    (out / f"{name}.json").write_text(json.dumps({"ok": True, "dry": True, "seconds": 0.0}))


def test_a_part_that_hangs_is_stopped_and_the_next_one_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_work", _first_alone)
    monkeypatch.setitem(gpu.PARTS, "waits", gpu.PARTS["waits"].__class__("T", 0, 0, gpu.PARTS["waits"].run))
    found = gpu._run("waits", tmp_path, True)
    assert found["error"] == "stopped after its time of 0 s"


def test_an_unknown_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.main(["--out", str(tmp_path), "--parts", "speed"])
    assert "there is no part 'speed'; there are suite, programs" in capsys.readouterr().err


def test_all_parts_together_take_at_most_eight_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(part.seconds for part in PARTS.values()) <= 480
    assert all(part.expected < part.seconds for part in PARTS.values())
    assert gpu.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(PARTS)


_BATTERY = """
import sys
from benchmarks import gpu
from tests.benchmarks import test_gpu
gpu.missing, gpu._work = (lambda: ""), test_gpu._first_alone
gpu.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_battery_that_is_killed_goes_on_where_it_was(ran: list[str], tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--dry", "--parts", "suite,memory,reuse"]
    battery = subprocess.Popen([sys.executable, "-c", _BATTERY, *arguments])
    end = time.monotonic() + 90
    while not (tmp_path / "memory.pid").exists() and time.monotonic() < end:
        time.sleep(0.01)
    battery.kill()
    battery.wait()
    assert "goals met, 0 s" in (tmp_path / "gpu.md").read_text(), "the page of the finished part is there"
    gpu.main(arguments)
    assert ran == ["memory", "reuse"]


def test_freed_memory_is_overwritten_before_it_is_used_again() -> None:
    memory = np.ones(1000, dtype=np.float32)
    with poison.Poison("cpu") as mode:
        tensor = torch.from_numpy(memory).detach()
        kept = tensor + 1
        del tensor
    assert mode.freed == 1
    assert np.isnan(memory).all()
    assert kept.eq(2).all(), "memory that lives stays as it is"


def test_steps_have_the_same_bits_while_freed_memory_is_overwritten() -> None:
    table, ok = poison.table("cpu", ways=("full_shard", "offload"))
    assert ok, table


def test_a_case_runs_with_data_and_a_wrong_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert real.row_of("cpu", "one rank") == ""
    losses = iter([[float("nan")], [2.0]])
    monkeypatch.setattr(real, "_losses", lambda name, device: next(losses))
    assert real.row_of("cuda", "one rank") == "a loss is nan; on the CPU it is 2"
