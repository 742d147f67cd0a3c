"""Collectives of real processes, checked against a plain reference and against simulated ranks."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial

import funcshard as fs
from tests.collective_oracle import line, sum_in_order
from tests.ranks import run_ranks, run_simulated
from tests.storages import Alive

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
# Elements of a shard or tensor: none, fewer than ranks, no multiple of the ranks, and too many for
# the all-to-all with which gloo gathers small tensors.
SIZES = (0, 1, 2, 3, 10, 20_001)
MESHES = [pytest.param(n, None, id=str(n)) for n in (1, 2, 3, 4)]
MESHES += [pytest.param(4, {"replicate": 2, "shard": 2}, id="2x2")]
TEXTS = ("", "rank: ½", "long " * 10_000, "\0")


def tensor_for(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a new tensor of one rank.

    Its numbers have very different magnitudes, so that the sum over ranks depends on the order.
    """
    return drawn(rank, n, dtype).clone()


@functools.cache  # every rank draws the tensors of all ranks, for every collective
def drawn(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    g = torch.Generator().manual_seed(10 * rank + 1)
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, (n,), generator=g, dtype=dtype)
    return (torch.randn(n, generator=g, dtype=torch.float64) * 10.0 ** torch.randint(-3, 3, (n,), generator=g)).to(dtype)


