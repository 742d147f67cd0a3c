"""``same_on_every_mesh``: whether a program returns the same numbers on every mesh."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils.options import check_number
from funcshard.comm import Mesh, simulate
from funcshard.plan import AXES, mesh_axes_of
from funcshard.testing.operations import axes_phrase, explain, recorded
from funcshard.testing.relations import (
    RankValues,
    distance,
    factor_of,
    mean_of,
    powers,
    relation,
    tolerance_of,
    varying_axes,
)
from funcshard.testing.returned_values import values_by_path

_MESHES: tuple[int | Mapping[str, int], ...] = (
    1,
    2,
    4,
    {"replicate": 2, "shard": 2},
    {"shard": 2, "tensor": 2},
)

# What is most likely wrong with a factor: by whether the axis is a data axis, and its power.
_HINTS = {
    (True, 1): "ranks' terms are added there, where their mean is due",
    (True, -1): "they are divided by the number of ranks too often there, or a psum is missing",
    (False, 1): "a psum adds a value there that's whole already, or its backward isn't its adjoint",
    (False, -1): "a psum is missing there, in its forward or of its gradient",
}


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
        check_number("tolerance", tolerance, least=0, none="for that of the dtype", remedy="pass 0")
    shapes = [mesh_axes_of(mesh, "meshes") for mesh in meshes]
    ones = {axis: 1 for shape in shapes for axis in shape}
    runs: list[_Run] = []
    reference, has_steps = _values(main, 1, ones)
    for mesh, shape in zip(meshes, shapes, strict=True):
        axes = ones | shape if len(shape) == len(ones) else {**shape, **_missing(ones, shape)}
        if math.prod(axes.values()) > 1:
            runs.append(_Run(mesh, axes, _values(main, mesh, axes)[0]))
    judge = _Judge(main, ones, reference, tuple(runs), has_steps, tolerance)
    differences = [difference for run in runs for difference in judge.differences(run)]
    rounding = max((judge.rounding(run) for run in runs), default=0.0) if not differences else 0.0
    return Comparison(tuple(run.mesh for run in runs), tuple(differences), rounding)


def _missing(ones: Mapping[str, int], shape: Mapping[str, int]) -> dict[str, int]:
    return {axis: 1 for axis in ones if axis not in shape}


def _values(main: Callable[[Mesh], Any], mesh: Any, axes: Mapping[str, int]) -> tuple[Any, bool]:
    """Return the values by path, and whether they are those of steps."""
    try:
        results = simulate(main, axes)
        return values_by_path(results, axes), isinstance(results[0], list)
    except Exception as error:
        error.add_note(f"raised on the mesh {mesh} of same_on_every_mesh")
        raise


@dataclass(frozen=True, slots=True)
class _Run:
    mesh: Any
    axes: Mapping[str, int]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Judge:
    main: Callable[[Mesh], Any]
    ones: Mapping[str, int]
    reference: Mapping[str, Any]
    runs: tuple[_Run, ...]
    has_steps: bool
    tolerance: float | None

    def limit(self, path: str) -> float:
        if self.tolerance is not None:
            return self.tolerance
        return tolerance_of(self.reference[path].values[0].dtype)

    def apart(self, run: _Run, path: str) -> float:
        """Return how far a value is from that of one rank; infinity for values that can't be."""
        value, expected = run.values.get(path), self.reference[path]
        if not isinstance(expected, RankValues) or not isinstance(value, RankValues):
            items = value if isinstance(value, list) else [value]
            return 0.0 if all([item] == expected for item in items) else math.inf
        # Why a scale: what is zero but for rounding, such as the gradient of a bias before a norm,
        # is compared with its neighbours.
        scale = 1e-3 * self.largest(path)
        return max(distance(item, expected.values[0], scale) for item in value.values)

    def largest(self, path: str) -> float:
        group = self.group(path)
        tensors = [
            value.values[0].detach().abs()
            for other, value in self.reference.items()
            if isinstance(value, RankValues) and self.group(other) == group
        ]
        return max((tensor.max().item() for tensor in tensors if tensor.numel()), default=0.0)

    def group(self, path: str) -> list[str]:
        return path.split(".")[: 2 if self.has_steps else 1]

    def differs(self, run: _Run, path: str) -> bool:
        numbers = isinstance(self.reference[path], RankValues)
        return self.apart(run, path) > (self.limit(path) if numbers else 0)

    def rounding(self, run: _Run) -> float:
        return max((self.apart(run, path) for path in self.reference), default=0.0)

    def differences(self, run: _Run) -> list[Difference]:
        if other := sorted(run.values.keys() ^ self.reference.keys()):
            text = "is not returned by every mesh: return the same entries"
            return [Difference(mesh=run.mesh, path=other[0], cause="form", text=text)]
        paths = [path for path in self.reference if self.differs(run, path)]
        step = None
        if paths and self.has_steps:
            step = min(int(path.split(".")[0]) for path in paths)
            paths = [path for path in paths if path.split(".")[0] == str(step)]
        by_kind: dict[Any, list[Difference]] = collections.defaultdict(list)
        for path in paths:
            found = dataclasses.replace(self.difference(run, path), step=step)
            if step is not None:
                found = dataclasses.replace(found, path=path.partition(".")[2])
            by_kind[found.cause, found.axes, found.text].append(found)
        merged = [dataclasses.replace(same[0], count=len(same)) for same in by_kind.values()]
        # Why: what is small beside a difference of another cause is most likely a part of it.
        merged = [found for found in merged if found.cause != "rounding"] or merged
        if any(found.cause in ("value", "copies", "not added") for found in merged):
            merged = self.explained(run, merged)
        return merged

    def explained(self, run: _Run, differences: list[Difference]) -> list[Difference]:
        """Return the differences with the cause that a recording shows."""
        try:
            (reference,) = simulate(lambda mesh: recorded(self.main, mesh), self.ones)
            logs = simulate(lambda mesh: recorded(self.main, mesh), run.axes)
        # Why: a program that can't be recorded, e.g. with compiled code, differs all the same.
        except Exception:
            return differences
        finding = explain(reference, logs, run.axes)
        if finding is None:
            return differences
        result, is_told = [], False
        for old in differences:
            if old.cause in ("value", "copies") or old.cause == finding.cause == "not added":
                if not is_told:
                    text = f"{old.text}: {finding.text}"
                    new = dataclasses.replace(
                        old, cause=finding.cause, axes=finding.axes, text=text
                    )
                    result.append(new)
                is_told = True
            else:
                result.append(old)
        return result

    def difference(self, run: _Run, path: str) -> Difference:
        make = lambda cause, text, axes=(), factor=None: Difference(  # noqa: E731
            mesh=run.mesh, path=path, cause=cause, axes=tuple(axes), factor=factor, text=text
        )
        value, expected = run.values[path], self.reference[path]
        if not isinstance(value, RankValues) or not isinstance(expected, RankValues):
            return make("value", "is not that of one rank")
        whole, limit = expected.values[0], self.limit(path)
        shapes = {tuple(item.shape) for item in value.values}
        if shapes != {tuple(whole.shape)}:
            text = f"has the shape {min(shapes)}, and {tuple(whole.shape)} on one rank"
            return make("form", text)
        varying = varying_axes(value)
        how = relation(value, whole) or {}
        for name, hint in (
            ("norm", "add the squares with psum"),
            ("max", "take the largest by pmax"),
        ):
            if axes := [axis for axis, other in how.items() if other == name]:
                text = f"is the {name} of each rank's own part {axes_phrase(axes)}: {hint}"
                return make(name, text, axes)
        right = [i for i, item in enumerate(value.values) if distance(item, whole) <= limit]
        if right and varying:
            text = f"is that of one rank on rank {right[0]} alone: the others don't get it"
            return make("one rank", text, varying)
        factor = factor_of(mean_of(value), whole, limit)
        if factor is not None and (found := self.scaled(run, path, factor, varying, make)):
            return found
        apart = self.apart(run, path)
        if apart <= 100 * limit:
            text = f"differs by {apart:.0e}, by rounding: compute in float64 to be sure"
            return make("rounding", text)
        if varying:
            text = f"is not the same on all ranks {axes_phrase(varying)}"
            return make("copies", text, varying)
        if apart == math.inf:
            return make("value", "has infinities or NaN, in other places than on one rank")
        return make("value", f"differs by {apart:.0e} of the largest element")

    def scaled(self, run: _Run, path: str, factor: float, varying: list[str], make: Any) -> Any:
        factors = []
        for other in self.runs:
            value = other.values.get(path)
            if isinstance(value, RankValues):
                ratio = factor_of(mean_of(value), self.reference[path].values[0], self.limit(path))
                factors += [(other.axes, ratio)] if ratio is not None else []
        exponents = powers(factors) or powers([(run.axes, factor)]) or {}
        exponents = {axis: power for axis, power in exponents.items() if run.axes[axis] > 1}
        if varying and not math.isclose(factor, self.product(run, exponents), rel_tol=1e-3):
            return None
        if varying:
            added = [axis for axis in varying if exponents.get(axis, 0) < 0]
            if added:
                text = f"is one term on each rank {axes_phrase(added)}: add them with psum"
                return make("not added", text, added, factor)
            text = f"is each rank's own {axes_phrase(varying)}: take the mean, e.g. by pmean"
            return make("not averaged", text, varying, factor)
        text = f"is {factor:.2f} times that of one rank"
        if exponents:
            axis, power = next(iter(exponents.items()))
            hint = _HINTS[axis in AXES, 1 if power > 0 else -1]
            return make(
                "scale", f"{text} {axes_phrase(list(exponents))}: {hint}", exponents, factor
            )
        # Why not a scale: any number is a multiple of another one.
        return make("value", text, (), factor)

    @staticmethod
    def product(run: _Run, exponents: Mapping[str, int]) -> float:
        return math.prod(run.axes[axis] ** power for axis, power in exponents.items())
