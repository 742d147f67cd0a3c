"""``plan_run``: the plan of a whole run, and the figures of its step, from a model or its files."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload

from torch import nn

from funcshard._utils import table
from funcshard._utils.options import check_count, outline
from funcshard._utils.process_state import without_collection
from funcshard._utils.table import Bullets, Part, Table
from funcshard.estimate import (
    Best,
    Change,
    Hardware,
    Infeasible,
    Profile,
    Report,
    Space,
    auto_plan,
    changes_to_fit,
    collective_time,
    load_hardware,
    memory_table,
    reserved_band,
)
from funcshard.module import make_functional
from funcshard.plan import AXES, Plan, Schedule, mesh_axes_of
from funcshard.planning.generation import GenerationPlan, plan_generation
from funcshard.planning.model_inputs import default_seq, trace
from funcshard.planning.planned_model import doubts_of, notes_of, planned_model
from funcshard.planning.planned_run import (
    LARGEST_BATCH,
    NARROW,
    WIDE,
    PlannedRun,
    least_reserved,
    usable_bytes,
)
from funcshard.planning.script import training_script
from funcshard.planning.tasks import Generation, Training
from funcshard.planning.tensor_parts import AXIS

_GAIN = 0.02  # of throughput, below which a larger batch isn't worth its memory
_SHORT = 0.25  # seconds of a step, in which launches of kernels may take a part
_FEW = 8  # GPUs, of which the runs that the times were fitted to had at least so many
_FITTED = "Times were fitted to steps of dense decoders on A100s and H100s."
_SAVED = 0.1  # of the peak: what the changes of a plan that fits are to save
_CHANGES = 3


_Search = Callable[
    ..., Best | Infeasible
]  # of samples, micro-batches and, if you like, the space


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunPlan(PlannedRun):
    """The plan of a run, and what its step takes; made by ``plan_run``.

    If nothing fits, ``fits`` is ``False``, and the plan is the leanest one.

    Attributes:
        plan: the plan.
        schedule: its schedule.
        remat: names of the units to recompute, for ``fully_shard(remat=...)``.
        report: the estimate of one step of one rank.
        profile: the trace of one micro-batch, for ``estimate`` of other plans.
        fits: whether ``reserved_bytes`` are at most ``budget``.
        parameters: number of parameters.
        batch: samples of a rank in one step.
        micro_batches: into how many parts ``accumulate`` splits them.
        seq: tokens of a sample.
        budget: bytes that torch's allocator may reserve.
        margin: bytes of the GPU beside it, for CUDA, NCCL and cuBLAS.
        changes: single changes that save memory, the cheapest first.
        notes: what you should know about the model and the hardware.
        title: the model and the hardware.
        tensor_seconds: seconds of a step in which a rank waits for the tensor axis.
        step_range: seconds between which a step lies by the errors of earlier estimates.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> inputs = lambda batch, seq: (torch.empty(batch, 64),)
        >>> task = fs.Training(inputs=inputs)
        >>> run = fs.plan_run(net, gpus=8, gpu="h100", seq=1, task=task)
        >>> run.fits, run.parameters, run.plan.world_size
        (True, 16640, 8)
    """

    FIGURES: ClassVar = (
        "parameters", "fits", "peak_bytes", "reserved_bytes", "step_seconds", "tokens_per_second", "samples_per_second",
        "mfu", "batch", "micro_batches", "seq", "budget", "margin",
    )  # fmt: skip
    plan: Plan
    schedule: Schedule
    remat: tuple[str, ...]
    report: Report
    profile: Profile
    fits: bool
    parameters: int
    batch: int
    micro_batches: int
    seq: int
    budget: int
    margin: int
    changes: tuple[Change, ...]
    notes: tuple[str, ...]
    title: str
    tensor_seconds: float
    step_range: tuple[float, float]
    _script: str
    _of_model: Mapping[tuple[str, str], Sequence[int]]

    @property
    def peak_bytes(self) -> int:
        """Most bytes that a rank has in use."""
        return self.report.peak

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator reserves at least; on a CPU those in use."""
        return least_reserved(self.report)

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.report.step_time

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks in one second."""
        return self.batch * math.prod(self.plan.mesh_shape) / self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks in one second; 0 if the first input isn't tokens."""
        return self.report.tokens_per_second * math.prod(self.plan.mesh_shape)

    @property
    def mfu(self) -> float:
        """Model FLOPs of a second ÷ the hardware's peak."""
        return self.report.mfu

    def _facts(self) -> Mapping[str, Any]:
        return {
            "binds": self.report.binds,
            "step_range": self.step_range,
            "waiting_seconds": self.report.exposed + self.tensor_seconds,
            "memory": self.report.by_category,
            "remat": self.remat,
            "changes": [str(change) for change in self.changes],
        }

    def _parts(self) -> Iterable[Part]:
        yield self._verdict(self.report.binds)
        yield self._step_table()
        yield memory_table(self.report, "Memory in use at the peak")
        yield _collectives_table(self.report, self._of_model)
        if self.changes:
            yield self._changes_table()
        yield Bullets("Notes", self.notes)

    def _step_table(self) -> Table:
        report, plan = self.report, self.plan
        remat_text = f"{len(self.remat)} of {len(plan.units) - 1} units recomputed"
        batch_text = ""
        if self.micro_batches > 1:
            batch_text = f"; in {self.micro_batches} micro-batches"
        range_text = " to ".join(map(table.duration, self.step_range))
        waiting_text = table.duration(report.exposed)
        if plan.model_axes:
            waiting_text += f" for data axes and {table.duration(self.tensor_seconds)} for the tensor axis"
        tokens_rows = [
            ["tokens per second", f"{self.tokens_per_second:,.0f}", f"{self.tokens_per_second / plan.world_size:,.0f} a GPU"]
        ]  # fmt: skip
        if not report.tokens:  # the first input is images or sounds
            tokens_rows = []
        rows = [
            *self._mesh_rows(remat_text, batch_text),
            [
                "budget",
                table.size(self.budget),
                f"for torch's allocator; a margin of {table.size(self.margin)} is left",
            ],
            ["memory in use", table.size(report.peak), "at the peak"],
            [
                "memory reserved",
                table.size(self.reserved_bytes),
                f"or more, up to {table.size(report.reserved[1])} if there is room",
            ],
            ["step time", table.duration(report.step_time), f"{range_text}; {waiting_text} waiting"],
            *tokens_rows,
            ["samples per second", f"{self.samples_per_second:,.4g}", "on all GPUs"],
            ["MFU", f"{100 * report.mfu:.1f} %", "model FLOPs of the hardware's peak"],
        ]  # fmt: skip
        return Table("One step", ["quantity", "value", "note"], rows)

    def _changes_table(self) -> Table:
        rows = [
            [
                change.text,
                table.signed(change.peak, table.size),
                table.signed(change.seconds, table.duration),
                f"{self.batch * math.prod(change.report.plan.mesh_shape) / change.report.step_time:,.4g}",
                "yes" if change.fits else "no",
            ]
            for change in self.changes
        ]
        goal = "a tenth less memory" if self.fits else "a plan that fits"
        return Table(
            f"Cheapest changes for {goal}",
            ["change", "peak", "step", "samples/s", "enough"],
            rows,
        )


