"""The error for a job that this machine cannot hold."""

from __future__ import annotations

import pytest

from funcshard.__main__ import main
from funcshard.demo import machine_limits
from funcshard.demo.machine_limits import PROCESS_BYTES, check_fits

MODEL = 4 * (1000 * (2 + 4) + 8 * 500 * 2)


def test_this_machine_tells_its_memory() -> None:
    available = machine_limits._available_bytes()
    assert available is None or available > PROCESS_BYTES


@pytest.mark.parametrize("command", ["train", "calibrate"])
def test_more_ranks_than_the_machine_holds_are_refused_before_anything_starts(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine_limits, "_available_bytes", lambda: 1 << 30)
    assert main([command, "--ranks", "100000"]) == 2
    words = "100,000 ranks and a model of 0 parameters need about 7,812.5 GiB, and this machine has 1.0 GiB: choose fewer"
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("job", "needed"), [((7,), 7 * PROCESS_BYTES), ((2, 1000, 500), 2 * PROCESS_BYTES + MODEL)])
def test_a_job_that_fits_is_accepted_and_one_byte_less_refuses_it(
    job: tuple[int, ...], needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_limits, "_available_bytes", lambda: needed)
    check_fits(*job)
    monkeypatch.setattr(machine_limits, "_available_bytes", lambda: needed - 1)
    with pytest.raises(ValueError, match="choose fewer --ranks, or a smaller model"):
        check_fits(*job)
