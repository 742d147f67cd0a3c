"""A rank that connects to others raises as soon as one of them is lost, and else waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from funcshard.comm.connecting import LostError, watched
from tests.commands import Command
from tests.hostile.nursery import needs_linux


def heart_of(*findings: str) -> Any:
    """Return a heart that finds these at its looks, and then nothing."""
    left, asked = list(findings), []

    def find_lost(ranks: Sequence[int], give_up: float) -> str:
        asked.append((list(ranks), give_up))
        return left.pop(0) if left else ""

    return SimpleNamespace(find_lost=find_lost, asked=asked)


def watch(connect: Callable[[], Any], heart: Any, patience: float = 5.0) -> Any:
    return watched(connect, heart, range(3), patience=patience, give_up=9.0)


def test_what_connects_at_once_is_returned_or_raised_without_a_look() -> None:
    heart = heart_of("rank 1 is lost")
    assert watch(lambda: "connected", heart) == "connected"
    with pytest.raises(ZeroDivisionError):
        watch(lambda: 1 / 0, heart)
    assert heart.asked == []


def test_what_takes_long_is_waited_for_while_no_rank_is_lost() -> None:
    heart, go_on = heart_of(), threading.Event()
    heart.find_lost = lambda ranks, give_up: go_on.set() or ""
    assert watch(lambda: go_on.wait(60), heart, 0.01) is True


def test_a_lost_rank_ends_the_wait() -> None:
    heart, go_on, start = heart_of("", "rank 1 is lost"), threading.Event(), time.monotonic()
    with pytest.raises(LostError, match="rank 1 is lost"):
        watch(lambda: go_on.wait(60), heart, 0.6)
    assert time.monotonic() - start < 4  # later looks come sooner than the first
    assert heart.asked == [([0, 1, 2], 9.0)] * 2
    go_on.set()


# Rank 1 is killed when it has said that it is alive, and begins to connect.
PROGRAM = """
import os, signal, sys, time
import torch.distributed as dist
import funcshard as fs
if os.environ["RANK"] == "1":
    dist.{call} = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    fs.init_mesh({{"replicate": 1, "shard": 2}}, device="cpu", timeout=100.0, patience=0.5)
except RuntimeError as error:
    print(time.monotonic() - begin, error)
"""


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("call", ["init_process_group", "distributed_c10d._new_process_group_helper"])
def test_a_rank_that_is_killed_while_it_connects_is_named_in_time(call: str) -> None:
    # Why here, as torchrun has it: a port that is only chosen here may be taken before rank 0 listens at it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    program = ["-c", PROGRAM.format(call=call)]
    ranks = [Command(program, {**os.environ, **names, "RANK": str(rank)}) for rank in range(2)]
    told, _ = ranks[0].communicate(timeout=200)
    ranks[1].communicate(timeout=60)
    assert [rank.returncode for rank in ranks] == [0, -9]
    seconds, _, message = told.partition(" ")
    assert "the process of rank 1 has ended (process " in message
    assert "rank 0 waited for it and gives it up" in message
    assert float(seconds) < 50
