"""Ways in which a folder of a checkpoint can be damaged, or made to do harm, and what is said then.

``CASES`` is the table: the name of a case, how it changes the folder, and words of the error. The
tests of several readers run over it.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

Harm = Callable[[Path], Any]
INDEX, TABLE, SIZES, TENSORS = "index.json", "__0_0.json", "sizes.json", "__0_0.distcp"
NOT_OURS = "it is not the index of a checkpoint; restore another checkpoint"
NO_TABLE = "it is not a file of a checkpoint; restore another checkpoint"


def deep(levels: int) -> Any:
    """Return lists in lists."""
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def forge(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the body of a text file, and give it the checksum of the new one."""
    head, body, *_ = file.read_text().split("\n")
    data = json.loads(body)
    new = change(data)
    body = json.dumps(data if new is None else new)
    write_forged(file, json.loads(head)["format"], body)
    if file.name == TABLE:  # its size is listed
        forge(file.parent / SIZES, lambda body: body["files"].update({TABLE: file.stat().st_size}))


def write_forged(file: Path, kind: str, body: str) -> None:
    """Write a text file with any body, whose checksum is right."""
    file.write_text(json.dumps({"format": kind, "sha256": hashlib.sha256(body.encode()).hexdigest()}) + f"\n{body}\n")


def put(name: str, *keys: Any, value: Any) -> Harm:
    """Return a change that puts a value somewhere into the body of a text file."""

    def change(body: Any) -> None:
        for key in keys[:-1]:
            body = body[key]
        body[keys[-1]] = value

    return lambda folder: forge(folder / name, change)


def text(name: str, content: str) -> Harm:
    """Return a change that gives a text file a body that is any text."""
    return lambda folder: write_forged(folder / name, "funcshard.checkpoint/2", content)


def replaced(name: str, make: Callable[[Path], Any]) -> Harm:
    """Return a change that removes a file and makes something else of its name."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def bind(path: Path) -> None:
    """Make a socket. Why from its folder: the name of a socket has at most 107 bytes."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.fchdir(before)
        os.close(before)


def link_out(path: Path) -> None:
    """Make a link to a file of the same bytes outside of the folder."""
    outside = path.parent.parent / f"outside-{path.name}"
    outside.write_bytes(ORIGINALS[path.name])
    path.symlink_to(outside)


ORIGINALS: dict[str, bytes] = {}  # the files of the checkpoint that is damaged

