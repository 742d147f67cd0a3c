"""A program that ends without ``Saving.wait()`` finishes its last checkpoint, or says that it can't."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import funcshard as fs

ROOT = Path(__file__).resolve().parents[2]

# Why one process forks the ranks of all cases: importing torch takes longer than everything else.
NURSERY = """
import json, os, sys, time
import torch, torch.distributed as dist
import funcshard as fs
from funcshard.checkpoint.writer import Writer

def program(how, rank):
    folder = f"{sys.argv[1]}/{how}"
    os.dup2(os.open(f"{folder}/messages-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/meeting", 2), rank=rank, world_size=2)
    mesh = fs.init_mesh(device="cpu")
    params = {"w": torch.arange(3_000_000.0)}
    plan = fs.make_plan(params, mesh)
    write = Writer.write

    def slowly(work):
        if rank == 1:
            time.sleep(2)
            if how == "full":
                raise OSError(28, "No space left on device")
        write(work)

    Writer.write = slowly
    fs.save(f"{folder}/saved/last", {"shards": fs.shard(params, plan, mesh), "step": 7}, plan, mesh, wait=False)
    if how != "open":
        dist.destroy_process_group()

ranks = {}
for how in ("closed", "open", "full"):
    os.mkdir(f"{sys.argv[1]}/{how}")
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            program(how, rank)
            sys.exit()
        ranks[pid] = how, rank
codes = {}
for pid, (how, rank) in ranks.items():
    codes.setdefault(how, []).append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks ranks, and this system has no fork")
def test_a_program_that_ends_without_waiting_finishes_its_last_checkpoint_or_fails(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NURSERY, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # They end with and without destroy_process_group, and on a full disk.
    assert json.loads(done.stdout) == {"closed": [0, 0], "open": [0, 0], "full": [1, 1]}
    for how in ("closed", "open"):
        saved = tmp_path / how / "saved"
        assert fs.latest(saved, thorough=True) == saved / "last"
        assert fs.restore(saved / "last").values == {"step": 7}
        assert os.listdir(saved) == ["last"]
    path = tmp_path / "full" / "saved" / "last"
    message, cause = ((tmp_path / "full" / f"messages-{rank}").read_text() for rank in range(2))
    assert f"checkpoint {path} is not saved: rank 1 could not write its part\n" in message
    assert f"checkpoint {path} is not saved: OSError: [Errno 28] No space left on device\n" in cause
    assert fs.latest(path.parent) is None
