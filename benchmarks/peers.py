"""The peers: one training step of the same model in each library, with its best options.

Every peer gets the same initial parameters, the same batches and AdamW with its fused kernel, and
computes on one thread a rank. A peer is a function of a batch that takes one step and returns this
rank's loss; a function of a shape makes it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import funcshard as fs
from benchmarks.rank_processes import RankProcesses
from benchmarks.shapes import LEARNING_RATE, SHAPES, Shape

Step = Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]

OURS = ("full_shard", "shard_grad_op")
PLANS: dict[str, dict[str, Any]] = {  # options of make_plan
    "full_shard": {"strategy": "full_shard"},
    "full_shard_alone": {"strategy": "full_shard", "bucket_bytes": 0},
    "full_shard_bucketed": {"strategy": "full_shard", "bucket_bytes": 1 << 20},
    "full_shard_large": {"strategy": "full_shard"},
    "full_shard_compiled": {"strategy": "full_shard"},
    "full_shard_exact": {"precision": fs.MixedPrecision(reduce_dtype=torch.float64, keep_low_precision_grads=True)},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "no_shard": {"strategy": "no_shard"},
}
# Modules with fewer bytes of parameters are no units and stay in the root.
LEAST = {"full_shard_large": 1 << 20, "full_shard_compiled": 1 << 20}
EXACT = "full_shard_exact"
COMPILED = ("full_shard_compiled",)  # peers whose units are compiled by torch.compile
GRID = 2.0**-44  # of the gradients of a peer with the same bits on every mesh
# Peers that run a plan of above as one traced step, compiled by Inductor.
TRACED = {"full_shard_traced_compiled": "full_shard", "full_shard_large_traced_compiled": "full_shard_large"}
TITLES = {
    "none": "no communication",
    "ddp": "DDP",
    "fsdp1": "FSDP1",
    "fsdp1_kept": "FSDP1, SHARD_GRAD_OP",
    "fsdp2": "FSDP2",
    "fsdp2_kept": "FSDP2, not resharded",
    "jax": "JAX, sharded parameters",
    "full_shard": "funcshard full_shard",
    "full_shard_alone": "funcshard full_shard, each unit by itself",
    "full_shard_bucketed": "funcshard full_shard, groups of 1 MiB",
    "full_shard_large": "funcshard full_shard, units of 1 MiB and more",
    "full_shard_compiled": "funcshard full_shard, units of 1 MiB and more, compiled",
    "full_shard_exact": "funcshard full_shard, the same bits on every mesh",
    "shard_grad_op": "funcshard shard_grad_op",
    "no_shard": "funcshard no_shard",
    "none_compiled": "no communication, compiled",
    "ddp_compiled": "DDP, compiled",
    "fsdp2_compiled": "FSDP2, compiled blocks",
    "full_shard_traced_compiled": "funcshard full_shard, traced and compiled",
    "full_shard_large_traced_compiled": "funcshard full_shard, units of 1 MiB and more, traced and compiled",
    "full_shard_gloo": "funcshard full_shard over gloo",
    "shard_grad_op_gloo": "funcshard shard_grad_op over gloo",
}


def _eager(module: nn.Module, shape: Shape) -> Step:
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = batch
        loss = shape.loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)  # no gradients in memory during the other peers' turns
        return loss.detach()

    return step


def _ddp(shape: Shape) -> Any:
    return DistributedDataParallel(shape.module(), gradient_as_bucket_view=True)


def _fsdp1(shape: Shape, strategy: ShardingStrategy) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 warns that it is deprecated, and that the CPU is slow
        policy = ModuleWrapPolicy({shape.unit})
        device = torch.device("cpu")
        return FullyShardedDataParallel(
            shape.module(), sharding_strategy=strategy, auto_wrap_policy=policy, device_id=device
        )


def _fsdp2_compiled(shape: Shape) -> nn.Module:
    """Compile each block on its own, and shard it then, as torchtitan does."""
    module = shape.module()
    for child in module.modules():
        if isinstance(child, shape.unit):
            child.compile(fullgraph=True)
    return sharded_by_fsdp2(module, shape.unit)


def sharded_by_fsdp2(module: nn.Module, unit: type[nn.Module], reshard: bool = True, **further: Any) -> nn.Module:
    """Apply FSDP2 to every unit and to the root, as its documentation does."""
    options: dict[str, Any] = {"reshard_after_forward": reshard, "mp_policy": MixedPrecisionPolicy(), **further}
    for child in module.modules():
        if isinstance(child, unit):
            fully_shard(child, **options)
    if reshard:  # FSDP2's default, which keeps the root gathered
        del options["reshard_after_forward"]
    fully_shard(module, **options)
    return module


def _ours(shape: Shape, peer: str, shared_memory: bool = True) -> Step:
    train_step, state = ours(shape, TRACED.get(peer, peer), fs.init_mesh(device="cpu", shared_memory=shared_memory))
    if peer in TRACED:
        train_step = fs.trace(train_step, state, shape.batches(0)[0]).compile()

    def step(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        nonlocal state
        state, metrics = train_step(state, batch)
        return metrics["loss"]

    return step


def ours(shape: Shape, peer: str, mesh: fs.Mesh) -> tuple[Any, fs.TrainState]:
    """Return the training step of one of funcshard's peers, and its initial state."""
    module = shape.module()
    apply, params, buffers = fs.make_functional(module)
    plan = _plan(module, params, shape, peer, mesh)
    del module
    sharded = fs.fully_shard(apply, plan, mesh, compiler=torch.compile if peer in COMPILED else None)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    loss_fn = lambda shards, buffers, batch: shape.loss(sharded(shards, buffers, batch[0]), batch[1])  # noqa: E731
    options: Any = {}
    if peer == EXACT:  # docs/same-on-every-mesh.md, with a block for each sample
        loss_fn = _exact(loss_fn)
        options = {"weighted": True, "accumulate": shape.batch, "on_grads": _round_grads}
    train_step = fs.make_train_step(loss_fn, optimizer, plan, mesh, **options)
    return train_step, train_step.init(fs.shard(params, plan, mesh), buffers)