CASES: dict[str, tuple[Harm, str]] = {
    # What is no file.
    **{
        f"{what} in the place of {name}": (replaced(name, make), rf"{name} must be a regular file; found {found}")
        for name in (INDEX, TABLE, SIZES, TENSORS)
        for what, make, found in (("a named pipe", os.mkfifo, "a named pipe"), ("a link", link_out, "a link"))
    },
    "a socket in the place of the index": (replaced(INDEX, bind), "found a socket"),
    "a folder in the place of the tensors": (replaced(TENSORS, Path.mkdir), "the checkpoint's own folder|found a folder"),
    "a link to a device": (replaced(INDEX, lambda path: path.symlink_to("/dev/zero")), "found a link: copy the folder"),
    # Text that is none.
    "an empty index": (lambda folder: (folder / INDEX).write_bytes(b""), NOT_OURS),
    "an index of zeros": (lambda folder: (folder / INDEX).write_bytes(bytes(5000)), NOT_OURS),
    "an index that is no text": (lambda folder: (folder / INDEX).write_bytes(b"\xff\xfe\x00\x01\n\xff"), "no text in UTF-8"),
    "an index with a byte order mark": (
        lambda folder: (folder / INDEX).write_bytes(b"\xef\xbb\xbf" + ORIGINALS[INDEX]), NOT_OURS,
    ),
    "half of the tensors": (lambda folder: os.truncate(folder / TENSORS, 800), r"distcp is damaged: it has 800 bytes"),
    "no tensors": (lambda folder: os.truncate(folder / TENSORS, 0), "it has 0 bytes"),
    # JSON that is no index.
    "a list": (text(INDEX, "[]"), "the index must be an object"),
    "a number of 5,000 digits": (text(INDEX, '{"saved": 1' + "0" * 5000 + "}"), NOT_OURS),
    "a key twice": (text(INDEX, '{"save": "a", "save": "b"}'), "it has the key 'save' twice"),
    "lists 100,000 deep": (text(INDEX, "[" * 100_000), "nested in more than 500 levels"),
    "lists 600 deep": (text(INDEX, json.dumps(deep(600))), "nested in more than 500 levels"),
    "a body that is cut off": (text(INDEX, '{"saved": 1, "plan": {'), "it is no JSON"),
    "a later format": (
        lambda folder: write_forged(folder / INDEX, "funcshard.checkpoint/9", "{}"),
        r"index\.json is of format 'funcshard\.checkpoint/9'; this version of funcshard reads",
    ),
    # Parts of the index.
    **{
        f"{part} that is {shown}": (put(INDEX, part, value=value), NOT_OURS)
        for part in ("saved", "save", "plan", "outline", "items")
        for shown, value in (("null", None), ("a number", 1.5), ("NaN", float("nan")), ("a deep list", deep(300)))
        if (part, value) != ("outline", None)  # the state None
    },
    "a time before all times": (put(INDEX, "saved", value=-1), "saved must be a whole number from 0"),
    "a time of 2^70": (put(INDEX, "saved", value=2**70), "saved must be a whole number from 0"),
    "a mesh of 2^60 ranks": (put(INDEX, "plan", "mesh_shape", value=[1, 2**60]), "was planned for mesh"),
    "a shape of 2^60": (
        put(INDEX, "plan", "unit_list", 0, "buffers", 0, "leaves", 0, "shape", value=[2**60, 2**60]), "a tensor has at most",
    ),
    "a negative shape": (
        put(INDEX, "plan", "unit_list", 0, "buffers", 0, "leaves", 0, "shape", value=[-1]), "shape must be a list",
    ),
    "a shape of other text": (
        put(INDEX, "plan", "unit_list", 0, "buffers", 0, "leaves", 0, "shape", value="12"), "shape must be a list",
    ),
    "a dtype that is a module": (put(INDEX, "plan", "unit_list", 0, "buffers", 0, "dtype", value="onnx"), "no|not the name"),
    "a leaf with a field of a later version": (
        put(INDEX, "plan", "unit_list", 0, "buffers", 0, "leaves", 0, "color", value="red"), "no other keys .* 'color'",
    ),
    "a container that is a program": (
        put(INDEX, "outline", value=["namedtuple", ["command"], "os:system", [["value", "echo called"]]]),
        "top level of the loaded module 'os'",
    ),
    "a container of a module that is not loaded": (
        put(INDEX, "outline", value=["namedtuple", ["x"], "antigravity:Thing", [["value", 1]]]), "import the module first",
    ),
    "a custom node of a class that is no container": (
        put(INDEX, "outline", value=["custom", None, ["subprocess:Popen", None], [["value", "echo called"]]]),
        "no registered container",
    ),
    "a tensor that is a container": (put(INDEX, "outline", value=["tensor", None, None, []]), "a value, a tensor or"),
    "a list with data that are an object": (
        put(INDEX, "outline", value=["list", None, {"a": 1}, [["value", 1]]]), "must be texts, numbers or lists; found an",
    ),
    "a tensor that is not there": (put(INDEX, "outline", value=["tensor", "nothing"]), "must name tensors of"),
    "a leaf that is not there": (
        put(INDEX, "outline", value=["shards", "every unit", [["nothing", ["tensor", "whole"]]]]), "name leaves of the plan",
    ),
    "a rank's value that is not there": (put(INDEX, "outline", value=["rank", 7]), "has 1 PerRank values"),
    "a negative number of a rank's value": (put(INDEX, "outline", value=["rank", -1]), "the number of a PerRank must be"),
    "a dictionary with too few keys": (
        put(INDEX, "outline", value=["dict", None, ["a"], [["value", 1], ["value", 2]]]), "the keys of a dictionary",
    ),
    "a whole tensor of 2^58 elements": (put(INDEX, "items", "whole", 0, value=[2**58]), "needed elements of 'whole'"),
    "a tensor of many dimensions": (put(INDEX, "items", "whole", 0, value=[1] * 1000), "at most 64 dimensions"),
    "a tensor of an unknown kind": (put(INDEX, "items", "whole", 2, value="global"), "the kind of 'whole' must be"),
    # Sizes and tables.
    "sizes that are texts": (put(SIZES, "files", TENSORS, value="800"), "must be a whole number"),
    "a file in another folder": (put(SIZES, "files", "../other", value=1), "not in the checkpoint's own folder"),
    "the folder above": (put(SIZES, "files", "..", value=1), "not in the checkpoint's own folder"),
    "a name with a zero byte": (put(SIZES, "files", "a\0b", value=1), "zero byte|is missing"),
    "a table of another save": (put(TABLE, "save", value="00000000"), "belongs to another checkpoint"),
    "a region of 2^60 bytes": (put(TABLE, "regions", 0, 5, value=2**60), "must lie inside of __0_0.distcp"),
    "a region behind the end": (put(TABLE, "regions", 0, 4, value=2**60), "must be a whole number from 0 to"),
    "a region at -1": (put(TABLE, "regions", 0, 4, value=-1), "must be a whole number from 0"),
    "a region of too few numbers": (put(TABLE, "regions", 0, value=["shards.w"]), "a region must be a list of 7"),
    "a region outside of its tensor": (put(TABLE, "regions", 0, 2, value=[2**40, 0]), "must lie inside of its shape"),
    "a region of no tensor": (put(TABLE, "regions", 0, 0, value="nothing"), "a region must be of a tensor"),
    "a region twice": (
        lambda folder: forge(folder / TABLE, lambda body: body["regions"].append(body["regions"][0])), "needed elements of",
    ),
    "no region": (put(TABLE, "regions", value=[]), "holds 0 of"),
    "a rank's value in itself": (put(TABLE, "own", 0, value=["rank", 0]), "the number of a PerRank must be"),
    "values of a rank inside each other": (
        lambda folder: [
            put(TABLE, "own", value=[["value", 1], *(["rank", i] for i in range(3000))])(folder),
            put(INDEX, "outline", value=["rank", 3000])(folder),
        ],
        "more PerRank values inside each other than save writes: restore another",
    ),
    "a rank's tensor of another rank": (
        lambda folder: forge(folder / TABLE, lambda body: body["items"].update({"x@1": body["items"].popitem()[1]})),
        "must be named after it",
    ),
}  # fmt: skip
