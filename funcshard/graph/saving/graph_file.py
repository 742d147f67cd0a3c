"""The file of a traced step, for all ranks.

The first line has the format and a checksum of the rest, the second one facts. An operation has a
line, so that files can be compared.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcshard._utils import file_data
from funcshard._utils.regular_files import read_regular
from funcshard.comm import Mesh, all_gather_texts
from funcshard.plan import Plan, plan_from_data

FORMAT = "funcshard.graph/1"
_SHOWN = 90  # characters of a line in an error


@dataclass(frozen=True, slots=True)
class FileContents:
    """The contents of a file.

    Attributes:
        changes: number of passes that changed the graphs.
        of_rank: index of each rank's kind in ``kinds``.
        kinds: the recordings of each kind of rank.
        digest: SHA-256 of the file after its first line.
    """

    torch: str
    mesh: dict[str, int]
    plan: Plan
    changes: int
    dynamic_shapes: Any
    of_rank: Sequence[int]
    kinds: list[Any]
    digest: str


def recordings_text(recordings: Sequence[dict[str, Any]]) -> str:
    """Return recordings as JSON, with a line for each operation and leaf."""
    recording_texts = ["{\n" + _fields(recording) + "\n}" for recording in recordings]
    return _lines(recording_texts)


def _fields(data: dict[str, Any]) -> str:
    return ",\n".join(f"{json.dumps(key)}: {_value_text(key, data[key])}" for key in data)


def _value_text(key: str, value: Any) -> str:
    if key in ("nodes", "leaves"):
        return _lines(map(_short, value))
    return "{" + _fields(value) + "}" if key == "signature" else _short(value)


def _lines(texts: Iterable[str]) -> str:
    return "[\n" + ",\n".join(texts) + "\n]"


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_file(path: Path, facts: dict[str, Any], kinds: Sequence[str]) -> None:
    """Write a file under another name, and rename it once it's complete."""
    file_text = f"{_short(facts)}\n{_lines(kinds)}\n"
    first_line = _short({"format": FORMAT, "sha256": text_digest(file_text)})
    part_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part_path, "w", newline="\n") as file:
            file.write(f"{first_line}\n{file_text}")
            file.flush()
            # Why: the rename must not come before the data, if the machine stops.
            os.fsync(file.fileno())
        os.replace(part_path, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part_path.unlink()


def read_file(path: Path) -> FileContents:
    """Return the contents of a file."""
    data = read_regular(path)
    first_part, _, file_rest = data.partition(b"\n")
    try:
        first_line = file_data.table("its first line", file_data.parse(first_part), ("format",))
    except ValueError:
        raise ValueError(
            f"{path} is not a file of Traced.save; found {first_part[:40]!r} in its first line"
        ) from None
    if first_line["format"] != FORMAT:
        format_text = file_data.shown(first_line["format"])
        raise ValueError(
            f"{path} is of format {format_text}; this version of funcshard reads {FORMAT!r}"
        )
    digest = hashlib.sha256(file_rest).hexdigest()
    if first_line.get("sha256") != digest:
        raise ValueError(
            f"{path} is damaged: its checksum is not the one that was saved; save the traced step "
            "again"
        )
    try:
        facts, _, kind_texts = file_rest.partition(b"\n")
        return _contents(file_data.parse(facts), file_data.parse(kind_texts), digest)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; save the traced step again") from None


def _contents(facts: Any, kinds: Any, digest: str) -> FileContents:
    fact_keys = ("torch", "mesh", "plan", "changes", "dynamic_shapes", "of_rank")
    file_data.table("its second line", facts, fact_keys)
    for recordings in file_data.listed("the graphs", kinds):
        for recording in file_data.listed("the graphs of a rank", recordings):
            file_data.texts(
                "numbers", file_data.table("a graph", recording, ("numbers",))["numbers"]
            )
    mesh_sizes = file_data.table("the mesh", facts["mesh"])
    return FileContents(
        torch=file_data.text("torch", facts["torch"]),
        mesh={
            axis: file_data.whole("the size of an axis", size, 1)
            for axis, size in mesh_sizes.items()
        },
        plan=plan_from_data(facts["plan"]),
        changes=file_data.whole("changes", facts["changes"]),
        dynamic_shapes=facts["dynamic_shapes"],
        of_rank=file_data.numbers("of_rank", facts["of_rank"], 0, len(kinds) - 1),
        kinds=kinds,
        digest=digest,
    )


# --- all ranks ------------------------------------------------------------------------------------


def save_together(
    path: Path,
    facts: dict[str, Any],
    text: str,
    collectives: str,
    mesh: Mesh,
    *,
    per_rank: bool,
    error: str = "",
) -> None:
    """Write one file for all ranks, which all call this; raise if they differ, or one has an error.

    Arguments:
        collectives: this rank's collectives, equal on all ranks.
        per_rank: whether ranks may have other graphs.
    """
    # Why digests: texts of many MiB are sent only if they differ.
    own_report = [error, text_digest(json.dumps([facts, per_rank])), text_digest(text)]
    rank_reports = map(json.loads, all_gather_texts(mesh, json.dumps(own_report), "a saved step"))
    rank_errors, fact_digests, text_digests = zip(*rank_reports, strict=True)
    for rank in range(mesh.world_size):
        if rank_errors[rank]:
            raise ValueError(error or f"rank {rank} cannot save: {rank_errors[rank]}")
        if fact_digests[rank] != fact_digests[0]:
            raise ValueError(
                f"every rank saves the same step with the same options; ranks 0 and {rank} differ "
                "in the plan, the mesh, the number of passes or per_rank"
            )
    # Note: the first rank of each kind of graph, in order.
    first_ranks = [text_digests.index(digest) for digest in dict.fromkeys(text_digests)]
    kind_texts: Sequence[str] = [text]
    if len(first_ranks) > 1:
        # Note: one rank of each kind is enough.
        own_texts = [text, collectives] if mesh.rank in first_ranks else []
        sent = all_gather_texts(mesh, json.dumps(own_texts), "the graphs of a saved step")
        kind_texts, collectives_of = zip(
            *(json.loads(sent[rank]) for rank in first_ranks), strict=True
        )
        for kind_index, rank in enumerate(first_ranks):
            if collectives_of[kind_index] != collectives_of[0]:
                raise ValueError(
                    f"the collectives of ranks 0 and {rank} differ, so a run would wait for ever: "
                    f"{_first_difference(collectives_of[0], collectives_of[kind_index])}"
                )
            if rank > 0 and not per_rank:
                raise ValueError(
                    f"the graphs of ranks 0 and {rank} differ, and one file holds one graph for "
                    f"all: {_first_difference(kind_texts[0], kind_texts[kind_index])}; if ranks have other "
                    "work, as with muon and groups of an optimizer, pass save(path, per_rank=True)"
                )
    write_failure = ""
    if mesh.rank == 0:
        of_rank = [first_ranks.index(text_digests.index(digest)) for digest in text_digests]
        try:
            write_file(path, {**facts, "of_rank": of_rank}, kind_texts)
        except OSError as problem:
            write_failure = f"rank 0 cannot write {path}: {problem}"
    # Why: no rank returns before the file is there.
    write_failure = all_gather_texts(mesh, write_failure, "the end of a saved step")[0]
    if write_failure:
        raise OSError(write_failure)


def _first_difference(first_text: str, second_text: str) -> str:
    texts = first_text.splitlines(), second_text.splitlines()
    for line_index, lines in enumerate(zip(*texts, strict=False)):
        if lines[0] != lines[1]:
            equal_chars = [
                first_part == second_part for first_part, second_part in zip(*lines, strict=False)
            ]
            begin = max(0, [*equal_chars, False].index(False) - _SHOWN // 2)
            first_part, second_part = (line[begin : begin + _SHOWN] for line in lines)
            return f"line {line_index + 1} is {first_part!r} and {second_part!r}"
    return f"one has {len(texts[0])} lines, the other {len(texts[1])}"
