"""``same_on_every_mesh``: whether a program returns the same numbers on every mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.options import check_number
from funcshard.comm import Mesh, simulate
from funcshard.plan import mesh_axes_of
from funcshard.testing.operations import explain, recorded
from funcshard.testing.relations import (
    Finding,
    distance,
    factor_of,
    find,
    largest_of,
    partial,
    relation,
    scale,
    tolerance_of,
    varying_axes,
)
from funcshard.testing.returned_values import Key, values_by_path

_MESHES: tuple[int | Mapping[str, int], ...] = (
    1,
    2,
    4,
    {"replicate": 2, "shard": 2},
    {"shard": 2, "tensor": 2},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where a program's results on one mesh differ from those of one rank.

    Attributes:
        mesh: the mesh, as you passed it.
        path: the first value that differs.
        count: the number of values that differ in this way.
        step: the first step that differs, from 0, if the program returns a list of steps.
        cause: ``"scale"``, ``"not averaged"``, ``"not added"``, ``"norm"``, ``"max"``,
            ``"one rank"``, ``"data"``, ``"weights"``, ``"randomness"``, ``"rounding"``,
            ``"copies"``, ``"value"`` or ``"form"``; docs/same-on-every-mesh.md explains them.
        axes: the mesh axes along which the ranks are at fault, as far as known.
        factor: how many times the value is that of one rank, if it's a multiple.
        text: what differs, and what is most likely wrong.
    """

    mesh: Any
    path: str
    count: int = 1
    step: int | None = None
    cause: str
    axes: tuple[str, ...] = ()
    factor: float | None = None
    text: str

    def __str__(self) -> str:
        more = f" (and {self.count - 1} more)" if self.count > 1 else ""
        since = f" from step {self.step + 1} on," if self.step else ""
        return f"{self.mesh}:{since} {self.path or 'the result'}{more} {self.text}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of ``same_on_every_mesh``: true if all meshes agree; its text says where not.

    Attributes:
        meshes: the meshes that were compared with one rank.
        differences: where they differ, mesh by mesh.
        rounding: the largest difference that counts as rounding, as part of the largest element.
    """

    meshes: tuple[Any, ...]
    differences: tuple[Difference, ...]
    rounding: float

    def __bool__(self) -> bool:
        return not self.differences

    def __str__(self) -> str:
        if self:
            return f"the same on {len(self.meshes)} meshes, up to rounding of {self.rounding:.0e}"
        faulty = {str(difference.mesh) for difference in self.differences}
        head = f"differs from one rank on {len(faulty)} of {len(self.meshes)} meshes:"
        return "\n".join([head, *map(str, self.differences)])

    __repr__ = __str__


def same_on_every_mesh(
    main: Callable[[Mesh], Any],
    meshes: Sequence[int | Mapping[str, int]] = _MESHES,
    *,
    tolerance: float | None = None,
) -> Comparison:
    """Return whether a program returns the same on every mesh as on one rank.

    ``main`` runs on simulated ranks, first on one. Return from it what has to be the same on every
    rank, such as mean losses. Return shards together with their plan: then the whole tensors are
    compared. If numbers differ, ``main`` runs once more to find the first operation that does.

    Arguments:
        main: the program of one rank, ``main(mesh)``. It returns a pytree of tensors, numbers and
            strings; of shards, gradients, optimizer states or a ``TrainState`` with their
            ``Plan``; or a list of such trees, one for each step.
        meshes: numbers of ranks and shapes of meshes. Each has all axes that you name for any of
            them, with one rank where you give no size.
        tolerance: the largest difference that counts as rounding, as part of a tensor's largest
            element. By default 1e-9 for float64, 0.03 for float16 and bfloat16, and 1e-4 otherwise.

    Returns:
        A ``Comparison``.

    Raises:
        Exception: whatever ``main`` raises, with a note that names the mesh.
        ValueError: a mesh has no valid shape.

    Example:
        >>> import torch, funcshard as fs
        >>> from funcshard.testing import same_on_every_mesh
        >>> batch = torch.arange(8.0)
        >>> def main(mesh):
        ...     mine = batch.chunk(mesh.world_size)[mesh.rank]
        ...     return {"loss": fs.psum(mine.mean(), mesh)}
        >>> found = same_on_every_mesh(main, [2, 4])
        >>> bool(found), found.differences[1].cause, found.differences[1].factor
        (False, 'scale', 4.0)
    """
    if tolerance is not None:
        check_number(
            "tolerance", tolerance, least=0, none="for that of the dtype", remedy="pass 0"
        )
    shapes = [mesh_axes_of(mesh, "meshes") for mesh in meshes]
    ones = {axis: 1 for shape in shapes for axis in shape}
    (expected,) = _values(main, 1, ones)
    runs = []
    for mesh, shape in zip(meshes, shapes, strict=True):
        sizes = shape | {axis: 1 for axis in ones if axis not in shape}
        if math.prod(sizes.values()) > 1:
            runs.append(_Run(mesh, sizes, _values(main, mesh, sizes)))
    reference = _Reference(expected, tolerance)
    by_run = [(run, _differences(run, runs, reference)) for run in runs]
    right_runs = [run for run, faults in by_run if not faults]
    right_axes = {
        axis for run in right_runs for axis, size in run.sizes.items() if size > 1
    }
    differences = []
    for run, faults in by_run:
        differences += _explained(main, ones, run, faults, right_axes)
    rounding = 0.0
    if not differences:
        rounding = max(
            (reference.apart(run, key) for run in runs for key in expected), default=0.0
        )
    return Comparison(tuple(run.mesh for run in runs), tuple(differences), rounding)


def _values(
    main: Callable[[Mesh], Any], mesh: Any, sizes: Mapping[str, int]
) -> list[dict[Key, Any]]:
    """Return what each rank returns, by step and path."""
    try:
        return simulate(lambda rank_mesh: values_by_path(main(rank_mesh), rank_mesh), sizes)
    except Exception as error:
        error.add_note(f"raised on the mesh {mesh} of same_on_every_mesh")
        raise


@dataclass(frozen=True, slots=True)
class _Run:
    """What each rank of a mesh returned."""

    mesh: Any
    sizes: Mapping[str, int]
    by_rank: Sequence[Mapping[Key, Any]]

    def at(self, key: Key) -> list[Any]:
        return [values[key] for values in self.by_rank]


class _Reference:
    """What one rank returned, and how far from it other values may be."""

    def __init__(self, values: Mapping[Key, Any], tolerance: float | None) -> None:
        self.values, self.tolerance = values, tolerance
        # Why: what is zero but for rounding, such as the gradient of a bias before a norm, is
        # compared with its neighbours.
        self.largest: dict[Any, float] = {}
        for (step, path), value in values.items():
            if isinstance(value, torch.Tensor):
                group = step, path.partition(".")[0]
                self.largest[group] = max(self.largest.get(group, 0.0), largest_of(value))

    def limit(self, key: Key) -> float:
        """Return the difference that counts as rounding."""
        value = self.values[key]
        if not isinstance(value, torch.Tensor):
            return 0.0
        return tolerance_of(value.dtype) if self.tolerance is None else self.tolerance

    def apart(self, run: _Run, key: Key) -> float:
        """Return how far a value is from that of one rank; infinity for values that can't be."""
        expected, values = self.values[key], run.at(key)
        if not all(isinstance(value, torch.Tensor) for value in (expected, *values)):
            return 0.0 if all(value == expected for value in values) else math.inf
        step, path = key
        neighbours_scale = 1e-3 * self.largest.get((step, path.partition(".")[0]), 0.0)
        return max(distance(value, expected, neighbours_scale) for value in values)


