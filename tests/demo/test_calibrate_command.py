"""The calibrate command: its arguments and its output; ``calibrate`` itself is not run."""

from __future__ import annotations

from typing import Any

import pytest

from funcshard.__main__ import main
from funcshard.demo import calibrate_command
from funcshard.estimate import load_hardware

CALLS: dict[str, tuple[list[str], tuple[str, dict[str, Any]]]] = {
    "defaults": ([], ("this-machine.json", {"ranks": 2, "shared_memory": True})),
    "given": (["here.json", "--ranks", "3", "--gloo"], ("here.json", {"ranks": 3, "shared_memory": False})),
}


@pytest.mark.parametrize(("argv", "expected"), CALLS.values(), ids=CALLS)
def test_it_measures_as_told_and_says_how_to_use_the_file(
    argv: list[str], expected: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def measure(path: str, **options: Any) -> Any:
        calls.append((path, options))
        return load_hardware("cpu-2x-shm")

    monkeypatch.setattr(calibrate_command, "calibrate", measure)
    assert main(["calibrate", *argv]) == 0
    assert calls == [expected]
    out = capsys.readouterr().out
    assert "float32 FLOP/s" in out
    assert "FLOP/s in a training step" in out
    assert "all_gather on 2 ranks" in out
    assert out.endswith(f"python -m funcshard plan --ranks {expected[1]['ranks']} --hardware {expected[0]}\n")
