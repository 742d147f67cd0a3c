"""The steps, options and conversions that run dry, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

import funcshard as fs
from benchmarks.dry.mode import Wait, dry_cuda
from funcshard.comm import DesyncDetector, WrappedGroup
from funcshard.comm.native import Native
from funcshard.comm.torch_group import TorchGroup

__all__ = ["CASES", "QUICK", "Case", "dry_mesh", "train"]

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD
BFLOAT16 = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FLOAT16 = fs.MixedPrecision(param_dtype=torch.float16)
BATCH, WIDTH, WORDS = 4, 8, 16


# --- ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _DryGroup(WrappedGroup):
    """The group of one rank of a job whose other ranks do not exist: texts of all are its own."""

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> _DryGroup:
        return _group(list(range(len(global_ranks))), axis)

    def all_gather_text(self, text: str) -> list[str]:
        return [text] * self.size


def dry_mesh(shape: Mapping[str, int]) -> fs.Mesh:
    """Return the mesh of rank 0 on CUDA; collectives go through the library's code for NCCL.

    Its process groups are torch's "fake" ones, two for each axis, as on NCCL.

    Arguments:
        shape: the size of each axis; the process groups stay until the process ends.
    """
    world = 1
    for size in shape.values():
        world *= size
    groups: dict[str, Any] = {}
    stride = world
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
        found: torch.Tensor = self.head(self.norm(x))
        return found


@dataclass(frozen=True, slots=True)
class Made:
    """A step and all that it was made of."""

    step: Any
    state: fs.TrainState
    plan: fs.Plan
    mesh: fs.Mesh
    optimizer: Any
    sharded: Any


def made(
    mesh: fs.Mesh,
    *,
    plan: dict[str, Any] | None = None,
    remat: tuple[str, ...] = (),
    dropout: float = 0.0,
    mutable: bool = False,
    weighted: bool = False,
    optimizer: Callable[[fs.Plan, fs.Mesh], Any] = lambda plan, mesh: fs.torch_optimizer(ADAMW, lr=1e-2),
    schedule: dict[str, Any] | None = None,
    **options: Any,
) -> Made:
    """Return a step and its first state, on CUDA."""
    with torch.device(mesh.device):
        net = Net(dropout, mutable)
    apply, params, buffers = fs.make_functional(net, mutable=mutable)
    cut = fs.make_plan(params, mesh, units=["embed", "blocks.*"], **(plan or {}))
    order = None if schedule is None else fs.make_schedule(cut, ["embed", "blocks.0", "blocks.1"], **schedule)
    sharded = fs.fully_shard(apply, cut, mesh, remat=remat, schedule=order)

    def loss_fn(shards: Any, buffers: Any, batch: torch.Tensor) -> Any:
        out = sharded(shards, buffers, batch)
        out, new = out if mutable else (out, None)
        loss = F.cross_entropy(out.float(), batch.flatten())
        return (loss, *[float(len(batch))] * weighted, *[new] * mutable) if weighted or mutable else loss

    run = optimizer(cut, mesh)
    step = fs.make_train_step(loss_fn, run, cut, mesh, weighted=weighted, mutable=mutable, **options)
    return Made(step, step.init(fs.shard(params, cut, mesh), buffers), cut, mesh, run, sharded)


def batch_of(mesh: fs.Mesh) -> torch.Tensor:
    return torch.zeros(BATCH, 6, dtype=torch.int64, device=mesh.device)


def train(mesh: fs.Mesh, *, steps: int = 1, **options: Any) -> tuple[Made, fs.TrainState]:
    """Run steps, and check where the results are."""
    run = made(mesh, **options)
    state = run.state
    for _ in range(steps):
        state, metrics = run.step(state, batch_of(mesh))
    for name, value in metrics.items():
        assert not isinstance(value, torch.Tensor) or value.device == mesh.device, f"metric {name} is on {value.device}"
    on_host = [unit.name for unit in run.plan.unit_list if unit.offload]
    for name, shards in state.shards.items():
        for shard in shards.values():
            assert shard.is_cuda or name in on_host, f"the shard of {name!r} is on {shard.device}"
            assert name not in on_host or shard.is_pinned(), f"the offloaded shard of {name!r} is not pinned"
    assert all(buffer.device == mesh.device for buffer in state.buffers.values()), "a buffer left the device"
    return run, state


# --- programs other than steps --------------------------------------------------------------------


def convert(mesh: fs.Mesh, **options: Any) -> None:
    """Convert parameters and optimizer state to names and back, in every form."""
    run, state = train(mesh, **options)
    plan, optimizer = run.plan, run.optimizer
    for form in ({}, {"rank0_only": True}, {"sharded": True}):
        found = fs.to_state_dict(state.shards, plan, mesh, buffers=state.buffers, **form)
        if not form:
            assert all(value.is_cuda for value in found.values()), "full tensors stay on the device"
            fs.from_state_dict({name: found[name] for name in plan.names}, plan, mesh)
    fs.gather(state.shards, plan, mesh)
    found = fs.optimizer_to_state_dict(state.opt_state, optimizer, plan, mesh)
    fs.optimizer_from_state_dict(found, optimizer, plan, mesh)


def to_host(mesh: fs.Mesh) -> None:
    """Convert to a state dict on the CPU, which the caller asks for."""
    run, state = train(mesh)
    found = fs.to_state_dict(state.shards, run.plan, mesh, offload=True)
    assert not any(value.is_cuda for value in found.values()), "offload=True moves to the CPU"


def initialise(mesh: fs.Mesh) -> None:
    """Make shards of a module on the meta device, and of one on the CPU."""
    with torch.device("meta"):
        net = Net()
    apply, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["embed", "blocks.*"])
    shards, buffers = fs.init_module(net, plan, mesh)
    out = fs.fully_shard(apply, plan, mesh)(shards, buffers, batch_of(mesh))
    assert out.device == mesh.device


def evaluate(mesh: fs.Mesh) -> None:
    """Run forward without gradients, and in inference mode; copy and average the state."""
    run, state = train(mesh)
    with torch.no_grad():
        run.sharded(state.shards, state.buffers, batch_of(mesh))
        average = torch.utils._pytree.tree_map(torch.clone, state.shards)
        for unit, shards in state.shards.items():
            for key, shard in shards.items():
                average[unit][key].lerp_(shard, 0.01)
    with torch.inference_mode():
        run.sharded(average, state.buffers, batch_of(mesh))
    run.step(fs.copy(state), batch_of(mesh))


def compose(mesh: fs.Mesh) -> None:
    """Compose unshard, reshard and remat by hand, and differentiate with torch's own backward."""
    params = {"w": torch.zeros(WIDTH, WIDTH, device=mesh.device, requires_grad=True)}
    plan = fs.make_plan(params, mesh)
    shards = {key: shard.detach().requires_grad_() for key, shard in fs.shard(params, plan, mesh)[""].items()}
    x = torch.zeros(BATCH, WIDTH, device=mesh.device)
    unit = fs.unshard(lambda leaves, x: torch.tanh(x @ leaves["w"]), plan.units[""], mesh)
    for f in (unit, fs.reshard(unit), fs.remat(unit)):
        with fs.record_events() as events:
            f(shards, x).sum().backward()
        assert all(shard.grad is not None and shard.grad.is_cuda for shard in shards.values())
        kinds = [event.kind for event in events]
        assert mesh.world_size == 1 or "reduce_scatter" in kinds, f"backward's collectives are not recorded; found {kinds}"
    torch.func.grad(lambda s: unit(s, x).sum())({key: shard.detach() for key, shard in shards.items()})


