"""The file of a traced step, for all ranks.

The first line has the format and a checksum of the rest, the second one facts, the third one the
graphs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcshard._utils import file_data
from funcshard._utils.regular_files import read_regular
from funcshard.comm import Mesh, all_gather_texts

FORMAT = "funcshard.graph/2"


def recordings_text(recordings: Sequence[dict[str, Any]]) -> str:
    """Return recordings as JSON."""
    return _short(recordings)


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_file(path: Path, facts: dict[str, Any], kinds: Sequence[str]) -> None:
    """Write a file under another name, and rename it once it's complete."""
    file_text = f"{_short(facts)}\n[{','.join(kinds)}]\n"
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


def read_file(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return the facts and the graphs of a file; the facts have its ``"digest"`` too."""
    first_part, _, file_rest = read_regular(path).partition(b"\n")
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
    facts, _, kind_texts = file_rest.partition(b"\n")
    try:
        file_facts = file_data.table("its second line", file_data.parse(facts))
        return file_facts | {"digest": digest}, file_data.parse(kind_texts)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; save the traced step again") from None


# --- all ranks ------------------------------------------------------------------------------------


def save_together(
    path: Path, facts: dict[str, Any], text: str, collectives: str, mesh: Mesh, *, error: str = ""
) -> None:
    """Write one file for all ranks, which all call this; raise if they differ, or one has an error.

    Arguments:
        text: this rank's graphs. The file holds each text once.
        collectives: this rank's collectives, equal on all ranks.
    """
    # Why digests: texts of many MiB are sent only if they differ.
    own_report = [error, text_digest(json.dumps([facts, collectives])), text_digest(text)]
    rank_reports = map(json.loads, all_gather_texts(mesh, json.dumps(own_report), "a saved step"))
    rank_errors, fact_digests, text_digests = zip(*rank_reports, strict=True)
    for rank in range(mesh.world_size):
        if rank_errors[rank]:
            raise ValueError(error or f"rank {rank} cannot save: {rank_errors[rank]}")
        if fact_digests[rank] != fact_digests[0]:
            raise ValueError(
                f"every rank saves the same step; ranks 0 and {rank} differ in the plan, the mesh, "
                "the number of passes, or the collectives of their graphs"
            )
    # Note: the first rank of each kind of graph, in order.
    first_ranks = [text_digests.index(digest) for digest in dict.fromkeys(text_digests)]
    kind_texts: Sequence[str] = [text]
    if len(first_ranks) > 1:
        # Note: one rank of each kind is enough.
        own_text = text if mesh.rank in first_ranks else ""
        sent_texts = all_gather_texts(mesh, own_text, "the graphs of a saved step")
        kind_texts = [sent_texts[rank] for rank in first_ranks]
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
