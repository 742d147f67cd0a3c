"""How the values that ranks have make up the value that one rank has, and what's wrong with them.

Ranks' values are a sequence in the order of ranks, beside the size of each mesh axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from funcshard.plan import AXES

Values = Sequence[torch.Tensor]
Sizes = Mapping[str, int]
Ways = Mapping[str, str]  # what values are along each axis, as ``relation`` returns them

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float16: 0.03,
    torch.bfloat16: 0.03,
}

# What a value is that ranks have before a collective: the cause if they use it as the whole.
_PARTIAL = {
    "norm": ("norm", "is the norm of each rank's own part {}: add the squares with psum"),
    "max": ("max", "is the max of each rank's own part {}: take the largest by pmax"),
    "sum": (
        "not added",
        "is one term on each rank {}, or uses it: a psum is missing before",
    ),
    "mean": ("not averaged", "is each rank's own {}: a mean is missing, e.g. by pmean"),
}

# What is most likely wrong with a factor: by whether the axis is a data axis, and it's too large.
_SCALE_HINTS = {
    (True, True): "ranks' terms are added there, where their mean is due",
    (
        True,
        False,
    ): "it's divided by the number of ranks too often there, or a psum is missing",
    (
        False,
        True,
    ): "a psum adds there what's whole already, or its backward isn't its adjoint",
    (False, False): "a psum is missing there, in its forward or of its gradient",
}


class Finding(NamedTuple):
    """A ``Difference.cause``, the axes at fault, what's wrong, and the factor of a scale."""

    cause: str
    axes: tuple[str, ...]
    text: str
    factor: float | None = None


def find(
    cause: str, axes: Iterable[str], text: str, factor: float | None = None
) -> Finding:
    """Return a finding whose text names the axes in place of ``{}``."""
    fault_axes = tuple(axes)
    phrase = "along " + " and ".join(map(repr, fault_axes)) if fault_axes else "everywhere"
    return Finding(cause, fault_axes, text.replace("{}", phrase), factor)


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the difference that counts as rounding, as part of the largest element."""
    return _TOLERANCES.get(dtype, 1e-4)


def distance(value: torch.Tensor, reference: torch.Tensor, scale: float = 0.0) -> float:
    """Return the largest difference as part of the largest element, or of ``scale``."""
    value, reference = _wide(value), _wide(reference)
    if value.shape != reference.shape:
        return math.inf
    if not torch.equal(value.isfinite(), reference.isfinite()):
        return math.inf
    # Why a least number: two tensors of zeros are 0 apart, and 0 / 0 is an error.
    return largest_of(value - reference) / max(largest_of(reference), scale, 1e-300)


def largest_of(value: torch.Tensor) -> float:
    """Return the largest absolute value of the finite elements; 0 if there are none."""
    finite = _wide(value)[value.isfinite()]
    if not finite.numel():
        return 0.0
    return finite.abs().max().item()


def _wide(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.complex128 if value.is_complex() else torch.float64)


def _same_rows(value: torch.Tensor, reference: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to rounding and the order of rows."""
    limit = tolerance_of(reference.dtype)
    if distance(value, reference) <= limit:
        return True
    if value.shape != reference.shape or not value.ndim or not value.numel():
        return False
    return distance(_sorted_rows(value), _sorted_rows(reference)) <= limit


def _sorted_rows(value: torch.Tensor) -> torch.Tensor:
    rows = _wide(value).reshape(len(value), -1)
    weights = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64, device="cpu").sin()
    return rows[(rows.real @ weights).argsort()]