def simulated(mesh: fs.Mesh) -> None:
    """Do the same as two simulated ranks, which share autograd's thread for the device."""
    fake = FakeTensorMode()

    def main(mesh: fs.Mesh) -> list[Wait]:
        with dry_cuda(fake=fake) as mode:
            compose(mesh)
        return mode.forbidden

    with _disable_current_modes():
        assert fs.simulate(main, 2, device=mesh.device) == [[], []]


def collectives(mesh: fs.Mesh) -> None:
    """Run the collectives of the user."""
    x = torch.zeros(mesh.world_size, 2, device=mesh.device)
    for found in (fs.psum(x, mesh), fs.pmean(x, mesh), fs.pmax(x, mesh), fs.all_gather(x, mesh), fs.psum_scatter(x, mesh)):
        assert found.device == mesh.device
    fs.all_to_all(x, mesh)
    fs.ppermute(x, mesh, [(0, 1), (1, 0)] if mesh.world_size > 1 else [])


def per_sample(mesh: fs.Mesh) -> None:
    """Take private gradients of each sample."""
    with torch.device(mesh.device):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["0"])
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    loss_fn = lambda shards, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
    fs.per_sample_grad(loss_fn, plan, mesh, max_norm=1.0, noise_multiplier=0.0)(
        shards, torch.zeros(BATCH, WIDTH, device=mesh.device)
    )


def _optimizer(cls: Any, **options: Any) -> Callable[[fs.Plan, fs.Mesh], Any]:
    return lambda plan, mesh: fs.torch_optimizer(cls, **options)


