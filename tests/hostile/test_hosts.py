"""Two hosts, each a network namespace: shared memory inside each, gloo across, and the bits of simulated ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import funcshard as fs
from tests.hostile.campaign import Campaign
from tests.hostile.namespaces import LIBC, NETWORK, enter_namespace
from tests.hostile.nursery import check_nothing_left, in_nursery, needs_linux, open_files, spawn, wait_all
from tests.hostile.training import digests_on

pytestmark = [pytest.mark.hostile, needs_linux]

LIMIT = 90.0  # seconds that the ranks may take, a tenth of which an idle machine takes
HOSTS, DEVICES = ("10.77.0.1", "10.77.0.2"), ("east", "west")


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
        assert not LIBC.unshare(NETWORK)
        os.write(writes, b".")
        time.sleep(60)
        os._exit(0)
    os.read(reads, 1)
    os.close(reads)
    os.close(writes)
    ip("link", "add", DEVICES[0], "type", "veth", "peer", "name", DEVICES[1], "netns", str(other))
    spaces.append(os.open(f"/proc/{other}/ns/net", os.O_RDONLY))
    for number, (space, device) in enumerate(zip(spaces, DEVICES, strict=True)):
        inside(space)
        ip("link", "set", "lo", "up")
        ip("addr", "add", f"{HOSTS[number]}/24", "dev", device)
        ip("link", "set", device, "up")
    os.kill(other, signal.SIGKILL)
    os.waitpid(other, 0)
    return spaces


def inside(space: int) -> None:
    """Move this process into a network namespace."""
    assert not LIBC.setns(space, NETWORK)


def rank_on_host(enter: Callable[[], None], rank: int, space: int, shape: dict[str, int], port: int, result: Path) -> None:
    """Train as the rank of a job that torchrun started on two hosts, and write how its axes communicate, and digests."""
    inside(space)
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": HOSTS[0], "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": DEVICES[rank // 2],
        "TP_SOCKET_IFNAME": DEVICES[rank // 2],
    }  # fmt: skip
    mesh = fs.init_mesh(shape, device="cpu")
    ways = {axis: way(group) for axis, group in mesh.groups.items()}
    result.write_text(json.dumps({"ways": ways, "digests": digests_on(mesh)}))


def way(group: object) -> str:
    if not hasattr(group, "shm"):
        return "alone"
    return "gloo" if group.shm is None else "shared memory"


def run_hosts(spaces: list[int], shape: dict[str, int], folder: Path, port: int) -> list[dict[str, Any]]:
    results = [folder / f"rank-{rank}.json" for rank in range(4)]
    ranks = [
        spawn(rank_on_host, rank, spaces[rank // 2], shape, port, result, log=folder / f"{rank}.log")
        for rank, result in enumerate(results)
    ]
    for rank, ended in enumerate(wait_all(ranks, LIMIT)):
        assert ended.code == 0, f"rank {rank}: {ended.error}\n{ended.output}"
    return [json.loads(result.read_text()) for result in results]


def two_hosts(name: str, seed: int) -> dict[str, int]:
    draw, folder, files = Random(seed), Path(name), open_files()
    shape = draw.choice([{"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}, {"shard": 4}])
    spaces = lay_cable()
    apart = run_hosts(spaces, shape, folder, 20_000 + draw.randrange(20_000))
    for space in spaces:
        os.close(space)
    for found in apart:
        *_, (inner, _) = ((axis, size) for axis, size in shape.items())
        across = [axis for axis in shape if axis != inner] if len(shape) > 1 else [inner]
        assert all(found["ways"][axis] == "gloo" for axis in across), apart
        assert len(shape) == 1 or found["ways"][inner] == "shared memory", apart
    assert [found["digests"] for found in apart] == fs.simulate(digests_on, shape), apart
    check_nothing_left(files)
    return {"jobs": 1}


def test_two_hosts_use_shared_memory_inside_and_gloo_across_with_the_bits_of_simulated_ranks(campaign: Campaign) -> None:
    def one(draw: Random) -> dict[str, int]:
        with tempfile.TemporaryDirectory(prefix="hostile-", ignore_cleanup_errors=True) as folder:
            return in_nursery(two_hosts, folder, draw.getrandbits(32), limit=3 * LIMIT)

    campaign.run(one, short=1, full=6, limit=3 * LIMIT + 30)
