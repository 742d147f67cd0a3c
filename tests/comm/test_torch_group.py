"""Collectives of real processes, checked against a plain reference and against simulated ranks."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial

import funcshard as fs
from tests.collective_oracle import line, results_of
from tests.comm.stores import until
from tests.ranks import run_ranks, run_simulated
from tests.storages import Alive

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
# Elements of a shard or tensor: none, fewer than ranks, no multiple of the ranks, and too many for
# the all-to-all with which gloo gathers small tensors.
SIZES = (0, 2, 3, 20_001)
TEXTS = ("", "rank: ½", "long " * 10_000, "\0")


@functools.cache  # every rank draws the tensors of all ranks, for every collective
def drawn(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of very different magnitudes, so that their sum over ranks depends on the order."""
    g = torch.Generator().manual_seed(10 * rank + 1)
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, (n,), generator=g, dtype=dtype)
    return (torch.randn(n, generator=g, dtype=torch.float64) * 10.0 ** torch.randint(-3, 3, (n,), generator=g)).to(dtype)


def run_collectives(mesh: fs.Mesh, backend: str) -> None:
    if backend == "gloo":
        mesh = fs.init_mesh(mesh.shape, device="cpu", shared_memory=False)
    for axis, dtype, n in itertools.product(("shard", "replicate"), DTYPES, SIZES):
        parts = [drawn(rank, n, dtype).clone() for rank in line(mesh.rank, dict(mesh.shape), axis)]
        for name, (out, meant) in results_of(getattr(mesh, axis), parts).items():
            assert torch.equal(out, meant), (name, axis, dtype, n)


GRID = {"replicate": 2, "shard": 2}
RUNS = {
    "simulated": (run_simulated, GRID),
    "shared memory": (run_ranks, GRID),
    "gloo": (run_ranks, {"shard": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("backend", RUNS)
def test_collectives_equal_a_plain_reference_to_the_bit(backend):
    run, shape = RUNS[backend]
    run(run_collectives, math.prod(shape.values()), backend, shape=shape)


def exchange_texts(mesh: fs.Mesh) -> list[str]:
    return mesh.shard.all_gather_text(TEXTS[mesh.rank])


@pytest.mark.parametrize("run", [run_ranks, run_simulated])
def test_texts_are_in_the_order_of_ranks(run):
    assert run(exchange_texts, 4) == [list(TEXTS)] * 4


@pytest.mark.nightly
def test_nothing_needs_numpy(tmp_path):
    script = f"""
import sys, warnings
sys.modules["numpy"] = None
warnings.simplefilter("ignore")  # torch warns that NumPy is missing
import torch, torch.distributed as dist, funcshard as fs
from funcshard.comm.torch_group import TorchGroup
dist.init_process_group("gloo", store=dist.FileStore({str(tmp_path / "store")!r}, 1), rank=0, world_size=1)
mesh = fs.Mesh({{"shard": TorchGroup.of(dist.group.WORLD)}})
assert mesh.shard.all_gather_text("größer") == ["größer"] and mesh.shard.all_gather_text("") == [""]
apply, params, buffers = fs.make_functional(torch.nn.Linear(2, 3))
plan = fs.make_plan(params, mesh)
shards = fs.shard(params, plan, mesh)
sharded = fs.fully_shard(apply, plan, mesh)
step = fs.make_train_step(
    lambda s, b, x: sharded(s, b, x).square().mean(), fs.torch_optimizer(torch.optim.AdamW, lr=0.1), plan, mesh, max_norm=1.0
)
shards = step(step.init(shards, buffers), torch.ones(1, 2))[0].shards
fs.from_state_dict(fs.to_state_dict(shards, plan, mesh), plan, mesh)
dist.destroy_process_group()
"""
    environment = os.environ | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def left_after_meshes(world: fs.Mesh, shape: dict[str, int], shared_memory: bool) -> list[tuple[int, int]]:
    """Return how many connections and process groups there are after each of five meshes, of which none stays."""
    found = []
    for _ in range(5):
        mesh = fs.init_mesh(shape, device="cpu", shared_memory=shared_memory)
        fs.psum(torch.ones(3), mesh)
        del mesh
        gc.collect()
        # Why all ranks together: one that makes its next mesh closes the far ends of this rank's connections.
        fs.psum(torch.ones(()), world)
        connections = sum(map(is_connection, os.listdir("/proc/self/fd")))
        found.append((connections, len(dist.distributed_c10d._world.pg_map)))
        fs.psum(torch.ones(()), world)
        assert world.shard.desync.control in dist.distributed_c10d._world.pg_map  # it was destroyed by the next mesh
    return found


def is_connection(file: str) -> bool:
    """Return whether an open file is a socket or the like; threads open the store's file and others."""
    try:
        return not os.readlink(f"/proc/self/fd/{file}").startswith("/") or "memfd" in os.readlink(f"/proc/self/fd/{file}")
    except FileNotFoundError:  # closed meanwhile
        return False


MESHES_THAT_GO = {
    "two axes": (GRID, True),
    "an axis of one rank, gloo": ({"replicate": 1, "shard": 2}, False),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize(("shape", "shared_memory"), MESHES_THAT_GO.values(), ids=list(MESHES_THAT_GO))
def test_meshes_that_are_gone_leave_no_open_files_and_no_process_groups(shape, shared_memory):
    for found in run_ranks(left_after_meshes, math.prod(shape.values()), shape, shared_memory):
        assert found[-1][0] <= found[1][0], found
        assert found[-1][1] == found[1][1], found


def keep_the_device_mesh(_: fs.Mesh) -> list[torch.Tensor]:
    kept = fs.init_mesh(GRID, device="cpu").device_mesh
    for _ in range(2):  # making a mesh destroys the groups of those that are gone
        gc.collect()
        fs.init_mesh(GRID, device="cpu")
    return [DTensor.from_local(torch.ones(2), kept["replicate"], [Partial()]).full_tensor()]


@pytest.mark.slow
def test_a_device_mesh_outlives_its_mesh_with_its_groups():
    assert all(torch.equal(found, torch.full((2,), 2.0)) for (found,) in run_ranks(keep_the_device_mesh, 4))


def held_after_a_gather(mesh: fs.Mesh, numel: int) -> list[int]:
    """Return how many buffers of a gathered unit's size are alive while its leaves are."""
    mesh = fs.init_mesh(mesh.shape, device="cpu", shared_memory=False)
    params = {"w": torch.ones(numel)}
    plan = fs.make_plan(params, mesh)
    f = fs.unshard(lambda leaves: leaves["w"].sum(), plan.units[""], mesh)
    shard = fs.shard(params, plan, mesh)[""]
    found = []
    for _ in range(2):
        with Alive(lambda nbytes: nbytes == 4 * numel) as alive:
            handle = f.start(shard)
            f(handle)
            until(lambda alive=alive: alive.now().total() <= 1, 5)  # gloo's thread drops a message just after its end
            found.append(alive.now().total())
        del handle
    return found


@pytest.mark.parametrize("numel", [64, 1 << 12])
def test_what_was_sent_is_free_once_a_unit_is_gathered(numel: int) -> None:
    assert run_ranks(held_after_a_gather, 2, numel) == [[1, 1]] * 2
