"""Text to train on: the source of Python's standard library, or the user's own files."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

MOST_BYTES = 16 * 2**20  # at most so many bytes are read, so that loading stays quick
HELD_OUT = 0.05  # fraction of the bytes
_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Bytes for training and bytes held out for validation.

    Attributes:
        train: 1-D uint8 tensor.
        valid: 1-D uint8 tensor, from other files than ``train``, or the end of the file if there is
            only one.
        description: the origin of the text, to be printed.
    """

    train: torch.Tensor
    valid: torch.Tensor
    description: str


def load_corpus(text: str | os.PathLike[str] | None, context: int) -> Corpus:
    """Read a text and hold out a part of it for validation, the same part on every rank.

    Arguments:
        text: a file, or a folder whose files are read, except hidden and binary files; by default
            the Python sources of the standard library.
        context: number of bytes that a model sees; each part of the text must have at least one
            more.

    Raises:
        ValueError: the text does not exist, or is too short.
    """
    files, corpus_title = (
        _standard_library() if text is None else _files_of(Path(text).expanduser())
    )
    contents = _read(files)
    total = sum(map(len, contents.values()))
    if len(contents) < 2:
        train, valid = _split_tail(b"".join(contents.values()))
        held = f"the last {HELD_OUT:.0%} held out"
    else:
        out = _held_out(contents)
        train, valid = (
            b"".join(contents[f] for f in contents if (f in out) is side) for side in (False, True)
        )
        held = f"{len(out)} of {len(contents)} files held out"
    shortest = min(len(train), len(valid))
    if shortest < context + 1:
        raise ValueError(
            f"the text is too short: {corpus_title} has {total:,} bytes, of which {shortest:,} are left "
            f"for its smaller part (training or validation), and a context of {context} needs "
            f"{context + 1:,}: pass a longer text, or a smaller --context"
        )
    return Corpus(
        _tensor(train), _tensor(valid), f"{corpus_title}, {total / 2**20:.1f} MiB, {held}"
    )


def batch(
    data: torch.Tensor, *, seed: int, step: int, rank: int, size: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``size`` windows of ``data`` at random; equal arguments give equal windows.

    Returns:
        ``(inputs, targets)``, int64, of shape ``(size, context)``; a target is the byte that
        follows its input.
    """
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    starts = torch.randint(len(data) - context, (size,), generator=generator, device="cpu")
    return _cut(data, starts, context)


def windows(data: torch.Tensor, *, count: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return up to ``count`` windows, evenly spaced over ``data``, in the form of ``batch``."""
    room = len(data) - context
    count = min(count, room)
    starts = torch.arange(count, device="cpu") * room // count
    return _cut(data, starts, context)


def _cut(
    data: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    cut = data[starts[:, None] + torch.arange(context + 1, device="cpu")].long()
    return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def _standard_library() -> tuple[dict[str, Path], str]:
    root = Path(sysconfig.get_path("stdlib"))
    files = _walk(root, suffix=".py")
    if not files:
        raise ValueError(
            f"the standard library at {root} has no .py files: give a text of your own with --text "
            "PATH"
        )
    return files, f"standard library of Python {platform.python_version()}"


def _files_of(path: Path) -> tuple[dict[str, Path], str]:
    if path.is_file():
        return {path.name: path}, str(path)
    if not path.is_dir():
        raise ValueError(f"--text must be a file or a folder; found none at {path}")
    files = _walk(path)
    if not files:
        raise ValueError(f"--text must hold text; found no files in the folder {path}")
    return files, str(path)


def _walk(root: Path, suffix: str = "") -> dict[str, Path]:
    """Return the files under a folder by their relative paths, in the order of these paths."""
    found_files = {}
    for folder, below, names in os.walk(root):
        below[:] = [
            name for name in below if not name.startswith(".") and not (suffix and name in _SKIPPED)
        ]
        for path in (
            Path(folder, name)
            for name in names
            if name.endswith(suffix) and not name.startswith(".")
        ):
            if path.is_file():  # neither a socket nor a broken link
                found_files[path.relative_to(root).as_posix()] = path
    return dict(sorted(found_files.items()))


def _read(files: dict[str, Path]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    room = MOST_BYTES
    for name, path in files.items():
        try:
            with path.open("rb") as file:
                data = file.read(room)
        except OSError as error:
            raise ValueError(f"cannot read the text {path}: {error.strerror or error}") from error
        if len(files) > 1 and b"\0" in data:
            continue  # a binary file, such as a picture
        contents[name] = data
        room -= len(data)
        if not room:
            break
    return contents


def _held_out(contents: dict[str, bytes]) -> set[str]:
    """Choose files by a hash of their names, to fit the held-out fraction, but at least one."""
    room = HELD_OUT * sum(map(len, contents.values()))
    order = sorted(
        contents, key=lambda name: (zlib.crc32(name.encode(errors="surrogateescape")), name)
    )
    held: set[str] = set()
    for name in order:
        if contents[name] and len(contents[name]) <= room:
            held.add(name)
            room -= len(contents[name])
    smallest = min(
        (name for name in order if contents[name]),
        key=lambda name: len(contents[name]),
        default=order[0],
    )
    return held or {smallest}


def _split_tail(data: bytes) -> tuple[bytes, bytes]:
    end = len(data) - int(HELD_OUT * len(data))
    return data[:end], data[end:]


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
