"""Damage to a checkpoint is an error that names the file, and ``latest`` finds a complete one."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import funcshard as fs
from funcshard.checkpoint import contents, writer
from tests.checkpoint.test_contents_hostile import INDEX, forge
from tests.json_damage import changed_once

PLAN = fs.make_plan({"w": torch.zeros(40, 3), "b": torch.zeros(5)}, 2, units=["b"])
ONE = fs.make_plan({"w": torch.zeros(1)}, 1)
DATA = Path(__file__).parent / "data"


def save(folder: Path, step: int) -> None:
    def main(mesh: fs.Mesh) -> None:
        shards = fs.shard({"w": torch.full((40, 3), float(step)), "b": torch.full((5,), float(step))}, PLAN, mesh)
        state = {"shards": shards, "step": step, "own": fs.PerRank({"rng": torch.zeros(3) + mesh.rank})}
        fs.save(folder / f"step-{step}", state, PLAN, mesh)

    fs.simulate(main, 2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (1, 2):
        save(folder, step)
    return folder


@pytest.mark.slow
def test_a_bit_anywhere_is_seen(folder: Path) -> None:
    draw = random.Random(0)
    for file in sorted((folder / "step-2").iterdir()):
        whole = file.read_bytes()
        for _ in range(6 if whole else 0):  # the file of the lock is empty
            index = draw.randrange(len(whole))
            file.write_bytes(whole[:index] + bytes([whole[index] ^ (1 << draw.randrange(8))]) + whole[index + 1 :])
            with pytest.raises(ValueError, match=r"is damaged|this version of funcshard"):
                fs.restore(folder / "step-2").check()
            assert fs.latest(folder, thorough=True) == folder / "step-1"
        file.write_bytes(whole)
    assert fs.latest(folder, thorough=True) == folder / "step-2"


def test_without_the_thorough_look_only_sizes_are_compared(folder: Path) -> None:
    (file,) = (folder / "step-2").glob("*-0.safetensors")
    file.write_bytes(bytes(file.stat().st_size))
    assert fs.latest(folder) == folder / "step-2"
    assert fs.latest(folder, thorough=True) == folder / "step-1"


def test_what_is_written_aside_is_no_checkpoint(folder: Path) -> None:
    (folder / "step-2" / "index.json").rename(folder / "step-2" / "01234567.part")  # complete, but not published
    (folder / "notes").mkdir()
    (folder / "file").write_text("")
    assert fs.latest(folder) == folder / "step-1"
    assert fs.latest(folder / "nothing") is None
    assert fs.latest(folder / "notes") is None


def test_a_clock_that_goes_back_does_not_change_the_order(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = fs.restore(folder / "step-2").saved
    monkeypatch.setattr(contents.time, "time_ns", lambda: 1_000)
    path = folder / "a-third"  # names do not count
    fs.save(path, {"step": 3}, ONE, fs.Mesh(), keep=1)
    assert fs.latest(folder) == path
    assert fs.restore(path).saved == last + 1
    assert list(folder.iterdir()) == [path]


def test_a_damaged_time_is_not_followed(folder: Path) -> None:
    index = folder / "step-2" / "index.json"
    index.write_text(index.read_text().replace('{"saved":1', '{"saved":99'))
    fs.save(folder / "step-3", {"step": 3}, ONE, fs.Mesh())
    assert fs.restore(folder / "step-1").saved < fs.restore(folder / "step-3").saved < 9 * 10**18


def test_the_table_says_what_is_there(folder: Path) -> None:
    described = fs.restore(folder / "step-2")
    lines = str(described).splitlines()
    assert lines[0].startswith("Checkpoint step-2 of 20")
    assert lines[0].endswith(f"saved by 2 ranks under plan {PLAN.fingerprint()}")
    cells = [line.split() for line in lines[4:]]
    assert ["shards.*", "shards,", "float32", "2", "125", "500", "B"] in cells
    assert ["own.rng", "each", "rank's", "own,", "float32", "2", "6", "24", "B"] in cells
    assert ["step", "=", "2"] in cells
    assert cells[-1] == ["total", "4", "131", "524", "B"]
    assert described.plan == PLAN
    assert "<table" in described._repr_html_()


def test_values_are_read_in_the_form_of_the_state_without_a_plan(tmp_path: Path) -> None:
    params = {"w": torch.zeros(2, 3)}
    plan, mesh = fs.make_plan(params, 1), fs.Mesh()
    shards = fs.shard(params, plan, mesh)
    state = {
        "train": fs.TrainState(shards, {"mean": torch.zeros(3)}, {}, 4),
        "config": {"sizes": [1, 2], "name": None, "none": {}, 3: "three", "pair": (0.5, torch.ones(1))},
        "ema": shards, "own": fs.PerRank(3), "tensors": [torch.ones(1)],
    }  # fmt: skip
    fs.save(tmp_path / "a", state, plan, mesh)
    assert fs.read_values(tmp_path / "a") == {
        "train": {"opt_state": {}, "step": 4, "scaler": None},
        "config": {"sizes": [1, 2], "name": None, "none": {}, 3: "three", "pair": [0.5, None]},
    }
    fs.save(tmp_path / "b", 7, plan, mesh)
    assert fs.read_values(tmp_path / "b") == 7
    with pytest.raises(FileNotFoundError, match="there is no checkpoint at"):
        fs.read_values(tmp_path / "c")


THERE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file": (lambda path: path.write_text("precious"), "a file"),
    "a folder of others": (lambda path: (path.mkdir(), (path / "thesis.tex").touch()), "a folder that holds 'thesis.tex'"),
    "a folder of checkpoints": (lambda path: shutil.copytree(path.parent, path), "a folder that holds 'step-1'"),
    "nothing but another program's index": (
        lambda path: (path.mkdir(), (path / "index.json").write_text('{"a": 1}')), "a folder that holds 'index.json'"
    ),
    "one that FSDP2 is writing": (
        lambda path: (path.mkdir(), (path / "__0_0.distcp").write_bytes(b"x")), r"a folder that holds '__0_0\.distcp'"
    ),
    "a link to a checkpoint": (lambda path: path.symlink_to("step-1"), "a link"),
}  # fmt: skip


@pytest.mark.parametrize("name", [".hidden", "..", "..."])
def test_a_name_that_latest_would_pass_over_is_refused(name: str, tmp_path: Path) -> None:
    words = "path must end in a name without a dot at its front, because latest passes over others; found '\\.+"
    with pytest.raises(ValueError, match=words):
        fs.save(tmp_path / name, {"step": 3}, ONE, fs.Mesh())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", THERE)
def test_what_is_no_checkpoint_is_left_alone(name: str, folder: Path) -> None:
    make, found = THERE[name]
    path = folder / "there"
    make(path)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ValueError, match=f"path must be free, or name a checkpoint, .*; found {found} at "):
        fs.save(path, {"step": 3}, ONE, fs.Mesh())
    assert sorted(folder.rglob("*")) == before
    assert fs.restore(folder / "step-1").values["step"] == 1


def test_your_files_in_a_checkpoint_that_is_replaced_stay(folder: Path) -> None:
    path = folder / "step-2"
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "vocabulary.txt").write_text("precious")
    (path / "config.json").write_text("{}")
    shutil.copytree(DATA / "fsdp2", path, dirs_exist_ok=True)
    fs.save(path, {"step": 3}, ONE, fs.Mesh())
    assert fs.restore(path).values["step"] == 3
    assert (path / "tokenizer" / "vocabulary.txt").read_text() == "precious"
    assert (path / "config.json").read_text() == "{}"
    assert (path / ".metadata").read_bytes() == (DATA / "fsdp2" / ".metadata").read_bytes()
    assert len(list(path.glob("*-*"))) == 2, "files of the checkpoint before"


def test_what_another_program_writes_to_the_path_while_a_save_runs_stays(tmp_path: Path, monkeypatch) -> None:
    wait = writer.Writer.wait_for_all
    copied = lambda path: shutil.copytree(DATA / "fsdp2", path, dirs_exist_ok=True)  # noqa: E731
    monkeypatch.setattr(writer.Writer, "wait_for_all", lambda work: (copied(work.path), wait(work)))
    with pytest.raises(OSError, match=r"is not saved: .*found a folder that holds '\.metadata' at .*choose another path"):
        fs.save(tmp_path / "last", {"step": 3}, ONE, fs.Mesh())
    assert {each.name for each in (tmp_path / "last").iterdir()} >= {".metadata", "__0_0.distcp", "__1_0.distcp"}


def test_links_are_neither_counted_nor_followed_when_old_ones_go(folder: Path) -> None:
    (folder / "best").symlink_to("step-2")
    fs.save(folder / "step-3", {"step": 3}, ONE, fs.Mesh(), keep=2)
    assert sorted(path.name for path in folder.iterdir()) == ["best", "step-2", "step-3"]
    assert fs.restore(folder / "best").values["step"] == 2


@pytest.mark.nightly
@pytest.mark.parametrize("name", [INDEX, "*-0.json"])
def test_every_small_change_of_a_file_with_a_right_checksum_is_read_or_is_a_value_error(name: str, folder: Path) -> None:
    path, errors = folder / "step-2", 0
    (file,) = path.glob(name)
    whole, index = file.read_bytes(), (path / INDEX).read_bytes()
    for _, data in changed_once(json.loads(whole.decode().split("\n")[1]), 200):
        (path / INDEX).write_bytes(index)
        file.write_bytes(whole)
        try:
            forge(file, lambda _, data=data: data)
            assert fs.latest(folder) is not None
            str(fs.restore(path))
            fs.simulate(lambda mesh: fs.restore(path, PLAN, mesh), 2)
        except ValueError:
            errors += 1
    assert 100 < errors < 200
