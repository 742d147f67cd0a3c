"""Two hosts, each a network namespace: shared memory inside each, gloo across, and one host's bits."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.hostile.campaign import Campaign, slowness
from tests.hostile.namespaces import NETWORK, enter_namespace
from tests.hostile.nursery import check_nothing_left, in_nursery, needs_linux, open_files
from tests.hostile.training import digests

pytestmark = [pytest.mark.hostile, needs_linux]

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 180.0  # seconds that torchrun and its ranks may take, a tenth of which an idle machine takes
HOSTS = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> None:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no command ip, which makes a network: install iproute2")
    if done.returncode:
        pytest.skip(f"the system forbids a network of one's own: ip {' '.join(words)}: {done.stderr}")


def lay_cable() -> list[int]:
    """Make two network namespaces that a cable joins; return an open file for each."""
    enter_namespace(NETWORK)
    spaces = [os.open("/proc/self/ns/net", os.O_RDONLY)]
    ip("link", "set", "lo", "up")
    reads, writes = os.pipe()
    other = os.fork()
    if not other:  # a process that holds the second namespace until this one opens it
        assert not _libc().unshare(NETWORK)
        os.write(writes, b".")
        time.sleep(60)
        os._exit(0)
    os.read(reads, 1)
    os.close(reads)
    os.close(writes)
    ip("link", "add", "east", "type", "veth", "peer", "name", "west", "netns", str(other))
    spaces.append(os.open(f"/proc/{other}/ns/net", os.O_RDONLY))
    for number, (space, device) in enumerate(zip(spaces, ("east", "west"), strict=True)):
        inside(space)
        ip("link", "set", "lo", "up")
        ip("addr", "add", f"{HOSTS[number]}/24", "dev", device)
        ip("link", "set", device, "up")
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    return spaces


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def inside(space: int) -> None:
    """Move this process into a network namespace."""
    assert not _libc().setns(space, NETWORK)


def torchrun(number: int, space: int, shape: str, folder: Path, port: int) -> Any:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "TORCHELASTIC_RUN_ID")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": ("east", "west")[number],
        "TP_SOCKET_IFNAME": ("east", "west")[number],
    }  # fmt: skip
    words = [
        "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number),
        "--master-addr", HOSTS[0], "--master-port", str(port), "--local-addr", HOSTS[number], "-m",
        "tests.hostile.host_program", shape, str(folder),
    ]  # fmt: skip
    with open(folder / f"host-{number}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            preexec_fn=lambda: inside(space),
        )  # fmt: skip


def run_hosts(spaces: list[int], shape: dict[str, int], folder: Path, port: int) -> list[dict[str, Any]]:
    started = [torchrun(number, space, json.dumps(shape), folder, port) for number, space in enumerate(spaces)]
    end = time.monotonic() + LIMIT * slowness()
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(1.0, end - time.monotonic()))
    logs = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
    for process in started:
        process.kill()
    assert [process.wait() for process in started] == [0, 0], logs
    return sorted((json.loads(path.read_text()) for path in folder.glob("*.json")), key=lambda found: found["rank"])


def two_hosts(name: str, seed: int) -> dict[str, int]:
    draw, folder, files = Random(seed), Path(name), open_files()
    shape = draw.choice([{"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}, {"shard": 4}])
    spaces = lay_cable()
    ranks = run_hosts(spaces, shape, folder, 20_000 + draw.randrange(20_000))
    for space in spaces:
        os.close(space)
    *_, inner = shape
    across = [axis for axis in shape if axis != inner] if len(shape) > 1 else [inner]
    for rank in ranks:
        assert all(rank["ways"][axis] == "gloo" for axis in across), ranks
        assert len(shape) == 1 or rank["ways"][inner] == "shared memory", ranks
    assert [rank["digest"] for rank in ranks] == [digests(tuple(shape.items()))[-1]] * 4, ranks
    check_nothing_left(files)
    return {"jobs": 1}


def test_two_hosts_use_shared_memory_inside_and_gloo_across_with_the_bits_of_one(campaign: Campaign) -> None:
    def one(draw: Random) -> dict[str, int]:
        with tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True) as folder:
            return in_nursery(two_hosts, folder, draw.getrandbits(32), limit=3 * LIMIT)

    campaign.run(one, short=1, full=6, limit=3 * LIMIT + 30)