def _differences(
    run: _Run, runs: Sequence[_Run], reference: _Reference
) -> list[Difference]:
    """Return where a mesh differs, in its first step that does, and what the values show."""
    for values in run.by_rank:
        if other := values.keys() ^ reference.values.keys():
            path = min(path for _, path in other)
            text = "is not returned by all ranks of every mesh: return the same entries"
            return [Difference(mesh=run.mesh, path=path, cause="form", text=text)]
    keys = [
        key for key in reference.values if reference.apart(run, key) > reference.limit(key)
    ]
    merged: dict[tuple[Any, ...], Difference] = {}
    for step, path in keys:
        if step != keys[0][0]:
            break
        finding = _finding((step, path), run, runs, reference)
        new = Difference(mesh=run.mesh, path=path, count=0, step=step, **finding._asdict())
        old = merged.setdefault(finding[:3], new)
        merged[finding[:3]] = dataclasses.replace(old, count=old.count + 1)
    # Why: what is small beside a difference of another cause is most likely a part of it.
    large = [new for new in merged.values() if new.cause != "rounding"]
    return large or list(merged.values())


def _finding(key: Key, run: _Run, runs: Sequence[_Run], reference: _Reference) -> Finding:
    values, whole, limit = run.at(key), reference.values[key], reference.limit(key)
    if not all(isinstance(value, torch.Tensor) for value in (whole, *values)):
        return find("value", (), "is not that of one rank")
    if other_shapes := {tuple(value.shape) for value in values} - {tuple(whole.shape)}:
        text = f"has the shape {min(other_shapes)}, and {tuple(whole.shape)} on one rank"
        return find("form", (), text)
    apart, varying = reference.apart(run, key), varying_axes(values, run.sizes)
    if varying:
        missing = partial([relation(values, run.sizes, whole)])
        right = [
            rank for rank, value in enumerate(values) if distance(value, whole) <= limit
        ]
        if right and (missing is None or missing.cause in ("not added", "not averaged")):
            text = f"is that of one rank on rank {right[0]} alone: the others don't get it"
            return find("one rank", varying, text)
        if missing is not None:
            return missing
    if apart <= 100 * limit:
        text = f"differs by {apart:.0e}, by rounding: compute in float64 to be sure"
        return find("rounding", (), text)
    lower = _lower_dtype(values, whole)
    if lower is not None and apart <= tolerance_of(lower):
        text = (
            f"differs by {apart:.0e}, because it's rounded to {lower}: reduce it in float32"
        )
        return find("rounding", (), text)
    if varying:
        return find("copies", varying, "is not the same on all ranks {}")
    if apart == math.inf:
        return find("value", (), "has infinities or NaN, in other places than on one rank")
    factor = factor_of(values[0], whole)
    if factor is None:
        return find("value", (), f"differs by {apart:.0e} of the largest element")
    every = [
        (other.sizes, factor_of(other.at(key)[0], whole)) for other in runs if other != run
    ]
    factors = [(sizes, other) for sizes, other in every if other is not None]
    # Why not a scale otherwise: any number is a multiple of another one.
    unnamed = find("value", (), f"is {factor:.2f} times that of one rank", factor)
    return scale([(run.sizes, factor), *factors], whole.dtype) or unnamed


