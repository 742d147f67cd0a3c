"""The calibrate command: its arguments and its output; ``calibrate`` itself is not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from funcshard.demo import calibrate_command
from funcshard.estimate import load_hardware
from tests.demo.test_main import check_refused
from tests.demo.test_plan_command import printed

CALLS: dict[str, tuple[list[str], tuple[str, dict[str, Any]]]] = {
    "defaults": ([], ("this-machine.json", {"ranks": 2, "shared_memory": True})),
    "given": (["here.json", "--ranks", "3", "--gloo"], ("here.json", {"ranks": 3, "shared_memory": False})),
}


@pytest.mark.parametrize(("argv", "expected"), CALLS.values(), ids=CALLS)
def test_it_measures_as_told_and_says_how_to_use_the_file(argv, expected, capsys, monkeypatch) -> None:
    calls = []

    def measure(path: str, **options: Any) -> Any:
        calls.append((path, options))
        return load_hardware("cpu-2x-shm")

    monkeypatch.setattr(calibrate_command, "calibrate", measure)
    out = printed(["calibrate", *argv], capsys)
    assert calls == [expected]
    assert all(words in out for words in ("float32 FLOP/s", "FLOP/s in a training step", "all_gather on 2 ranks"))
    assert out.endswith(f"python -m funcshard plan --ranks {expected[1]['ranks']} --hardware {expected[0]}\n")


def linear() -> nn.Module:
    return nn.Linear(1024, 1024)


def samples(batch: int, seq: int) -> tuple[torch.Tensor]:
    return (torch.empty(batch, seq, 1024),)


def test_a_step_of_ones_own_moves_the_answers(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argv = ["plan", f"{__file__}:linear", "--inputs", f"{__file__}:samples", "--gpus", "1", "--batch", "8", "--seq", "512"]
    before = json.loads(printed([*argv, "--json"], capsys))
    assert before["waiting_seconds"] == 0
    Path("plan.json").write_text(json.dumps(before))
    step, peak = 1.5 * before["step_seconds"], 2 * before["reserved_bytes"]
    fit = ["calibrate", "mine.json", "--plan", "plan.json", "--from-step"]
    out = printed([*fit, str(step), "--peak", str(peak)], capsys)
    assert "computes 1.50 times as long as h100-8x400gbps, and leaves 50% of the memory free." in out
    after = json.loads(printed([*argv, "--json", "--gpu", "mine.json"], capsys))
    assert after["step_seconds"] == pytest.approx(step)
    assert after["budget"] + after["margin"] == (before["budget"] + before["margin"]) // 2
    check_refused([*fit, str(0.01 * step)], "must be a time that h100-8x400gbps can reach", capsys)
    check_refused(["calibrate", "--from-step", "1"], "--from-step and --plan need each other", capsys)
    Path("plan.json").write_text("{}")
    check_refused([*fit, "1"], "must be a file that plan PATH --json wrote; found plan.json", capsys)
