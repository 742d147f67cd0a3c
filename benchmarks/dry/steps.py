"""The ranks, models and steps that run dry."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import funcshard as fs
from benchmarks.dry.mode import is_dry
from funcshard.comm import DeferredWork, DesyncDetector, Op, Work, WrappedGroup
from funcshard.comm.process_groups import Native
from funcshard.comm.torch_group import TorchGroup

BATCH, WIDTH, WORDS = 4, 8, 16


# --- ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DryGroup(WrappedGroup):
    """The group of one rank of a job whose other ranks do not exist: texts of all are its own."""

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> _DryGroup:
        return _group(list(range(len(global_ranks))), axis)

    def start(self, op: Op) -> Work:
        if op.kind == "all_gather_text":
            return DeferredWork(result=[op.data] * self.size)
        return self.inner.start(op)


def dry_mesh(shape: Mapping[str, int]) -> fs.Mesh:
    """Return the mesh of rank 0 on CUDA; collectives go through the library's code for NCCL.

    Its process groups are torch's "fake" ones, two for each axis, as on NCCL. They stay until the
    process ends.
    """
    groups: dict[str, Any] = {}
    stride = math.prod(shape.values())
    for axis, size in shape.items():
        stride //= size
        if size > 1:
            groups[axis] = _group([stride * i for i in range(size)], axis)
    return fs.Mesh(groups, torch.device("cuda", 0))


_MOST = 4  # ranks of the pretended job


def _group(ranks: list[int], axis: str) -> _DryGroup:
    if not dist.is_initialized():
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_MOST)
    group, reductions = (dist.new_group(ranks, backend="fake") for _ in range(2))
    desync = DesyncDetector(axis, ranks, 0)
    return _DryGroup(TorchGroup(group, 0, len(ranks), Native(group, reductions), None, "cuda", desync))


# --- models and steps -----------------------------------------------------------------------------


class Net(nn.Module):
    """An embedding, two blocks, a norm and a head."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2))
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if norm else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A step and all that it was made of; ``losses`` are those of ``train``."""

    step: Any
    state: fs.TrainState
    plan: fs.Plan
    mesh: fs.Mesh
    optimizer: Any
    sharded: Any
    losses: list[torch.Tensor] = field(default_factory=list)


def made(
    mesh: fs.Mesh,
    *,
    plan: dict[str, Any] | None = None,
    remat: tuple[str, ...] = (),
    dropout: float = 0.0,
    frozen: bool = False,
    tied: bool = False,
    autocast: str = "",
    mutable: bool = False,
    weighted: bool = False,
    optimizer: Callable[[fs.Plan, fs.Mesh], Any] = lambda plan, mesh: fs.torch_optimizer(torch.optim.AdamW, lr=1e-2),
    schedule: dict[str, Any] | None = None,
    **options: Any,
) -> Made:
    """Return a step and its first state, on the mesh's device."""
    torch.manual_seed(0)
    with torch.device(mesh.device if is_dry() else "cpu"):  # the same values on every device
        net = Net(dropout, mutable)
    net = net if is_dry() else net.to(mesh.device)
    net.embed.requires_grad_(not frozen)
    if tied:
        net.head.weight = net.embed.weight
    apply, params, buffers = fs.make_functional(net, mutable=mutable)
    cut = fs.make_plan(params, mesh, **({"units": ["embed", "blocks.*"]} | (plan or {})))
    order = None if schedule is None else fs.make_schedule(cut, ["embed", "blocks.0", "blocks.1"], **schedule)
    sharded = fs.fully_shard(apply, cut, mesh, remat=remat, schedule=order)

    def loss_fn(shards: Any, buffers: Any, batch: torch.Tensor) -> Any:
        with torch.autocast(mesh.device.type, getattr(torch, autocast or "bfloat16"), enabled=bool(autocast)):
            out = sharded(shards, buffers, batch)
        out, new = out if mutable else (out, None)
        loss = F.cross_entropy(out.float(), batch.flatten())
        return (loss, *[float(len(batch))] * weighted, *[new] * mutable) if weighted or mutable else loss

    run = optimizer(cut, mesh)
    step = fs.make_train_step(loss_fn, run, cut, mesh, weighted=weighted, mutable=mutable, **options)
    state = step.init(fs.shard(params, cut, mesh), buffers)
    return Made(step=step, state=state, plan=cut, mesh=mesh, optimizer=run, sharded=sharded)


def batch_of(mesh: fs.Mesh) -> torch.Tensor:
    """Return a batch of words."""
    return (torch.arange(BATCH * 6, device=mesh.device) * (3 + mesh.rank) % WORDS).view(BATCH, 6)


def train(mesh: fs.Mesh, *, steps: int = 1, **options: Any) -> tuple[Made, fs.TrainState]:
    """Run steps, and check where the results are."""
    run = made(mesh, **options)
    state = run.state
    for _ in range(steps):
        state, metrics = run.step(state, batch_of(mesh))
        run.losses.append(metrics["loss"])
    check_state(run, state, metrics)
    return run, state


def check_state(run: Made, state: fs.TrainState, metrics: Mapping[str, Any]) -> None:
    """Check where the results of a step are."""
    for name, value in metrics.items():
        assert not isinstance(value, torch.Tensor) or value.device == run.mesh.device, f"metric {name} is on {value.device}"
    check_placed(state.shards, run.plan, run.mesh)
    assert all(buffer.device == run.mesh.device for buffer in state.buffers.values()), "a buffer left the device"


def check_placed(shards: Mapping[str, Any], plan: fs.Plan, mesh: fs.Mesh) -> None:
    """Check that shards are on the device, and those of offloaded units in pinned memory."""
    assert set(shards) == {unit.name for unit in plan.unit_list}, f"the shards have units {sorted(shards)}"
    for unit in plan.unit_list:
        for shard in shards[unit.name].values():
            device = torch.device("cpu") if unit.offload else mesh.device
            assert shard.device == device, f"the shard of {unit.title!r} is on {shard.device}"
            if unit.offload and mesh.device.type == "cuda":
                assert shard.is_pinned(), f"the offloaded shard of {unit.title!r} is not pinned"
