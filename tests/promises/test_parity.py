"""Training has the numbers of DistributedDataParallel; tests/jobs.py has those of one process."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import funcshard as fs
from tests.models import SUBJECTS, Subject, cast, part
from tests.ranks import run_ranks

# The optimizer has state from the second step on, the loss of the third shows an update that read
# it, and later steps run the same code again. So ten steps of the smallest model show that errors
# do not add up; three are enough for the others.
STEPS = {"mlp": 10}
FEWER = 3
SAMPLES = 2  # for each rank and step
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
HYBRID = {"replicate": 2, "shard": 2}

# AdamW divides a gradient by its own size plus eps. So it hides the scale of gradients: a sum over
# ranks in place of a mean would not be noticed. And if a gradient is zero except for rounding (key
# biases in attention, biases before BatchNorm), AdamW turns the rounding into full steps. Therefore
# eps is much larger than rounding, and as large as small gradients. A change of a gradient by d
# then changes a parameter by at most about lr / eps * d = 3 d in each step.
ADAMW = {"lr": 3e-3, "eps": 1e-3, "weight_decay": 0.1}


def steps_of(name: str) -> int:
    return STEPS.get(name, FEWER)


def tolerance(subject: Subject, dtype: torch.dtype) -> float:
    """Return the tolerance for losses, gradients, parameters and buffers: relative above 1, absolute below.

    Adding the same numbers in another order (over ranks, or over parts of a batch) changes results
    by the rounding of ``dtype``. Over ten steps these changes add up to a small multiple of its
    epsilon: at most two were measured, for any model, number of ranks and strategy, in float64 and
    in float32. The tolerance is ten times as much. If a model computes in float32 inside (RMSNorm,
    softmax), the epsilon is that of float32, whatever the dtype of its parameters.
    """
    return 20 * torch.finfo(torch.float32 if subject.float32_inside else dtype).eps


class Run(NamedTuple):
    losses: list[float]  # the mean over ranks, for each step
    grads: dict[str, torch.Tensor]  # of the first step
    params: dict[str, torch.Tensor]  # after the last step
    buffers: dict[str, torch.Tensor]


def train_sharded(mesh: fs.Mesh, name: str, dtype: torch.dtype, strategy: str = "full_shard") -> Run:
    subject = SUBJECTS[name]
    mutable, module = subject.batch_statistics, subject.build().to(dtype)
    apply, params, buffers = fs.make_functional(module, mutable=mutable)
    plan = fs.make_plan(params, mesh, units=subject.units, strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> Any:
        output = sharded(shards, buffers, **batch["inputs"])
        return (subject.loss(output[0], batch), output[1]) if mutable else subject.loss(output, batch)

    optimizer = fs.torch_optimizer(torch.optim.AdamW, **ADAMW)
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, mutable=mutable)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    _, grads = fs.value_and_grad(loss_fn, has_aux=mutable)(state.shards, buffers, batch_of_rank(mesh, name, dtype, 0))
    losses = []
    for i in range(steps_of(name)):
        state, metrics = step(state, batch_of_rank(mesh, name, dtype, i))
        losses.append(metrics["loss"].item())
    return Run(losses, *(copies(fs.gather(tree, plan, mesh).items()) for tree in (grads, state.shards)), state.buffers)


def train_ddp(mesh: fs.Mesh, name: str, dtype: torch.dtype) -> Run:
    module = DistributedDataParallel(SUBJECTS[name].build().to(dtype))
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    losses, grads = [], {}
    for i in range(steps_of(name)):
        batch = batch_of_rank(mesh, name, dtype, i)
        optimizer.zero_grad()
        loss = SUBJECTS[name].loss(module(**batch["inputs"]), batch)
        loss.backward()
        grads = grads or copies((key, p.grad) for key, p in module.module.named_parameters())
        optimizer.step()
        losses.append(fs.pmean(loss.detach(), mesh).item())
    return Run(losses, grads, copies(module.module.named_parameters()), copies(module.module.named_buffers()))


def batch_of_rank(mesh: fs.Mesh, name: str, dtype: torch.dtype, step: int) -> Any:
    (rows, columns), at = (mesh.shape["replicate"], mesh.shape["shard"]), mesh.position
    whole = cast(SUBJECTS[name].make_batch(SAMPLES * rows * columns, step), dtype)
    return part(whole, at["replicate"] * columns + at["shard"], rows * columns)


def copies(named: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: x.detach().clone() for key, x in named}


def train_every_way(mesh: fs.Mesh, name: str, dtype: torch.dtype) -> dict[str, Run]:
    """Train with DDP and with every strategy; on four ranks, which cut differently, with full_shard on two meshes."""
    runs = {"ddp": train_ddp(mesh, name, dtype)}
    if mesh.world_size == 4:
        grid = fs.init_mesh(HYBRID, device="cpu")
        return runs | {str(each.shape): train_sharded(each, name, dtype) for each in (mesh, grid)}
    return runs | {strategy: train_sharded(mesh, name, dtype, strategy) for strategy in STRATEGIES}


@functools.cache
def runs_of_ranks(name: str, dtype: torch.dtype, world_size: int) -> list[dict[str, Run]]:
    return run_ranks(train_every_way, world_size, name, dtype, timeout=150)


MODELS = [pytest.param(name, torch.float64, id=f"{name}-float64") for name in SUBJECTS]
MODELS += [pytest.param(name, torch.float32, id=f"{name}-float32") for name in ("mlp", "gpt", "gpt2")]


@pytest.mark.nightly(one_in=8)
@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_two_ranks_equal_ddp_to_the_bit_with_every_strategy(name, dtype):
    # Why two: dividing by two is exact, and a + b = b + a, so nothing can round differently.
    for rank, runs in enumerate(runs_of_ranks(name, dtype, 2)):
        ddp = runs_of_ranks(name, dtype, 2)[0]["ddp"]  # under DDP each rank has running statistics of its own
        for strategy in STRATEGIES:
            assert_close(runs[strategy], ddp, 0.0, f"{strategy} on rank {rank}")


@pytest.mark.nightly(one_in=10)
@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_four_ranks_on_either_mesh_equal_ddp_which_adds_in_another_order(name, dtype):
    for rank, runs in enumerate(runs_of_ranks(name, dtype, 4)):
        ddp = runs_of_ranks(name, dtype, 4)[0]["ddp"]
        for mesh in runs.keys() - {"ddp"}:
            assert_close(runs[mesh], ddp, tolerance(SUBJECTS[name], dtype), f"{mesh} on rank {rank}")


@pytest.mark.nightly(one_in=7)
@pytest.mark.parametrize("name", SUBJECTS)
def test_the_steps_move_parameters_far_more_than_the_tolerance(name):
    run, start = runs_of_ranks(name, torch.float64, 2)[0]["full_shard"], SUBJECTS[name].build().double()
    change = {key: (run.params[key] - value).abs().max().item() for key, value in start.named_parameters()}
    assert max(change.values()) > 1000 * tolerance(SUBJECTS[name], torch.float64)
    assert len(set(run.losses)) == steps_of(name)
    if SUBJECTS[name].batch_statistics:
        assert not [key for key, value in start.named_buffers() if torch.equal(run.buffers[key], value)]


def assert_close(run: Run, expected: Run, allowed: float, where: str) -> None:
    close = functools.partial(torch.testing.assert_close, rtol=allowed, atol=allowed)
    close(run.losses, expected.losses, msg=lambda text: f"losses, {where}: {text}")
    for what in ("grads", "params", "buffers"):
        found, wanted = getattr(run, what), getattr(expected, what)
        assert found.keys() == wanted.keys()
        for key in wanted:
            close(found[key], wanted[key], msg=lambda text, key=key, what=what: f"{what} {key}, {where}: {text}")