def varying_axes(values: Values, sizes: Sizes) -> list[str]:
    """Return the axes along which ranks have different values."""
    varying: list[str] = []
    stride = 1
    for axis, size in reversed(list(sizes.items())):
        first_ranks = [rank - rank // stride % size * stride for rank in range(len(values))]
        pairs = [(values[rank], values[first]) for rank, first in enumerate(first_ranks)]
        if any(
            distance(value, first) > tolerance_of(first.dtype) for value, first in pairs
        ):
            varying.insert(0, axis)
        stride *= size
    return varying


def relation(values: Values, sizes: Sizes, reference: torch.Tensor) -> Ways | None:
    """Return how the values of ranks make up that of one rank, axis by axis.

    Returns:
        ``"copy"``, ``"cut"`` (joined along a dimension), ``"sum"``, ``"mean"``, ``"norm"`` or
        ``"max"`` for each axis of several ranks; ``None`` if none of these gives the reference.
    """
    combinations = _combinations(values, sizes, reference)
    return next(
        (ways for ways, whole in combinations if _same_rows(whole, reference)), None
    )


def _combinations(
    values: Values, sizes: Sizes, reference: torch.Tensor
) -> Iterator[tuple[dict[str, str], torch.Tensor]]:
    long_sizes = {axis: size for axis, size in sizes.items() if size > 1}
    if not long_sizes:
        yield {}, values[0]
        return
    axis, size = long_sizes.popitem()
    # Note: the last axis varies fastest, so ``size`` values in a row are on one line of it.
    choices = list(_joined(list(zip(*[iter(values)] * size, strict=True)), reference))
    if axis not in AXES:  # terms are more likely than parts, if both make up the whole
        choices.sort(key=lambda choice: {"copy": 0, "sum": 1}.get(choice[0], 2))
    for way, joined in choices:
        for outer_ways, whole in _combinations(joined, long_sizes, reference):
            yield outer_ways | {axis: way}, whole


def _joined(
    lines: Sequence[Values], reference: torch.Tensor
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Yield what the values on each line of ranks may be, and what they make up then."""
    first = lines[0][0]
    limit = tolerance_of(first.dtype)
    are_equal = all(distance(value, line[0]) <= limit for line in lines for value in line)
    if are_equal:
        yield "copy", [line[0] for line in lines]
    if first.ndim != reference.ndim:
        return
    shapes = {value.shape for line in lines for value in line}
    for dim in range(first.ndim):
        rests = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        numbers = [sum(value.shape[dim] for value in line) for line in lines]
        if len(rests) == 1 and max(numbers) <= reference.shape[dim]:
            yield "cut", [torch.cat(list(line), dim) for line in lines]
    if len(shapes) > 1 or first.dtype == torch.bool:
        return
    stacks = [torch.stack([_wide(value) for value in line]) for line in lines]
    # Why: equal terms are counts; other equal values are wholes that are too small.
    if not are_equal or first.numel() == 1:
        yield "sum", [stack.sum(0).to(first.dtype) for stack in stacks]
    if are_equal:
        return
    yield "mean", [stack.mean(0).to(first.dtype) for stack in stacks]
    if first.is_complex():
        return
    yield "norm", [stack.square().sum(0).sqrt().to(first.dtype) for stack in stacks]
    largest = [stack.amax(0).to(first.dtype) for stack in stacks]
    # Why: a few elements may all be largest on one rank by chance.
    is_one_rank = any(torch.equal(value, largest[0]) for value in lines[0])
    if first.numel() == 1 or not is_one_rank:
        yield "max", largest


def partial(all_ways: Iterable[Ways | None]) -> Finding | None:
    """Return the first collective that values need, if they are used as the whole."""
    pairs = [pair for ways in all_ways for pair in (ways or {}).items()]
    for partial_way, (cause, text) in _PARTIAL.items():
        if axes := {axis for axis, way in pairs if way == partial_way}:
            return find(cause, sorted(axes), text)
    return None


def factor_of(value: torch.Tensor, reference: torch.Tensor) -> float | None:
    """Return the number by which the reference has to be multiplied, if there is one."""
    limit = 10 * tolerance_of(reference.dtype)  # Why 10: the factor is rounded too.
    value, reference = _wide(value), _wide(reference)
    if value.shape != reference.shape or not value.isfinite().all() or not reference.any():
        return None
    factor = ((value * reference.conj()).sum() / reference.abs().square().sum()).real.item()
    return factor if factor and distance(value, factor * reference) <= limit else None


def scale_of(values: Values, sizes: Sizes, reference: torch.Tensor) -> Finding | None:
    """Return by which sizes of axes ranks' copies, parts or means are too large."""
    if not reference.is_floating_point():
        return None
    for ways, whole in _combinations(values, sizes, reference):
        if {*ways.values()} <= {"copy", "cut", "mean"} and (
            factor := factor_of(whole, reference)
        ):
            return scale([(sizes, factor)], reference.dtype)
    return None


def scale(factors: Sequence[tuple[Sizes, float]], dtype: torch.dtype) -> Finding | None:
    """Return by which powers of the sizes of axes a value is too large, on every mesh.

    Arguments:
        factors: sizes of mesh axes, and the factor on this mesh; first on that of the finding.
        dtype: dtype of the value, which bounds how precise the factors are.
    """
    axes = sorted(
        {axis for sizes, _ in factors for axis, size in sizes.items() if size > 1}
    )
    # Note: few powers first, and of model axes, whose collectives you write yourself.
    weights = [1.5 if axis in AXES else 1.0 for axis in axes]
    choices = sorted(
        itertools.product(range(-2, 3), repeat=len(axes)),
        key=lambda powers: sum(
            p * p * weight for p, weight in zip(powers, weights, strict=True)
        ),
    )
    # Why so small: any number is nearly a power of a few sizes.
    limit = min(1e-3, tolerance_of(dtype))
    for powers in choices:
        by_axis = dict(zip(axes, powers, strict=True))
        products = [
            math.prod(sizes[axis] ** by_axis[axis] for axis in axes) for sizes, _ in factors
        ]
        pairs = zip(products, factors, strict=True)
        if all(
            math.isclose(product, factor, rel_tol=limit) for product, (_, factor) in pairs
        ):
            sizes, factor = factors[0]
            fault_axes = [
                axis for axis, power in by_axis.items() if power and sizes[axis] > 1
            ]
            if not fault_axes:
                return None
            hint = _SCALE_HINTS[fault_axes[0] in AXES, by_axis[fault_axes[0]] > 0]
            text = f"is {factor:.2f} times that of one rank {{}}: {hint}"
            return find("scale", fault_axes, text, factor)
    return None
