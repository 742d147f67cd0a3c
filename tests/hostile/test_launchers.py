"""The launcher, torchrun and their ranks are killed: no process stays, and a restart gives the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.demo.gpt import GPTConfig
from funcshard.demo.launch import Stop
from funcshard.demo.train import Settings, train
from tests.comm.stores import until
from tests.hostile.campaign import slowness
from tests.hostile.nursery import check_nothing_left, descendants, in_nursery, needs_linux, open_files
from tests.hostile.training import empty_folder
from tests.promises.test_examples import load
from tests.ranks import one_thread

pytestmark = [pytest.mark.hostile, needs_linux]

STEPS = 12
BOUND = 60.0  # seconds in which all processes of a job end after one of them was killed
SIZES = ["--width", "32", "--layers", "1", "--heads", "2", "--context", "32", "--steps", str(STEPS), "--batch", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0"]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "preemption.py"
HOW = {"ranks of the launcher": [], "ranks of torchrun": TORCHRUN}


def start(how: str, folder: Path, out: str) -> subprocess.Popen[bytes]:
    sizes = [*SIZES, "--text", str(folder / "text"), "--out", str(folder / out)]
    return run([*HOW[how], "-m", "funcshard", "train", *sizes, "--save-every", "2", "--resume"], folder, out)


def run(words: list[str], folder: Path, out: str) -> subprocess.Popen[bytes]:
    """Start Python with these words, in a session of its own; the log is ``out.log``."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"OMP_NUM_THREADS": "1", "TERM": "dumb", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder / "temporary")}
    log = open(folder / f"{out}.log", "ab")  # noqa: SIM115  # closed below
    with log:
        return subprocess.Popen(
            [sys.executable, *words],
            env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def ended(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> int:
    """Wait until a job and all of its processes have ended; return its exit code."""
    seconds *= slowness()
    end = time.monotonic() + seconds
    try:
        code = process.wait(seconds)
        while left := descendants(os.getpid()):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(left), seconds)
            time.sleep(0.02)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"{error.cmd} hang; {[path.read_text() for path in folder.glob('*.log')]}") from error
    return code