@overload
def plan_run(
    model: nn.Module | str | os.PathLike[str],
    *,
    gpus: int | Mapping[str, int],
    gpu: str | Hardware = "h100",
    seq: int | None = None,
    batch: int | None = None,
    budget: int | str | None = None,
    task: Training | None = ...,
) -> RunPlan: ...


@overload
def plan_run(
    model: nn.Module | str | os.PathLike[str],
    *,
    gpus: int | Mapping[str, int],
    gpu: str | Hardware = "h100",
    seq: int | None = None,
    batch: int | None = None,
    budget: int | str | None = None,
    task: Generation,
) -> GenerationPlan: ...


# Why: a search for garbage walks through all objects of torch and transformers.
@without_collection()
def plan_run(
    model: nn.Module | str | os.PathLike[str],
    *,
    gpus: int | Mapping[str, int],
    gpu: str | Hardware = "h100",
    seq: int | None = None,
    batch: int | None = None,
    budget: int | str | None = None,
    task: Training | Generation | None = None,
) -> RunPlan | GenerationPlan:
    """Plan a run: whether it fits, what its memory is, and how long a step or a token takes.

    You need no GPU, no weights and no network: see docs/estimating.md.

    Arguments:
        model: a ``config.json`` of Hugging Face, a folder with one, or your module, best on the
            meta device.
        gpus: number of ranks, or sizes of the mesh's axes: in ``{"shard": 8, "tensor": 8}``, 8 GPUs
            divide each layer, with tensor parallelism as transformers does it, and 8 such groups
            take other samples. The plan divides these along replicate and shard.
        gpu: name of the hardware, or another description; see ``load_hardware``.
        seq: tokens of a sample; by default the context of the model, at most 8192.
        batch: samples of a rank at a time; by default the fastest batch that fits.
        budget: bytes that torch's allocator may reserve, or text as ``"60GiB"``; by default, GPUs
            keep a margin of 3 GiB for CUDA, NCCL and cuBLAS.
        task: what the run does: ``Training`` of weights, adapters or from preferences, or
            ``Generation`` of text; by default ``Training()``.

    Returns:
        The plan and its figures, which you can print. ``code()`` returns a script.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ImportError: transformers or peft is needed, and isn't installed.
        TypeError: ``task`` isn't a task.
        ValueError: an option is out of range, the budget is more than the hardware has, or the
            model fails on its inputs.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> task = fs.Training(inputs=lambda batch, seq: (torch.empty(batch, 64),))
        >>> fs.plan_run(net, gpus=8, seq=1, task=task).fits
        True
    """
    ranks, tensor = _ranks_of(gpus)
    task = Training() if task is None else task
    if not isinstance(task, Training | Generation):
        raise TypeError(
            f"task must be a Training or a Generation; found {outline(task)}: pass fs.Training(...)"
        )
    if batch is not None:
        batch = check_count("batch", batch, of="samples")
    if seq is not None:
        seq = check_count("seq", seq, of="tokens")
    hardware = load_hardware(gpu)
    limit = usable_bytes(hardware, budget)
    planned = planned_model(model, task, tensor)
    seq = seq or default_seq(planned.module)
    notes = notes_of(planned, task, seq, hardware)
    size_text = f"{table.count(planned.parameters)} parameters"
    hardware_text = f"{ranks * tensor:,} × {hardware.name}"
    name = type(planned.module).__name__
    if isinstance(task, Generation):
        return plan_generation(
            planned,
            task,
            ranks=ranks,
            tensor=tensor,
            hardware=hardware,
            seq=seq,
            batch=batch,
            limit=limit,
            notes=notes,
            title=f"{name} that generates, {size_text}, on {hardware_text}",
        )
    functional = make_functional(planned.traced)
    profiles: dict[tuple[int, int], Profile] = {}

    def search(
        samples: int, micro_batches: int, space: Space | None = None
    ) -> Best | Infeasible:
        key = samples, micro_batches
        if key not in profiles:
            profiles[key] = trace(
                planned.traced,
                samples // micro_batches,
                seq,
                precision=planned.precision,
                inputs=planned.inputs,
                functional=functional,
            )
        return plan_within(
            limit,
            {micro_batches: profiles[key]},
            ranks=ranks if tensor == 1 else {"shard": ranks, AXIS: tensor},
            hardware=hardware,
            optimizer=task.optimizer,
            units=planned.units,
            space=planned.space(space),
        )

    best, batch = _with_batch(search, batch)
    report = best.report
    profile = profiles[batch, report.accumulation.micro_batches]
    of_model, tensor_seconds = _model_collectives(profile, report, hardware)
    doubts = [
        *doubts_of(planned, hardware),
        *[f"fewer than {_FEW} GPUs"] * (ranks * tensor < _FEW),
        *["a short step"] * (report.step_time < _SHORT),
        *["a tensor axis"] * (tensor > 1),
        *["adapters"] * (task.lora is not None),
        *["two forwards"] * task.dpo,
    ]
    low, high = WIDE if doubts else NARROW
    doubt_text = f"{_FITTED} This one has {', '.join(doubts)}, so its time is less certain."
    return RunPlan(
        plan=report.plan,
        schedule=report.schedule,
        remat=report.remat,
        report=report,
        profile=profile,
        fits=least_reserved(report) <= limit,
        parameters=planned.parameters,
        batch=batch,
        micro_batches=report.accumulation.micro_batches,
        seq=seq,
        budget=limit,
        margin=hardware.memory - limit,
        changes=_changes(best, hardware),
        notes=(*notes, *[doubt_text] * bool(doubts)),
        title=f"{name}{task.title}, {size_text}, on {hardware_text}",
        _script=training_script(planned, task, report),
        tensor_seconds=tensor_seconds,
        step_range=(low * report.step_time, high * report.step_time),
        _of_model=of_model,
    )


