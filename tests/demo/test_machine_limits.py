"""The largest number of ranks that a machine holds, and the error beyond it."""

from __future__ import annotations

import pytest

from funcshard.__main__ import main
from funcshard.demo import machine_limits
from funcshard.demo.arguments import BadInputError
from funcshard.demo.machine_limits import PROCESS_BYTES, most_ranks

LIMITS = {
    "by memory": (10 * PROCESS_BYTES + 1, None, 10),
    "by processes": (10 * PROCESS_BYTES, 8, 4),
    "nothing known": (None, None, 1024),
    "hardly any memory": (1, None, 2),
}


@pytest.mark.parametrize(("available", "processes", "most"), LIMITS.values(), ids=LIMITS)
def test_memory_and_processes_limit_the_ranks(available: int | None, processes: int | None, most: int) -> None:
    assert most_ranks(available, processes) == most


def test_this_machine_tells_its_memory() -> None:
    available = machine_limits._available_bytes()
    assert available is None or available > PROCESS_BYTES


@pytest.mark.parametrize("command", ["train", "calibrate"])
def test_more_ranks_than_the_machine_holds_are_refused_before_anything_starts(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine_limits, "_available_bytes", lambda: 7 * PROCESS_BYTES)
    monkeypatch.setattr(machine_limits, "_process_limit", lambda: None)
    assert main([command, "--ranks", "100000"]) == 2
    assert "--ranks must be at most 7 here, because each rank is a process of about" in capsys.readouterr().err


def test_a_model_that_fits_is_accepted_and_one_byte_less_refuses_it() -> None:
    needed = 4 * (1000 * (2 + 4) + 8 * 500 * 2)
    machine_limits.check_model_fits(1000, 500, 2, available=needed)
    with pytest.raises(BadInputError, match=r"a model of 1,000 parameters needs about .* on 2 ranks.*choose a smaller"):
        machine_limits.check_model_fits(1000, 500, 2, available=needed - 1)
