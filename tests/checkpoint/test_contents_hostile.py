"""No damaged or malicious checkpoint hangs a reader, runs code or ends in an odd error."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

import funcshard as fs
from funcshard.checkpoint import save_restore
from tests.checkpoint import hostile_files
from tests.checkpoint.hostile_files import CASES, INDEX, TABLE, TENSORS

PARAMS = {"w": torch.arange(120.0).view(40, 3), "b": torch.ones(5)}
MESH = fs.Mesh()
PLAN = fs.make_plan(PARAMS, MESH, units=["b"])

# In these, the checksums of what is described are right, and only a reader of tensors sees it.
UNREAD = ("no shard", "a shard that", "a container that", "a container of", "a custom node", "a rank's value that is not",
          "a whole tensor of", "values of a rank")  # fmt: skip
# In these, no rank that restores needs what is wrong.
UNNEEDED = ("another size",)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    shards = fs.shard(PARAMS, PLAN, MESH)
    state = {"shards": shards, "whole": torch.ones(3), "step": 2, "own": fs.PerRank({"rng": torch.zeros(3)})}
    fs.save(folder / "step-1", {"step": 1}, PLAN, MESH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_restore.secrets, "randbits", lambda _: 0x01234567)
        fs.save(folder / "step-2", state, PLAN, MESH)
    for name in (INDEX, TABLE, TENSORS):
        hostile_files.ORIGINALS[name] = (folder / "step-2" / name).read_bytes()
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_checkpoint_is_refused_with_words_and_passed_over(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    harm, words = CASES[case]
    path = folder / "step-2"
    harm(path)
    if case in UNNEEDED:
        fs.restore(path, PLAN, MESH)
    else:
        with pytest.raises(ValueError, match=words) as raised:
            fs.restore(path, PLAN, MESH)
        assert case.startswith(UNREAD) or str(path) in str(raised.value)
    if not case.startswith(UNREAD):
        with pytest.raises(ValueError, match=words):
            fs.restore(path).check()
        with caplog.at_level(logging.WARNING, "funcshard.checkpoint"):
            assert fs.latest(folder, thorough=True) == folder / "step-1"
        assert caplog.records[0].getMessage().startswith(f"checkpoint {path} is passed over: ")
    assert "called" not in capfd.readouterr().out


def test_the_checkpoint_that_the_cases_damage_is_whole(folder: Path) -> None:
    assert fs.latest(folder, thorough=True) == folder / "step-2"
    assert fs.restore(folder / "step-2", PLAN, MESH)["own"].value["rng"].tolist() == [0, 0, 0]
