"""``PlannedRun``: what the plans of both tasks say alike; and the memory that a run may use."""

from __future__ import annotations

import abc
import json
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from funcshard._utils import table
from funcshard._utils.options import check_bytes
from funcshard._utils.table import Shown
from funcshard.estimate import Hardware, Report
from funcshard.plan import Plan

LARGEST_BATCH = 64  # samples of a rank that the search for a batch tries
# Shares of the step time. Between the first two lie 238 of 243 published runs of decoders, in
# docs/dev/estimates.md; between the others the steps of one GPU there.
NARROW, WIDE = (0.85, 1.2), (0.7, 1.5)

_MARGIN = 3 * 2**30  # bytes of a GPU that CUDA, NCCL and cuBLAS may take


def least_reserved(report: Report) -> int:
    """Return the bytes that torch's allocator reserves at least."""
    return max(report.reserved[0], report.peak)


def usable_bytes(hardware: Hardware, budget: int | str | None) -> int:
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


class PlannedRun(Shown):
    """Base of ``RunPlan`` and ``GenerationPlan``."""

    __slots__ = ()

    FIGURES: ClassVar[tuple[str, ...]]  # names of the attributes that ``to_json`` writes
    plan: Plan
    fits: bool
    batch: int
    budget: int
    notes: tuple[str, ...]
    title: str
    _script: str

    @property
    @abc.abstractmethod
    def report(self) -> Report:
        """The estimate of the step, or of the pass that needs more memory."""

    @property
    @abc.abstractmethod
    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator reserves at least."""

    @abc.abstractmethod
    def _facts(self) -> Mapping[str, Any]:
        """Return what ``to_json`` writes beside the figures."""

    def to_json(self) -> str:
        """Return the figures and the plan as JSON."""
        facts = {
            **{name: getattr(self, name) for name in self.FIGURES},
            "gpus": self.plan.world_size,
            "gpu": self.report.hardware,
            **self._facts(),
            "notes": self.notes,
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(facts, indent=2, ensure_ascii=False)

    def code(self) -> str:
        """Return a script with this plan, whose ``main`` is one rank."""
        return self._script

    def _verdict(self, binds: str) -> str:
        verdict = "It fits" if self.fits else "It doesn't fit"
        memory_text = (
            f"{table.size(self.reserved_bytes)} of {table.size(self.budget)} a GPU"
        )
        return f"{self.title}. {verdict}: {memory_text}. {binds}"

    def _mesh_rows(self, mesh_note: str, batch_note: str = "") -> list[list[str]]:
        plan = self.plan
        sizes = [*plan.mesh_shape, *(size for _, size in plan.model_axes)]
        axes_text = "replicas × shards" + " × tensor" * bool(plan.model_axes)
        per = "group of GPUs" if plan.model_axes else "GPU"
        samples = table.count(self.batch * math.prod(plan.mesh_shape))
        return [
            ["mesh", " × ".join(map(str, sizes)), f"{axes_text}; {mesh_note}"],
            [
                "batch",
                table.count(self.batch),
                f"samples a {per}, {samples} in all{batch_note}",
            ],
        ]
