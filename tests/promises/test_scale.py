"""Nothing that one rank holds, sends or stores grows with the number of ranks: counts and bytes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import funcshard as fs
from benchmarks.scale import Scale, measure
from benchmarks.scale_checkpoints import CheckpointScale, measure_checkpoint
from funcshard.checkpoint import manifest
from funcshard.comm import desync

UNITS, FEW, MANY = 8, 8, 16_384


@pytest.fixture(scope="module")
def few() -> Scale:
    return smallest(FEW)


def smallest(ranks: int) -> Scale:
    """Return the measurement of three that holds the fewest bytes.

    Why: the heap is that of the process, so a table of another module that grows during one
    measurement (a cache, what a thread of an earlier test makes) counts as the rank's.
    """
    return min((measure(ranks, UNITS) for _ in range(3)), key=own_heap)


def own_heap(scale: Scale) -> int:
    return scale.heap - scale.heap_torch


def check_runs(few: Scale, many: Scale) -> None:
    """Raise ``AssertionError`` if one rank of many does more for a step than one of few."""
    assert (many.step, many.construction) == (few.step, few.construction), "messages grow with the number of ranks"
    assert without_digits(many.plan) == without_digits(few.plan), "plans grow with the number of ranks"
    before, now = own_heap(few), own_heap(many)
    assert now < before + 12_000, f"Python objects grow with the number of ranks: from {before} to {now} bytes"


def check_checkpoints(few: CheckpointScale, many: CheckpointScale) -> None:
    """Raise ``AssertionError`` if the index of many ranks is larger than that of few."""
    digits = 4 * (3 * UNITS + 4)  # four more digits for each number of ranks
    assert many.index <= few.index + digits, f"the index grows with the number of ranks: {few.index} to {many.index} bytes"
    assert many.table <= few.table, "tables grow with the number of ranks"
    assert many.tables <= 3, f"a rank reads the files of {many.tables} ranks"


def without_digits(text: str) -> str:
    return re.sub(r"\d+", "0", text)


@pytest.mark.slow
def test_one_rank_of_16384_holds_and_sends_what_one_of_8_does(few: Scale) -> None:
    check_runs(few, smallest(MANY))


def test_the_fingerprint_and_the_shape_of_a_plan_do_not_know_the_number_of_ranks() -> None:
    params = {str(i): {"w": torch.zeros(4, 4)} for i in range(UNITS)}
    small, large = (fs.make_plan(params, ranks, units=["*"]) for ranks in (FEW, MANY))
    assert without_digits(small.to_json()) == without_digits(large.to_json())
    assert len(small.fingerprint()) == len(large.fingerprint()) == 16


@pytest.mark.slow
def test_the_index_of_a_checkpoint_and_the_files_that_a_rank_reads_do_not_grow() -> None:
    small = measure_checkpoint(UNITS, {"shard": FEW}, {"shard": 6})
    check_checkpoints(small, measure_checkpoint(UNITS, {"shard": 1024}, {"shard": 768}))
    hybrid = measure_checkpoint(UNITS, {"shard": 1024}, {"replicate": 8, "shard": 96})
    assert hybrid.tables == 9  # a shard of 44 elements lies in shards of 5


# --- planted faults -------------------------------------------------------------------------------


def in_plan(patch: pytest.MonkeyPatch) -> None:
    make = fs.make_plan

    def planted(params: object, mesh: fs.Mesh, **options: object) -> fs.Plan:
        plan = make(params, mesh, **options)
        return dataclasses.replace(plan, names=(*plan.names, *map(str, range(mesh.world_size))))

    patch.setattr(fs, "make_plan", planted)


def in_detector(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(desync, "compact", lambda ranks: [2**20 + rank for rank in ranks])


def in_message(patch: pytest.MonkeyPatch) -> None:
    start = desync.DesyncDetector._start_comparison

    def planted(self: desync.DesyncDetector, *values: int) -> object:
        desync.dist.all_reduce(torch.zeros(len(self._ranks)), group=self._control)
        return start(self, *values)

    patch.setattr(desync.DesyncDetector, "_start_comparison", planted)


RUNS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "a plan that lists ranks": (in_plan, "plans grow"),
    "a detector that lists ranks": (in_detector, "Python objects grow"),
    "a message with a number for each rank": (in_message, "messages grow"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_list_of_ranks_in_a_run_is_caught(name: str, few: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, words = RUNS[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=words):
        check_runs(few, smallest(2_048))


@pytest.mark.slow
def test_a_list_of_ranks_in_an_index_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    write = manifest.write_text

    def planted(path: Path, body: dict) -> None:
        write(path, {**body, "ranks": list(range(fs.Plan.from_json(json.dumps(body["plan"])).world_size))})

    monkeypatch.setattr(manifest, "write_text", planted)
    small, large = (measure_checkpoint(UNITS, {"shard": ranks}, {"shard": ranks * 3 // 4}) for ranks in (FEW, 1024))
    with pytest.raises(AssertionError, match="the index grows with the number of ranks"):
        check_checkpoints(small, large)


def test_no_process_group_is_left(few: Scale) -> None:
    assert few.ranks == FEW
    assert not dist.is_initialized()