def _lower_dtype(
    values: Sequence[torch.Tensor], reference: torch.Tensor
) -> torch.dtype | None:
    """Return the dtype of 16 bits that holds all digits of the values, but not of the reference."""
    is_exact = lambda value, dtype: torch.equal(value, value.to(dtype).to(value.dtype))  # noqa: E731
    for dtype in (torch.bfloat16, torch.float16):
        if all(is_exact(value, dtype) for value in values) and not is_exact(
            reference, dtype
        ):
            return dtype
    return None


def _explained(
    main: Callable[[Mesh], Any],
    ones: Mapping[str, int],
    run: _Run,
    differences: list[Difference],
    right_axes: Set[str],
) -> list[Difference]:
    """Return the differences, with the cause that a recording shows where they have none."""
    open_ones = [old for old in differences if old.cause in ("value", "copies", "one rank")]
    if not open_ones:
        return differences
    first, *others = open_ones
    try:
        (reference,) = simulate(lambda mesh: recorded(main, mesh), ones)
        logs = simulate(lambda mesh: recorded(main, mesh), run.sizes)
    # Why: a program that can't be recorded, e.g. with compiled code, differs all the same.
    except Exception as error:
        text = (
            f"{first.text} (no cause: recording it raised {type(error).__name__}: {error})"
        )
        new = dataclasses.replace(first, text=text)
        return [new if old is first else old for old in differences]
    finding = explain(reference, logs, run.sizes, right_axes)
    if finding is None or (first.cause == "one rank" and finding.cause == "value"):
        return differences
    text = f"{first.text}: {finding.text}"
    new = dataclasses.replace(first, cause=finding.cause, axes=finding.axes, text=text)
    return [new if old is first else old for old in differences if old not in others]