def _grouped(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    groups = [{"paths": ["**.bias"], "weight_decay": 0.0}]
    return fs.torch_optimizer(ADAMW, lr=lambda step: 1e-2 / (1 + step), groups=groups, plan=plan, mesh=mesh)


def _torchopt(plan: fs.Plan, mesh: fs.Mesh) -> Any:
    import torchopt

    return torchopt.adam(1e-2)


# --- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """A program to run dry.

    Attributes:
        run: the program of one rank.
        shape: the ranks; the program is that of rank 0.
    """

    run: Callable[[fs.Mesh], object]
    shape: Mapping[str, int]


ONE, TWO, HYBRID = {"shard": 1}, {"shard": 2}, {"replicate": 2, "shard": 2}


def _steps(shape: Mapping[str, int] = TWO, run: Callable[..., object] = train, **options: Any) -> Case:
    return Case(lambda mesh: run(mesh, **options), shape)


# The cases that the tests run.
QUICK: dict[str, Case] = {
    "one rank, float16": _steps(ONE, plan={"precision": FLOAT16}, scaler=fs.GradScaler(), max_norm=1.0),
    "full_shard": _steps(steps=2),
    "no_shard, foreach": _steps(plan={"strategy": "no_shard"}, optimizer=_optimizer(ADAMW, lr=1e-2, foreach=True)),
    "hybrid, shard_grad_op, fused": _steps(
        HYBRID, plan={"strategy": "shard_grad_op"}, max_norm=1.0, optimizer=_optimizer(ADAMW, lr=1e-2, fused=True)
    ),
    "slices, capturable": _steps(
        {"shard": 4}, plan={"reshard_after_forward": 2}, optimizer=_optimizer(ADAMW, lr=1e-2, capturable=True)
    ),
    "offload, clipped": _steps(plan={"offload": True}, max_norm=1.0),
    "offload, buckets, bfloat16": _steps(plan={"offload": True, "bucket_bytes": 1 << 12, "precision": BFLOAT16}),
    "bfloat16": _steps(plan={"precision": BFLOAT16}),
    "micro-batches, once": _steps(accumulate=2, reduce="once", optimizer=_optimizer(SGD, lr=0.1, momentum=0.9)),
    "remat, dropout, groups": _steps(remat=("blocks.0", "blocks.1"), dropout=0.5, optimizer=_grouped),
    "weights, mutable, torchopt": _steps(weighted=True, mutable=True, optimizer=_torchopt),
    "muon": _steps(optimizer=lambda plan, mesh: fs.muon(plan=plan, mesh=mesh, lr=1e-2)),
    "state dicts": _steps(run=convert),
    "init": _steps(run=initialise),
    "evaluation": _steps(run=evaluate),
    "composed by hand": _steps(run=compose),
    "composed by hand, simulated": _steps(ONE, run=simulated),
    "collectives": _steps(run=collectives),
    "per-sample gradients": _steps(run=per_sample),
}

CASES: dict[str, Case] = {
    **QUICK,
    "one rank": _steps(ONE, steps=2),
    "one rank, offload": _steps(ONE, steps=2, plan={"offload": True}),
    "shard_grad_op": _steps(steps=2, plan={"strategy": "shard_grad_op"}),
    "no_shard": _steps(steps=2, plan={"strategy": "no_shard"}),
    "hybrid": _steps(HYBRID, steps=2),
    "buckets": _steps(steps=2, plan={"bucket_bytes": 1 << 12}),
    "buckets, slices": _steps({"shard": 4}, steps=2, plan={"bucket_bytes": 1 << 12, "reshard_after_forward": 2}),
    "prefetch after backward": _steps(steps=2, schedule={"backward_prefetch": "post", "limit": 2}),
    "no prefetch": _steps(steps=2, schedule={"backward_prefetch": None, "forward_prefetch": False}),
    "offload, hybrid": _steps(HYBRID, steps=2, plan={"offload": True}),
    "offload, float16, scaler": _steps(plan={"offload": True, "precision": FLOAT16}, scaler=fs.GradScaler(), max_norm=1.0),
    "offload, weights": _steps(plan={"offload": True}, weighted=True),
    "offload, muon": _steps(plan={"offload": True}, optimizer=lambda plan, mesh: fs.muon(plan=plan, mesh=mesh, lr=1e-2)),
    "offload, fused": _steps(plan={"offload": True}, optimizer=_optimizer(ADAMW, lr=1e-2, fused=True)),
    "float16, scaler": _steps(steps=2, plan={"precision": FLOAT16}, scaler=fs.GradScaler()),
    "micro-batches": _steps(steps=2, accumulate=2),
    "micro-batches, shard_each": _steps(HYBRID, accumulate=2, reduce="shard_each"),
    "mutable": _steps(steps=2, mutable=True),
    "weights": _steps(steps=2, weighted=True),
    "not donated": _steps(steps=2, donate=False),
    "state dicts, offload": _steps(run=convert, plan={"offload": True}),
    "state dicts, hybrid, muon": _steps(
        HYBRID, run=convert, optimizer=lambda plan, mesh: fs.muon(plan=plan, mesh=mesh, lr=1e-2)
    ),
    "state dict on the CPU": _steps(run=to_host),
}
