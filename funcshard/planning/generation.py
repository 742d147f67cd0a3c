"""``GenerationPlan``: whether a model that generates fits, and how long its tokens take."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from funcshard._utils import table
from funcshard._utils.table import Bullets, Part, Table
from funcshard.estimate import Hardware, Profile, Report, estimate, memory_table
from funcshard.module import make_functional
from funcshard.plan import Plan, make_plan
from funcshard.planning.model_inputs import trace
from funcshard.planning.planned_model import PlannedModel
from funcshard.planning.planned_run import LARGEST_BATCH, WIDE, PlannedRun, least_reserved
from funcshard.planning.script import generation_script
from funcshard.planning.task_models import cache_bytes
from funcshard.planning.tasks import Generation
from funcshard.planning.tensor_parts import AXIS

_TRAFFIC = (
    3  # times that a pass moves the cache: attention reads it, and the new token copies it
)
_BINDS = 0.5  # of the time for a token, above which launches or waits limit it
_NOTE = (
    "Times follow from kernels, bytes and links; no published run of generation was fitted. An engine "
    "that captures graphs or batches requests as they come is faster than transformers' generate."
)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class GenerationPlan(PlannedRun):
    """The plan of a model that generates, and what its tokens take; made by ``plan_run``.

    Each rank has prompts that are its own. If nothing fits, ``fits`` is ``False``, and the plan
    shards the weights over all ranks.

    Attributes:
        plan: the plan.
        prefill: the estimate of the pass over a prompt of ``seq`` tokens, without the cache.
        decode: the estimate of the pass over one token, without the cache.
        fits: whether ``reserved_bytes`` are at most ``budget``.
        parameters: number of parameters.
        batch: samples of a rank at a time.
        seq: tokens of a sample, prompt and answer.
        cache_bytes: bytes of a rank's keys and values when each sample has ``seq`` tokens.
        cache_seconds: seconds in which a pass reads and copies them.
        launch_seconds: seconds in which a pass over one token launches kernels.
        budget: bytes that torch's allocator may reserve.
        margin: bytes of the GPU beside it, for CUDA, NCCL and cuBLAS.
        notes: what you should know about the model and the hardware.
        title: the model and the hardware.

    Example:
        >>> import torch, transformers, funcshard as fs
        >>> config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=64, vocab_size=96)
        >>> with torch.device("meta"):
        ...     net = transformers.LlamaForCausalLM(config)
        >>> run = fs.plan_run(net, gpus=2, seq=128, batch=4, task=fs.Generation())
        >>> run.fits, run.cache_bytes == 2 * 2 * 4 * 128 * 64 * 2  # keys and values in bfloat16
        (True, True)
    """

    FIGURES: ClassVar = (
        "parameters", "fits", "peak_bytes", "reserved_bytes", "cache_bytes", "prefill_seconds", "token_seconds",
        "tokens_per_second", "batch", "seq", "budget", "margin", "binds",
    )  # fmt: skip
    plan: Plan
    prefill: Report
    decode: Report
    fits: bool
    parameters: int
    batch: int
    seq: int
    cache_bytes: int
    cache_seconds: float
    launch_seconds: float
    budget: int
    margin: int
    notes: tuple[str, ...]
    title: str
    _script: str

    @property
    def report(self) -> Report:
        """The estimate of the pass that needs more memory."""
        return max(self.prefill, self.decode, key=least_reserved)

    @property
    def peak_bytes(self) -> int:
        """Most bytes that a rank has in use."""
        return self.report.peak + self.cache_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator reserves at least."""
        return least_reserved(self.report) + self.cache_bytes

    @property
    def prefill_seconds(self) -> float:
        """Seconds until the first token of a prompt of ``seq`` tokens."""
        return self.prefill.step_time

    @property
    def token_seconds(self) -> float:
        """Seconds of one further token of each sample, at a full cache."""
        return self.decode.step_time + self.cache_seconds

    @property
    def tokens_per_second(self) -> float:
        """Further tokens of all ranks in one second."""
        return self.batch * math.prod(self.plan.mesh_shape) / self.token_seconds

    @property
    def binds(self) -> str:
        """What limits the time for a token, as a sentence."""
        if self.decode.exposed > _BINDS * self.token_seconds:
            return "Communication binds: the rank waits for gathers of weights."
        if self.launch_seconds > _BINDS * self.token_seconds:
            return "Launches of kernels bind: a larger batch takes little longer."
        return "Memory bandwidth binds: each token reads all weights and the cache."

    def _facts(self) -> Mapping[str, Any]:
        return {
            "token_range": [share * self.token_seconds for share in WIDE],
            "prefill_range": [share * self.prefill_seconds for share in WIDE],
            "memory": {**self.report.by_category, "cache": self.cache_bytes},
        }

    def _parts(self) -> Iterable[Part]:
        yield self._verdict(self.binds)
        yield self._times_table()
        title, cache = "Memory in use at the peak", {"cache": self.cache_bytes}
        yield memory_table(self.report, title, cache)
        yield Bullets("Notes", self.notes)

    def _times_table(self) -> Table:
        gathers_text = "weights are on each GPU"
        if self.plan.mesh_shape[1] > 1:
            gathers_text = "each pass gathers the weights, unit by unit"

        def range_text(seconds: float) -> str:
            low, high = (table.duration(share * seconds) for share in WIDE)
            return f"{low} to {high}"

        waiting_text = f"{table.duration(self.decode.exposed)} waiting for weights"
        rows = [
            *self._mesh_rows(gathers_text),
            ["context", table.count(self.seq), "tokens of a sample, prompt and answer"],
            ["cache", table.size(self.cache_bytes), "keys and values of a full context, on each GPU"],
            ["memory reserved", table.size(self.reserved_bytes), f"or more; a margin of {table.size(self.margin)} is left"],
            ["first token", table.duration(self.prefill_seconds),
             f"{range_text(self.prefill_seconds)}; for a prompt of {self.seq:,} tokens"],
            ["further token", table.duration(self.token_seconds),
             f"{range_text(self.token_seconds)}; {table.duration(self.cache_seconds)} for the cache, {waiting_text}"],
            ["tokens per second", f"{self.tokens_per_second:,.0f}",
             f"{self.tokens_per_second / self.plan.world_size:,.0f} a GPU, {1 / self.token_seconds:,.3g} a sample"],
        ]  # fmt: skip
        return Table("Generation", ["quantity", "value", "note"], rows)


