"""The use of each unit, with equal units as one."""

from __future__ import annotations

import dataclasses

import pytest

import funcshard as fs
from funcshard.estimate.reports.report import by_unit, recomputed_units
from tests.estimate.made_reports import MIB, plan_of, report_of

PLANS = {
    "one axis": plan_of(),
    "two axes": plan_of(mesh={"replicate": 2, "shard": 4}),
    "groups": plan_of(blocks=5, mesh={"replicate": 2, "shard": 3}, bucket_bytes=5 * MIB),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_traffic_of_units_adds_up_to_the_traffic_of_the_report(name: str) -> None:
    report = report_of(PLANS[name])
    assert sum(use.traffic for use in by_unit(report)) == sum(report.traffic.values()) > 0


def test_the_memory_and_time_of_units_are_those_of_the_report() -> None:
    report = report_of(seconds=0.01)
    root, blocks = by_unit(report)
    assert (root.title, blocks.title) == ("(root)", "4 × blocks.*")
    assert blocks.memory == {"activations": 4 * 3 * MIB, "gathered": 2 * MIB}
    assert blocks.bytes == 14 * MIB
    assert blocks.compute == pytest.approx(4 * 0.03)
    assert blocks.communication == pytest.approx(4 * (0.005 + 0.005 + 0.0025))


@pytest.mark.parametrize(
    ("remat", "titles"),
    [
        ((), ["(root)", "4 × blocks.*"]),
        (("blocks.1",), ["(root)", "3 × blocks.0 … blocks.3", "blocks.1"]),
        (("blocks.0", "blocks.1"), ["(root)", "2 × blocks.0, blocks.1", "2 × blocks.2, blocks.3"]),
    ],
)
def test_units_that_are_computed_again_are_a_row_of_their_own(remat, titles) -> None:  # type: ignore[no-untyped-def]
    report = report_of(options={"remat": remat})
    assert recomputed_units(report) == set(remat)
    assert [use.title for use in by_unit(report)] == titles


def test_events_of_no_unit_have_a_row() -> None:
    report = report_of(plan_of())
    events = (*report.events, fs.Event("all_reduce", None, "", "float32", 800, "shard", 8))
    *_, rest = by_unit(dataclasses.replace(report, events=events))
    assert (rest.title, rest.traffic) == ("(no unit)", 1400)


def test_a_group_is_computed_again_if_one_of_its_modules_is() -> None:
    report = report_of(plan_of(bucket_bytes=5 * MIB), options={"remat": ("blocks.1",)})
    assert [*report.plan.units] == ["", "blocks.0…blocks.1", "blocks.2…blocks.3"]
    assert recomputed_units(report) == {"blocks.0…blocks.1"}
