"""The GPU battery goes on after a failure, keeps results, and says what it could not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parts
from benchmarks.gpu_parts import PARTS

pytestmark = pytest.mark.slow


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of parts that run, in place of processes; the part "programs" fails."""
    names: list[str] = []

    def run(name: str, out: Path, dry: bool) -> dict[str, Any]:
        names.append(name)
        result = {"error": "it broke"} if name == "programs" else {"tables": [["T", ["a"], [["1"]]]], "ok": name != "suite"}
        result |= {"dry": dry, "seconds": 1.0}
        (out / f"{name}.json").write_text(json.dumps(result))
        return result

    monkeypatch.setattr(gpu, "_run", run)
    monkeypatch.setattr(gpu, "missing", lambda: "")
    return names


def test_a_failure_stops_no_other_part_and_only_failed_parts_run_again(ran: list[str], tmp_path: Path) -> None:
    can = [name for name, part in PARTS.items() if part.dry]
    assert gpu.main(["--out", str(tmp_path), "--dry"]) == 1
    assert ran == can
    text = (tmp_path / "gpu.md").read_text()
    for words in ("it broke", "a goal is missed, 1 s", "Not run: it needs a GPU.", "| a |"):
        assert words in text
    del ran[:]
    gpu.main(["--out", str(tmp_path), "--dry"])
    assert ran == ["programs"]


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


def test_a_case_runs_with_data_and_a_wrong_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_parts.compare("cpu", "full_shard") == ""
    losses = iter([[float("nan")], [2.0]])
    monkeypatch.setattr(gpu_parts, "_losses", lambda name, device: next(losses))
    assert gpu_parts.compare("cuda", "full_shard") == "a loss is nan; on the CPU it is 2"
