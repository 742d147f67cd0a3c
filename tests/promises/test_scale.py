"""Nothing that one rank holds, sends or stores grows with the number of ranks: counts and bytes."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

import funcshard as fs
from benchmarks.scale import Scale, measure
from benchmarks.scale_checkpoints import measure_checkpoint

UNITS, FEW, MANY = 8, 8, 16_384


def smallest(ranks: int) -> Scale:
    """Return the measurement of three that holds the fewest bytes.

    Why: the heap is that of the process, so a table of another module that grows during one
    measurement (a cache, what a thread of an earlier test makes) counts as the rank's.
    """
    return min((measure(ranks, UNITS) for _ in range(3)), key=own_heap)


def own_heap(scale: Scale) -> int:
    return scale.heap - scale.heap_torch


def without_digits(text: str) -> str:
    return re.sub(r"\d+", "0", text)


@pytest.mark.nightly
def test_one_rank_of_16384_holds_and_sends_what_one_of_8_does() -> None:
    few, many = smallest(FEW), smallest(MANY)
    assert (many.step, many.construction) == (few.step, few.construction), "messages grow with the number of ranks"
    assert without_digits(many.plan) == without_digits(few.plan), "plans grow with the number of ranks"
    before, now = own_heap(few), own_heap(many)
    assert now < before + 12_000, f"Python objects grow with the number of ranks: from {before} to {now} bytes"
    assert few.ranks == FEW
    assert not dist.is_initialized()


def test_the_fingerprint_and_the_shape_of_a_plan_do_not_know_the_number_of_ranks() -> None:
    params = {str(i): {"w": torch.zeros(4, 4)} for i in range(UNITS)}
    small, large = (fs.make_plan(params, ranks, units=["*"]) for ranks in (FEW, MANY))
    assert without_digits(small.to_json()) == without_digits(large.to_json())
    assert len(small.fingerprint()) == len(large.fingerprint()) == 16


@pytest.mark.slow
def test_the_index_of_a_checkpoint_and_the_files_that_a_rank_reads_do_not_grow() -> None:
    few, many = (measure_checkpoint(UNITS, {"shard": n}, {"shard": 3 * n // 4}) for n in (FEW, 1024))
    digits = 4 * (3 * UNITS + 4)  # four more digits for each number of ranks
    assert many.index <= few.index + digits, f"the index grows with the number of ranks: {few.index} to {many.index} bytes"
    assert many.table <= few.table, "tables grow with the number of ranks"
    assert many.tables <= 3, f"a rank reads the files of {many.tables} ranks"
    hybrid = measure_checkpoint(UNITS, {"shard": 1024}, {"replicate": 8, "shard": 96})
    assert hybrid.tables == 9  # a shard of 44 elements lies in shards of 5
