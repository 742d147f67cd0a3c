"""Answers of ``funcshard plan`` on disk: the same question again needs neither model nor trace."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard._utils.regular_files import read_regular

_MOST_ANSWERS = 200  # files in the folder; older ones are deleted
_PACKAGES = ("transformers", "peft")


@dataclass(frozen=True, slots=True)
class Answer:
    """What the command shows of a ``RunPlan``: text, JSON, HTML, and whether it fits."""

    text: str
    json: str
    html: str
    fits: bool

    def _repr_html_(self) -> str:
        return self.html


def answer_file(path: Path, question: Mapping[str, Any]) -> Path | None:
    """Return the file of an answer, named by a digest of all that the answer depends on.

    Arguments:
        path: a ``config.json``, or a folder with one.
        question: the other options, whose ``repr`` is the same in every process.

    Returns:
        The file, which needn't exist; ``None`` if the config can't be read.
    """
    config_file = path / "config.json" if path.is_dir() else path
    adapter_file = config_file.with_name("adapter_config.json")  # transformers reads it too
    try:
        configs = [
            read_regular(file) for file in (config_file, adapter_file) if file.exists()
        ]
        folder = _folder()
    except (OSError, RuntimeError, ValueError):
        return None
    versions = [str(torch.__version__)]
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    # Why not funcshard's version: in a clone, the files change and the version doesn't.
    statuses = {str(file): file.stat() for file in Path(__file__).parents[1].rglob("*.py")}
    sources = sorted(
        (name, status.st_mtime_ns, status.st_size) for name, status in statuses.items()
    )
    digest = hashlib.sha256(
        repr((configs, sorted(question.items()), versions, sources)).encode()
    )
    return folder / f"{digest.hexdigest()}.json"


def read_answer(file: Path) -> Answer | None:
    """Return the answer in a file; ``None`` if there is none, or it's damaged."""
    try:
        fields = json.loads(read_regular(file))
        answer = Answer(**fields)
    except (OSError, TypeError, ValueError):
        return None
    texts = (answer.text, answer.json, answer.html)
    return (
        answer
        if isinstance(answer.fits, bool) and all(isinstance(t, str) for t in texts)
        else None
    )


def write_answer(file: Path, answer: Answer) -> None:
    """Write an answer in one piece, and delete the oldest of many, if the folder allows it."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent)
        with open(descriptor, "w", encoding="utf-8") as new_file:
            json.dump(dataclasses.asdict(answer), new_file)
        os.replace(name, file)
        files = sorted(file.parent.glob("*.json"), key=lambda old: old.stat().st_mtime)
        for old_file in files[:-_MOST_ANSWERS]:
            old_file.unlink()


def _folder() -> Path:
    cache_home = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache_home) if cache_home else Path.home() / ".cache") / "funcshard"
