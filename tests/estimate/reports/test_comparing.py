"""Two reports side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.estimate import Runtime
from funcshard.estimate.reports.comparing import compare, tabulate
from tests.estimate.made_reports import MIB, plan_of, report_of

MIXED = fs.MixedPrecision(torch.bfloat16, torch.float32)
PLAIN = plan_of()


def scheduled(**options: Any) -> Any:
    return dataclasses.replace(report_of(), schedule=fs.make_schedule(PLAIN, **options))


def of_blocks(names: list[str], **options: Any) -> Any:
    units = fs.wrap.Units([f"blocks.{i}" for i in range(4)], {f"blocks.{name}": options for name in names})
    return report_of(plan_of(units=units))


def worked(**work: int) -> Any:
    spans = tuple(span._replace(**work) if span.what == "forward" else span for span in report_of().spans)
    return dataclasses.replace(report_of(), spans=spans)


CHANGES: dict[str, tuple[Any, list[str]]] = {
    "strategy": (report_of(plan_of(strategy="shard_grad_op")),
     ["all units: strategy is shard_grad_op instead of full_shard"]),
    "strategy of some": (of_blocks(["0", "1"], strategy="shard_grad_op"),
     ["2 × blocks.0, blocks.1: strategy is shard_grad_op instead of full_shard"]),
    "kept": (of_blocks(["2"], reshard_after_forward=False), ["blocks.2: reshard_after_forward is False instead of True"]),
    "kept by neighbours": (of_blocks(["0", "1", "2", "3"], reshard_after_forward=2),
     ["4 × blocks.*: reshard_after_forward is 2 instead of True"]),
    "precision": (report_of(plan_of(precision=MIXED)),
     ["all units: param_dtype is torch.bfloat16 instead of None",
      "all units: reduce_dtype is torch.float32 instead of None"]),
    "offload": (of_blocks(["3"], offload=True), ["blocks.3: offload is True instead of False"]),
    "remat": (report_of(options={"remat": ("blocks.0", "blocks.3")}),
     ["2 × blocks.0, blocks.3: remat is True instead of False"]),
    "mesh": (report_of(plan_of(mesh={"replicate": 2, "shard": 8})),
     ["the mesh is 16 ranks = 2 replicate × 8 shard instead of 8 ranks"]),
    "units": (dataclasses.replace(report_of(plan_of(units=["blocks.0"])), spans=report_of().spans),
     ["the number of units is 2 instead of 5"]),
    "prefetch": (scheduled(forward_prefetch=False), ["forward_prefetch is False instead of True"]),
    "limit": (scheduled(limit=2), ["limit is 2 instead of 1"]),
    "hardware": (report_of(hardware="a100"), ["the hardware is a100 instead of h100-8x400gbps"]),
    "option": (report_of(options={"batch": 2}), ["batch is 2 instead of None"]),
    "micro-batches": (
     dataclasses.replace(report_of(options={"accumulate": fs.Accumulation(2)}, tokens=8192), spans=2 * report_of().spans),
     ["micro_batches is 2 instead of 1"]),
    "batch": (report_of(tokens=8192), ["the number of tokens in a micro-batch is 8,192 instead of 4,096"]),
    "dtype of leaves": (report_of(plan_of(dtype=torch.bfloat16)),
     ["all units: the dtype of leaves is bfloat16 instead of float32"]),
    "frozen leaves": (report_of(plan_of(frozen=True)), ["4 × blocks.*: trainable is False instead of True"]),
    "loss": (worked(flops=2 * 10**9), ["FLOPs of forward and loss is 8,000,000,000 instead of 4,000,000,000"]),
    "code of the model": (report_of(saved=MIB), ["the reports differ in what this list does not show"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_each_change_is_one_clause(case: str) -> None:
    after, clauses = CHANGES[case]
    found = compare(report_of(), after)
    assert [*found.changes] == clauses
    assert all(clause in str(found) for clause in clauses)


def test_changes_go_both_ways_and_equal_reports_differ_in_nothing() -> None:
    after = report_of(options={"remat": ("blocks.1",)})
    assert compare(after, report_of()).changes == ("blocks.1: remat is False instead of True",)
    assert "Changes\n  - none" in str(compare(after, after))
    more = compare(report_of(), report_of(plan_of(blocks=5))).changes
    assert "the number of parameters is 2,883,584 instead of 2,359,296" in more


def rows_of(text: str, title: str) -> list[str]:
    """Return the rows of a table and its total, without the spaces between cells."""
    lines = text[text.index(title) :].split("\n\n")[0].splitlines()[4:]
    return ["|".join(filter(None, map(str.strip, line.split("  ")))) for line in lines if not line.startswith("─")]


def test_times_move_by_phase_and_by_waiting() -> None:
    after = dataclasses.replace(report_of(seconds=0.02, hardware="a100"), exposed=0.05)
    assert rows_of(str(compare(report_of(seconds=0.01), after)), "Time of a step") == [
        "forward|40.0 ms|80.0 ms|+40.0 ms", "backward|80.0 ms|160.0 ms|+80.0 ms",
        "waits for collectives|10.0 ms|50.0 ms|+40.0 ms", "total|162.5 ms|325.0 ms|+162.5 ms",
    ]  # fmt: skip


def test_traffic_moves_by_collective_and_axis() -> None:
    after = report_of(plan_of(strategy="shard_grad_op", mesh={"replicate": 2, "shard": 4}))
    rows = [row.split("|") for row in rows_of(str(compare(report_of(), after)), "Traffic of a rank in a step")]
    assert [row[0] for row in rows] == [
        "all-gather along shard", "reduce-scatter along shard", "all-reduce along replicate", "total",
    ]  # fmt: skip
    assert rows[2][1] == "0 B"
    assert rows[2][3] == f"+{rows[2][2]}"


def test_another_option_of_estimate_is_a_change() -> None:
    profile = fs.profile(*fs.make_functional(torch.nn.Linear(32, 32)), torch.zeros(8, 32))
    plan = fs.make_plan(profile.forms, 2)
    for name, option in (
        ("reduce", {"accumulate": fs.Accumulation(reduce="once")}),
        ("runtime", {"runtime": Runtime.fsdp2()}),
    ):
        (change,) = compare(fs.estimate(profile, plan), fs.estimate(profile, plan, **option)).changes
        assert change.startswith(f"{name} is ")


def titles_of(found: Any) -> list[str]:
    return [row.partition("|")[0] for row in rows_of(str(found), "compared with plan")]


def test_the_table_pairs_units_and_folds_those_that_are_equal_in_both() -> None:
    after = report_of(options={"remat": ("blocks.0", "blocks.1")})
    found = compare(of_blocks(["1"], strategy="shard_grad_op"), after)
    assert titles_of(found) == ["(root)", "blocks.0", "blocks.1", "2 × blocks.2, blocks.3", "total"]
    row = next(line for line in str(found).splitlines() if line.startswith("blocks.1 "))
    assert row.split("  ")[-1].strip() == "-"
    assert "−3.0 MiB" in row
    alone = compare(report_of(), report_of(plan_of(units=["blocks.0"])))
    assert titles_of(alone) == ["(root)", "blocks.0", "3 × blocks.1 … blocks.3", "total"]
    html = found._repr_html_()
    assert html.count("<li>") == len(found.changes)
    assert "−3.0 MiB" in html


def test_a_table_has_a_row_for_each_report() -> None:
    reports = {"many": report_of(budget=2 * MIB), "few": report_of(tokens=0, flops=0)}
    found = tabulate(reports)
    assert len(str(found).splitlines()) == 4 + len(reports) + 1
    assert found._repr_html_().count("<tr>") == 1 + len(reports)


def test_only_reports_are_compared() -> None:
    with pytest.raises(TypeError, match="after must be a Report that estimate returned; found Plan"):
        compare(report_of(), PLAIN)  # type: ignore[arg-type]