def _ranks_of(gpus: int | Mapping[str, int]) -> tuple[int, int]:
    """Return the number of ranks along the data axes, and that along the tensor axis."""
    if not isinstance(gpus, Mapping):
        return check_count("gpus", gpus, of="GPUs"), 1
    sizes = mesh_axes_of(gpus, "gpus")
    tensor = sizes.pop(AXIS, 1)
    if sizes.keys() - {*AXES}:
        raise ValueError(
            f"gpus may have the axes replicate, shard and {AXIS}; found {dict(gpus)}: leave out the others"
        )
    return math.prod(sizes.values()), tensor


def plan_within(
    limit: int, profiles: Mapping[int, Profile] | Profile, **options: Any
) -> Best | Infeasible:
    """Return the fastest plan whose reserved memory is within a limit.

    Arguments:
        limit: bytes that torch's allocator may reserve.
        profiles: profiles by number of micro-batches, or one.
        options: those of ``auto_plan``, with ``hardware`` and without ``budget``.
    """
    in_use = limit
    if options["hardware"].device == "cuda":
        # Note: auto_plan bounds memory in use, of which reserved memory is a multiple.
        in_use = limit * limit // reserved_band(limit)[0]
    while True:
        best = auto_plan(profiles, budget=in_use, **options)
        reserved_bytes = least_reserved(best.report)
        if not best.fits or reserved_bytes <= limit:
            return best
        # Note: the allocator's pools may hold more than is in use at any moment.
        in_use = min(in_use - 1, in_use * limit // reserved_bytes)


def _has_faster(best: Best) -> bool:
    """Return whether more memory would allow a plan that's faster by more than ``_GAIN``."""
    return any(point.seconds * (1 + _GAIN) < best.report.step_time for point in best.pareto)


def _with_batch(search: _Search, batch: int | None) -> tuple[Best | Infeasible, int]:
    """Return the plan of a batch, split if it must be, or of the fastest one; and the batch."""
    micro_batches = 1
    if batch is None:
        best, batch = _fastest(search)
    else:
        best = _plan_batch(search, batch, 1)
        # Why only then: each further micro-batch gathers and reduces once more.
        while not best.fits and batch % (2 * micro_batches) == 0:
            micro_batches *= 2
            best = _plan_batch(search, batch, micro_batches)
    # Note: recomputation takes time, so all it can do for a plan that fits is make room for a
    # faster one, which keeps more gathered or whole.
    if isinstance(best, Best) and not best.report.remat and _has_faster(best):
        best = search(batch, micro_batches)
    return best, batch


def _plan_batch(search: _Search, batch: int, micro_batches: int) -> Best | Infeasible:
    """Return the best plan that recomputes nothing, or if none fits, the best of all."""
    # Why first: each number of recomputed units takes a trace.
    best = search(batch, micro_batches, Space(remat=0))
    return best if best.fits else search(batch, micro_batches)


def _fastest(search: _Search) -> tuple[Best | Infeasible, int]:
    """Return a plan of the fastest batch that fits, and the batch."""
    batch, factor = 1, 4
    best = _plan_batch(search, 1, 1)
    step_seconds = best.report.step_time
    # Why: four samples would take little longer, or so little time that more would gain as well.
    if 16 * step_seconds < _SHORT:
        factor = LARGEST_BATCH
    elif best.report.exposed > step_seconds / 2 or 4 * step_seconds < _SHORT:
        factor = 16
    while best.fits and batch < LARGEST_BATCH and _may_gain(best.report):
        factor = min(factor, LARGEST_BATCH // batch)
        larger = _plan_batch(search, factor * batch, 1)
        seconds = larger.report.step_time / factor
        if larger.fits and seconds < best.report.step_time / (1 + _GAIN):
            best, batch = larger, factor * batch
        elif factor > 2 and not larger.fits:
            factor = max(factor // 4, 2)
        else:
            break
    return best, batch


def _may_gain(report: Report) -> bool:
    """Return whether a larger batch may have more samples per second."""
    # Note: only these seconds don't grow with the batch, beside launches in a short step.
    updating = sum(span.seconds for span in report.spans if span.what == "optimizer")
    is_short = report.step_time < _SHORT
    return is_short or report.exposed + updating > _GAIN * report.step_time


def _changes(best: Best | Infeasible, hardware: Hardware) -> tuple[Change, ...]:
    """Return changes for a plan that fits, or if it does, for a tenth less memory."""
    if isinstance(best, Infeasible):
        changes = best.changes
    else:
        target = int((1 - _SAVED) * best.report.peak)
        options = {**best.report.options, "budget": target}
        report = dataclasses.replace(best.report, budget=target, options=options)
        changes = changes_to_fit(best.profile, report, hardware)
    # Note: the update on the host has no time in an estimate, so offload would seem cheap.
    priced_changes = [
        change
        for change in changes
        if not any(unit.offload for unit in change.report.plan.unit_list)
    ]
    enough = [change for change in priced_changes if change.fits]
    return tuple(enough or priced_changes)[:_CHANGES]


def _model_collectives(
    profile: Profile, report: Report, hardware: Hardware
) -> tuple[dict[tuple[str, str], list[int]], float]:
    """Return number and bytes sent of the model's own collectives, and their seconds in a step."""
    remat = report.remat
    micro_batches = report.accumulation.micro_batches
    counts: dict[tuple[str, str], list[int]] = {}
    seconds = 0.0
    if not report.plan.model_axes:
        return counts, seconds
    for step in profile.program(report.plan, remat=remat).steps:
        for work in getattr(step, "work", ()):  # of a run
            kind, _, axis = work.dtype.partition(" ")
            if axis:
                ranks = report.plan.mesh_axes[axis]
                row = counts.setdefault((kind, axis), [0, 0])
                row[0] += work.kernels * micro_batches
                halves = 2 if kind == "all_reduce" else 1
                row[1] += halves * work.bytes * (ranks - 1) // ranks * micro_batches
                one_seconds = collective_time(
                    hardware, kind, work.bytes // work.kernels, ranks
                ).seconds
                seconds += work.kernels * one_seconds * micro_batches
    return counts, seconds


def _collectives_table(
    report: Report, of_model: Mapping[tuple[str, str], Sequence[int]]
) -> Table:
    counts = {key: list(row) for key, row in of_model.items()}
    for event in report.events:
        row = counts.setdefault((event.kind, event.axis), [0, 0])
        row[0] += 1
        row[1] += event.traffic
    rows = [
        [kind, axis, table.count(count), table.size(traffic)]
        for (kind, axis), (count, traffic) in counts.items()
    ]
    return Table("Collectives of a step", ["kind", "axis", "number", "sent by a GPU"], rows)
