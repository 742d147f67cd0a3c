"""Training jobs as data, and the laws that hold for each of them.

A ``Job`` says everything that a training step can be: its model, mesh, units, strategy, precision
and so on. ``run`` trains it for three steps, and ``oracle`` trains the plain module in one process.
``covering`` returns jobs in which each pair of two options' values occurs.

A law is a test over jobs, in ``tests/promises/test_jobs.py``. A new option of the library is one
more field here, and every law holds for it at once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import funcshard as fs
from funcshard.testing import delayed
from tests.models import SUBJECTS, Subject, cast, part
from tests.pairwise import pairwise
from tests.ranks import run_ranks, run_simulated

__all__ = [
    "CHOICES", "Calls", "Job", "Outcome", "Training", "change_of", "covering", "decoded", "is_possible", "oracle",
    "run", "tolerance",
]  # fmt: skip

STEPS = 3  # the second update reads the optimizer's state, and the third step shows its effect
SAMPLES = 72  # of all ranks, divisible by all numbers of ranks and micro-batches
HYBRID = (("replicate", 2), ("shard", 2))


# --- a model whose units are nested and run several times -------------------------------------------


class Calls(nn.Module):
    """Calls its parts in an order, and uses a leaf that it owns where the order says ``None``."""

    def __init__(self, order: tuple[int | None, ...], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.order = nn.ModuleList(parts), order
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = torch.sin(x * self.scale if number is None else self.parts[number](x))
        return x


def _nested() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        inner = Calls((0, None, 1), nn.Linear(3, 3), nn.Linear(3, 3))
        return Calls((0, None, 2, 1, 2, 0), nn.Linear(3, 3), nn.Linear(3, 3), inner)


def _vectors(n: int, seed: int) -> dict[str, Any]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))
    return {"inputs": {"x": x}, "targets": torch.zeros(n, 1)}


MODELS: Mapping[str, Subject] = {
    **{name: SUBJECTS[name] for name in ("mlp", "gpt", "convnet")},
    "nested": Subject(_nested, _vectors, lambda out, _: out.square().mean(), ("parts.*", "parts.2.parts.*")),
}


# --- jobs -------------------------------------------------------------------------------------------

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "mesh": ((("shard", 2),), (("shard", 3),), HYBRID),
    "units": ("all", "none", "first"),
    "strategy": ("full_shard", "shard_grad_op", "no_shard"),
    "frozen": ("", "a leaf", "a unit", "a packed unit"),
    "bucket_bytes": ("auto", 0, 1 << 20),
    "precision": (None, "bfloat16", "float32 sums", "low-precision gradients"),
    "remat": (False, True),
    "micro_batches": (1, 2, 3),
    "reduce": ("each", "once", "shard_each"),
    "reshard_after_backward": (True, False),
    "weighted": (False, True),
    "scaler": (False, True),
    "offload": (False, True),
    "max_norm": (None, 0.1),
    "optimizer": ("SGD", "AdamW"),
    "schedule": ("learned", "no prefetch", "post", "on demand"),
    "slow": ("", "all_gather", "reduce_scatter", "all_reduce"),
    "compiled": (False, True),
    "traced": (False, True),
    "carrier": ("simulated", "gloo", "shared memory"),
}
"""The values of each field of a ``Job``; the first is the default."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a training step is made of.

    Attributes:
        model: a name of ``MODELS``.
        mesh: name and size of each mesh axis.
        units: which of the model's modules are units.
        frozen: what is not trained: one leaf, or all leaves of the second unit, whose input
            requires a gradient; these may be stored packed.
        strategy, bucket_bytes, offload: as in ``make_plan``.
        precision: a name of ``PRECISIONS``; ``None`` trains in float64.
        remat: whether backward computes every unit again.
        micro_batches, reduce, weighted, max_norm: as in ``make_train_step``.
        scaler: whether the loss is scaled.
        optimizer: a name of ``OPTIMIZERS``.
        schedule: which units are gathered ahead.
        slow: the kind of collectives whose results come late.
        compiled: whether units are compiled.
        traced: whether the step runs as a recorded graph.
        carrier: what the ranks are, and what carries their data.
    """

    model: str = "mlp"
    mesh: tuple[tuple[str, int], ...] = (("shard", 2),)
    units: str = "all"
    strategy: str = "full_shard"
    frozen: str = ""
    bucket_bytes: int | str = "auto"
    precision: str | None = None
    remat: bool = False
    micro_batches: int = 1
    reduce: str = "each"
    reshard_after_backward: bool = True
    weighted: bool = False
    scaler: bool = False
    offload: bool = False
    max_norm: float | None = None
    optimizer: str = "SGD"
    schedule: str = "learned"
    slow: str = ""
    compiled: bool = False
    traced: bool = False
    carrier: str = "simulated"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.mesh)

    @property
    def is_predicted(self) -> bool:
        """Whether ``predict_events`` covers the job: its docstring names what it leaves out."""
        if not self.remat or self.strategy == "no_shard":
            return True
        # Of units inside a recomputed one, some run several times in "nested". BatchNorm's, which a
        # precision makes, are in one group with units outside.
        joined = self.model == "convnet" and self.precision is not None and self.bucket_bytes == 1 << 20
        return self.model != "nested" and not joined

    @property
    def plain(self) -> Job:
        """The same mathematics without what may change no bit."""
        return dataclasses.replace(
            self, schedule="learned", slow="", compiled=False, traced=False, carrier="simulated", bucket_bytes=0
        )

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != CHOICES[name][0]]
        return ", ".join(changed) or "the default"


_SECOND_UNIT = {"mlp": "layers.3.", "gpt": "blocks.1.", "convnet": "second.", "nested": "parts.1."}
PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bfloat16": {"param_dtype": torch.bfloat16},
    "float32 sums": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "low-precision gradients": {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float16,
        "keep_low_precision_grads": True,
    },
}
OPTIMIZERS: Mapping[str, tuple[Any, Mapping[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    # Why such an eps: AdamW divides a gradient by its own size plus eps. Where a gradient is zero
    # but for rounding, such as a bias before BatchNorm, a small eps would make full steps of it.
    "AdamW": (torch.optim.AdamW, {"lr": 3e-3, "eps": 1e-3}),
}
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "no prefetch": {"forward_prefetch": False, "backward_prefetch": None},
    "post": {"backward_prefetch": "post", "limit": 3},
    "on demand": {"forward_prefetch": True},  # and the last unit on demand
}


def is_possible(job: Job) -> bool:
    """Return whether the library promises to run a job."""
    # A unit that is freed after forward can't stay gathered after backward.
    return job.reshard_after_backward or job.strategy != "full_shard"


# --- running ----------------------------------------------------------------------------------------


class Outcome(NamedTuple):
    """What one rank has after a job.

    Attributes:
        losses: the metric of each step.
        params: the whole parameters after the last step.
        buffers: the buffers after the last step.
        events: the collectives of units in the last step.
        predicted: those that ``predict_events`` tells.
    """

    losses: list[float]
    params: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    events: tuple[fs.Event, ...]
    predicted: tuple[fs.Event, ...]


def run(job: Job, folder: Path | None = None) -> list[Outcome]:
    """Train a job for three steps; return what each rank has.

    Arguments:
        job: the job.
        folder: if given, the job is saved there after its second step, and restored.
    """
    if job.carrier == "simulated":
        return run_simulated(run_job, job.ranks, job, folder, shape=dict(job.mesh))
    return run_ranks(run_job, job.ranks, job, folder, shape=dict(job.mesh))


def run_job(mesh: fs.Mesh, job: Job, folder: Path | None = None) -> Outcome:
    """Do on one rank what ``run`` does."""
    if job.carrier == "gloo":
        mesh = fs.init_mesh(dict(job.mesh), device="cpu", shared_memory=False)
    if job.slow:
        mesh = delayed(mesh, job.slow, 0.002)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor", UserWarning)  # while torch compiles
        warnings.filterwarnings("ignore", "ignored_classes of the precision hold BatchNorm2d", UserWarning)
        return train(Training.of(job, mesh), folder)


@dataclass(frozen=True)
class Training:
    """The parts of a job on one rank."""

    job: Job
    mesh: fs.Mesh
    plan: fs.Plan
    sharded: Any
    loss_fn: Any
    step: Any
    state: Any
    batches: list[Any] = field(repr=False)

    @property
    def mutable(self) -> bool:
        """Whether the loss function returns new buffers."""
        return MODELS[self.job.model].batch_statistics

    @classmethod
    def of(cls, job: Job, mesh: fs.Mesh) -> Training:
        subject, low = MODELS[job.model], job.precision is not None
        dtype, mutable = torch.float32 if low else torch.float64, subject.batch_statistics
        apply, params, buffers = fs.make_functional(_module(job).to(dtype), mutable=mutable)
        units = {"all": subject.units, "first": subject.units[:1], "none": ()}[job.units]
        plan = fs.make_plan(
            params, mesh,
            units={key: {"reshard_after_backward": job.reshard_after_backward} for key in ("", *units)},
            strategy=job.strategy,
            offload=job.offload,
            precision=fs.MixedPrecision(**PRECISIONS[job.precision]) if job.precision else None,
            bucket_bytes=job.bucket_bytes,
            storage={"**": fs.nf4()} if job.frozen == "a packed unit" else {},
        )  # fmt: skip
        options: dict[str, Any] = {"remat": job.remat}
        if job.compiled:
            options["compiler"] = functools.partial(torch.compile, backend="eager")
        shards = fs.shard(params, plan, mesh)
        batches = [part(_whole_batch(job, i, dtype), mesh.rank, mesh.world_size) for i in range(STEPS)]
        sharded = fs.fully_shard(apply, plan, mesh, **options)
        if job.schedule != "learned":
            loss_fn = _loss_fn(job, sharded, mesh)
            fs.value_and_grad(loss_fn, mutable, weighted=job.weighted)(shards, buffers, batches[0])
            order = sharded.schedule.order
            chosen = {**SCHEDULES[job.schedule]}
            if job.schedule == "on demand":
                chosen["on_demand"] = order[-1:]
            sharded = fs.fully_shard(apply, plan, mesh, schedule=fs.make_schedule(plan, order, **chosen), **options)
        loss_fn = _loss_fn(job, sharded, mesh)
        optimizer, settings = OPTIMIZERS[job.optimizer]
        step = fs.make_train_step(
            loss_fn, fs.torch_optimizer(optimizer, **settings), plan, mesh,
            mutable=mutable, accumulate=job.micro_batches, reduce=job.reduce, weighted=job.weighted,
            max_norm=job.max_norm, scaler=fs.GradScaler(init_scale=8.0) if job.scaler else None,
        )  # fmt: skip
        return cls(job, mesh, plan, sharded, loss_fn, step, step.init(shards, buffers), batches)


def train(training: Training, folder: Path | None = None) -> Outcome:
    """Take three steps; save and restore the state before the last one if there is a ``folder``."""
    job, mesh, plan = training.job, training.mesh, training.plan
    state, step = training.state, training.step
    if job.traced:
        step = fs.trace(step, state, training.batches[0])
    losses = []
    for number, batch in enumerate(training.batches):
        if folder is not None and number == STEPS - 1:
            state = fs.restore(fs.save(folder / "job", state, plan, mesh).path, plan, mesh)
        with fs.record_events() as events:
            state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    predicted = fs.predict_events(
        plan,
        training.sharded.schedule,
        recomputed=[unit.name for unit in plan.unit_list if unit.name] if job.remat else (),
        accumulate=fs.Accumulation(job.micro_batches, job.reduce),
    )
    of_units = tuple(event for event in events if event.unit is not None)
    return Outcome(losses, fs.gather(state.shards, plan, mesh), dict(state.buffers), of_units, predicted)


def _loss_fn(job: Job, sharded: Any, mesh: fs.Mesh) -> Any:
    subject = MODELS[job.model]

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> Any:
        out, results = sharded(shards, buffers, **batch["inputs"]), ()
        if subject.batch_statistics:
            out, new = out
            results = (new,)
        loss = subject.loss(out.float() if job.precision else out, batch)
        results = (loss, _weight(job, mesh.rank), *results) if job.weighted else (loss, *results)
        return results if len(results) > 1 else loss

    return loss_fn


def _module(job: Job) -> nn.Module:
    module = MODELS[job.model].build()
    named = dict(module.named_parameters())
    of_unit = [name for name in named if name.startswith(_SECOND_UNIT[job.model])]
    for name in {"": [], "a leaf": of_unit[:1]}.get(job.frozen, of_unit):
        named[name].requires_grad_(False)
    return module


def _weight(job: Job, rank: int) -> float:
    return 1.0 + rank if job.weighted else 1.0


def _whole_batch(job: Job, step: int, dtype: torch.dtype) -> Any:
    return cast(MODELS[job.model].make_batch(SAMPLES, step), dtype)


# --- the oracle -------------------------------------------------------------------------------------


def oracle(job: Job) -> Outcome:
    """Train the plain module in one process, in float64, on the parts of all ranks in turn."""
    key = dataclasses.replace(
        Job(),
        **{
            name: getattr(job, name)
            for name in ("model", "mesh", "frozen", "micro_batches", "weighted", "max_norm", "optimizer")
        },
    )
    return _oracle(key)


@functools.cache
def _oracle(job: Job) -> Outcome:
    subject = MODELS[job.model]
    module = _module(job).double()
    if job.frozen == "a packed unit":
        for parameter in module.parameters():
            parameter.data = parameter.data if parameter.requires_grad else decoded(parameter.data, fs.nf4())
    optimizer, settings = OPTIMIZERS[job.optimizer]
    optimize = optimizer([p for p in module.parameters() if p.requires_grad], **settings)
    total = sum(_weight(job, rank) for rank in range(job.ranks)) * job.micro_batches
    losses = []
    for step in range(STEPS):
        optimize.zero_grad()
        before, loss_of_step = _copies(module.named_buffers()), 0.0
        for rank in reversed(range(job.ranks)):  # so that rank 0's buffers remain
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])
            rank_batch = part(_whole_batch(job, step, torch.float64), rank, job.ranks)
            for number in range(job.micro_batches):
                batch = part(rank_batch, number, job.micro_batches)
                loss = subject.loss(module(**batch["inputs"]), batch) * _weight(job, rank) / total
                loss.backward()
                loss_of_step += loss.item()
        if job.max_norm is not None:
            nn.utils.clip_grad_norm_([p for p in module.parameters() if p.requires_grad], job.max_norm)
        optimize.step()
        losses.append(loss_of_step)
    return Outcome(losses, _copies(module.named_parameters()), _copies(module.named_buffers()), (), ())


def decoded(leaf: torch.Tensor, storage: fs.Storage) -> torch.Tensor:
    """Return what a model sees of a leaf that is stored packed."""
    blocks = leaf.new_zeros(-(-leaf.numel() // storage.block), storage.block)
    blocks.view(-1)[: leaf.numel()] = leaf.flatten()
    encoded = storage.encode(blocks)
    values = storage.decode(*(encoded if isinstance(encoded, tuple) else (encoded,)))
    return values.flatten()[: leaf.numel()].view(leaf.shape).to(leaf.dtype)


def change_of(job: Job, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return how much training has changed all parameters, in one vector of float64."""
    before = dict(MODELS[job.model].build().double().named_parameters())
    return torch.cat([(params[name].double() - value.detach()).flatten() for name, value in before.items()])


def _copies(named: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in named}


def tolerance(job: Job) -> float:
    """Return by how much a change may differ from the oracle's, relative to its norm.

    Measured: 3e-15 at most in float64, and 0.09 where units compute in bfloat16, by BatchNorm.
    """
    return 1e-13 if job.precision is None else 0.15


# --- which jobs -------------------------------------------------------------------------------------


def covering() -> list[Job]:
    """Return possible jobs in which each possible pair of two options' values occurs."""

    def is_taken(row: dict[str, Any]) -> bool:
        job = Job(**row)
        # Every micro-batch of every rank is recorded, or compiled: many of them would take most of the time.
        most = {(False, False): 12, (True, True): 2}.get((job.traced, job.compiled), 6)
        return is_possible(job) and job.ranks * job.micro_batches <= most

    return [Job(**row) for row in pairwise(CHOICES, is_taken)]
