"""The file of a traced step: two lines of facts, then the graphs, one operation a line.

The first line has the format and a checksum of all that follows. Reading a file runs no code of it:
see ``operators`` for the operations that it may name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcshard._utils import file_data, read_regular
from funcshard.plan import Plan, plan_from_data

FORMAT = "funcshard.graph/1"


@dataclass(frozen=True, slots=True)
class FileContents:
    """The contents of a file.

    Attributes:
        torch: the version of torch that recorded the graphs.
        mesh: size of each mesh axis.
        plan: the plan of the step.
        changes: number of passes that changed the graphs.
        dynamic_shapes: the argument of ``trace``.
        of_rank: for each rank, the number of its kind in ``kinds``.
        kinds: the recordings of each kind of rank, as JSON.
        digest: SHA-256 of the file after its first line.
    """

    torch: str
    mesh: dict[str, int]
    plan: Plan
    changes: int
    dynamic_shapes: Any
    of_rank: list[int]
    kinds: list[Any]
    digest: str


def recordings_text(recordings: Sequence[dict[str, Any]]) -> str:
    """Return recordings as JSON text, with a line for each operation and each leaf."""
    return "[\n" + ",\n".join(map(_recording_text, recordings)) + "\n]"


def _recording_text(recording: dict[str, Any]) -> str:
    parts = []
    for key, value in recording.items():
        as_text: Callable[[Any], str] = _object if key == "signature" else _short
        if isinstance(value, list) and key == "nodes":
            as_text = _lines
        parts.append(f"{json.dumps(key)}: {as_text(value)}")
    return "{\n" + ",\n".join(parts) + "\n}"


def _object(value: dict[str, Any]) -> str:
    return (
        "{"
        + ",\n".join(
            f"{json.dumps(k)}: {_lines(v) if k == 'leaves' else _short(v)}"
            for k, v in value.items()
        )
        + "}"
    )


def _lines(values: list[Any]) -> str:
    return "[\n" + ",\n".join(map(_short, values)) + "\n]"


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_file(path: Path, facts: dict[str, Any], kinds: Sequence[str]) -> None:
    """Write a file under another name, and rename it once it is complete."""
    file_text = f"{_short(facts)}\n[\n" + ",\n".join(kinds) + "\n]\n"
    head = _short({"format": FORMAT, "sha256": text_digest(file_text)})
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", newline="\n") as file:
            file.write(f"{head}\n{file_text}")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def read_file(path: Path) -> FileContents:
    """Return the contents of a file.

    Raises:
        OSError: there is no such file.
        ValueError: ``write_file`` did not write it, or it is damaged.
    """
    data = read_regular(path)
    first, _, file_rest = data.partition(b"\n")
    try:
        head = file_data.table("its first line", file_data.parse(first), ("format",))
    except ValueError:
        raise ValueError(
            f"{path} is not a file of Traced.save; found {first[:40]!r} in its first line"
        ) from None
    if head["format"] != FORMAT:
        format_text = file_data.shown(head["format"])
        raise ValueError(
            f"{path} is of format {format_text}; this version of funcshard reads {FORMAT!r}"
        )
    digest = hashlib.sha256(file_rest).hexdigest()
    if head.get("sha256") != digest:
        raise ValueError(
            f"{path} is damaged: its checksum is not the one that was saved; save the traced step "
            "again"
        )
    try:
        facts, _, kinds = file_rest.partition(b"\n")
        return _contents(file_data.parse(facts), file_data.parse(kinds), digest)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; save the traced step again") from None


def _contents(facts: Any, kinds: Any, digest: str) -> FileContents:
    file_data.table(
        "its second line", facts, ("torch", "mesh", "plan", "changes", "dynamic_shapes", "of_rank")
    )
    for graph_kind in file_data.listed("the graphs", kinds):
        for recording in file_data.listed("the graphs of a rank", graph_kind):
            file_data.texts(
                "numbers", file_data.table("a graph", recording, ("numbers",))["numbers"]
            )
    mesh = file_data.table("the mesh", facts["mesh"])
    return FileContents(
        file_data.text("torch", facts["torch"]),
        {axis: file_data.whole("the size of an axis", size, 1) for axis, size in mesh.items()},
        plan_from_data(facts["plan"]),
        file_data.whole("changes", facts["changes"]),
        facts["dynamic_shapes"],
        list(file_data.numbers("of_rank", facts["of_rank"], 0, len(kinds) - 1)),
        kinds,
        digest,
    )
