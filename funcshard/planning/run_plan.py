"""``plan_run``: the plan of a whole run, and the figures of its step, from a model or its files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from funcshard._utils import table
from funcshard._utils.options import check_bytes, check_choice, check_count, outline
from funcshard._utils.table import Bullets, Part, Shown, Table
from funcshard.checkpoint import default_units, is_hugging_face, module_of_config
from funcshard.estimate import (
    OPTIMIZERS,
    Best,
    Change,
    Hardware,
    Infeasible,
    Profile,
    Report,
    auto_plan,
    changes_to_fit,
    load_hardware,
    memory_table,
    profile,
    reserved_band,
)
from funcshard.module import make_functional
from funcshard.plan import MixedPrecision, Plan, Schedule
from funcshard.planning.model_inputs import (
    LONGEST,
    OTHERS,
    ModelInputs,
    default_seq,
    hugging_face_inputs,
    loss_of,
    token_inputs,
)
from funcshard.planning.script import training_script

PRECISIONS = ("bf16", "fp32", "bf16-params")

_MARGIN = "3GiB"
_LARGEST_BATCH = 64  # samples of a rank that the search for a batch tries
_GAIN = 0.02  # of throughput, below which a larger batch isn't worth its memory
_SHORT = 0.25  # seconds of a step, in which launches of kernels may take a part
_NO_DROPS = "The plan runs every layer: it leaves the config's layerdrop out."
_SAVED = 0.1  # of the peak: what the changes of a plan that fits are to save
_CHANGES = 3
_FIGURES = (
    "parameters", "fits", "peak_bytes", "reserved_bytes", "step_seconds", "tokens_per_second", "samples_per_second",
    "mfu", "batch", "micro_batches", "seq", "budget", "margin",
)  # fmt: skip
_MIXED = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunPlan(Shown):
    """The plan of a run, and what its step takes; made by ``plan_run``.

    If nothing fits, ``fits`` is ``False``, and the plan is the leanest one.

    Attributes:
        plan: the plan.
        schedule: its schedule.
        remat: names of the units to recompute, for ``fully_shard(remat=...)``.
        report: the estimate of one step of one rank.
        fits: whether ``reserved_bytes`` are at most ``budget``.
        parameters: number of parameters.
        batch: samples of a rank in one step.
        micro_batches: into how many parts ``accumulate`` splits them.
        seq: tokens of a sample.
        budget: bytes that torch's allocator may reserve.
        margin: bytes of the GPU that it doesn't get, for CUDA, NCCL and cuBLAS.
        changes: single changes that save memory, the cheapest first.
        notes: what you should know about the model and the hardware.
        title: the model and the hardware.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> inputs = lambda batch, seq: (torch.empty(batch, 64),)
        >>> run = fs.plan_run(net, gpus=8, gpu="h100", seq=1, inputs=inputs)
        >>> run.fits, run.parameters, run.plan.world_size
        (True, 16640, 8)
    """

    plan: Plan
    schedule: Schedule
    remat: tuple[str, ...]
    report: Report
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
    _script: str

    @property
    def peak_bytes(self) -> int:
        """Most bytes that a rank has in use."""
        return self.report.peak

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator reserves at least; on a CPU those in use."""
        return max(self.report.reserved[0], self.report.peak)

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.report.step_time

    @property
    def samples_per_second(self) -> float:
        """Samples of all ranks in one second."""
        return self.batch * self.plan.world_size / self.step_seconds if self.step_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all ranks in one second; 0 if the first input isn't tokens."""
        return self.report.tokens_per_second * self.plan.world_size

    @property
    def mfu(self) -> float:
        """Model FLOPs of a second ÷ the hardware's peak."""
        return self.report.mfu

    def to_json(self) -> str:
        """Return the figures and the plan as JSON."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        about_plan = {
            "gpus": self.plan.world_size,
            "gpu": self.report.hardware,
            "binds": self.report.binds,
            "memory": self.report.by_category,
            "remat": self.remat,
            "changes": [str(change) for change in self.changes],
            "notes": self.notes,
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(figures | about_plan, indent=2, ensure_ascii=False)

    def code(self) -> str:
        """Return a training script with this plan; its ``main(mesh, batches)`` is one rank."""
        return self._script

    def _parts(self) -> Iterable[Part]:
        verdict = "It fits" if self.fits else "It doesn't fit"
        memory_text = f"{table.size(self.reserved_bytes)} of {table.size(self.budget)} a GPU"
        yield f"{self.title}. {verdict}: {memory_text}. {self.report.binds}"
        yield self._step_table()
        yield memory_table(self.report, "Memory in use at the peak")
        yield _collectives_table(self.report)
        if self.changes:
            yield self._changes_table()
        yield Bullets("Notes", self.notes)

    def _step_table(self) -> Table:
        report, plan = self.report, self.plan
        remat_text = f"{len(self.remat)} of {len(plan.units) - 1} units recomputed"
        batch_text = f"samples a GPU, {table.count(self.batch * plan.world_size)} in all"
        if self.micro_batches > 1:
            batch_text += f"; in {self.micro_batches} micro-batches"
        rows = [
            ["mesh", " × ".join(map(str, plan.mesh_shape)), f"replicas × shards; {remat_text}"],
            ["batch", table.count(self.batch), batch_text],
            ["memory in use", table.size(report.peak), "at the peak"],
            [
                "memory reserved",
                table.size(self.reserved_bytes),
                f"or more, up to {table.size(report.reserved[1])} if there is room",
            ],
            ["step time", table.duration(report.step_time), f"{table.duration(report.exposed)} waiting"],
            ["tokens per second", f"{self.tokens_per_second:,.0f}", f"{report.tokens_per_second:,.0f} a GPU"],
            ["samples per second", f"{self.samples_per_second:,.4g}", "on all GPUs"],
            ["MFU", f"{100 * report.mfu:.1f} %", "model FLOPs of the hardware's peak"],
        ]  # fmt: skip
        return Table("One step", ["quantity", "value", "note"], rows)

    def _changes_table(self) -> Table:
        rows = []
        for change in self.changes:
            world_size = change.report.plan.world_size
            rate = change.report.tokens_per_second * world_size
            rows.append(
                [
                    change.text,
                    table.signed(change.peak, table.size),
                    table.signed(change.seconds, table.duration),
                    f"{rate:,.0f}" if rate else "-",
                    "yes" if change.fits else "no",
                ]
            )
        goal = "a tenth less memory" if self.fits else "a plan that fits"
        return Table(
            f"Cheapest changes for {goal}",
            ["change", "peak", "step", "tokens/s", "enough"],
            rows,
        )


def plan_run(
    model: nn.Module | str | os.PathLike[str],
    *,
    gpus: int,
    gpu: str | Hardware = "h100",
    seq: int | None = None,
    batch: int | None = None,
    budget: int | str | None = None,
    margin: int | str | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    units: Sequence[str] | None = None,
    inputs: Callable[[int, int], Any] | None = None,
) -> RunPlan:
    """Plan a training run: whether it fits, what its memory is, and how long a step takes.

    It needs no GPU, no weights and no network: see docs/estimating.md.

    Arguments:
        model: a ``config.json`` of Hugging Face, a folder with one, or your module, best on the
            meta device.
        gpus: number of ranks.
        gpu: name of the hardware, or another description; see ``load_hardware``.
        seq: tokens of a sample; by default the context of the model, at most 8192.
        batch: samples of a rank in one step; by default the fastest batch that fits.
        budget: bytes that torch's allocator may reserve, or text as ``"60GiB"``; by default, and at
            most, the hardware's memory without ``margin``.
        margin: bytes for CUDA, NCCL and cuBLAS; by default 3 GiB on GPUs and none on CPUs.
        precision: ``"bf16"`` computes in bfloat16 and keeps float32 parameters, ``"fp32"`` does
            both in float32, and ``"bf16-params"`` both in bfloat16.
        optimizer: name in ``funcshard.estimate.OPTIMIZERS``.
        units: paths or globs of the modules that are units; by default the repeated blocks, and
            embeddings and heads that aren't tied.
        inputs: function of batch and seq that returns the model's inputs, as a tuple or a
            dictionary. Models of transformers don't need it, and others do unless they take
            tokens and return logits. The loss is ``outputs.loss``, or the mean of the first output.

    Returns:
        The plan and its figures, which you can print. ``code()`` returns a training script.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ImportError: the model is a file, and transformers isn't installed.
        ValueError: an option is out of range, the budget is more than the hardware has, or the
            model fails on its inputs.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
        >>> inputs = lambda batch, seq: (torch.empty(batch, 64),)
        >>> fs.plan_run(net, gpus=8, seq=1, inputs=inputs).fits
        True
    """
    gpus = check_count("gpus", gpus, of="GPUs")
    check_choice("precision", precision, PRECISIONS)
    check_choice("optimizer", optimizer, [*OPTIMIZERS])
    hardware = load_hardware(gpu)
    limit, margin_bytes = _limits(hardware, budget, margin)
    path = None if isinstance(model, nn.Module) else os.fspath(model)
    module = model if isinstance(model, nn.Module) else module_of_config(Path(model))
    config: Any = getattr(module, "config", None)
    drops_layers = path is not None and bool(getattr(config, "layerdrop", 0.0))
    if drops_layers:
        # Why: it reads random values, which a trace doesn't have.
        config.layerdrop = 0.0
    if precision == "bf16-params":
        module = copy.deepcopy(module).to(torch.bfloat16)
    if batch is not None:
        batch = check_count("batch", batch, of="samples")
    seq = default_seq(config) if seq is None else check_count("seq", seq, of="tokens")
    unit_names = default_units(module, ends=True) if units is None else list(units)
    search = _Search(
        functional=make_functional(module),
        make_inputs=_inputs_of(module, inputs),
        seq=seq,
        options={
            "ranks": gpus,
            "hardware": hardware,
            "optimizer": optimizer,
            "units": unit_names,
        },
        precision=_MIXED if precision == "bf16" else None,
        limit=limit,
    )
    best, batch_size, micro_profile = search.fastest() if batch is None else search.of(batch)
    report = best.report
    parameters = sum(leaf.numel for leaf in report.plan.leaves)
    size_text = f"{table.count(parameters)} parameters"
    remat = cast("tuple[str, ...]", report.options["remat"])
    micro_batches = cast("int", report.options["micro_batches"])
    return RunPlan(
        plan=report.plan,
        schedule=report.schedule,
        remat=remat,
        report=report,
        fits=best.fits,
        parameters=parameters,
        batch=batch_size,
        micro_batches=micro_batches,
        seq=seq,
        budget=limit,
        margin=margin_bytes,
        changes=_changes(best, micro_profile, hardware),
        notes=(*_notes(config, seq, precision, hardware), *[_NO_DROPS] * drops_layers),
        title=f"{type(module).__name__}, {size_text}, on {gpus:,} × {hardware.name}",
        _script=training_script(
            report.plan,
            path=path,
            module=module,
            units=unit_names,
            remat=remat,
            precision=precision,
            optimizer=optimizer,
            micro_batches=micro_batches,
        ),
    )


def _limits(
    hardware: Hardware, budget: int | str | None, margin: int | str | None
) -> tuple[int, int]:
    """Return the bytes that the allocator may reserve, and those that it doesn't get."""
    if margin is None:
        margin = _MARGIN if hardware.device == "cuda" else 0
    margin_bytes = 0 if margin == 0 else check_bytes("margin", margin, example="3GiB")
    if margin_bytes >= hardware.memory:
        raise ValueError(
            f"margin must be less than the {table.size(hardware.memory)} of {hardware.name}; found "
            f"{table.size(margin_bytes)}: pass 3GiB"
        )
    most = hardware.memory - margin_bytes
    if budget is None:
        return most, margin_bytes
    budget_bytes = check_bytes("budget", budget, example="60GiB")
    if budget_bytes > hardware.memory:
        raise ValueError(
            f"budget must be at most the {table.size(hardware.memory)} of {hardware.name}; found "
            f"{table.size(budget_bytes)}: leave it out, and {table.size(most)} count"
        )
    return min(budget_bytes, most), margin_bytes


