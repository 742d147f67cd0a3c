"""Damage to files: flipped bits, missing ends, swapped files, other kinds of files, changed JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

# Values where a file has another: some are of no type of JSON that Python writes by itself.
_JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 2**60, 2**200, 1e308, float("nan"), float("inf"), "", "a.b", "../../x", "\ud800", [], {}, [[]],
    {"": None}, "os:system", "builtins:eval",
)  # fmt: skip


def _flip(draw: Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 8]) if data else 0):
        changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _insert(draw: Random, data: bytes) -> bytes:
    place = draw.randrange(len(data) + 1)
    return data[:place] + draw.randbytes(draw.randrange(1, 20)) + data[place:]


def _change_json(draw: Random, data: bytes) -> bytes:
    """Replace or remove one value of a JSON file, or of its first line; flip bits of any other file."""
    head, *rest = data.split(b"\n", 1) if _parsed(data) is None else [data]
    tree = _parsed(head)
    if not isinstance(tree, dict | list) or not tree:
        return _flip(draw, data)
    box: list[Any] = [tree]
    place, key = box, 0
    while draw.random() < 0.8 and isinstance(place[key], dict | list) and place[key]:
        place = place[key]
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
    if place is not box and draw.random() < 0.3:
        del place[key]
    else:
        place[key] = draw.choice(_JUNK)
    return b"\n".join([json.dumps(box[0]).encode(), *rest])


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # it is no JSON, or an earlier damage made it so
        return None


_OF_BYTES: dict[str, Callable[[Random, bytes], bytes]] = {
    "flip bits": _flip,
    "truncate": lambda draw, data: data[: draw.randrange(len(data) or 1)],
    "lengthen": lambda draw, data: data + draw.randbytes(draw.choice([1, 8, 5000])),
    "overwrite": lambda draw, data: draw.choice(
        [b"", bytes(len(data)), b"\xff\xfe" * (len(data) // 2), draw.randbytes(len(data)), b"[" * 100_000]
    ),
    "insert": _insert,
    "change JSON": _change_json,
}
# What comes in place of a file that is removed.
_OF_FILES: dict[str, Callable[[Random, Path], object]] = {
    "remove": lambda draw, file: None,
    "become a pipe": lambda draw, file: os.mkfifo(file),
    "become a folder": lambda draw, file: file.mkdir(),
    "become a link": lambda draw, file: file.symlink_to(
        draw.choice(["nowhere", file.name, "/dev/zero", "/proc/self/environ", ".."])
    ),
}
DAMAGES = (*_OF_BYTES, *_OF_FILES, "swap with a neighbour")


def _files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def damage(draw: Random, folder: Path) -> str:
    """Damage a file of a folder; return what was done to which file, ``""`` if none is left."""
    files = _files_below(folder)
    if not files:
        return ""
    file, name = draw.choice(files), draw.choice([*DAMAGES, "flip bits", "truncate", "change JSON"])
    data = file.read_bytes()
    if name in _OF_BYTES:
        file.write_bytes(_OF_BYTES[name](draw, data))
    elif name in _OF_FILES:
        file.unlink()
        _OF_FILES[name](draw, file)
    else:
        neighbour = draw.choice([other for other in files if other.parent == file.parent])
        file.write_bytes(neighbour.read_bytes())
        neighbour.write_bytes(data)
    return f"{name}: {file.relative_to(folder)}"