def plan_generation(
    model: PlannedModel,
    task: Generation,
    *,
    ranks: int,
    tensor: int,
    hardware: Hardware,
    seq: int,
    batch: int | None,
    limit: int,
    notes: Iterable[str],
    title: str,
) -> GenerationPlan:
    """Return the plan of a model that generates: as few shards as fit, and the batch that pays.

    Arguments:
        model: the model.
        task: what the run does.
        ranks: number of ranks along the data axes.
        tensor: number of ranks that divide each layer.
        hardware: the hardware.
        seq: tokens of a sample.
        batch: samples of a rank; ``None``: that with the most tokens per second.
        limit: bytes that torch's allocator may reserve.
        notes: what you should know about the model.
        title: the model and the hardware.
    """
    sample_bytes = cache_bytes(model.module, seq)
    functional = make_functional(model.traced)
    bandwidth = hardware.memory_bandwidth * hardware.memory_efficiency

    def planned(samples: int) -> GenerationPlan:
        profiles = [
            trace(
                model.traced,
                samples,
                length,
                precision=None,
                inputs=model.inputs,
                functional=functional,
            )
            for length in (seq, 1)
        ]
        for shards in (size for size in range(1, ranks + 1) if ranks % size == 0):
            plan = _plan_of(
                model, profiles[0], {"replicate": ranks // shards, "shard": shards}, tensor
            )
            prefill, decode = (
                estimate(profile, plan, hardware=hardware, optimizer=None)
                for profile in profiles
            )
            kept_bytes = max(least_reserved(prefill), least_reserved(decode))
            # Note: fewer shards are faster, as smaller groups gather, and one gathers nothing.
            if kept_bytes + samples * sample_bytes <= limit:
                break
        kernels = sum(
            work.kernels
            for step in profiles[1].program(plan).steps
            for work in getattr(step, "work", ())
        )
        return GenerationPlan(
            plan=plan,
            prefill=prefill,
            decode=decode,
            fits=kept_bytes + samples * sample_bytes <= limit,
            parameters=model.parameters,
            batch=samples,
            seq=seq,
            cache_bytes=samples * sample_bytes,
            cache_seconds=_TRAFFIC * samples * sample_bytes / bandwidth,
            launch_seconds=kernels * hardware.kernel_overhead,
            budget=limit,
            margin=hardware.memory - limit,
            notes=(*notes, _NOTE),
            title=title,
            _script=generation_script(model, task, plan),
        )

    notes = tuple(notes)
    if batch is not None:
        return planned(batch)
    best, factor = planned(1), 4
    while best.fits and factor * best.batch <= LARGEST_BATCH:
        larger = planned(factor * best.batch)
        if larger.fits and larger.tokens_per_second >= best.tokens_per_second:
            best = larger
        elif factor > 2 and not larger.fits:
            factor = 2
        else:
            break
    return best


def _plan_of(
    model: PlannedModel, profile: Profile, mesh: dict[str, int], tensor: int
) -> Plan:
    if tensor > 1:
        mesh = {**mesh, AXIS: tensor}
    return make_plan(
        profile.forms, mesh, units=model.units, local=model.local, storage=model.storage
    )
