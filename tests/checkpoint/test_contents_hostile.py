"""Ways in which a folder of a checkpoint can be damaged, or made to do harm, and what is said then.

``CASES`` is the table: the name of a case, how it changes the folder, and words of the error. The
tests of several readers run over it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.checkpoint import save_restore

Harm = Callable[[Path], Any]
INDEX, TABLE, TENSORS = "index.json", "01234567-0.json", "01234567-0.safetensors"
PARTS = ("saved", "save", "plan", "outline", "stored", "bytes")  # of the index
DEEP = json.loads("[" * 300 + "]" * 300)
NOT_OURS = "it is not the index of a checkpoint; restore another checkpoint"
NO_TABLE = "it is not a file of a checkpoint; restore another checkpoint"


def forge(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the body of a text file, and give it the checksum of the new one."""
    head, body, *_ = file.read_text().split("\n")
    data, size = json.loads(body), file.stat().st_size
    new = change(data)
    # Why compact, as save writes: a reader that finds no token in an index tries again, for seconds.
    body = json.dumps(data if new is None else new, separators=(",", ":"))
    write_forged(file, json.loads(head)["format"], body)
    if file.name != INDEX:  # the index has the sum of the sizes
        more = file.stat().st_size - size
        forge(file.parent / INDEX, lambda body: body.update(bytes=body["bytes"] + more))


def write_forged(file: Path, kind: str, body: str) -> None:
    """Write a text file with any body, whose checksum is right."""
    file.write_text(json.dumps({"format": kind, "sha256": hashlib.sha256(body.encode()).hexdigest()}) + f"\n{body}\n")


def put(name: str, *keys: Any, value: Any = ...) -> Harm:
    """Return a change that puts a value somewhere into the body of a text file, or takes out what is there."""

    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        if value is ...:
            del body[keys[-1]]
        else:
            body[keys[-1]] = value

    return lambda folder: forge(folder / name, change)


def planned(change: Callable[[Any], Any]) -> Harm:
    """Return a change of the plan in the index."""
    return lambda folder: forge(folder / INDEX, lambda body: {**body, "plan": change(body["plan"])})


def text(content: str, version: int = 3) -> Harm:
    """Return a change that gives the index a body that is any text, of a version of the format."""
    return lambda folder: write_forged(folder / INDEX, f"funcshard.checkpoint/{version}", content)


def outline(*value: Any) -> Harm:
    """Return a change that gives the index another description of the state."""
    return put(INDEX, "outline", value=list(value))


