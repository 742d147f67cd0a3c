"""Text to train on."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Sequence
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
        valid: 1-D uint8 tensor, the end of the text.
    """

    train: torch.Tensor
    valid: torch.Tensor
    description: str


def load_corpus(text: str | os.PathLike[str] | None, context: int) -> Corpus:
    """Read a text and hold out its end for validation.

    Arguments:
        text: a file, or a folder, whose hidden and binary files are skipped; by default the
            standard library.
        context: number of bytes that a model sees at once.

    Raises:
        ValueError: the text doesn't exist, or is too short.
    """
    if text is None:
        title = f"standard library of Python {platform.python_version()}"
        files = _walk(Path(sysconfig.get_path("stdlib")), ".py")
    else:
        title, root = str(text), Path(text).expanduser()
        if not root.exists():
            raise ValueError(f"--text must be a file or a folder; found none at {root}")
        files = [root] if root.is_file() else _walk(root)
    text_bytes = _read(files)
    num_valid = int(HELD_OUT * len(text_bytes))
    if num_valid < context + 1:
        raise ValueError(
            f"the text is too short: {title} has {len(text_bytes):,} bytes, of which {num_valid:,} "
            f"are held out, and a context of {context} needs {context + 1:,}: pass a longer text, "
            "or a smaller --context"
        )
    description = (
        f"{title}, {len(text_bytes) / 2**20:.1f} MiB, the last {HELD_OUT:.0%} held out"
    )
    train, valid = torch.frombuffer(text_bytes, dtype=torch.uint8).tensor_split(
        [len(text_bytes) - num_valid]
    )
    return Corpus(train, valid, description)


def batch(
    data: torch.Tensor, *, seed: int, step: int, rank: int, size: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``size`` windows of ``data`` at random; equal arguments give equal windows.

    Returns:
        ``(inputs, targets)``, int64, of shape ``(size, context)``, where a target is the next byte.
    """
    # A hash, so that neighbouring steps and ranks draw independent windows.
    digest = hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
    window_starts = torch.randint(
        len(data) - context, (size,), generator=generator, device="cpu"
    )
    return _cut(data, window_starts, context)


def windows(
    data: torch.Tensor, *, count: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return up to ``count`` windows, evenly spaced, in the form of ``batch``."""
    num_starts = len(data) - context
    count = min(count, num_starts)
    # Note: multiplied before it is divided, so that the windows reach the end.
    window_starts = torch.arange(count, device="cpu") * num_starts // count
    return _cut(data, window_starts, context)


def _cut(
    data: torch.Tensor, starts: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    windows_cut = data[starts[:, None] + torch.arange(context + 1, device="cpu")].long()
    return windows_cut[:, :-1].contiguous(), windows_cut[:, 1:].contiguous()


def _walk(root: Path, suffix: str = "") -> list[Path]:
    files = []
    for folder, folders_below, names in os.walk(root):
        # Note: os.walk does not enter what is taken out of this list.
        folders_below[:] = [
            name
            for name in folders_below
            if not name.startswith(".") and not (suffix and name in _SKIPPED)
        ]
        files += [
            Path(folder, name)
            for name in names
            if name.endswith(suffix) and not name.startswith(".")
        ]
    # Why sorted: the system lists a folder in any order, and all ranks must read one text.
    return sorted(files)


def _read(files: Sequence[Path]) -> bytearray:
    """Return the bytes of all files of text, or of a single file of any kind."""
    read_text = bytearray()
    for path in files:
        if not path.is_file():  # a socket, or a broken link
            continue
        with path.open("rb") as file:
            file_bytes = file.read(MOST_BYTES - len(read_text))
        # A file with a zero byte holds no text.
        if len(files) == 1 or b"\0" not in file_bytes:
            read_text += file_bytes
    return read_text