def prepare(folder: Path) -> None:
    (folder / "temporary").mkdir()
    (folder / "text").write_text("".join(f"{number} squared is {number * number}.\n" for number in range(300)))


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The metrics of a run that nothing disturbs, on simulated ranks; both ways to start ranks have to give them."""
    folder = tmp_path_factory.mktemp("whole")
    prepare(folder)
    (folder / "out").mkdir()
    settings = Settings(
        config=GPTConfig(width=32, layers=1, heads=2, context=32), units=("blocks.*",), strategy="full_shard",
        replicate=1, steps=STEPS, batch=2, lr=5e-4, seed=0, text=str(folder / "text"), out=str(folder / "out"),
    )  # fmt: skip
    with one_thread():
        fs.simulate(lambda mesh: train(mesh, Stop(), settings), 2)
    return json.loads((folder / "out" / "metrics.json").read_text())


def kill_a_process(how: str, seed: int, name: str, meant: dict[str, Any]) -> dict[str, int]:
    draw, folder, files = Random(seed), Path(name), open_files()
    prepare(folder)
    process = start(how, folder, "killed")
    place = draw.choice(["start", "first checkpoint", "later"])
    checkpoints = folder / "killed" / "checkpoints"

    def is_there() -> bool:
        if place == "start":
            return len(descendants(process.pid)) > 1
        return last_saved(checkpoints) >= (1 if place == "first checkpoint" else 6)

    until(lambda: process.poll() is not None or is_there(), BOUND * slowness())
    time.sleep(draw.random() ** 2 * (0.5 if place != "start" else 4.0))
    victim = draw.choice([process.pid, *descendants(process.pid)])
    number = draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    with contextlib.suppress(ProcessLookupError):
        os.kill(victim, number)
    ended(process, folder, BOUND)
    again = start(how, folder, "killed")
    assert ended(again, folder, 2 * BOUND) == 0, (folder / "killed.log").read_text()
    found = json.loads((folder / "killed" / "metrics.json").read_text())
    what = f"after signal {number} to {'the parent' if victim == process.pid else 'a child'} at {place}"
    assert found["losses"] == meant["losses"], what
    assert found["validation"]["after"] == meant["validation"]["after"], what
    names = sorted(path.name for path in checkpoints.iterdir())
    assert names == sorted([f"step-{STEPS - 2}", f"step-{STEPS}"]), f"{what}: {names}"
    # torchrun makes folders of its own, and leaves them if a signal ends it.
    left = sorted(path for path in (folder / "temporary").iterdir() if not path.name.startswith("torchelastic_"))
    assert not left or number == signal.SIGKILL, f"{what}: {left}"
    check_nothing_left(files)
    return {"kills": 1}


@pytest.mark.nightly
def test_a_job_whose_process_is_killed_ends_and_its_restart_gives_the_bits_of_a_whole_run(campaign, whole_run) -> None:
    def one(draw: Random) -> dict[str, int]:
        how, seed = draw.choice(list(HOW)), draw.getrandbits(32)
        with empty_folder() as folder:
            return in_nursery(kill_a_process, how, seed, str(folder), whole_run, limit=6 * BOUND)

    campaign.run(one, short=1, full=50, limit=6 * BOUND + 30)


def train_on_simulated_ranks(ranks: int, steps: int, folder: Path) -> list[float]:
    """Run ``examples/preemption.py`` until its end, or from its last checkpoint; return the losses of all steps."""
    example = load(EXAMPLE)
    with one_thread():
        return fs.simulate(lambda mesh: example.train(mesh, steps, folder, threading.Event()), ranks)[0]


def interrupt(seed: int, name: str, steps: int, meant: list[float]) -> dict[str, int]:
    draw, folder, files = Random(seed), Path(name), open_files()
    prepare(folder)
    checkpoints, last_step = folder / "checkpoints", 0
    for _ in range(4):
        ranks, number = draw.choice([1, 2, 3]), draw.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL])
        launcher = ["--nproc-per-node", str(ranks), "--signals-to-handle", "SIGTERM,SIGINT,SIGUSR1"]
        words = ["-m", "torch.distributed.run", "--standalone", *launcher, "--max-restarts", str(draw.choice([0, 1]))]
        process = run([*words, str(EXAMPLE), "--steps", str(steps), "--folder", str(checkpoints)], folder, "job")
        wanted = last_step + draw.choice([0, 10, 20])
        until(lambda: process.poll() is not None or last_saved(checkpoints) >= wanted, BOUND * slowness())  # noqa: B023
        time.sleep(draw.random() ** 2)
        is_kill = number == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError, IndexError):
            # a killed torchrun could not end its ranks
            os.kill(draw.choice(descendants(process.pid)) if is_kill else process.pid, number)
        ended(process, folder, 2 * BOUND)
        assert last_saved(checkpoints) >= last_step, (folder / "job.log").read_text()
        last_step = last_saved(checkpoints)
    losses = train_on_simulated_ranks(draw.choice([1, 2, 3]), steps, checkpoints)
    torch.testing.assert_close(losses, meant, rtol=1e-3, atol=1e-5)
    check_nothing_left(files)
    return {"interruptions": 4}


def last_saved(checkpoints: Path) -> int:
    last = fs.latest(checkpoints)
    return 0 if last is None else int(last.name.removeprefix("step-"))


@pytest.mark.nightly
def test_a_preempted_job_continues_on_other_numbers_of_ranks_with_the_losses_of_an_undisturbed_one(campaign, tmp_path):
    steps = 100
    meant = train_on_simulated_ranks(1, steps, tmp_path)

    def one(draw: Random) -> dict[str, int]:
        with empty_folder() as folder:
            return in_nursery(interrupt, draw.getrandbits(32), str(folder), steps, meant, limit=12 * BOUND)

    campaign.run(one, short=1, full=50, limit=12 * BOUND + 30)
