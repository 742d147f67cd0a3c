"""``load_traced``: a traced step from a file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard._utils.options import check_path
from funcshard.comm import Mesh, all_gather_texts
from funcshard.graph.entries import Entry
from funcshard.graph.named_sizes import NamedSizes
from funcshard.graph.replay import bind
from funcshard.graph.saving import FileContents, graph_from, read_file
from funcshard.graph.step_graph import StepGraph
from funcshard.graph.traced import Traced, torch_version
from funcshard.plan import Plan, axes_text, check_plan
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
        TypeError: ``step`` is no step of ``make_train_step``.

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
    file_contents = _read_together(path, mesh)
    _check(file_contents, Path(path), mesh, plan if step is None else step.plan)
    held_schedules = "no step was given"
    step_schedules: dict[str, Any] = {}
    if step is not None:
        step_schedules = step.schedules
        held_schedules = f"the step's schedules are {sorted(step_schedules) or 'none'}"
    rank_recordings = file_contents.kinds[file_contents.of_rank[mesh.rank]]
    needed_schedules = {name for recording in rank_recordings for name in recording["numbers"]}
    for name in sorted(needed_schedules - step_schedules.keys()):
        raise ValueError(
            f"{path} computes the option {name!r} by a function of the number of steps, which a "
            f"file cannot hold; {held_schedules}: pass load_traced(path, mesh, step=step) with the step that "
            "was traced"
        )
    step_graphs = [
        _graph(recording, Path(path), mesh, step_schedules) for recording in rank_recordings
    ]
    step_entries = [Entry(step_graph, bind(step_graph, mesh)) for step_graph in step_graphs]
    fixed_reason = ""
    if step is None:
        fixed_reason = "it was loaded without its step: pass load_traced(path, mesh, step=step)"
    elif file_contents.changes:
        fixed_reason = (
            "passes changed its graphs before it was saved, and a new one would lack them: trace "
            "and save the step again"
        )
    try:
        named_sizes = NamedSizes(file_contents.dynamic_shapes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from None
    return Traced(
        step or LoadedStep(file_contents.plan, str(path)),
        mesh,
        step_entries,
        fixed=fixed_reason,
        earlier=file_contents.changes,
        names=named_sizes,
    )


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """Takes the place of a step that wasn't loaded, and raises if it's called."""

    plan: Plan
    path: str

    @property
    def schedules(self) -> dict[str, Any]:
        return {}

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        raise ValueError(
            f"the first step with a GradScaler or weights runs without its graph, and {self.path} "
            "was loaded without its step: pass load_traced(path, mesh, step=step), or begin with "
            "a state whose optimizer has taken a step"
        )


def _read_together(path: Path, mesh: Mesh) -> FileContents:
    """Return the contents of a file; raise on every rank if one can't read it."""
    contents, read_error = None, None
    try:
        contents = read_file(path)
    except (OSError, ValueError) as error:
        read_error = error
    own_report = [contents.digest if contents else "", str(read_error or "")]
    # Why before the error: a rank that raises alone would let the others wait.
    rank_reports = all_gather_texts(mesh, json.dumps(own_report), "a loaded step")
    if contents is None:
        assert read_error is not None
        raise read_error
    for rank, (digest, rank_problem) in enumerate(map(json.loads, rank_reports)):
        if digest != contents.digest:
            raise ValueError(
                f"rank {rank} reads another file at {path} than rank {mesh.rank}; "
                f"{rank_problem or 'its checksum differs'}"
            )
    return contents


def _check(contents: FileContents, path: Path, mesh: Mesh, plan: Plan | None) -> None:
    if contents.torch != torch_version():
        raise ValueError(
            f"{path} was recorded with torch {contents.torch}, whose operations may differ; found "
            f"torch {torch_version()}: trace the step again"
        )
    if list(contents.mesh.items()) != list(mesh.shape.items()):
        raise ValueError(
            f"{path} was recorded on a mesh of {axes_text(contents.mesh)}; found "
            f"{axes_text(mesh.shape)}: trace the step again"
        )
    if len(contents.of_rank) != mesh.world_size:
        raise ValueError(
            f"{path} has the graphs of {len(contents.of_rank)} ranks; found {mesh.world_size} ranks"
        )
    if plan is not None and plan.fingerprint() != contents.plan.fingerprint():
        recorded_plan, found_plan = (json.loads(each.to_json()) for each in (contents.plan, plan))
        raise ValueError(
            f"{path} was recorded with plan {contents.plan.fingerprint()}; found plan "
            f"{plan.fingerprint()}, which differs in {_first_difference(recorded_plan, found_plan)}: trace "
            "the step again"
        )


def _first_difference(recorded: Any, found: Any, path: str = "") -> str:
    """Return the first place at which two plans differ, as JSON writes them."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in recorded | found:
            if key != "names" and recorded.get(key) != found.get(key):
                inner_path = f"{path}.{key}".lstrip(".")
                return _first_difference(recorded.get(key), found.get(key), inner_path)
    if isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for index, pair in enumerate(zip(recorded, found, strict=True)):
            if pair[0] != pair[1]:
                return _first_difference(*pair, f"{path}[{index}]")
    return f"`{path}`: recorded {_short(recorded)}, found {_short(found)}"


def _short(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, list) else json.dumps(value)[:60]


def _graph(recording: Any, path: Path, mesh: Mesh, schedules: Mapping[str, Any]) -> StepGraph:
    try:
        with torch.inference_mode(False):
            return graph_from(recording, mesh.device, mesh.shape, schedules)
    except ValueError as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from None
    except Exception as error:  # of any kind: torch's operators raise what they meet
        raise ValueError(
            f"{path} cannot be loaded, because it is damaged: {type(error).__name__}: {error}"
        ) from None