def _inputs_of(
    module: nn.Module, inputs: Callable[[int, int], Any] | None
) -> Callable[[int, int], ModelInputs]:
    if inputs is None and is_hugging_face(module):
        return functools.partial(hugging_face_inputs, module)
    if inputs is None:
        return token_inputs

    def make(batch: int, seq: int) -> ModelInputs:
        with torch.device("meta"):
            made_inputs = inputs(batch, seq)
        if isinstance(made_inputs, Mapping):
            return ModelInputs((), made_inputs, loss=loss_of)
        if isinstance(made_inputs, tuple):
            return ModelInputs(made_inputs, {}, loss=loss_of)
        raise TypeError(
            f"inputs must return a tuple or a dictionary; found {outline(made_inputs)}: put a "
            "single input in a tuple"
        )

    return make


@dataclass(slots=True, kw_only=True)
class _Search:
    """The search for the plan and the batch of one model.

    Attributes:
        functional: the result of ``make_functional``.
        make_inputs: a function of batch and seq.
        seq: tokens of a sample.
        options: options of ``auto_plan``.
        precision: the precision.
        limit: bytes that the allocator may reserve.
    """

    functional: Any
    make_inputs: Callable[[int, int], ModelInputs]
    seq: int
    options: dict[str, Any]
    precision: MixedPrecision | None
    limit: int

    def fastest(self) -> tuple[Best | Infeasible, int, Profile]:
        """Return the plan of the fastest batch, the batch, and the profile of a micro-batch."""
        batch, factor = 1, 4
        best, micro_profile = self._plan({1: self._trace(1)})
        while best.fits and factor * batch <= _LARGEST_BATCH and self._may_gain(best.report):
            larger, larger_profile = self._plan({1: self._trace(factor * batch)})
            seconds = larger.report.step_time / factor
            if larger.fits and seconds < best.report.step_time / (1 + _GAIN):
                best, micro_profile, batch = larger, larger_profile, factor * batch
            elif factor == 4 and not larger.fits:
                factor = 2
            else:
                break
        return best, batch, micro_profile

    @staticmethod
    def _may_gain(report: Report) -> bool:
        """Return whether a larger batch may have more samples per second."""
        # Note: only these seconds don't grow with the batch, beside launches in a short step.
        updating = sum(span.seconds for span in report.spans if span.what == "optimizer")
        is_short = report.step_time < _SHORT
        return is_short or report.exposed + updating > _GAIN * report.step_time

    def of(self, batch: int) -> tuple[Best | Infeasible, int, Profile]:
        """Return the plan of a batch, which may be split into micro-batches."""
        traced = self._plan({1: self._trace(batch)})
        count = 2
        # Why only then: each further micro-batch gathers and reduces once more.
        while not traced[0].fits and batch % count == 0:
            traced = self._plan({count: self._trace(batch // count)})
            count *= 2
        return traced[0], batch, traced[1]

    def _trace(self, batch: int) -> Profile:
        model_inputs = self.make_inputs(batch, self.seq)
        try:
            return profile(
                *self.functional,
                *model_inputs.args,
                loss=model_inputs.loss,
                targets=model_inputs.targets,
                precision=self.precision,
                **model_inputs.kwargs,
            )
        except Exception as error:  # of any kind: the model is the user's
            first_line = str(error).partition("\n")[0]
            raise ValueError(
                f"the model failed on its inputs ({type(error).__name__}: {first_line}): pass inputs="
            ) from error

    def _plan(self, profiles: dict[int, Profile]) -> tuple[Best | Infeasible, Profile]:
        (micro_profile,) = profiles.values()
        budget = self.limit
        if self.options["hardware"].device == "cuda":
            # Note: a budget of auto_plan bounds memory in use, of which reserved memory is a
            # multiple.
            budget = self.limit * self.limit // reserved_band(self.limit)[0]
        best = auto_plan(profiles, budget=budget, **self.options)
        return best, micro_profile


def _changes(
    best: Best | Infeasible, micro_profile: Profile, hardware: Hardware
) -> tuple[Change, ...]:
    """Return changes for a plan that fits, or if it does, for a tenth less memory."""
    report = best.report
    if best.fits:
        target = int((1 - _SAVED) * report.peak)
        options = {**report.options, "budget": target}
        report = dataclasses.replace(report, budget=target, options=options)
    changes = changes_to_fit(micro_profile, report, hardware)
    if any(change.fits for change in changes):
        changes = tuple(change for change in changes if change.fits)
    # Note: the update on the host has no time in an estimate, so offload would seem cheap.
    return tuple(
        change
        for change in changes
        if not any(unit.offload for unit in change.report.plan.unit_list)
    )[:_CHANGES]


def _notes(config: Any, seq: int, precision: str, hardware: Hardware) -> Iterator[str]:
    yield hardware.about
    dtype = getattr(config, "dtype", None)
    kept = {"bf16": "float32 parameters and computes in bfloat16", "fp32": "all in float32"}
    if dtype is not None and dtype != torch.float32 and precision in kept:
        yield (
            f"The config says {str(dtype).removeprefix('torch.')}, which is the dtype of its files. "
            f"The plan keeps {kept[precision]}; precision bf16-params keeps all in bfloat16."
        )
    if getattr(config, "quantization_config", None):
        yield "The config quantizes its files; the plan trains weights that aren't quantized."
    if getattr(config, "_attn_implementation", None) == "eager":
        yield (
            "Attention is eager, as transformers has no call of SDPA for this model, so each head "
            "keeps a matrix of tokens × tokens."
        )
    if hasattr(config, "vision_config") and hasattr(config, "text_config"):
        yield "The batch has tokens only unless the model's main input is images: pass inputs= for both."
    context = default_seq(config)
    if config is not None and seq > context and context not in (LONGEST, OTHERS):
        yield f"{seq:,} tokens are more than the {context:,} positions of the config."


def _collectives_table(report: Report) -> Table:
    counts: dict[tuple[str, str], list[int]] = {}
    for event in report.events:
        row = counts.setdefault((event.kind, event.axis), [0, 0])
        row[0] += 1
        row[1] += event.traffic
    rows = [
        [kind, axis, table.count(count), table.size(traffic)]
        for (kind, axis), (count, traffic) in counts.items()
    ]
    return Table("Collectives of a step", ["kind", "axis", "number", "sent by a GPU"], rows)
