"""Two reports side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.estimate.reports.comparing import compare
from funcshard.estimate.reports.differences import differences_between
from tests.estimate.made_reports import MIB, plan_of, report_of

MIXED = fs.MixedPrecision(torch.bfloat16, torch.float32)
PLAIN = plan_of()


def scheduled(**options: Any) -> Any:
    return dataclasses.replace(report_of(), schedule=fs.make_schedule(PLAIN, **options))


def of_blocks(names: list[str], **options: Any) -> Any:
    units = fs.wrap.Units([f"blocks.{i}" for i in range(4)], {f"blocks.{name}": options for name in names})
    return report_of(plan_of(units=units))


CHANGES: dict[str, tuple[Any, str]] = {
    "strategy": (
        report_of(plan_of(strategy="shard_grad_op")),
        "all units have the strategy shard_grad_op instead of full_shard",
    ),
    "strategy of some": (
        of_blocks(["0", "1"], strategy="shard_grad_op"),
        "2 × blocks.0, blocks.1 have the strategy shard_grad_op instead of full_shard",
    ),
    "kept": (
        of_blocks(["2"], reshard_after_forward=False),
        "blocks.2 is kept until backward instead of freed after forward",
    ),
    "kept by neighbours": (
        of_blocks(["0", "1", "2", "3"], reshard_after_forward=2),
        "4 × blocks.* are held by 2 ranks after forward instead of freed after forward",
    ),
    "precision": (
        report_of(plan_of(precision=MIXED)),
        "all units use bfloat16 for parameters and float32 for reductions instead of the dtypes of the leaves",
    ),
    "offload": (of_blocks(["3"], offload=True), "blocks.3 is offloaded to the CPU"),
    "remat": (report_of(options={"remat": ("blocks.0", "blocks.3")}), "2 × blocks.0, blocks.3 are recomputed in backward"),
    "mesh": (
        report_of(plan_of(mesh={"replicate": 2, "shard": 8})),
        "the mesh has 16 ranks = 2 replicate × 8 shard instead of 8 ranks",
    ),
    "buckets": (report_of(plan_of(bucket_bytes=4 * MIB)), "the plan has 2 buckets instead of none"),
    "units": (report_of(plan_of(units=["blocks.0"])), "the plan has 2 units instead of 5"),
    "prefetch": (scheduled(forward_prefetch=False), "the forward prefetch is off instead of on"),
    "backward prefetch": (scheduled(backward_prefetch=None), "the backward prefetch is off instead of pre"),
    "limit": (scheduled(limit=2), "the limit of units gathered ahead is 2 instead of 1"),
    "hardware": (report_of(hardware="a100"), "the hardware is a100 instead of h100-8x400gbps"),
    "option": (report_of(options={"batch": 2}), "the option batch is 2 instead of None"),
    "micro-batches": (
        report_of(options={"micro_batches": 2}, tokens=8192),
        "the step has 2 micro-batches instead of 1",
    ),
    "optimizer": (report_of(options={"optimizer": "sgd"}), "the optimizer is sgd instead of None"),
    "batch": (report_of(tokens=8192), "a rank's batch has 8,192 tokens instead of 4,096"),
    "model": (report_of(plan_of(blocks=5)), "the model has 2,883,584 parameters a rank instead of 2,359,296"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_each_change_is_one_clause(case: str) -> None:
    after, text = CHANGES[case]
    assert [change.text for change in differences_between(report_of(), after)] == [text]
    assert text in str(compare(report_of(), after))


def test_changes_go_both_ways() -> None:
    after = report_of(options={"remat": ("blocks.1",)})
    assert compare(after, report_of()).changes == ("blocks.1 is not recomputed in backward",)
    assert compare(of_blocks(["3"], offload=True), report_of()).changes == ("blocks.3 is not offloaded to the CPU",)
    assert compare(after, after).changes == ()


def test_a_number_that_one_change_can_move_has_it_as_its_cause() -> None:
    after = report_of(plan_of(bucket_bytes=4 * MIB), options={"remat": ("blocks.0", "blocks.1")})
    found = compare(report_of(), after).reasons
    cause = "because 2 × blocks.0, blocks.1 are recomputed in backward"
    assert found == (
        "The peak falls by 6.0 MiB (31.0 %), from 19.4 MiB to 13.4 MiB; it lies in the backward of blocks.3.",
        f"The bytes of saved activations at the peak fall by 6.0 MiB (50.0 %), from 12.0 MiB to 6.0 MiB, {cause}.",
        "The step time stays at 162.5 ms.",
    )


def test_recomputation_moves_the_time_of_backward() -> None:
    before, after = report_of(), report_of(options={"remat": ("blocks.0",)})
    spans = tuple(each._replace(seconds=2 * each.seconds) if each.what == "backward" else each for each in after.spans)
    found = compare(before, dataclasses.replace(after, spans=spans)).reasons
    (time,) = (line for line in found if "time of backward" in line)
    assert time.endswith(", because blocks.0 is recomputed in backward.")


def test_a_number_that_several_changes_can_move_lists_them() -> None:
    after = report_of(plan_of(strategy="shard_grad_op", precision=MIXED))
    (traffic,) = (line for line in compare(report_of(), after).reasons if "traffic" in line)
    assert traffic.startswith("The traffic along shard falls by ")
    assert "; changes that can move it: all units have the strategy shard_grad_op instead of full_shard, all" in traffic
    assert traffic.endswith("for parameters and float32 for reductions instead of the dtypes of the leaves.")


def test_a_peak_at_another_moment_has_no_sure_cause() -> None:
    after = report_of(options={"remat": ("blocks.3",)})
    moved = dataclasses.replace(after, timeline=tuple(m for m in after.timeline if m.unit != "blocks.3"))
    peak, activations, *_ = compare(report_of(), moved).reasons
    assert peak.endswith("it lies in the backward of blocks.2 instead of the backward of blocks.3.")
    assert activations.endswith("; changes that can move it: blocks.3 is recomputed in backward.")


def test_times_move_by_phase_and_by_waiting() -> None:
    after = dataclasses.replace(report_of(seconds=0.02, hardware="a100"), exposed=0.05)
    found = [line for line in compare(report_of(seconds=0.01), after).reasons if "hardware" in line or "step time" in line]
    cause = ", because the hardware is a100 instead of h100-8x400gbps."
    assert found == [
        "The step time rises by 162.5 ms (100.0 %), from 162.5 ms to 325.0 ms.",
        f"The time of backward rises by 80.0 ms (100.0 %), from 80.0 ms to 160.0 ms{cause}",
        f"The time of forward rises by 40.0 ms (100.0 %), from 40.0 ms to 80.0 ms{cause}",
        f"The wait for collectives rises by 40.0 ms (400.0 %), from 10.0 ms to 50.0 ms{cause}",
    ]


def test_the_table_pairs_units_and_folds_those_that_are_equal_in_both() -> None:
    after = report_of(options={"remat": ("blocks.0", "blocks.1")})
    found = compare(of_blocks(["1"], strategy="shard_grad_op"), after)
    assert [pair.title for pair in found.units] == ["(root)", "blocks.0", "blocks.1", "2 × blocks.2, blocks.3"]
    assert sum(pair.of(lambda use: use.bytes)[0] for pair in found.units) == 14 * MIB
    assert found.units[2].of(lambda use: use.bytes) == (3 * MIB, 0)
    row = next(line for line in str(found).splitlines() if line.startswith("blocks.1 "))
    assert row.split("  ")[-1].strip() == "-"
    assert "−3.0 MiB" in row
    html = found._repr_html_()
    assert html.count("<li>") == len(found.changes) + len(found.reasons)
    assert "−3.0 MiB" in html


def test_units_of_one_plan_alone_are_rows_of_their_own() -> None:
    found = compare(report_of(), report_of(plan_of(units=["blocks.0"])))
    alone = [(pair.title, bool(pair.before), bool(pair.after)) for pair in found.units]
    assert alone == [("(root)", True, True), ("blocks.0", True, True), ("3 × blocks.1 … blocks.3", True, False)]
    assert sum(pair.of(lambda use: use.traffic)[0] for pair in found.units) == sum(report_of().traffic.values())


def test_totals_are_those_of_the_reports() -> None:
    before, after = report_of(), report_of(plan_of(strategy="shard_grad_op", mesh={"replicate": 2, "shard": 4}))
    found = compare(before, after)
    for i, report in enumerate((before, after)):
        assert sum(pair.of(lambda use: use.traffic)[i] for pair in found.units) == sum(report.traffic.values())


def test_an_axis_of_one_plan_alone_has_the_mesh_as_the_cause_of_its_traffic() -> None:
    after = report_of(plan_of(strategy="shard_grad_op", mesh={"replicate": 2, "shard": 4}))
    along = {line.split()[3]: line for line in compare(report_of(), after).reasons if "traffic" in line}
    assert along["replicate"].endswith(", because the mesh has 8 ranks = 2 replicate × 4 shard instead of 8 ranks.")
    assert "; changes that can move it: the mesh has" in along["shard"]


def test_equal_reports_differ_in_nothing() -> None:
    text = str(compare(report_of(), report_of()))
    assert "Changes\n  - none" in text
    assert "The peak stays at 19.4 MiB; it lies in the backward of blocks.3." in text


def test_only_reports_are_compared() -> None:
    with pytest.raises(TypeError, match="after must be a Report that estimate returned; found Plan"):
        compare(report_of(), PLAIN)  # type: ignore[arg-type]