def replaced(name: str, make: Callable[[Path], Any]) -> Harm:
    """Return a change that removes a file and makes something else of its name."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


ECHO = [["value", "echo called"]]
LINK = lambda path: path.symlink_to("/dev/zero")  # noqa: E731
OF_THREE_RANKS = json.loads(fs.make_plan({"w": torch.zeros(3)}, 3).to_json())

CASES: dict[str, tuple[Harm, str]] = {
    # What is no file.
    **{
        f"{what} in the place of {name}": (replaced(name, make), rf"{name} must be a regular file; found {found}")
        for name in (INDEX, TABLE, TENSORS)
        for what, make, found in (("a named pipe", os.mkfifo, "a named pipe"), ("a link to a device", LINK, "a link"))
    },
    "a folder in the place of the tensors": (replaced(TENSORS, Path.mkdir), "found a folder"),
    # Text that is none.
    "an index that is no text": (lambda folder: (folder / INDEX).write_bytes(b"\xff\xfe\x00\x01\n\xff"), "text in UTF-8"),
    "half an index": (lambda folder: os.truncate(folder / INDEX, 700), "its checksum is not the one that"),
    "a missing table": (lambda folder: (folder / TABLE).unlink(), rf"{TABLE} is missing, so the checkpoint is not complete"),
    "missing tensors": (lambda folder: (folder / TENSORS).unlink(), rf"{TENSORS} is missing, so the checkpoint is not"),
    "half of the tensors": (lambda folder: os.truncate(folder / TENSORS, 800), r"safetensors is damaged: it has 800 bytes"),
    # JSON that is no index.
    "a number of 5,000 digits": (text('{"saved": 1' + "0" * 5000 + "}"), NOT_OURS),
    "lists 100,000 deep": (text("[" * 100_000), "nested in more than 500 levels"),
    "an older format": (
        lambda folder: (text("{}", 2)(folder), (folder / ".metadata").touch()),
        r"'funcshard\.checkpoint/2'; this version of funcshard reads .*: import_dcp\(path, plan, mesh\) reads",
    ),
    "a later format": (text("{}", 9), r"is of format 'funcshard\.checkpoint/9'; this version of funcshard reads"),
    # Parts of the index.
    **{
        f"{part} that is {shown}": (put(INDEX, part, value=value), NOT_OURS)
        for part in PARTS
        for shown, value in (("null", None), ("a number", 1.5), ("NaN", float("nan")), ("a deep list", DEEP))
        if (part, value) != ("outline", None)  # the state None
    },
    "a time before all times": (put(INDEX, "saved", value=-1), "saved must be a whole number from 0"),
    **{f"an index without {part}": (put(INDEX, part), NOT_OURS) for part in PARTS},
    "no plan": (put(INDEX, "plan", value={}), NOT_OURS),
    "a plan of no entry": (planned(lambda plan: {"missing": plan}), NOT_OURS),
    "plans of two meshes": (planned(lambda plan: {"shards": plan, "step": OF_THREE_RANKS}), NOT_OURS),
    "a mesh of 2^60 ranks": (put(INDEX, "plan", "mesh_shape", value=[1, 2**60]), "must be those of make_plan"),
    "a container that is a program": (outline("namedtuple", ["a"], "os:system", ECHO), "top level of the loaded module 'os"),
    "a custom node that is no container": (outline("custom", None, ["subprocess:Popen", None], ECHO), "isn't a registered"),
    "a list with data that are an object": (outline("list", None, {"a": 1}, [["value", 1]]), NOT_OURS),
    "a tensor that is not there": (outline("tensor", "nothing"), NOT_OURS),
    "a buffer that is not there": (outline("shards", "every unit", [["nothing", "float32", ["tensor", "whole"]]]), NOT_OURS),
    "shards in shards": (outline("shards", "list", [["", "float32", ["shards", "list", []]]]), NOT_OURS),
    "a rank's value that is not there": (outline("rank", 7), NOT_OURS),
    "a tensor of too few facts": (put(INDEX, "stored", "whole", value=["whole"]), "must be a list of 6"),
    "a token that names another folder": (put(INDEX, "save", value="../12345"), "save must be 8 hexadecimal digits"),
    "a namedtuple with too few fields": (outline("namedtuple", [], "funcshard:TrainState", [["value", 1]]), NOT_OURS),
    "a turn of a text": (put(INDEX, "stored", "shards.float32", 5, value="1"), "must be a whole number"),
    # Tables.
    "a tensor at -1": (put(TABLE, "places", "whole", 0, value=-1), "must be a whole number from 0"),
    **{
        f"a table without {part}": (put(TABLE, part), NO_TABLE)
        for part in ("save", "own", "stored", "size", "header", "places")
    },
    "another size": (put(INDEX, "bytes", value=1), NOT_OURS),
    "a table of another save": (put(TABLE, "save", value="00000000"), "belongs to another checkpoint"),
    "too few checksums": (put(TABLE, "places", "whole", 2, value=[]), NOT_OURS),
    "no shard": (put(TABLE, "places", "shards.float32"), "it holds 0: restore another"),
    "a shard that is too small": (put(TABLE, "places", "shards.float32", 1, value=4), "it holds 4: restore another"),
    "no tensor of the rank": (put(TABLE, "places", "own.rng"), "must hold 12 bytes of 'own.rng' at 0; it holds 0"),
    "values of a rank inside each other": (
        lambda folder: [
            put(TABLE, "own", value=[["value", 1], *(["rank", i] for i in range(3000))])(folder),
            outline("rank", 3000)(folder),
        ],
        NOT_OURS,
    ),
}  # fmt: skip


PARAMS = {"w": torch.arange(120.0).view(40, 3), "b": torch.ones(5)}
MESH = fs.Mesh()
PLAN = fs.make_plan(PARAMS, MESH, units=["b"])

# In these, the checksums of what is described are right, and only a reader of tensors sees it.
UNREAD = (
    "no shard", "a shard that", "a container that", "a custom node", "a rank's value that is not",
    "values of a rank", "a list with", "a tensor that", "shards in", "a namedtuple", "too few", "no tensor",
)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    shards = fs.shard(PARAMS, PLAN, MESH)
    state = {"shards": shards, "whole": torch.ones(3), "step": 2, "own": fs.PerRank({"rng": torch.zeros(3)})}
    fs.save(folder / "step-1", {"step": 1}, PLAN, MESH)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_restore.secrets, "randbits", lambda _: 0x01234567)
        fs.save(folder / "step-2", state, PLAN, MESH)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_hostile_checkpoint_is_refused_with_words_and_passed_over(case: str, folder: Path, caplog, capfd) -> None:
    harm, words = CASES[case]
    path = folder / "step-2"
    harm(path)
    if case == "another size":  # which no rank that restores needs
        assert fs.restore(path, PLAN, MESH)["own"].value["rng"].tolist() == [0, 0, 0]
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
