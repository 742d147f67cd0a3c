"""On CUDA: the numbers of the CPU, a host that does not wait, and gathers that overlap computation.

Without a GPU these tests are skipped.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from funcshard.comm import Op
from funcshard.testing import delayed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, one a process")

CUDA = torch.device("cuda", 0)
UNITS = ["0", "2", "4"]


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))


def trained(mesh: fs.Mesh, **options: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train three steps; return losses and full parameters, on the CPU."""
    apply, params, buffers = fs.make_functional(made())
    plan = fs.make_plan(params, mesh, units=UNITS, **options)
    sharded = fs.fully_shard(apply, plan, mesh)
    loss_fn = lambda shards, b, x: sharded(shards, b, x).square().mean()  # noqa: E731
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=0.01), plan, mesh)
    state, losses = step.init(fs.shard(params, plan, mesh), buffers), []
    for _ in range(3):
        state, metrics = step(state, batch(mesh.rank).to(mesh.device))
        losses.append(float(metrics["loss"]))
    return losses, {path: leaf.cpu() for path, leaf in fs.gather(state.shards, plan, mesh).items()}


WAYS = {
    "full_shard": {},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "no_shard": {"strategy": "no_shard"},
    "offload": {"offload": True},
    "joined": {"bucket_bytes": 1 << 20},
    "joined, offload": {"bucket_bytes": 1 << 20, "offload": True},
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_on_cuda_is_the_cpus(way: str, world_size: int) -> None:
    on_cuda = fs.simulate(lambda mesh: trained(mesh, **WAYS[way]), world_size, device=CUDA)
    on_cpu = fs.simulate(lambda mesh: trained(mesh, **WAYS[way]), world_size)
    torch.testing.assert_close(on_cuda, on_cpu, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", ["cpu", "moved", "meta", "meta, in blocks"])
def test_wherever_the_module_is_its_shards_are_on_the_meshs_device(where: str) -> None:
    mesh = fs.Mesh(device=CUDA)
    module = made()
    if where == "moved":
        module.to(CUDA)
    if where.startswith("meta"):
        module.to("meta")
    apply, params, _ = fs.make_functional(module)
    plan = fs.make_plan(params, mesh, units=UNITS)
    if where.startswith("meta"):
        shards, _ = fs.init_module(module, plan, mesh, draws="blocks" if "blocks" in where else "whole")
    else:
        shards = fs.shard(params, plan, mesh)
    assert {leaf.device for unit in shards.values() for leaf in unit.values()} == {CUDA}
    out = fs.fully_shard(apply, plan, mesh)(shards, {}, batch(0).to(CUDA))
    assert out.device == CUDA
    if not where.startswith("meta"):
        torch.testing.assert_close(out.cpu(), made()(batch(0)), rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def no_waiting_host() -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients_of(mesh: fs.Mesh) -> Callable[[], Any]:
    apply, params, buffers = fs.make_functional(made())
    plan = fs.make_plan(params, mesh, units=UNITS)
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    x = batch(mesh.rank).to(mesh.device)
    return lambda: fs.value_and_grad(lambda s: sharded(s, buffers, x).square().mean())(shards)


def test_shards_of_an_offloaded_unit_and_their_gradients_are_pinned_and_finished() -> None:
    mesh = fs.Mesh(device=CUDA)
    apply, params, buffers = fs.make_functional(made())
    plan = fs.make_plan(params, mesh, units=UNITS, offload=True)
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    expected = made()
    for _ in range(20):  # in some of the rounds, a copy without a wait would be unfinished
        _, grads = fs.value_and_grad(lambda s: sharded(s, buffers, batch(0).to(CUDA)).square().mean())(shards)
        expected.zero_grad()
        expected(batch(0)).square().mean().backward()
        for number in UNITS:
            layer = expected[int(number)]
            wanted = torch.cat([layer.bias.grad, layer.weight.grad.flatten()])  # in the order of their names
            found = grads[number]["float32"]
            assert found.is_pinned() and shards[number]["float32"].is_pinned()  # noqa: PT018
            torch.testing.assert_close(found, wanted, rtol=2e-2, atol=1e-3)
            shards[number]["float32"].mul_(0.99)  # right away, as an optimizer does
            with torch.no_grad():
                for leaf in expected[int(number)].parameters():
                    leaf.mul_(0.99)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_delay_holds_up_the_stream_and_not_the_host(kind: str) -> None:
    def main(mesh: fs.Mesh) -> tuple[torch.cuda.Event, torch.cuda.Event, bool]:
        slow = delayed(mesh, kind, 0.3)
        full, shard = torch.ones(4, device=CUDA), torch.ones(2, device=CUDA)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out, brought = (full, shard) if kind == "all_gather" else (shard, full)
        given = brought.clone() if kind == "all_gather" else [brought.clone()]
        work = getattr(slow.shard, kind)(out, given)
        work.wait()
        end.record()
        return begin, end, end.query()  # whether the stream is here already when the host is

    delayed(fs.Mesh(device=CUDA), kind, 0.0).shard.start(
        Op("all_gather", "", torch.ones(1, device=CUDA), torch.ones(1, device=CUDA))
    )
    fs.simulate(main, 2, device=CUDA)  # the first run measures the clock, for which the host waits
    torch.cuda.synchronize()
    results = fs.simulate(main, 2, device=CUDA)
    torch.cuda.synchronize()  # not in a rank: the others' delays would end meanwhile
    for begin, end, finished_before in results:
        assert begin.elapsed_time(end) > 200
        assert not finished_before


def on_nccl(rank: int, body: Callable[[fs.Mesh], None], directory: str) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(directory) / "store"), 2)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    try:
        body(fs.Mesh.from_device_mesh(dist.device_mesh.init_device_mesh("cuda", (2,))))
    finally:
        dist.destroy_process_group()


def equal_to_the_cpus(mesh: fs.Mesh) -> None:
    for options in WAYS.values():
        losses, params = trained(mesh, **options)
        wanted = fs.simulate(lambda cpu, options=options: trained(cpu, **options), 2)[mesh.rank]
        torch.testing.assert_close((losses, params), wanted, rtol=1e-4, atol=1e-5)


def without_a_waiting_host(mesh: fs.Mesh) -> None:
    run = gradients_of(mesh)
    for _ in range(4):
        run()
    with no_waiting_host():
        run()


def beside_the_computation(mesh: fs.Mesh) -> None:
    # A delayed all-gather sleeps on a stream of its own, so computation that does not need its data
    # goes on meanwhile.
    run = gradients_of(mesh)
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        slow = delayed(mesh, "all_gather", 0.2)
        out = torch.empty(2_000_000, device=mesh.device)
        work = slow.shard.start(Op("all_gather", "", out, torch.ones(1_000_000, device=mesh.device)))
        x = torch.ones(64, 64, device=mesh.device)
        for _ in range(10):
            x = (x @ x).clamp(max=1.0)
        work.wait()
        torch.cuda.synchronize()
    streams: dict[str, set[int]] = {"AllGather": set(), "ReduceScatter": set(), "gemm": set()}
    for event in profile.profiler.kineto_results.events():
        for name, found in streams.items():
            if event.device_type() == torch.autograd.DeviceType.CUDA and name.lower() in event.name().lower():
                found.add(event.device_resource_id())
    assert all(streams.values()), streams
    assert not streams["AllGather"] & streams["gemm"]
    assert not streams["ReduceScatter"] & streams["gemm"]
    assert not streams["AllGather"] & streams["ReduceScatter"]


@two_gpus
@pytest.mark.parametrize(
    "body", [equal_to_the_cpus, without_a_waiting_host, beside_the_computation], ids=lambda f: f.__name__
)
def test_on_nccl(body: Callable[[fs.Mesh], None], tmp_path: Path) -> None:
    torch.multiprocessing.spawn(on_nccl, (body, str(tmp_path)), nprocs=2)
