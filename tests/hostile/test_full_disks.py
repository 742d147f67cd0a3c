"""Disks that are full, and limits on files and memory: a save fails in words, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.hostile.blame import outcome_of
from tests.hostile.campaign import Campaign, slowness
from tests.hostile.namespaces import MOUNTS, enter_namespace, mount_disk
from tests.hostile.nursery import in_nursery, needs_linux

pytestmark = [pytest.mark.hostile, needs_linux]

TIMEOUT = 20.0  # seconds within which a save that cannot write has to say so
PARAMS = {"w": torch.zeros(300, 70), "b": torch.zeros(11)}


def write(folder: Path, step: int, shape: Any, *, exports: bool = False) -> None:
    full = {name: torch.full_like(leaf, float(step)) for name, leaf in PARAMS.items()}

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan(PARAMS, mesh)
        shards = fs.shard(full, plan, mesh)
        if exports:
            fs.export_safetensors(folder / "exported", shards, plan, mesh, max_shard_size=50_000)
        else:
            state = {"shards": shards, "step": step, "own": fs.PerRank(mesh.rank)}
            fs.save(folder / f"step-{step}", state, plan, mesh, wait=bool(step % 2), keep=2).wait()

    fs.simulate(main, shape)


def step_of(tree: Any) -> int:
    values = {value for leaf in tree.values() for value in leaf.unique().tolist()}
    assert len(values) == 1, f"a mixture of steps {sorted(values)}"
    return int(values.pop())


def check_all(folder: Path, saved: int, exported: int) -> None:
    """Check that the last save and the last export that succeeded are whole."""
    plan, mesh = fs.make_plan(PARAMS, 1), fs.Mesh()
    last = fs.latest(folder, thorough=True)
    assert (last is not None) == bool(saved), f"{last} after {saved} was saved"
    if last is not None:
        state = fs.restore(last, plan, mesh)
        assert state["step"] == step_of(fs.gather(state["shards"], plan, mesh)) == saved, (state["step"], saved)
    if exported:
        # A failed export may leave the one before it, or nothing that imports; never a mixture.
        found = outcome_of(lambda: fs.import_safetensors(folder / "exported", plan, mesh), "import", (ValueError, OSError))
        assert not isinstance(found, Exception), f"the export of step {exported} is lost: {found}"
        assert step_of(fs.gather(found, plan, mesh)) == exported


@contextlib.contextmanager
def trouble(how: str, draw: Random, disk: Path) -> Iterator[None]:
    """Take all of a disk's bytes or files but a few, or set a limit, inside the ``with`` block."""
    if how == "a full disk":
        free, fillers = os.statvfs(disk), disk / "fillers"
        fillers.mkdir()
        with contextlib.suppress(OSError):
            if draw.random() < 0.5:
                (fillers / "0").write_bytes(bytes(max(0, free.f_bavail * free.f_bsize - draw.randrange(0, 400_000))))
            else:
                for number in range(max(0, free.f_favail - 1 - draw.randrange(0, 12))):
                    (fillers / str(number)).touch()
        yield
        shutil.rmtree(fillers)
        return
    kind, most = {
        "a limit on the size of files": (resource.RLIMIT_FSIZE, draw.choice([1000, 20_000, 60_000])),
        "a limit on open files": (resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")) + draw.randrange(0, 12)),
    }[how]
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def write_in_trouble(folder: str, seed: int, how: str) -> dict[str, int]:
    draw, disk, counts = Random(seed), Path(folder), Counter[str]()
    if how == "a full disk":
        enter_namespace(MOUNTS)
        mount_disk(disk, 4 << 20, 200)
    checkpoints = disk / "checkpoints"
    checkpoints.mkdir()
    done = {False: 0, True: 0}  # the last step that was saved, and the last that was exported
    for step in range(1, 7):
        shape, exports = draw.choice([1, 2, {"replicate": 2, "shard": 2}]), draw.random() < 1 / 3
        begin = time.monotonic()
        with trouble(how, draw, disk) if step % 2 == 0 else contextlib.nullcontext():
            error = outcome_of(lambda: write(checkpoints, step, shape, exports=exports), f"write under {how}", (OSError,))  # noqa: B023
        seconds = time.monotonic() - begin
        assert step % 2 == 0 or error is None, error
        assert seconds < TIMEOUT * slowness(), f"a write took {seconds:.0f} s to fail"
        counts["failures" if error else "successes"] += 1
        done[exports] = done[exports] if error else step
        check_all(checkpoints, done[False], done[True])
    write(checkpoints, 9, 2)
    check_all(checkpoints, 9, done[True])
    left = [*checkpoints.rglob("*.part")]
    left += [path for path in checkpoints.glob("step-*") if not (path / "index.json").exists()]
    assert not left, f"leftovers after a save that succeeded: {left}"
    return dict(counts)


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("how", ["a full disk", "a limit on the size of files", "a limit on open files"])
def test_a_save_that_cannot_write_says_so_and_loses_nothing(campaign: Campaign, how: str) -> None:
    def one(draw: Random) -> dict[str, int]:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            return in_nursery(write_in_trouble, folder, draw.getrandbits(32), how, limit=8 * TIMEOUT)

    campaign.run(one, short=2, full=60, limit=8 * TIMEOUT + 20)
