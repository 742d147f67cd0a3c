"""The demo job: the command that a user starts, and the functions that it is made of."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import funcshard as fs
from funcshard.__main__ import main
from funcshard.demo.corpus import batch, load_corpus, windows
from funcshard.demo.gpt import GPT, GPTConfig
from funcshard.demo.launch import Stop, launch
from funcshard.demo.train import Settings, train, validation_loss
from tests.comm.stores import until
from tests.commands import Command

TINY = GPTConfig(width=32, layers=1, heads=2, context=32)
SIZES = ["--width", "32", "--layers", "1", "--heads", "2", "--context", "32"]
TRAIN = ["-m", "funcshard", "train", *SIZES]


def start(*words: str) -> Command:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return Command(words, env | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", "TERM": "dumb"})


def finish(process: Command, code: int) -> tuple[str, str]:
    """Wait for a command, check its exit code, and return its output."""
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"still running after 90 s; it printed\n{process.out.read_text()}\n{process.err.read_text()}")
    assert process.returncode == code, f"exit code {process.returncode}, expected {code}; it printed\n{out}\n{err}"
    return out, err


def wait_for(file: Path, text: str) -> None:
    assert until(lambda: text in file.read_text(), 90), f"nothing printed {text!r}, but\n{file.read_text()}"


def check_result(out: Path, *, steps: int | None) -> dict:
    """Check that the saved files fit the plain module and one plan, and that their values are finite."""
    model = GPT(TINY)
    assert str(model.load_state_dict(torch.load(out / "model.pt", weights_only=True))) == "<All keys matched successfully>"
    metrics = json.loads((out / "metrics.json").read_text())
    assert fs.Plan.from_json((out / "plan.json").read_text()).fingerprint() == metrics["plan"]
    assert len(metrics["losses"]) == metrics["steps"]
    assert steps is None or metrics["steps"] == steps
    data = load_corpus(metrics["settings"]["text"], TINY.context).valid
    size = metrics["settings"]["batch"]
    again = validation_loss(model, data, fs.Mesh(), size=size, context=TINY.context, show=lambda done, words: None)
    assert again == pytest.approx(metrics["validation"]["after"], rel=1e-5)  # batches of other sizes round differently
    return metrics


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(3000)))
    return path


@pytest.mark.nightly
def test_a_run_on_two_ranks_learns_and_saves_what_it_says(tmp_path: Path, text: Path) -> None:
    words = ["--steps", "60", "--batch", "8", "--lr", "5e-3", "--out", str(tmp_path / "new" / "o")]
    out, err = finish(start(*TRAIN, "--text", str(text), *words), 0)
    metrics = check_result(tmp_path / "new" / "o", steps=60)
    assert metrics["mesh"] == {"replicate": 1, "shard": 2}
    assert metrics["validation"]["before"] > 5  # log(256) is 5.5
    assert metrics["validation"]["after"] < metrics["validation"]["before"] - 2
    assert f"Plan {metrics['plan']} for 2 ranks" in out
    assert f"Validation before: {metrics['validation']['before']:.3f} nats per byte" in out
    assert f"Validation after: {metrics['validation']['after']:.3f} nats per byte" in out
    assert f"in {tmp_path / 'new' / 'o'}" in out
    assert "Sample" in out
    assert "Traceback" not in err


@pytest.mark.slow
def test_one_rank_runs_in_this_process(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ranks", "1", "--text", str(text), "--steps", "3", "--batch", "4", "--out", str(tmp_path)]
    assert main([*TRAIN[2:], *words]) == 0
    assert check_result(tmp_path, steps=3)["mesh"] == {"replicate": 1, "shard": 1}
    assert "Starting" not in capsys.readouterr().out


@pytest.mark.slow
def test_it_goes_on_from_its_checkpoint_on_another_number_of_ranks(tmp_path: Path, text: Path, capsys) -> None:
    settings = Settings(
        config=TINY, units=("blocks.*",), strategy="full_shard", replicate=1, steps=5, batch=4, lr=5e-3, seed=0,
        text=str(text), out=str(tmp_path), save_every=2, resume=True,
    )  # fmt: skip
    train(fs.Mesh(), Stop(), settings)
    assert "Resumed" not in capsys.readouterr().out
    last = tmp_path / "checkpoints" / "step-5"
    assert sorted(path.name for path in last.parent.iterdir()) == ["step-4", "step-5"]
    first = json.loads((tmp_path / "metrics.json").read_text())
    fs.simulate(lambda mesh: train(mesh, Stop(), dataclasses.replace(settings, steps=8, batch=2)), 2)
    assert f"Resumed from {last}" in capsys.readouterr().out
    metrics = check_result(tmp_path, steps=8)
    assert metrics["losses"][:5] == first["losses"]
    assert metrics["validation"]["before"] == pytest.approx(first["validation"]["after"], rel=1e-5)


REPLICAS = ["--ranks", "2", "--replicate", "2", "--strategy", "no_shard", "--units"]
SIGNALS = {
    "SIGTERM to a single rank": (["--ranks", "1"], (1, 1), signal.SIGTERM, False),
    "Ctrl-C in a terminal, which reaches both replicas of the root unit": (REPLICAS, (2, 1), signal.SIGINT, True),
    "SIGINT to the command alone": (["--ranks", "2"], (1, 2), signal.SIGINT, False),
}


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize(("ranks", "mesh", "number", "everyone"), SIGNALS.values(), ids=SIGNALS)
def test_a_signal_ends_it_after_the_step_and_saves(ranks, mesh, number, everyone: bool, tmp_path: Path, text: Path) -> None:
    words = [*TRAIN, *ranks, "--text", str(text), "--steps", "1000000", "--save-every", "1", "--out", str(tmp_path)]
    process = start(*words)
    wait_for(process.out, "Validation before")
    assert until(lambda: fs.latest(tmp_path / "checkpoints"), 90)  # it has trained at least one step
    (os.killpg if everyone else os.kill)(process.pid, number)
    out, err = finish(process, 130)  # within minutes, while a million steps take days
    metrics = check_result(tmp_path, steps=None)
    assert metrics["mesh"] == dict(zip(("replicate", "shard"), mesh, strict=True))
    assert metrics["stopped"]
    assert 0 < metrics["steps"] < 1_000_000
    assert f"Stopped after {metrics['steps']} of 1000000 steps" in out
    assert "Saved model.pt" in out
    assert "Stopping after this step; Ctrl-C again ends it at once." in err
    assert "Traceback" not in out + err


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_it_at_once() -> None:
    code = "from tests.demo.test_demo import launch, deaf; raise SystemExit(launch(deaf, ranks=2))"
    process = start("-c", code)
    wait_for(process.out, "busy")
    os.killpg(process.pid, signal.SIGINT)
    wait_for(process.err, "Stopping after this step")
    time.sleep(1)
    assert process.returncode is None  # the ranks never reach the end of their step
    os.killpg(process.pid, signal.SIGINT)
    _, err = finish(process, 130)
    assert "Traceback" not in err


@pytest.mark.slow
def test_ranks_end_also_if_their_fork_server_was_killed(tmp_path: Path) -> None:
    """Without it, multiprocessing counts them as ended, and one waited minutes for the others."""
    code = f"from tests.demo.test_demo import launch, lost; raise SystemExit(launch(lost, ({str(tmp_path)!r},)))"
    finish(start("-c", code), 1)
    stats = [Path("/proc", pid.name, "stat") for pid in tmp_path.iterdir()]
    assert len(stats) == 2
    assert until(lambda: not any(stat.exists() and stat.read_text().split()[2] != "Z" for stat in stats), 10)


def lost(mesh: fs.Mesh, stop: Stop, folder: str) -> None:
    Path(folder, str(os.getpid())).touch()
    fs.psum(torch.ones(1), mesh)
    if mesh.rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    deaf(mesh, stop)


def deaf(mesh: fs.Mesh, stop: Stop) -> None:
    if mesh.rank == 0:
        print("busy", flush=True)
    while True:
        time.sleep(0.1)


def waits_for_rank_1(mesh: fs.Mesh, stop: Stop, ending: str) -> None:
    if mesh.rank == 1 and ending == "raise":
        raise ValueError("the data of rank 1 is gone")
    if mesh.rank == 1 and ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    fs.psum(torch.ones(1), mesh)


ENDINGS = {
    "raise": "funcshard: rank 1 failed: ValueError: the data of rank 1 is gone (test_demo.py:",
    "kill": "funcshard: rank 1 failed: it was ended by signal SIGKILL (out of memory?)",
}


@pytest.mark.slow
@pytest.mark.usefixtures("server_of_forks")
@pytest.mark.parametrize(("ending", "words"), ENDINGS.items(), ids=ENDINGS)
def test_a_rank_that_fails_ends_all_ranks_and_is_named(ending: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert launch(waits_for_rank_1, (ending,), ranks=2) == 1
    assert time.monotonic() - began < 60  # rank 0 waits in a collective that times out after 10 minutes
    err = capfd.readouterr().err
    assert words in err
    assert "rank 0 failed" not in err


@pytest.mark.slow
def test_a_failure_while_saving_fails_the_command(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").mkdir()
    assert main([*TRAIN[2:], "--ranks", "1", "--text", str(text), "--steps", "1", "--out", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "funcshard: rank 0 failed: IsADirectoryError" in err
    assert "Traceback" not in err


def test_a_folder_is_read_without_files_that_are_no_text_and_its_end_is_held_out(tmp_path: Path) -> None:
    contents = {f"{number:03}.txt": bytes([33 + number]) * 50 for number in range(60)}
    for name, data in contents.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "picture").write_bytes(b"\0" * 50)
    (tmp_path / ".hidden").write_bytes(b"~" * 50)
    corpus = load_corpus(tmp_path, 32)
    train, valid = ({bytes([b]) for b in part.tolist()} for part in (corpus.train, corpus.valid))
    assert not train & valid
    assert train | valid == {data[:1] for data in contents.values()}
    assert len(valid) == 3  # 5 % of 60 files of one size


TEXTS = {
    "missing": (lambda path: None, "--text must be a file or a folder; found none at"),
    "empty folder": (lambda path: path.mkdir(), "has 0 bytes"),
    "short file": (lambda path: path.write_bytes(b"x" * 300), "has 300 bytes, of which 15 are held out"),
    "empty file": (lambda path: path.write_bytes(b""), "a context of 32 needs 33"),
}


@pytest.mark.parametrize(("make", "words"), TEXTS.values(), ids=TEXTS)
def test_a_text_that_will_not_do_is_refused(make: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    make(tmp_path / "text")
    with pytest.raises(ValueError, match=re.escape(words)):
        load_corpus(tmp_path / "text", 32)


def test_batches_depend_on_seed_step_and_rank_alone() -> None:
    data = torch.arange(200, dtype=torch.uint8)
    draws = {}
    for seed, step, rank in itertools.product(range(2), range(2), range(2)):
        inputs, targets = batch(data, seed=seed, step=step, rank=rank, size=4, context=8)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert inputs.shape == (4, 8)
        torch.rand(1)  # moves the global generator
        assert torch.equal(inputs, batch(data, seed=seed, step=step, rank=rank, size=4, context=8)[0])
        draws[seed, step, rank] = tuple(inputs[:, 0].tolist())
    assert len(set(draws.values())) == 8


def test_validation_does_not_depend_on_the_number_of_ranks() -> None:
    torch.manual_seed(0)
    data = torch.randint(256, (500,), dtype=torch.uint8)
    model = GPT(TINY)

    def main(mesh: fs.Mesh) -> float:
        return validation_loss(model, data, mesh, size=5, context=32, show=lambda done, words: None)

    inputs, targets = windows(data, count=64, context=32)
    expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    for world_size in (1, 2, 3):
        assert fs.simulate(main, world_size) == pytest.approx([expected] * world_size, rel=1e-5)
