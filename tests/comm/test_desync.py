"""A detector of different collectives: what it compares and when, and what it leaves.

What ranks are told is in test_desync_waits.py.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import funcshard as fs
from funcshard.comm import Op, check_all_same, desync, watch
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.watch import Limits, Watch
from funcshard.core import raise_on_every_rank
from tests.ranks import run_simulated


def gather(mesh: fs.Mesh) -> None:
    mesh.shard.start(Op("all_gather", "unit 'b'" if mesh.rank else "unit 'a'", torch.empty(2), torch.empty(1))).wait()


def exchange(mesh: fs.Mesh) -> None:
    raise_on_every_rank(mesh, None) if mesh.rank else check_all_same(mesh, {"the plan": "text"})


LABELS = {
    r"all_gather of float32\[2\], float32\[1\] of unit 'a' on rank 0 and all_gather .* of unit 'b' on rank 1": gather,
    "a comparison of the plan on rank 0 .* report of faults on rank 1": exchange,
}


@pytest.mark.parametrize("words", LABELS)
def test_simulated_ranks_compare_labels_and_purposes_of_texts_too(words: str) -> None:
    with pytest.raises(RuntimeError, match=f"ranks issue different collectives: number .*{words}"):
        run_simulated(LABELS[words], 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_of_a_rank_is_told_that_it_cannot_take_part(tmp_path: Path) -> None:
    detector, answer = DesyncDetector("shard", [0], 0), tmp_path / "answer"
    child = os.fork()
    if not child:
        try:
            detector.record("all_reduce", "", torch.float32, 2)
        except RuntimeError as error:
            answer.write_text(str(error))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    words = "which is rank 0, and cannot take part in its collectives: keep the mesh out of forked workers"
    assert f"was forked from process {os.getpid()}, {words}" in answer.read_text()


def test_a_detector_that_is_deleted_waits_for_nothing_and_its_group_ends_after_its_last_comparison(monkeypatch) -> None:
    destroyed: list[str] = []
    ended: list[bool] = []
    monkeypatch.setattr(watch, "destroy_group", destroyed.append)
    own, work = Watch(0, dist.HashStore()), SimpleNamespace(is_completed=lambda: bool(ended))
    control = SimpleNamespace(group_name="control")
    detector = DesyncDetector("shard", [0, 1], 0, control, own, Limits(1000.0))
    detector.comparison = desync.Comparison(1, 2, torch.zeros(7), work)
    start = time.monotonic()
    del detector
    own.destroy_unused()  # as before another mesh is made
    assert destroyed == []
    own.finish(0.01)  # at the end of the process
    assert time.monotonic() - start < 10
    ended.append(True)
    own.destroy_unused()
    assert destroyed == [control]
    assert own.unused == []


@pytest.mark.slow
def test_a_desync_aborts_the_groups_of_other_backends_than_gloo_once() -> None:
    aborted: list[str] = []

    def group(name: str, error: str = "") -> Any:
        def abort() -> None:
            aborted.append(name)
            if error:
                raise RuntimeError(error)

        return SimpleNamespace(abort=abort)

    groups = [group("gathers"), group("reductions", "the backend has no abort"), SimpleNamespace()]
    detector = DesyncDetector("shard", [0, 1], 0, limits=Limits(0.01), aborted=groups)
    with pytest.raises(RuntimeError, match="ranks issue different collectives"):
        detector.raise_desync(0)
    assert sorted(aborted) == ["gathers", "reductions"]
    detector.close_connections()
    assert len(aborted) == 2


class Counted(DesyncDetector):
    """A detector that counts how often the ranks wait for an agreement."""

    waits = 0

    def _compare_now(self, *_: int) -> list[int]:
        self.waits += 1
        return []

    def _start_comparison(self, *_: int) -> Any:
        return None


def waits_of(sizes: Callable[[int], int], order: Callable[[int], list[str]] = lambda step: ["a", "b", "c"]) -> list[int]:
    """Return how often ranks wait for an agreement in each of a thousand steps."""
    detector = Counted("shard", [0, 1], 0, control=SimpleNamespace(group_name="control"))
    found = []
    for step in range(1000):
        before = detector.waits
        for unit in order(step):
            detector.record("all_gather", unit, torch.float32, 100)
        detector.record("all_reduce", "psum", torch.float32, sizes(step))
        found.append(detector.waits - before)
    return found


def test_later_steps_wait_for_no_agreement_whatever_sizes_their_collectives_have() -> None:
    fixed = waits_of(lambda step: 7)
    assert sum(fixed[3:]) == 0
    for sizes in (lambda step: 1 + step, lambda step: 1 + step % 50, lambda step: 1 + step // 100):
        waits = waits_of(sizes)
        assert sum(waits) <= sum(fixed) + desync.MOST_SIZES
        assert waits[0] == fixed[0]
    assert sum(waits_of(lambda step: 1 + step)[10:]) == 0
    assert waits_of(lambda step: 1 + step // 100)[100] == 1  # a new size


def test_a_program_with_ever_new_orders_says_that_its_ranks_agree_no_more(caplog) -> None:
    mixed = random.Random(0)

    def order(_: int) -> list[str]:
        return mixed.sample([f"unit {number}" for number in range(16)], 16)

    waits = waits_of(lambda step: 7, order)
    assert 4000 < sum(waits) <= desync.MOST_CONTEXTS + 17
    assert waits[-1] == 0
    (record,) = caplog.records
    assert "mesh axis 'shard': the program has issued its collectives in 4096 orders" in record.getMessage()
    assert "compares the ranks every 16 collectives only" in record.getMessage()


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_closes_its_connections_by_a_receive_from_another_rank(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: list[int] = []
    monkeypatch.setattr(dist, "irecv", lambda _, group, group_src: senders.append(group_src))
    for rank in range(size):
        DesyncDetector("shard", range(size), rank, groups=["gloo"]).close_connections()
    assert senders == [*range(1, size), 0]
