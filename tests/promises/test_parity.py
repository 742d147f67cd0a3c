"""Training has the numbers of DistributedDataParallel, and of one process on the whole batch."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import funcshard as fs
from tests.models import SUBJECTS, Subject, cast, part
from tests.ranks import one_thread, run_ranks, run_simulated

# The optimizer has state from the second step on, the loss of the third shows an update that read
# it, and later steps run the same code again. So ten steps of the smallest model show that errors
# do not add up; three are enough for the others.
STEPS = {"mlp": 10}
FEWER = 3
SAMPLES = 2  # for each rank and step
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
HYBRID = {"replicate": 2, "shard": 2}
GRID = "hybrid "  # begins the name of a strategy on that mesh
SMALL = ("mlp", "gpt", "convnet")

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


def train_sharded(mesh: fs.Mesh, name: str, dtype: torch.dtype, strategy: str) -> Run:
    subject = SUBJECTS[name]
    mutable = subject.batch_statistics
    apply, params, buffers = fs.make_functional(subject.build().to(dtype), mutable=mutable)
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
    return Run(losses, fs.gather(grads, plan, mesh), fs.gather(state.shards, plan, mesh), state.buffers)


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


def train_in_one_process(name: str, dtype: torch.dtype, world_size: int) -> Run:
    """Train on the whole batch at once, without sharding.

    A model with BatchNorm would be another function of the whole batch, because its statistics
    would run over the whole batch. Its reference therefore runs the ranks' parts one after another,
    and averages their gradients. The running statistics are those of rank 0's part.
    """
    subject = SUBJECTS[name]
    module = subject.build().to(dtype)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    parts = world_size if subject.batch_statistics else 1
    losses, grads = [], {}
    for i in range(steps_of(name)):
        optimizer.zero_grad()
        before, total = copies(module.named_buffers()), 0.0
        for rank in reversed(range(parts)):
            for key, buffer in module.named_buffers():
                buffer.copy_(before[key])
            batch = part(whole_batch(name, dtype, i, world_size), rank, parts)
            loss = subject.loss(module(**batch["inputs"]), batch) / parts
            loss.backward()
            total += loss.item()
        grads = grads or copies((key, p.grad) for key, p in module.named_parameters())
        optimizer.step()
        losses.append(total)
    return Run(losses, grads, copies(module.named_parameters()), copies(module.named_buffers()))


def whole_batch(name: str, dtype: torch.dtype, step: int, world_size: int) -> Any:
    return cast(SUBJECTS[name].make_batch(SAMPLES * world_size, step), dtype)


def batch_of_rank(mesh: fs.Mesh, name: str, dtype: torch.dtype, step: int) -> Any:
    return part(whole_batch(name, dtype, step, mesh.world_size), mesh.rank, mesh.world_size)


def copies(named: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in named}


def ways(name: str, dtype: torch.dtype, world_size: int) -> list[str]:
    """Return the strategies that a model is trained with on a number of ranks.

    Every model runs every strategy on two ranks, where DDP has the same bits. More ranks and the
    grid change the cuts of flat buffers, and not the model's own code, so there large models run
    one strategy. Three ranks, whose shards have padding, are for the small models.
    """
    small = name in SMALL and dtype == torch.float64
    if world_size == 2 or (small and world_size == 3):
        return list(STRATEGIES)
    if world_size in (1, 3):
        return ["full_shard"] if small and world_size == 1 else []
    chosen = STRATEGIES if small else STRATEGIES[:1]
    return [*chosen, *(f"{GRID}{strategy}" for strategy in chosen)]


def train_every_way(mesh: fs.Mesh, name: str, dtype: torch.dtype) -> dict[str, Run]:
    found = ways(name, dtype, mesh.world_size)
    grid = fs.init_mesh(HYBRID, device="cpu") if mesh.world_size == 4 else mesh
    runs = {way: train_sharded(grid if way.startswith(GRID) else mesh, name, dtype, way.removeprefix(GRID)) for way in found}
    return {**runs, "ddp": train_ddp(mesh, name, dtype)}


@functools.cache
def outcome(name: str, dtype: torch.dtype, world_size: int) -> list[dict[str, Run]] | Exception:
    try:
        with one_thread():
            alone = train_in_one_process(name, dtype, world_size)
        return [{**runs, "one process": alone} for runs in run_ranks(train_every_way, world_size, name, dtype, timeout=150)]
    except Exception as error:  # every case of the table reports it, but the training runs once
        return error


def runs_of_ranks(name: str, dtype: torch.dtype, world_size: int) -> list[dict[str, Run]]:
    runs = outcome(name, dtype, world_size)
    if isinstance(runs, Exception):
        raise runs
    return runs


MODELS = [pytest.param(name, torch.float64, id=f"{name}-float64") for name in SUBJECTS]
MODELS += [pytest.param(name, torch.float32, id=f"{name}-float32") for name in ("mlp", "gpt", "gpt2")]
WORLDS = [(*model.values, n) for model in MODELS for n in (1, 2, 3, 4) if ways(*model.values, n)]


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["ddp", "one process"])
@pytest.mark.parametrize(
    ("name", "dtype", "world_size", "strategy"), [(*world, way) for world in WORLDS for way in ways(*world)], ids=str
)
def test_training_equals_the_reference(name, dtype, world_size, strategy, reference):
    allowed = tolerance(SUBJECTS[name], dtype)
    for_all = runs_of_ranks(name, dtype, world_size)
    expected = for_all[0][reference]  # rank 0, because under DDP each rank has running statistics of its own
    for rank, runs in enumerate(for_all):
        assert_close(runs[strategy], expected, allowed, f"{strategy} on rank {rank} against {reference}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "world_size", "strategy"),
    [(*world, way) for world in WORLDS if world[2] <= 2 for way in ways(*world)],
    ids=str,
)
def test_one_and_two_ranks_equal_ddp_to_the_bit(name, dtype, world_size, strategy):
    # Why only one and two: dividing by one or two is exact, and a + b = b + a, so nothing can round
    # differently. With three ranks DDP divides before it adds; with four it adds in the order of a
    # ring.
    runs = runs_of_ranks(name, dtype, world_size)[0]
    assert_same_bits(runs[strategy], runs["ddp"])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "world_size"), WORLDS, ids=str)
def test_strategies_and_ranks_agree_to_the_bit(name, dtype, world_size):
    # Every reduction adds in the order of ranks. So over one mesh a strategy changes on which rank
    # numbers are, and not the numbers.
    for_all = runs_of_ranks(name, dtype, world_size)
    for runs in for_all:
        for strategy, run in runs.items():
            if strategy in STRATEGIES:
                assert_same_bits(run, for_all[0]["full_shard"])
            elif strategy.startswith(GRID):
                assert_same_bits(run, for_all[0][f"{GRID}full_shard"])


@pytest.mark.slow
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


def assert_same_bits(run: Run, expected: Run) -> None:
    assert run.losses == expected.losses
    for what in ("grads", "params", "buffers"):
        found, wanted = getattr(run, what), getattr(expected, what)
        assert found.keys() == wanted.keys()
        different = [key for key in wanted if not torch.equal(found[key], wanted[key])]
        assert not different, f"{what} differ in {different}"


def three_steps(mesh: fs.Mesh, name: str, dropout: float) -> Any:
    """Train three steps; return this rank's losses, gradients and shards, without gathering them."""
    if dropout:
        torch.manual_seed(mesh.rank)
    subject = SUBJECTS[name]
    apply, params, buffers = fs.make_functional(subject.build(dropout), mutable=True)
    plan = fs.make_plan(params, mesh, units=subject.units)
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> Any:
        output, buffers = sharded(shards, buffers, **batch["inputs"])
        return subject.loss(output, batch), buffers

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=1e-2), plan, mesh, mutable=True)
    state, losses, grads = step.init(fs.shard(params, plan, mesh), buffers), [], []
    for i in range(3):
        batch = batch_of_rank(mesh, name, torch.float32, i)
        (loss, _), grad = fs.value_and_grad(loss_fn, has_aux=True)(state.shards, state.buffers, batch)
        state, metrics = step(state, batch)
        losses += [loss.item(), metrics["loss"].item()]
        grads.append(grad)
    return losses, {"grads": grads, "shards": state.shards, "buffers": state.buffers}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "shape"), [(3, None), (4, HYBRID)], ids=["3", "2x2"])
@pytest.mark.parametrize("name", ["gpt", "convnet"])
def test_a_simulated_run_with_dropout_equals_one_on_processes_to_the_bit(name, world_size, shape):
    real = run_ranks(three_steps, world_size, name, 0.3, shape=shape)
    simulated = run_simulated(three_steps, world_size, name, 0.3, shape=shape)
    for (losses, tensors), (real_losses, real_tensors) in zip(simulated, real, strict=True):
        assert losses == real_losses
        torch.testing.assert_close(tensors, real_tensors, rtol=0, atol=0)
    assert len({tuple(losses) for losses, _ in real}) == world_size  # every rank drops other activations
