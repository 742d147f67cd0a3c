"""The calibrate command: its arguments and its output; ``calibrate`` itself is not run."""

from __future__ import annotations

from typing import Any

import pytest

from funcshard.__main__ import main
from funcshard.demo import calibrate_command
from funcshard.estimate import load_hardware


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        pytest.param([], ("this-machine.json", {"ranks": 2, "shared_memory": True}), id="defaults"),
        pytest.param(
            ["here.json", "--ranks", "3", "--gloo"], ("here.json", {"ranks": 3, "shared_memory": False}), id="given"
        ),
    ],
)
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


def test_a_missing_folder_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "no/such/folder/file.json"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("funcshard calibrate: error: path must lie in a folder that exists")
    assert err.count("\n") == 1
    assert out == ""


def test_one_rank_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", "--ranks", "1"])
    assert "argument --ranks: must be a whole number, at least 2; found '1'" in capsys.readouterr().err
