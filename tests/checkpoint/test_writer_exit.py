"""A program that ends without ``Saving.wait()`` finishes its last checkpoint, or says that it can't."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import funcshard as fs
from funcshard.checkpoint.writer import Writer
from tests.hostile.nursery import Ended, in_nursery, needs_linux, spawn, wait_all
from tests.hostile.test_exits import exit_as_an_interpreter

# How a program ends, without its process group, with it and on a full disk, and the exit codes of its ranks.
ENDS = {"closed": [0, 0], "open": [0, 0], "full": [1, 1]}


def program(_: Callable[[], None], folder: Path, how: str, rank: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "meeting"), 2), rank=rank, world_size=2)
    mesh, params, write = fs.init_mesh(device="cpu"), {"w": torch.arange(300_000.0)}, Writer.write
    plan = fs.make_plan(params, mesh)

    def slowly(work: Writer) -> None:
        if rank == 1:
            time.sleep(1)
            if how == "full":
                raise OSError(28, "No space left on device")
        write(work)

    Writer.write = slowly  # type: ignore[method-assign]
    fs.save(folder / "saved" / "last", {"shards": fs.shard(params, plan, mesh), "step": 7}, plan, mesh, wait=False)
    if how != "open":
        dist.destroy_process_group()


def end_without_waiting(folder: Path) -> dict[str, list[Ended]]:
    ranks = {}
    for how in ENDS:
        (folder / how).mkdir()
        ranks[how] = [
            spawn(program, folder / how, how, rank, log=folder / f"{how}-{rank}", leave=exit_as_an_interpreter)
            for rank in range(2)
        ]
    return {how: wait_all(both, 60.0) for how, both in ranks.items()}


@pytest.mark.slow
@needs_linux
def test_a_program_that_ends_without_waiting_finishes_its_last_checkpoint_or_fails(tmp_path: Path) -> None:
    ended = in_nursery(end_without_waiting, tmp_path, limit=120.0)
    assert {how: [each.code for each in both] for how, both in ended.items()} == ENDS, ended
    for how in ("closed", "open"):
        saved = tmp_path / how / "saved"
        assert fs.latest(saved, thorough=True) == saved / "last"
        assert fs.restore(saved / "last").values == {"step": 7}
        assert os.listdir(saved) == ["last"]
    path = tmp_path / "full" / "saved" / "last"
    message, cause = (each.output for each in ended["full"])
    assert f"checkpoint {path} is not saved: rank 1 could not write its part\n" in message
    assert f"checkpoint {path} is not saved: OSError: [Errno 28] No space left on device\n" in cause
    assert fs.latest(path.parent) is None
