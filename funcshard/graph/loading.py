"""``load_traced``: a traced step from a file, without the code of its model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from funcshard._utils import check_path
from funcshard.comm import Mesh, all_gather_texts
from funcshard.graph.named_sizes import NamedSizes
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

    Reading runs no code of the file. The result runs without the Python code of the model: it needs
    a state and a batch of the recorded shapes, and ``result.plan`` cuts the state's shards. Every
    rank of the mesh has to call this.

    Schedules are functions of Python, so a file has only their names. If the step has any, pass
    ``step``. A step is also needed for arguments of other shapes, which are recorded again.

    Arguments:
        path: the file.
        mesh: the ranks; as many along each axis as when the step was traced.
        plan: the plan that the arguments are cut by, to be compared with that of the file.
        step: the step of ``make_train_step`` that was traced.

    Returns:
        The step as a graph; see ``trace``.

    Raises:
        OSError: there is no such file.
        ValueError: the file is damaged; it was written for another plan, mesh or version of torch;
            or it needs a schedule that the step does not have. The message names the difference.
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
    contents = _read_together(path, mesh)
    _check(contents, Path(path), mesh, plan if step is None else step.plan)
    schedules = {} if step is None else step.schedules
    rank_kind = contents.kinds[contents.of_rank[mesh.rank]]
    needed = {name for recording in rank_kind for name in recording["numbers"]}
    for name in sorted(needed - schedules.keys()):
        held = (
            "no step was given"
            if step is None
            else f"the step's schedules are {sorted(schedules) or 'none'}"
        )
        raise ValueError(
            f"{path} computes the option {name!r} by a function of the number of steps, which a "
            f"file cannot hold; {held}: pass load_traced(path, mesh, step=step) with the step that "
            "was traced"
        )
    graphs = [_graph(recording, Path(path), mesh, schedules) for recording in rank_kind]
    fixed = ""
    if step is None:
        fixed = "it was loaded without its step: pass load_traced(path, mesh, step=step)"
    elif contents.changes:
        fixed = (
            "passes changed its graphs before it was saved, and a new one would lack them: trace "
            "and save the step again"
        )
    try:
        names = NamedSizes(contents.dynamic_shapes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be loaded: {error}") from None
    return Traced.of_graphs(
        step or LoadedStep(contents.plan, str(path)),
        mesh,
        graphs,
        fixed=fixed,
        earlier=contents.changes,
        names=names,
    )


@dataclass(frozen=True, slots=True)
class LoadedStep:
    """The place of the step in a traced step that was loaded without it.

    Attributes:
        plan: the plan of the shards.
        path: the file.
    """

    plan: Plan
    path: str

    @property
    def schedules(self) -> dict[str, Any]:
        """No functions of the number of steps, because a file cannot hold them."""
        return {}

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Raise, because only the step itself can run what its graph cannot."""
        raise ValueError(
            f"the first step with a GradScaler or weights runs without its graph, and {self.path} "
            "was loaded without its step: pass load_traced(path, mesh, step=step), or begin with "
            "a state whose optimizer has taken a step"
        )


def _read_together(path: Path, mesh: Mesh) -> FileContents:
    """Return the contents of a file; raise on every rank if one of them cannot read it."""
    contents, problem = None, None
    try:
        contents = read_file(path)
    except (OSError, ValueError) as error:
        problem = error
    own_report = [contents.digest if contents else "", str(problem or "")]
    rank_reports = [
        json.loads(report_text)
        for report_text in all_gather_texts(mesh, json.dumps(own_report), "a loaded step")
    ]
    if problem is not None:
        raise problem
    assert contents is not None
    for rank, (digest, rank_problem) in enumerate(rank_reports):
        if digest != contents.digest:
            reason = rank_problem or "its checksum differs"
            raise ValueError(
                f"rank {rank} reads another file at {path} than rank {mesh.rank}; {reason}"
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
        first_plan, second_plan = (json.loads(each.to_json()) for each in (contents.plan, plan))
        raise ValueError(
            f"{path} was recorded with plan {contents.plan.fingerprint()}; found plan "
            f"{plan.fingerprint()}, which differs in {_first_difference(first_plan, second_plan)}: trace the "
            "step again"
        )


def _first_difference(recorded: Any, found: Any, path: str = "") -> str:
    """Return the first place at which two plans differ, as JSON writes them."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        pairs: Any = {
            key: (recorded.get(key), found.get(key)) for key in recorded | found if key != "names"
        }.items()
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        pairs = enumerate(zip(recorded, found, strict=True))
    else:
        return f"`{path}`: recorded {_short(recorded)}, found {_short(found)}"
    key, (first_value, second_value) = next(
        (key, pair) for key, pair in pairs if pair[0] != pair[1]
    )
    return _first_difference(
        first_value,
        second_value,
        f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".lstrip("."),
    )


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} entries"
    return json.dumps(value)[:60]


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
