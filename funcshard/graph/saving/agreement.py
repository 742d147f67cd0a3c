"""Save the graphs of all ranks into one file, which needs them to agree."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcshard.comm import Mesh, all_gather_texts
from funcshard.graph.saving.graph_file import text_digest, write_file

_SHOWN = 90  # characters of a line in an error


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
    """Write one file for all ranks; every rank of the mesh has to call this.

    Arguments:
        path: the file.
        facts: the plan, the mesh and so on, the same on every rank.
        text: this rank's recordings.
        collectives: this rank's collectives, which have to be the same on every rank.
        mesh: the ranks.
        per_rank: whether ranks may have other graphs.
        error: why this rank has no recordings to save.

    Raises:
        ValueError: ranks differ, or one of them has an error.
    """
    own_report = {
        "text": text_digest(text), "collectives": text_digest(collectives), "per_rank": per_rank,
        "facts": text_digest(json.dumps(facts)), "error": error,
    }  # fmt: skip
    rank_reports = [
        json.loads(report_text)
        for report_text in all_gather_texts(mesh, json.dumps(own_report), "a saved step")
    ]
    for rank, rank_report in enumerate(rank_reports):
        if rank_report["error"]:
            raise ValueError(
                rank_report["error"]
                if rank_report["error"] == error
                else f"rank {rank} cannot save: {rank_report['error']}"
            )
    for rank, rank_report in enumerate(rank_reports):
        if (rank_report["facts"], rank_report["per_rank"]) != (
            rank_reports[0]["facts"],
            rank_reports[0]["per_rank"],
        ):
            raise ValueError(
                f"every rank saves the same step with the same options; ranks 0 and {rank} differ "
                "in the plan, the mesh, the number of passes or per_rank"
            )
    digests = [rank_report["text"] for rank_report in rank_reports]
    # The first rank of each kind.
    firsts = [digests.index(digest) for digest in dict.fromkeys(digests)]
    texts = {0: text}
    if len(firsts) > 1:
        rank_text = text if mesh.rank in firsts else ""
        sent = all_gather_texts(
            mesh,
            json.dumps([rank_text, collectives if rank_text else ""]),
            "the graphs of a saved step",
        )
        both = {rank: json.loads(sent[rank]) for rank in firsts}
        texts = {rank: graph_text for rank, (graph_text, _) in both.items()}
        for rank in firsts[1:]:
            if both[rank][1] != both[0][1]:
                where = _first_difference(both[0][1], both[rank][1])
                raise ValueError(
                    f"the collectives of ranks 0 and {rank} differ, so a run would wait for ever: "
                    f"{where}"
                )
            if not per_rank:
                where = _first_difference(texts[0], texts[rank])
                raise ValueError(
                    f"the graphs of ranks 0 and {rank} differ, and one file holds one graph for "
                    f"all: {where}; if ranks have other work, as with muon and groups of an "
                    "optimizer, pass save(path, per_rank=True)"
                )
    failed = ""
    if mesh.rank == 0:
        try:
            kinds = [texts[rank] for rank in firsts]
            of_rank = [firsts.index(digests.index(digest)) for digest in digests]
            write_file(path, {**facts, "of_rank": of_rank}, kinds)
        except OSError as problem:
            failed = f"rank 0 cannot write {path}: {problem}"
    # Why: no rank returns before the file is there.
    failed = all_gather_texts(mesh, failed, "the end of a saved step")[0]
    if failed:
        raise OSError(failed)


def _first_difference(one: str, other: str) -> str:
    lines: Sequence[tuple[str, str]] = list(zip(one.splitlines(), other.splitlines(), strict=False))
    for line_number, (first, second) in enumerate(lines, 1):
        if first != second:
            same = next(
                (
                    i
                    for i, pair in enumerate(zip(first, second, strict=False))
                    if pair[0] != pair[1]
                ),
                0,
            )
            begin = max(0, same - _SHOWN // 2)
            return f"line {line_number} is {first[begin : begin + _SHOWN]!r} and {second[begin : begin + _SHOWN]!r}"
    return f"one has {len(one.splitlines())} lines, the other {len(other.splitlines())}"
