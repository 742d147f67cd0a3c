"""``load_traced``: a traced step from a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from funcshard._utils.options import check_path
from funcshard.comm import Mesh, all_gather_texts
from funcshard.graph.replay import bind
from funcshard.graph.saving import graph_from, read_file
from funcshard.graph.signatures import NamedSizes
from funcshard.graph.traced import Entry, Traced, by_signature, torch_version
from funcshard.plan import Plan, axes_text, check_plan, plan_from_data
from funcshard.train import TrainStep


def load_traced(
    path: str | os.PathLike[str],
    mesh: Mesh,
    *,
    plan: Plan | None = None,
    step: TrainStep | None = None,
) -> Traced:
    """Return the traced step that ``Traced.save`` wrote, bound to a mesh.

    You need no code of the model, and reading runs no code of the file. Call it on every rank.
    ``result.plan`` cuts the shards of a state.

    Pass ``step`` if it has schedules, or to record for arguments of other shapes: see
    docs/tracing.md, "Files of graphs".

    Arguments:
        path: your file.
        mesh: the ranks, as many along each axis as the step was traced for.
        plan: your plan, to compare with that of the file.
        step: the step that you traced.

    Returns:
        The step as a graph; see ``trace``.

    Raises:
        OSError: there is no such file.
        ValueError: the file is damaged, of another plan, mesh or version of torch, or needs a
            schedule that the step lacks.
        TypeError: ``step`` isn't a step of ``make_train_step``.

    Example:
        >>> import tempfile, torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(3, 1))
        >>> mesh = fs.Mesh()
        >>> plan = fs.make_plan(params, mesh)
        >>> sharded = fs.fully_shard(apply, plan, mesh)
        >>> loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
        >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        >>> step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        >>> state = step.init(fs.shard(params, plan, mesh), buffers)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fs.trace(step, state, torch.ones(2, 3)).save(f"{folder}/step.json")
        ...     loaded = fs.load_traced(f"{folder}/step.json", mesh)
        >>> state, metrics = loaded(state, torch.ones(2, 3))
        >>> state.step
        1

    Source: ``jax.export``.
    """
    path = check_path("path", path)
    if step is not None and not isinstance(step, TrainStep):
        raise TypeError(
            f"step must be the step that make_train_step returned; found {type(step).__name__}"
        )
    if plan is not None:
        check_plan(plan)
    facts, kinds = _read_together(Path(path), mesh)
    try:
        with torch.inference_mode(False):
            return _traced(facts, kinds, mesh, plan, step, str(path))
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from None
    except Exception as error:  # of any kind: torch's operators raise what they meet
        raise ValueError(
            f"{path} cannot be loaded, because it is damaged: {type(error).__name__}: {error}"
        ) from None


def _traced(
    facts: dict[str, Any],
    kinds: list[Any],
    mesh: Mesh,
    plan: Plan | None,
    step: TrainStep | None,
    path: str,
) -> Traced:
    file_plan = plan_from_data(facts["plan"])
    used_step = step or LoadedStep(file_plan if plan is None else plan, path)
    for recorded, current in (
        (f"with torch {facts['torch']}", f"with torch {torch_version()}"),
        (
            f"on a mesh of {axes_text(facts['mesh'], ones=facts['mesh'])}",
            f"on a mesh of {axes_text(mesh.shape, ones=mesh.shape)}",
        ),
        *[
            (f"with plan {file_plan.fingerprint()}", f"with plan {your_plan.fingerprint()}")
            for your_plan in (used_step.plan, plan or file_plan)
        ],
    ):
        if recorded != current:
            _, _, found_text = current.partition(" ")
            raise ValueError(
                f"it was recorded {recorded}; found {found_text}: trace the step again"
            )
    recordings = kinds[facts["of_rank"][mesh.rank]]
    schedules = used_step.schedules
    for name in sorted({name for recording in recordings for name in recording["numbers"]}):
        if name not in schedules:
            raise ValueError(
                f"it computes the option {name!r} by a function of the number of steps, which a "
                "file cannot hold; found a step without one, or none: pass "
                "load_traced(path, mesh, step=step) with the step that was traced"
            )
    step_graphs = [
        graph_from(recording, mesh.device, schedules) for recording in recordings
    ]
    fixed_reason = ""
    if step is None:
        fixed_reason = (
            "it was loaded without its step: pass load_traced(path, mesh, step=step)"
        )
    elif facts["changes"]:
        fixed_reason = (
            "passes changed its graphs before it was saved, and a new one would lack them: trace "
            "and save the step again"
        )
    return Traced(
        used_step,
        mesh,
        by_signature(
            Entry(step_graph, bind(step_graph, mesh)) for step_graph in step_graphs
        ),
        _fixed=fixed_reason,
        _earlier=facts["changes"],
        _names=NamedSizes(facts["dynamic_shapes"]),
    )


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """Takes the place of a step that wasn't loaded, and raises if it's called."""

    plan: Plan
    path: str
    schedules: ClassVar[dict[str, Any]] = {}

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        raise ValueError(
            f"the first step with a GradScaler or weights runs without its graph, and {self.path} "
            "was loaded without its step: pass load_traced(path, mesh, step=step), or begin with "
            "a state whose optimizer has taken a step"
        )


def _read_together(path: Path, mesh: Mesh) -> tuple[dict[str, Any], list[Any]]:
    """Return the contents of a file; raise on every rank if one can't read it."""
    facts: dict[str, Any] = {"digest": ""}
    kinds: list[Any] = []
    read_error = None
    try:
        facts, kinds = read_file(path)
    except (OSError, ValueError) as error:
        read_error = error
    own_report = [facts["digest"], str(read_error or "")]
    # Why before the error: a rank that raises alone would let the others wait.
    rank_reports = all_gather_texts(mesh, json.dumps(own_report), "a loaded step")
    if read_error is not None:
        raise read_error
    for rank, (digest, rank_problem) in enumerate(map(json.loads, rank_reports)):
        if digest != facts["digest"]:
            raise ValueError(
                f"rank {rank} reads another file at {path} than rank {mesh.rank}; "
                f"{rank_problem or 'its checksum differs'}"
            )
    return facts, kinds
