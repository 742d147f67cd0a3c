"""Damage to files: flipped bits, missing ends, swapped files, other kinds of files, changed JSON."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["DAMAGES", "damage"]

# Values where a file has another: some are of no type of JSON that Python writes by itself.
_JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 2**60, 2**200, 1e308, float("nan"), float("inf"), "", "a.b", "../../x", "\ud800", [], {}, [[]],
    {"": None}, "os:system", "builtins:eval",
)  # fmt: skip


def _flip(draw: Random, file: Path) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 8])):
        if data:
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def _truncate(draw: Random, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: draw.randrange(len(data))] if data else b"")


def _lengthen(draw: Random, file: Path) -> None:
    file.write_bytes(file.read_bytes() + draw.randbytes(draw.choice([1, 8, 5000])))


def _overwrite(draw: Random, file: Path) -> None:
    size = file.stat().st_size
    file.write_bytes(draw.choice([b"", bytes(size), b"\xff\xfe" * (size // 2), draw.randbytes(size), b"[" * 100_000]))


def _insert(draw: Random, file: Path) -> None:
    data = file.read_bytes()
    place = draw.randrange(len(data) + 1)
    file.write_bytes(data[:place] + draw.randbytes(draw.randrange(1, 20)) + data[place:])


def _remove(draw: Random, file: Path) -> None:
    file.unlink()


def _become_a_pipe(draw: Random, file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _become_a_folder(draw: Random, file: Path) -> None:
    file.unlink()
    file.mkdir()


def _become_a_link(draw: Random, file: Path) -> None:
    target = draw.choice(["nowhere", file.name, "/dev/zero", "/proc/self/environ", ".."])
    file.unlink()
    file.symlink_to(target)


def _swap_with_a_neighbour(draw: Random, file: Path) -> None:
    other = draw.choice(sorted(each for each in file.parent.iterdir() if each.is_file() and not each.is_symlink()))
    aside = file.with_name(".aside")
    shutil.move(file, aside)
    if other != file:
        shutil.move(other, file)
        shutil.move(aside, other)
    else:
        shutil.move(aside, file)


def _change_json(draw: Random, file: Path) -> None:
    """Replace, remove or repeat one value of a JSON file; flip bits of any other file."""
    try:
        text = file.read_bytes()
        lines = text.split(b"\n", 1)
        whole = _parsed(text)
        tree = whole if whole is not None else _parsed(lines[0])
    except OSError:
        return
    if not isinstance(tree, dict | list) or not tree:
        _flip(draw, file)
        return
    box: list[Any] = [tree]
    place, key = box, 0
    while draw.random() < 0.8 and isinstance(place[key], dict | list) and place[key]:
        place = place[key]
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if place is not box and draw.random() < 0.3:
        del place[key]
    else:
        place[key] = draw.choice(_JUNK)
    changed = json.dumps(box[0]).encode()
    file.write_bytes(changed if whole is not None else b"\n".join([changed, *lines[1:]]))


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # an earlier damage made it so
        return None


DAMAGES: dict[str, Callable[[Random, Path], None]] = {
    "flip bits": _flip,
    "truncate": _truncate,
    "lengthen": _lengthen,
    "overwrite": _overwrite,
    "insert": _insert,
    "remove": _remove,
    "become a pipe": _become_a_pipe,
    "become a folder": _become_a_folder,
    "become a link": _become_a_link,
    "swap with a neighbour": _swap_with_a_neighbour,
    "change JSON": _change_json,
}


def damage(draw: Random, folder: Path) -> str:
    """Damage a file of a folder; return what was done to which file, ``""`` if none is left."""
    files = sorted(each for each in folder.rglob("*") if each.is_file() and not each.is_symlink())
    if not files:
        return ""
    file = draw.choice(files)
    name = draw.choice([*DAMAGES, "flip bits", "truncate", "change JSON"])
    DAMAGES[name](draw, file)
    return f"{name}: {file.relative_to(folder)}"
