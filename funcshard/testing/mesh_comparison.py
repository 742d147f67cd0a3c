"""``same_on_every_mesh``: whether a program returns the same numbers on every mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.options import check_number
from funcshard.comm import Mesh, simulate
from funcshard.plan import AXES, mesh_axes_of
from funcshard.testing.operations import axes_phrase, explain, recorded
from funcshard.testing.relations import (
    distance,
    factor_of,
    partial_cause,
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

# What is most likely wrong with a factor: by whether the axis is a data axis, and it's too large.
_SCALE_HINTS = {
    (True, True): "ranks' terms are added there, where their mean is due",
    (True, False): "they are divided by the number of ranks too often there, or a psum is missing",
    (
        False,
        True,
    ): "a psum adds a value there that's whole already, or its backward isn't its adjoint",
    (False, False): "a psum is missing there, in its forward or of its gradient",
}
_HINTS = {
    "norm": "is the norm of each rank's own part {}: add the squares with psum",
    "max": "is the max of each rank's own part {}: take the largest by pmax",
    "not added": "is one term on each rank {}: add them with psum",
    "not averaged": "is each rank's own {}: take the mean, e.g. by pmean",
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
    runs = []
    (has_steps, reference), *_ = _values(main, 1, ones)
    for mesh, shape in zip(meshes, shapes, strict=True):
        sizes = shape | {axis: 1 for axis in ones if axis not in shape}
        if math.prod(sizes.values()) > 1:
            runs.append(_Run(mesh, sizes, [values for _, values in _values(main, mesh, sizes)]))
    judge = _Judge(main, ones, reference, runs, has_steps, tolerance)
    differences = [difference for run in runs for difference in judge.differences(run)]
    rounding = 0.0
    if not differences:
        rounding = max((judge.apart(run, path) for run in runs for path in reference), default=0.0)
    return Comparison(tuple(run.mesh for run in runs), tuple(differences), rounding)


def _values(
    main: Callable[[Mesh], Any], mesh: Any, sizes: Mapping[str, int]
) -> list[tuple[bool, dict[str, Any]]]:
    """Return for each rank whether it returned steps, and the values by path."""

    def values_of_rank(mesh: Mesh) -> tuple[bool, dict[str, Any]]:
        result = main(mesh)
        return isinstance(result, list), values_by_path(result, mesh)

    try:
        return simulate(values_of_rank, sizes)
    except Exception as error:
        error.add_note(f"raised on the mesh {mesh} of same_on_every_mesh")
        raise


@dataclass(frozen=True, slots=True)
class _Run:
    """What each rank of a mesh returned, by path."""

    mesh: Any
    sizes: Mapping[str, int]
    by_rank: Sequence[Mapping[str, Any]]

    def at(self, path: str) -> list[Any]:
        return [values[path] for values in self.by_rank]


@dataclass(frozen=True, slots=True)
class _Judge:
    main: Callable[[Mesh], Any]
    ones: Mapping[str, int]
    reference: Mapping[str, Any]
    runs: Sequence[_Run]
    has_steps: bool
    tolerance: float | None

    def limit(self, path: str) -> float:
        """Return the difference that counts as rounding."""
        expected = self.reference[path]
        if not isinstance(expected, torch.Tensor):
            return 0.0
        return tolerance_of(expected.dtype) if self.tolerance is None else self.tolerance

    def apart(self, run: _Run, path: str) -> float:
        """Return how far a value is from that of one rank; infinity for values that can't be."""
        expected = self.reference[path]
        if not all(isinstance(value, torch.Tensor) for value in (expected, *run.at(path))):
            return 0.0 if all(value == expected for value in run.at(path)) else math.inf
        # Why a scale: what is zero but for rounding, such as the gradient of a bias before a norm,
        # is compared with its neighbours.
        scale = 1e-3 * max(_largest(self.reference[other]) for other in self.neighbours(path))
        return max(distance(value, expected, scale) for value in run.at(path))

    def neighbours(self, path: str) -> list[str]:
        length = 1 + self.has_steps
        first_names = path.split(".")[:length]
        return [other for other in self.reference if other.split(".")[:length] == first_names]

    def differences(self, run: _Run) -> list[Difference]:
        """Return where a mesh differs, in its first step that does, and why."""
        for values in run.by_rank:
            if other := sorted(values.keys() ^ self.reference.keys()):
                text = "is not returned by every mesh: return the same entries"
                return [Difference(mesh=run.mesh, path=other[0], cause="form", text=text)]
        paths = [path for path in self.reference if self.apart(run, path) > self.limit(path)]
        step = None
        if paths and self.has_steps:
            step = min(int(path.split(".")[0]) for path in paths)
            paths = [path for path in paths if path.split(".")[0] == str(step)]
        merged: dict[Any, Difference] = {}
        for path in paths:
            new = self.difference(run, path)
            new_path = path.partition(".")[2] if self.has_steps else path
            key = new.cause, new.axes, new.text
            old = merged.get(key, dataclasses.replace(new, path=new_path, step=step, count=0))
            merged[key] = dataclasses.replace(old, count=old.count + 1)
        # Why: what is small beside a difference of another cause is most likely a part of it.
        large = [new for new in merged.values() if new.cause != "rounding"]
        return self.explained(run, large or list(merged.values()))

    def explained(self, run: _Run, differences: list[Difference]) -> list[Difference]:
        """Return the differences, with the cause that a recording shows where they have none."""
        open_ones = [old for old in differences if old.cause in ("value", "copies")]
        if not open_ones:
            return differences
        first = open_ones[0]
        try:
            (reference,) = simulate(lambda mesh: recorded(self.main, mesh), self.ones)
            logs = simulate(lambda mesh: recorded(self.main, mesh), run.sizes)
        # Why: a program that can't be recorded, e.g. with compiled code, differs all the same.
        except Exception as error:
            text = f"{first.text} (no cause: recording it raised {type(error).__name__}: {error})"
            new = dataclasses.replace(first, text=text)
            return [new if old is first else old for old in differences]
        finding = explain(reference, logs, run.sizes)
        if finding is None:
            return differences
        text = f"{first.text}: {finding.text}"
        new = dataclasses.replace(first, cause=finding.cause, axes=finding.axes, text=text)
        return [new if old is first else old for old in differences if old not in open_ones[1:]]

    def difference(self, run: _Run, path: str) -> Difference:
        """Return what the values alone show."""
        values, whole, limit = run.at(path), self.reference[path], self.limit(path)

        def make(
            cause: str, text: str, axes: Iterable[str] = (), factor: float | None = None
        ) -> Difference:
            return Difference(
                mesh=run.mesh, path=path, cause=cause, axes=tuple(axes), factor=factor, text=text
            )

        if not all(isinstance(value, torch.Tensor) for value in (whole, *values)):
            return make("value", "is not that of one rank")
        if other_shapes := {tuple(value.shape) for value in values} - {tuple(whole.shape)}:
            text = f"has the shape {min(other_shapes)}, and {tuple(whole.shape)} on one rank"
            return make("form", text)
        if varying := varying_axes(values, run.sizes):
            partial = partial_cause([relation(values, run.sizes, whole)])
            right = [rank for rank, value in enumerate(values) if distance(value, whole) <= limit]
            if right and (partial is None or partial[0] in ("not added", "not averaged")):
                text = f"is that of one rank on rank {right[0]} alone: the others don't get it"
                return make("one rank", text, varying)
            if partial is not None:
                cause, axes = partial
                return make(cause, _HINTS[cause].replace("{}", axes_phrase(axes)), axes)
        apart = self.apart(run, path)
        lower = _lower_dtype(values, whole)
        if apart <= 100 * limit:
            text = f"differs by {apart:.0e}, by rounding: compute in float64 to be sure"
            return make("rounding", text)
        if lower is not None and apart <= tolerance_of(lower):
            text = f"differs by {apart:.0e}, because it's rounded to {lower}: reduce it in float32"
            return make("rounding", text)
        if varying:
            text = f"is not the same on all ranks {axes_phrase(varying)}"
            return make("copies", text, varying)
        if apart == math.inf:
            return make("value", "has infinities or NaN, in other places than on one rank")
        factor = factor_of(values[0], whole)
        # Why not a scale without exponents: any number is a multiple of another one.
        if factor is None:
            return make("value", f"differs by {apart:.0e} of the largest element")
        text = f"is {factor:.2f} times that of one rank"
        exponents = self.exponents(run, path, factor)
        if not exponents:
            return make("value", text, (), factor)
        axis, power = next(iter(exponents.items()))
        hint = _SCALE_HINTS[axis in AXES, power > 0]
        return make("scale", f"{text} {axes_phrase([*exponents])}: {hint}", exponents, factor)

    def exponents(self, run: _Run, path: str, factor: float) -> dict[str, int]:
        """Return by which powers of the sizes of axes a value is too large, on every mesh."""
        factors = [
            (other.sizes, factor_of(other.at(path)[0], self.reference[path])) for other in self.runs
        ]
        every = powers([(sizes, other) for sizes, other in factors if other is not None])
        exponents = every or powers([(run.sizes, factor)]) or {}
        return {axis: power for axis, power in exponents.items() if run.sizes[axis] > 1}


def _largest(value: Any) -> float:
    is_number = isinstance(value, torch.Tensor) and value.numel()
    return value.abs().max().item() if is_number else 0.0


def _lower_dtype(values: Sequence[torch.Tensor], reference: torch.Tensor) -> torch.dtype | None:
    """Return the dtype of 16 bits that holds all digits of the values, but not of the reference."""
    is_exact = lambda value, dtype: torch.equal(value, value.to(dtype).to(value.dtype))  # noqa: E731
    for dtype in (torch.bfloat16, torch.float16):
        if all(is_exact(value, dtype) for value in values) and not is_exact(reference, dtype):
            return dtype
    return None