def all_gather(group: Any, tensor_of: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [tensor_of(i) for i in range(group.size)]
    out = torch.full((sum(len(part) for part in parts),), -1, dtype=parts[0].dtype)
    shared = group.all_gather_shared(parts[group.rank])
    stacks = [torch.stack([part, part.flip(0)]) for part in parts]  # gathered along the last dim
    stacked = group.all_gather_shared(stacks[group.rank])
    group.all_gather(out, parts[group.rank]).wait()
    assert shared.wait() is shared.wait()
    assert stacked.wait().shape == (2, len(out))
    assert stacked.wait() is stacked.wait()
    return torch.cat([out, shared.wait(), stacked.wait().flatten()]), torch.cat([*parts, *parts, *torch.cat(stacks, -1)])


def reduce_scatter(group: Any, tensor_of: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    # each rank has one slice for every rank
    wholes = [torch.cat([tensor_of(i) + k for k in range(group.size)]) for i in range(group.size)]
    out = torch.full_like(tensor_of(0), -1)
    group.reduce_scatter(out, [wholes[group.rank].reshape(-1)]).wait()
    return out, sum_in_order([whole.view(group.size, -1)[group.rank] for whole in wholes])


def reduce_scatter_of_parts_of_a_lower_dtype(
    group: Any, tensor_of: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    # the group casts parts before it adds, so the sum has the precision of ``out``
    wholes = [torch.cat([tensor_of(i) + k for k in range(group.size)]).to(torch.bfloat16) for i in range(group.size)]
    whole = wholes[group.rank]
    out = torch.full((len(whole) // group.size,), -1.0)
    group.reduce_scatter(out, [whole[: len(whole) // 3], whole[len(whole) // 3 :]]).wait()
    return out, sum_in_order([whole.float().view(group.size, -1)[group.rank] for whole in wholes])


def all_reduce(group: Any, tensor_of: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out = tensor_of(group.rank).clone()
    group.all_reduce(out).wait()
    return out, sum_in_order([tensor_of(i) for i in range(group.size)])


def all_reduce_of_two_dims(group: Any, tensor_of: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.stack([tensor_of(group.rank), tensor_of(group.rank) + 1])
    group.all_reduce(out).wait()
    return out, sum_in_order([torch.stack([tensor_of(i), tensor_of(i) + 1]) for i in range(group.size)])


def broadcast_from_the_last_rank(group: Any, tensor_of: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    out = tensor_of(group.rank).clone()
    group.broadcast(out, group.size - 1).wait()
    return out, tensor_of(group.size - 1)


def several_at_once(group: Any, tensor_of: Callable[[int], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    # all are started first, and waited for in reverse order
    parts = [tensor_of(i) for i in range(group.size)]
    whole, total, last = torch.zeros_like(torch.cat(parts)), parts[group.rank].clone(), parts[group.rank].clone()
    works = [group.all_gather(whole, parts[group.rank]), group.broadcast(last, group.size - 1), group.all_reduce(total)]
    for work in reversed(works):
        work.wait()
    return torch.cat([whole, total, last]), torch.cat([*parts, sum_in_order(parts), parts[-1]])


COLLECTIVES = {
    fn.__name__: fn
    for fn in (
        all_gather, reduce_scatter, reduce_scatter_of_parts_of_a_lower_dtype,
        all_reduce, all_reduce_of_two_dims, broadcast_from_the_last_rank,
        several_at_once,
    )
}  # fmt: skip


def run_collectives(mesh: fs.Mesh, backend: str) -> dict[tuple[str, str, torch.dtype], torch.Tensor]:
    """Compare each collective with its reference, and return its results, those of one dtype as one tensor."""
    if backend == "gloo":
        mesh = fs.init_mesh(mesh.shape, device="cpu", shared_memory=False)
    results = {}
    for (name, collective), axis, dtype in itertools.product(COLLECTIVES.items(), ("shard", "replicate"), DTYPES):
        ranks, group = line(mesh.rank, dict(mesh.shape), axis), getattr(mesh, axis)
        outs = []
        for n in SIZES:
            out, expected = collective(group, lambda i, n=n, dtype=dtype, ranks=ranks: tensor_for(ranks[i], n, dtype))
            assert torch.equal(out, expected), (name, axis, dtype, n)
            outs.append(out.flatten())
        results[name, axis, dtype] = torch.cat(outs)
    return results


BACKENDS = [pytest.param(*case.values, "shared memory", id=f"{case.id}-shared memory") for case in MESHES]
BACKENDS += [pytest.param(3, None, "gloo", id="3-gloo")]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "shape", "backend"), BACKENDS)
def test_collectives_equal_a_plain_reference_and_the_simulated_group_to_the_bit(world_size, shape, backend):
    real = run_ranks(run_collectives, world_size, backend, shape=shape)
    simulated = run_simulated(run_collectives, world_size, "simulated", shape=shape)
    for on_process, on_thread in zip(real, simulated, strict=True):
        assert all(torch.equal(out, on_thread[case]) for case, out in on_process.items())


def exchange_texts(mesh: fs.Mesh) -> list[str]:
    return mesh.shard.all_gather_text(TEXTS[mesh.rank])


@pytest.mark.parametrize("run", [run_ranks, run_simulated])
@pytest.mark.parametrize("world_size", [1, 4])
def test_texts_are_in_the_order_of_ranks(run, world_size):
    assert run(exchange_texts, world_size) == [list(TEXTS[:world_size])] * world_size


def train_until_a_rank_is_killed(mesh: fs.Mesh, shared_memory: bool) -> tuple[str, float] | None:
    mesh = fs.init_mesh(mesh.shape, device="cpu", shared_memory=shared_memory)
    apply, params, buffers = fs.make_functional(torch.nn.Linear(5, 5))
    plan = fs.make_plan(params, mesh)
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    start = time.monotonic()
    try:
        for i in range(100):
            if i == 3 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            fs.value_and_grad(lambda s: sharded(s, buffers, torch.ones(2, 5)).sum())(shards)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return None


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_the_remaining_ranks_raise_within_seconds_when_a_rank_is_killed(shared_memory):
    first, second, third = run_ranks(train_until_a_rank_is_killed, 3, shared_memory, may_die={1}, timeout=20)
    assert second is None
    for message, seconds in (first, third):
        assert "the process of rank 1 has ended" in message
        assert seconds < 15  # the timeout of the group is 80 s


@pytest.mark.slow
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


def count_pooled_tensors(mesh: fs.Mesh) -> list[int]:
    found, held = [], []
    for numel in (100, 1 << 15, 100):
        held.append(mesh.shard.empty(numel, torch.ones(1)))
        found.append(mesh.shard.pool.made)
    return found


def test_only_large_tensors_have_memory_from_a_pool():
    assert run_ranks(count_pooled_tensors, 2) == [[0, 1, 1]] * 2


def open_files_after_meshes(world: fs.Mesh, shape: dict[str, int], shared_memory: bool) -> list[int]:
    found = []
    for _ in range(5):
        mesh = fs.init_mesh(shape, device="cpu", shared_memory=shared_memory)
        fs.psum(torch.ones(3), mesh)
        del mesh
        gc.collect()
        # Why all ranks together: one that makes its next mesh closes the far ends of this rank's connections.
        fs.psum(torch.ones(()), world)
        found.append(sum(map(is_connection, os.listdir("/proc/self/fd"))))
        fs.psum(torch.ones(()), world)
    return found


def is_connection(file: str) -> bool:
    """Return whether an open file is a socket or the like; threads open the store's file and others."""
    try:
        return not os.readlink(f"/proc/self/fd/{file}").startswith("/") or "memfd" in os.readlink(f"/proc/self/fd/{file}")
    except FileNotFoundError:  # closed meanwhile
        return False


MESHES_THAT_GO = {
    "one axis": ({"shard": 2}, True),
    "two axes": ({"replicate": 2, "shard": 2}, True),
    "two axes, gloo": ({"replicate": 2, "shard": 2}, False),
    "an axis of one rank, gloo": ({"replicate": 1, "shard": 2}, False),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize(("shape", "shared_memory"), MESHES_THAT_GO.values(), ids=list(MESHES_THAT_GO))
def test_meshes_that_are_gone_leave_no_open_files(shape, shared_memory):
    for found in run_ranks(open_files_after_meshes, math.prod(shape.values()), shape, shared_memory):
        assert found[-1] <= found[1], found


def keep_the_device_mesh(_: fs.Mesh) -> list[torch.Tensor]:
    kept = fs.init_mesh({"replicate": 2, "shard": 2}, device="cpu").device_mesh
    for _ in range(2):  # making a mesh destroys the groups of those that are gone
        gc.collect()
        fs.init_mesh({"replicate": 2, "shard": 2}, device="cpu")
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
            end = time.monotonic() + 5
            while alive.now().total() > 1 and time.monotonic() < end:
                time.sleep(0.01)  # gloo's thread drops a message just after its end
            found.append(alive.now().total())
        del handle
    return found


@pytest.mark.parametrize("numel", [64, 1 << 12])
def test_what_was_sent_is_free_once_a_unit_is_gathered(numel: int) -> None:
    assert run_ranks(held_after_a_gather, 2, numel) == [[1, 1]] * 2