def _exact(loss_fn: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, float]]:
    def exact(*arguments: Any) -> tuple[torch.Tensor, float]:
        loss = loss_fn(*arguments).double()
        return loss + ((loss / GRID).round() * GRID - loss).detach(), 1.0

    return exact


def _round_grads(_: str, grads: dict[str, torch.Tensor]) -> None:
    for grad in grads.values():
        grad.copy_((grad / GRID).round() * GRID)


def planned(shape: Shape, peer: str, ranks: int) -> fs.Plan:
    """Return the plan of one of funcshard's peers without drawing parameters."""
    with torch.device("meta"):
        module = shape.build()
    return _plan(module, fs.make_functional(module)[1], shape, peer, ranks)


def _plan(module: nn.Module, params: Any, shape: Shape, peer: str, mesh: Any) -> fs.Plan:
    def is_unit(m: nn.Module) -> bool:
        return isinstance(m, shape.unit) and sum(p.nbytes for p in m.parameters()) >= LEAST.get(peer, 0)

    return fs.make_plan(params, mesh, units=fs.wrap.by_function(is_unit)(module), **PLANS[peer])


MODULES: dict[str, Callable[[Shape], nn.Module]] = {  # peers that train a module
    "none": lambda shape: shape.module(),
    "ddp": _ddp,
    "none_compiled": lambda shape: torch.compile(shape.module()),
    "ddp_compiled": lambda shape: torch.compile(_ddp(shape)),
    "fsdp1": lambda shape: _fsdp1(shape, ShardingStrategy.FULL_SHARD),
    "fsdp1_kept": lambda shape: _fsdp1(shape, ShardingStrategy.SHARD_GRAD_OP),
    "fsdp2": lambda shape: sharded_by_fsdp2(shape.module(), shape.unit),
    "fsdp2_kept": lambda shape: sharded_by_fsdp2(shape.module(), shape.unit, False),
    "fsdp2_compiled": _fsdp2_compiled,
}


def made(peer: str, shape: Shape) -> Step:
    """Make the peer of a name on this rank."""
    if peer in MODULES:
        return _eager(MODULES[peer](shape), shape)
    return _ours(shape, peer.removesuffix("_gloo"), shared_memory=not peer.endswith("_gloo"))


# --- turns ----------------------------------------------------------------------------------------


class Ranks(RankProcesses):
    """The processes of a race of steps; a context manager."""

    def __init__(self, size: int) -> None:
        super().__init__(size, _Rank, preload=["benchmarks.peers", "torch._dynamo"], timeout=600.0)

    def steps(self, peer: str, number: int) -> tuple[float, list[float]]:
        """Run steps of a peer; return the slowest rank's seconds, and each step's mean loss over ranks."""
        seconds, losses = zip(*self.call("steps", peer, number), strict=True)
        return max(seconds), [sum(each) / len(each) for each in zip(*losses, strict=True)]


class _Rank:
    """The state of one rank between its turns."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.shape = rank, ""

    def make(self, peer: str, shape: str) -> None:
        if shape != self.shape:
            self.runs: dict[str, Step] = {}
            self.taken: dict[str, int] = {}
            self.shape, self.batches = shape, SHAPES[shape].batches(self.rank)
        self.runs[peer], self.taken[peer] = made(peer, SHAPES[shape]), 0

    def steps(self, peer: str, number: int) -> tuple[float, list[float]]:
        run, losses = self.runs[peer], []
        dist.barrier()
        start = time.perf_counter()
        for _ in range(number):
            losses.append(run(self.batches[self.taken[peer] % len(self.batches)]))
            self.taken[peer] += 1
        dist.barrier()
        return time.perf_counter() - start, [loss.item() for loss in losses]
