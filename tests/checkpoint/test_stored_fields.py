"""No damaged or malicious checkpoint hangs a reader, runs code or ends in an odd error."""

from __future__ import annotations

import copy
import logging
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.checkpoint import hostile_files
from tests.checkpoint.hostile_files import CASES, INDEX, SIZES, TABLE, TENSORS, deep, forge

PARAMS = {"w": torch.arange(120.0).view(40, 3), "b": torch.ones(5)}
MESH = fs.Mesh()
PLAN = fs.make_plan(PARAMS, MESH, units=["b"])

# In these, the checksums of what is described are right, and only a reader of tensors sees it.
UNREAD = ("a region twice", "no region", "a container that", "a container of", "a custom node", "a rank's value that is not",
          "a whole tensor of", "values of a rank")  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    shards = fs.shard(PARAMS, PLAN, MESH)
    state = {"shards": shards, "whole": torch.ones(3), "step": 2, "own": fs.PerRank({"rng": torch.zeros(3)})}
    fs.save(folder / "step-1", {"step": 1}, PLAN, MESH)
    fs.save(folder / "step-2", state, PLAN, MESH)
    for name in (INDEX, TABLE, SIZES, TENSORS):
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


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**60,
    2**70,
    0.5,
    float("nan"),
    "",
    "..",
    "\ud800",
    "os:system",
    [],
    [[]],
    {},
    deep(20),
]


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in range(len(data)) if isinstance(data, list) else data if isinstance(data, dict) else ():
        yield from places(data[key], (*path, key))


def mutated(data: Any, draw: random.Random) -> Any:
    """Return data in which one place holds an odd value, nothing, or what stands at another place."""
    found = list(places(data))
    *above, last = draw.choice(found[1:])
    new = copy.deepcopy(draw.choice(ODD))
    if draw.random() < 0.3:
        new = data
        for key in draw.choice(found):
            new = new[key]
    new = copy.deepcopy(new)
    parent = data
    for key in above:
        parent = parent[key]
    if draw.random() < 0.2:
        del parent[last]
    else:
        parent[last] = new
    return data


@pytest.mark.slow
def test_random_changes_give_a_state_or_a_value_error(folder: Path) -> None:
    for seed in range(80):
        draw = random.Random(seed)
        name = draw.choice([INDEX, TABLE, SIZES])
        forge(folder / "step-2" / name, lambda body, draw=draw: mutated(body, draw))
        for read in (lambda: str(fs.restore(folder / "step-2")), lambda: fs.restore(folder / "step-2", PLAN, MESH)):
            try:
                read()
            except ValueError:
                pass
            except Exception as error:
                raise AssertionError(f"seed {seed}, {name}: {type(error).__name__}: {error}") from error
        assert fs.latest(folder) is not None
        for file, data in hostile_files.ORIGINALS.items():
            (folder / "step-2" / file).write_bytes(data)
