"""Ranks are killed at random moments; every published checkpoint is complete."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Why one process forks the ranks of every round: importing torch takes longer than everything else.
NURSERY = """
import atexit, contextlib, json, os, random, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import funcshard as fs

folder, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
PARAMS = {"w": torch.zeros(300, 70), "b": torch.zeros(11)}

def make(step, plan, mesh):
    full = {name: torch.full_like(leaf, float(step)) for name, leaf in PARAMS.items()}
    own = fs.PerRank({"position": step * 10 + mesh.rank})
    return {"shards": fs.shard(full, plan, mesh), "step": step, "own": own}

def rank_main(rank, meeting):
    store = dist.FileStore(str(meeting), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    mesh = fs.init_mesh(device="cpu")
    plan = fs.make_plan(PARAMS, mesh)
    last, saving = fs.latest(folder, thorough=True), None
    step = fs.restore(last, plan, mesh)["step"] if last else 0
    while True:
        step += 1
        # with and without waiting, under new names and under one that is replaced
        path = folder / ("last" if step % 3 == 0 else f"step-{step}")
        saving = fs.save(path, make(step, plan, mesh), plan, mesh, wait=step % 2 == 0, after=saving, keep=3)

def check():
    plan = fs.make_plan(PARAMS, 3)
    steps = {}
    for path in folder.iterdir():
        if not (path / "index.json").exists():
            continue
        def look(mesh):
            state = fs.restore(path, plan, mesh)
            step = state["step"]
            rank = mesh.rank % 2
            assert state["own"].value == {"position": step * 10 + rank}, (state["own"], step)
            for leaf in fs.gather(state["shards"], plan, mesh).values():
                assert bool((leaf == step).all()), (path, step)
            return step
        steps[path] = fs.simulate(look, 3)[0]
    last = fs.latest(folder, thorough=True)
    if steps:
        assert last is not None and steps.get(last, 0) == max(steps.values()), (last, steps)
    return max(steps.values(), default=0)

def there(pattern):
    while True:
        try:
            return {path.parent.name for path in folder.glob(pattern)}
        except FileNotFoundError:  # a folder is deleted just now
            pass

def published():
    return there("*/index.json")

draw = random.Random(seed)
reached, aside, pids = [], 0, []

def end_ranks():
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

atexit.register(end_ranks)  # also after an error
for number in range(rounds):
    pids[:], before = [], published()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 2)  # for gloo's messages about killed peers
            try:
                rank_main(rank, folder.parent / f"meeting-{number}")
            finally:
                os._exit(1)
        pids.append(pid)
    if number % 4 != 2:  # let them save something new first, however slow the machine is
        end = time.monotonic() + 60
        while published() == before and time.monotonic() < end:
            time.sleep(0.01)
    else:
        time.sleep(draw.random() * 0.4)
    if number % 4 == 1:  # on a machine where they rarely write, too, some are killed while they do
        while not there("*/*.part") and time.monotonic() < end:
            pass
    else:
        time.sleep(draw.random() * 0.05)
    victims = pids if number % 3 == 0 else [draw.choice(pids)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)  # the surviving rank may continue with work that it can do alone
    aside += len(there("*/*.part"))
    end_ranks()
    reached.append(check())
print(json.dumps({"reached": reached, "aside": aside}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks ranks, and this system has no fork")
def test_ranks_killed_at_any_moment_leave_the_last_checkpoint_whole(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NURSERY, str(folder), "12", "5"],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    reached = result["reached"]
    assert reached == sorted(reached), "a step that had been saved was lost"
    assert reached[-1] > reached[0] > 0
    assert result["aside"] > 0, "no kill came while something was being written"
