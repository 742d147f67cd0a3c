"""What torchrun puts into the environment is checked, and a job that does not start says why."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import funcshard as fs

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

WRONG: dict[str, tuple[dict[str, str | None], str]] = {
    "a rank that is no number": ({"RANK": "one"}, "RANK must be a whole number of at least 0, as torchrun sets it; found"),
    "a negative rank": ({"RANK": "-1"}, "RANK must be a whole number of at least 0, as torchrun sets it; found"),
    "a rank too high": ({"RANK": "2"}, "RANK must be less than WORLD_SIZE, 2; found 2"),
    "no port": ({"MASTER_PORT": None}, "MASTER_PORT must be a whole number of at least 0, as torchrun sets it; found"),
    "no address": ({"MASTER_ADDR": None}, "MASTER_ADDR must name the machine of rank 0, because RANK"),
}


def launch(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**LAUNCHED, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_environment_is_an_error_before_anything_is_connected(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, words = WRONG[case]
    launch(monkeypatch, **changes)
    with pytest.raises(ValueError, match=f"environment variable {words}.*start the program with torchrun, or unset"):
        fs.init_mesh(device="cpu", timeout=1.0)
    assert not dist.is_initialized()


def test_a_process_without_a_gpu_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, LOCAL_RANK="1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"found process number 1 \(LOCAL_RANK\) and 1 GPUs: start torchrun"):
        fs.init_mesh(device="cuda")
    assert not dist.is_initialized()


def test_a_machine_without_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=r"needs a GPU, and torch finds none here: see nvidia-smi .* or pass init_mesh"):
        fs.init_mesh(device="cuda")
    assert not dist.is_initialized()


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Yield a port at which nobody listens, nor can meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.slow
def test_a_job_whose_first_rank_does_not_start_names_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    with silent_port() as port:
        launch(monkeypatch, MASTER_PORT=str(port))
        words = f"rank 1 of 2 cannot join the job at 127.0.0.1:{port} within 1 s"
        with pytest.raises(RuntimeError, match=words) as raised:
            fs.init_mesh(device="cpu", timeout=1.0)
    assert "read the logs of the other ranks, and see MASTER_ADDR and MASTER_PORT. Communication ended" in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_a_rank_whose_torchrun_has_ended_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    with silent_port() as port:
        launch(monkeypatch, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        words = r"cannot join the job .* torchrun, which holds the store of the job, has ended"
        with pytest.raises(RuntimeError, match=words):
            fs.init_mesh(device="cpu", timeout=600.0, patience=0.2)
    assert time.monotonic() - start < 100  # it has not waited for the timeout
