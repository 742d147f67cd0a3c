"""``plan_run``: the plan of a whole run, and the figures of its step, from a model or its files."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from funcshard._utils import table
from funcshard._utils.garbage import without_collection
from funcshard._utils.options import check_bytes, check_choice, check_count, check_flag
from funcshard._utils.table import Bullets, Part, Shown, Table
from funcshard.checkpoint import default_units, module_of_config
from funcshard.estimate import (
    OPTIMIZERS,
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
from funcshard.plan import MixedPrecision, Plan, Schedule
from funcshard.planning.adapters import add_adapters, storage_of
from funcshard.planning.model_inputs import (
    InputMaker,
    context_of,
    default_seq,
    has_vision,
    takes_text_alone,
    trace,
)
from funcshard.planning.preferences import SCRIPT, Preferences, pairs
from funcshard.planning.script import training_script
from funcshard.planning.tensor_parts import AXIS, cut_along_tensor

# By name; bf16-params keeps the parameters in bfloat16 too.
PRECISIONS = {
    "bf16": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "fp32": None,
    "bf16-params": None,
}

_MARGIN = 3 * 2**30  # bytes of a GPU that CUDA, NCCL and cuBLAS may take
_LARGEST_BATCH = 64  # samples of a rank that the search for a batch tries
_GAIN = 0.02  # of throughput, below which a larger batch isn't worth its memory
_SHORT = 0.25  # seconds of a step, in which launches of kernels may take a part
_FEW = 8  # GPUs, of which the runs that the times were fitted to had at least so many
# Shares of the step time. Between the first two lie 238 of 243 published runs of decoders, in
# docs/dev/estimates.md; between the others the steps of one GPU there.
_NARROW, _WIDE = (0.85, 1.2), (0.7, 1.5)
_NO_DROPS = "The plan runs every layer: it leaves the config's layerdrop out."
_DECODING = "Layers decode their packed weights in forward and backward, which takes no time here."
_FITTED = "Times were fitted to steps of dense decoders on A100s and H100s."
_SAVED = 0.1  # of the peak: what the changes of a plan that fits are to save
_CHANGES = 3
_FIGURES = (
    "parameters", "fits", "peak_bytes", "reserved_bytes", "step_seconds", "tokens_per_second", "samples_per_second",
    "mfu", "batch", "micro_batches", "seq", "budget", "margin",
)  # fmt: skip


_Search = Callable[..., Best | Infeasible]  # of samples, micro-batches and, if you like, the space


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
        return _reserved(self.report)

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

    def to_json(self) -> str:
        """Return the figures and the plan as JSON."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        about_plan = {
            "gpus": self.plan.world_size,
            "gpu": self.report.hardware,
            "binds": self.report.binds,
            "step_range": self.step_range,
            "waiting_seconds": self.report.exposed + self.tensor_seconds,
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
        yield _collectives_table(self.report, self._of_model)
        if self.changes:
            yield self._changes_table()
        yield Bullets("Notes", self.notes)

    def _step_table(self) -> Table:
        report, plan = self.report, self.plan
        remat_text = f"{len(self.remat)} of {len(plan.units) - 1} units recomputed"
        axes_text, copies = "replicas × shards", math.prod(plan.mesh_shape)
        mesh_sizes = [*plan.mesh_shape]
        per = "GPU"
        if plan.model_axes:
            axes_text += " × tensor"
            mesh_sizes += [size for _, size in plan.model_axes]
            per = "group of GPUs"
        batch_text = f"samples a {per}, {table.count(self.batch * copies)} in all"
        if self.micro_batches > 1:
            batch_text += f"; in {self.micro_batches} micro-batches"
        range_text = " to ".join(map(table.duration, self.step_range))
        waiting_text = table.duration(report.exposed)
        if plan.model_axes:
            waiting_text += (
                f" for data axes and {table.duration(self.tensor_seconds)} for the tensor axis"
            )
        tokens_rows = [
            ["tokens per second", f"{self.tokens_per_second:,.0f}", f"{self.tokens_per_second / plan.world_size:,.0f} a GPU"]
        ]  # fmt: skip
        if not report.tokens:  # the first input is images or sounds
            tokens_rows = []
        rows = [
            ["mesh", " × ".join(map(str, mesh_sizes)), f"{axes_text}; {remat_text}"],
            ["batch", table.count(self.batch), batch_text],
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


def plan_run(
    model: nn.Module | str | os.PathLike[str],
    *,
    gpus: int,
    gpu: str | Hardware = "h100",
    seq: int | None = None,
    batch: int | None = None,
    budget: int | str | None = None,
    precision: str = "bf16",
    optimizer: str = "adamw",
    inputs: InputMaker | None = None,
    lora: Mapping[str, Any] | None = None,
    tensor: int = 1,
    dpo: bool = False,
) -> RunPlan:
    """Plan a training run: whether it fits, what its memory is, and how long a step takes.

    You need no GPU, no weights and no network: see docs/estimating.md.

    Arguments:
        model: a ``config.json`` of Hugging Face, a folder with one, or your module, best on the
            meta device.
        gpus: number of ranks.
        gpu: name of the hardware, or another description; see ``load_hardware``.
        seq: tokens of a sample; by default the context of the model, at most 8192.
        batch: samples of a rank in one step; by default the fastest batch that fits.
        budget: bytes that torch's allocator may reserve, or text as ``"60GiB"``; by default, GPUs
            keep a margin of 3 GiB for CUDA, NCCL and cuBLAS.
        precision: ``"bf16"`` computes in bfloat16 and keeps float32 parameters, ``"fp32"`` does
            both in float32, and ``"bf16-params"`` both in bfloat16.
        optimizer: name in ``funcshard.estimate.OPTIMIZERS``.
        inputs: function of batch and seq that returns the model's inputs, as a tuple or a
            dictionary. Models of transformers don't need it, and others do unless they take
            tokens and return logits. The loss is ``outputs.loss``, or the mean of the first output.
        lora: adapters to train in place of the weights, as ``{"r": 16, "targets": ["q_proj",
            "v_proj"]}``. Frozen weights are in bfloat16, unless ``precision`` is ``"fp32"``; with
            ``"base": "nf4"``, those of layers are stored in 4 bits, as in QLoRA.
        tensor: number of GPUs that divide each layer, with tensor parallelism as transformers does
            it; the other GPUs take other samples.
        dpo: whether the model, a decoder, learns from preferences, beside a frozen reference in
            bfloat16. A sample is a pair of answers then.

    Returns:
        The plan and its figures, which you can print. ``code()`` returns a training script.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ImportError: transformers or peft is needed, and isn't installed.
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
    tensor = check_count("tensor", tensor, of="GPUs")
    check_flag("dpo", dpo)
    if gpus % tensor:
        raise ValueError(f"tensor must divide the {gpus} gpus; found {tensor}: pass a divisor")
    if lora is not None and (dpo or tensor > 1):
        raise ValueError("lora can't be planned with tensor or dpo yet; found both: leave out one")
    check_choice("precision", precision, [*PRECISIONS])
    check_choice("optimizer", optimizer, [*OPTIMIZERS])
    hardware = load_hardware(gpu)
    limit = _limit(hardware, budget)
    path = None if isinstance(model, nn.Module) else os.fspath(model)
    with without_collection():  # the files of transformers take a third less time to import
        module = model if isinstance(model, nn.Module) else module_of_config(Path(model))
    drops_layers = path is not None and _without_layerdrop(module)
    if lora is not None or precision == "bf16-params" or tensor > 1:
        module = copy.deepcopy(module)
    if precision == "bf16-params" or (lora is not None and precision == "bf16"):
        module = module.to(torch.bfloat16)
    if lora is not None:
        add_adapters(module, lora)
    parameters = sum(param.numel() for param in module.parameters())
    local: Mapping[str, Mapping[str, int]] = {}
    if tensor > 1:
        local = cut_along_tensor(module, tensor)
    if batch is not None:
        batch = check_count("batch", batch, of="samples")
    seq = default_seq(module) if seq is None else check_count("seq", seq, of="tokens")
    unit_names = default_units(module, ends=True)
    storage = storage_of(module, lora)
    trained_module = module
    if dpo:
        if "CausalLM" not in type(module).__name__ or inputs is not None:
            raise ValueError(
                f"dpo needs a decoder of transformers, and makes its inputs; found {type(module).__name__}"
                f"{' and inputs' * (inputs is not None)}: leave out dpo"
            )
        trained_module = Preferences(module, None if precision == "fp32" else torch.bfloat16)
        inputs = pairs
        parts = ("policy", "reference")
        unit_names = [f"{part}.{name}" for part in parts for name in unit_names]
        local = {f"{part}.{name}": cut for part in parts for name, cut in local.items()}
    functional = make_functional(trained_module)

    profiles: dict[tuple[int, int], Profile] = {}

    def search(samples: int, micro_batches: int, space: Space | None = None) -> Best | Infeasible:
        key = samples, micro_batches
        if key not in profiles:
            profiles[key] = trace(
                trained_module,
                samples // micro_batches,
                seq,
                precision=PRECISIONS[precision],
                inputs=inputs,
                functional=functional,
            )
        return plan_within(
            limit,
            {micro_batches: profiles[key]},
            ranks={"shard": gpus // tensor, AXIS: tensor},
            hardware=hardware,
            optimizer=optimizer,
            units=unit_names,
            space=dataclasses.replace(space or Space(), local=local, storage=storage),
        )

    best, batch = _with_batch(search, batch)
    report = best.report
    profile = profiles[batch, report.accumulation.micro_batches]
    of_model, tensor_seconds = _model_collectives(profile, report, hardware)
    doubts = [
        *_doubts(module, hardware),
        *[f"fewer than {_FEW} GPUs"] * (gpus < _FEW),
        *["a short step"] * (report.step_time < _SHORT),
        *["a tensor axis"] * (tensor > 1),
        *["adapters"] * (lora is not None),
        *["two forwards"] * dpo,
    ]
    low, high = _WIDE if doubts else _NARROW
    size_text = f"{table.count(parameters)} parameters"
    remat = report.remat
    micro_batches = report.accumulation.micro_batches
    script = training_script(
        report.plan,
        path=path,
        module=module,
        units=unit_names,
        remat=remat,
        precision=precision,
        optimizer=optimizer,
        micro_batches=micro_batches,
        lora=lora,
        storage=storage,
    )
    if dpo:
        script = SCRIPT.format(units=unit_names, remat=list(remat))
    return RunPlan(
        plan=report.plan,
        schedule=report.schedule,
        remat=remat,
        report=report,
        fits=_reserved(report) <= limit,
        parameters=parameters,
        batch=batch,
        micro_batches=micro_batches,
        seq=seq,
        budget=limit,
        margin=hardware.memory - limit,
        changes=_changes(best, hardware),
        notes=(
            *_notes(module, seq, precision, hardware),
            *[_NO_DROPS] * drops_layers,
            *[_DECODING] * bool(storage),
            *[f"{_FITTED} This one has {', '.join(doubts)}, so its time is less certain."]
            * bool(doubts),
        ),
        title=f"{type(module).__name__}{' with DPO' * dpo}, {size_text}, on {gpus:,} × {hardware.name}",
        _script=script,
        tensor_seconds=tensor_seconds,
        step_range=(low * report.step_time, high * report.step_time),
        _of_model=of_model,
    )


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
        reserved_bytes = _reserved(best.report)
        if not best.fits or reserved_bytes <= limit:
            return best
        # Note: the allocator's pools may hold more than is in use at any moment.
        in_use = min(in_use - 1, in_use * limit // reserved_bytes)


def _reserved(report: Report) -> int:
    """Return the bytes that torch's allocator reserves at least."""
    return max(report.reserved[0], report.peak)


def _limit(hardware: Hardware, budget: int | str | None) -> int:
    """Return the bytes that torch's allocator may reserve."""
    usual_limit = hardware.memory
    if hardware.device == "cuda":
        usual_limit -= _MARGIN
    if budget is None:
        return usual_limit
    budget_bytes = check_bytes("budget", budget, example="60GiB")
    if budget_bytes > hardware.memory:
        raise ValueError(
            f"budget must be at most the {table.size(hardware.memory)} of {hardware.name}; found "
            f"{table.size(budget_bytes)}: leave it out, and {table.size(usual_limit)} count"
        )
    return budget_bytes


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
    if best.report.exposed > best.report.step_time / 2:  # then four samples take little longer
        factor = 16
    while best.fits and factor * batch <= _LARGEST_BATCH and _may_gain(best.report):
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


def _without_layerdrop(module: nn.Module) -> bool:
    """Set all layerdrop of a model of transformers to 0, and return whether there was any."""
    # Why: a layer that may be dropped reads a random value, which a trace doesn't have.
    drops_layers = False
    for submodule in module.modules():
        for owner in (submodule, getattr(submodule, "config", None)):
            for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
                if getattr(owner, name, 0.0):
                    setattr(owner, name, 0.0)
                    drops_layers = True
    return drops_layers


def _doubts(module: nn.Module, hardware: Hardware) -> Iterator[str]:
    """Yield what model and hardware have that the runs didn't to which times were fitted."""
    config: Any = getattr(module, "config", None)
    if hardware.sources["flops_efficiency"].how == "extrapolated":
        yield "another GPU"
    if "CausalLM" not in type(module).__name__ and "LMHead" not in type(module).__name__:
        yield "no decoder" if config is not None else "a model of yours"
    if getattr(config, "num_experts_per_tok", None):
        yield "experts"
    if getattr(config, "_attn_implementation", None) == "eager":
        yield "eager attention"


def _notes(module: nn.Module, seq: int, precision: str, hardware: Hardware) -> Iterator[str]:
    yield hardware.about
    config: Any = getattr(module, "config", None)
    dtype = getattr(config, "dtype", None)
    kept = {"bf16": "float32 parameters and computes in bfloat16", "fp32": "all in float32"}
    frozen = not all(param.requires_grad for param in module.parameters())
    if dtype not in (None, torch.float32) and precision in kept and not frozen:
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
    main_input = getattr(module, "main_input_name", "")
    if has_vision(config) and takes_text_alone(config) and main_input != "pixel_values":
        yield "The batch has tokens only: pass inputs= for images too."
    context = context_of(module)
    if context is not None and seq > context:
        yield f"{seq:,} tokens are more than the {context:,} positions of the config."


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


def _collectives_table(report: Report, of_model: Mapping[tuple[str, str], Sequence[int]]) -> Table:
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
