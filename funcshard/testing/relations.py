"""How the values that ranks have make up the value that one rank has.

Ranks' values are a sequence in the order of ranks, beside the size of each mesh axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from funcshard.plan import AXES

Values = Sequence[torch.Tensor]
Sizes = Mapping[str, int]

_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float16: 0.03,
    torch.bfloat16: 0.03,
}

# What a value is that ranks have before a collective, and the cause if they use it as the whole.
PARTIAL = {"norm": "norm", "max": "max", "sum": "not added", "mean": "not averaged"}


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the difference that counts as rounding, as part of the largest element."""
    return _TOLERANCES.get(dtype, 1e-4)


def distance(value: torch.Tensor, reference: torch.Tensor, scale: float = 1e-300) -> float:
    """Return the largest difference as part of the largest element, or of ``scale``."""
    value, reference = _wide(value), _wide(reference)
    if value.shape != reference.shape:
        return torch.inf
    finite = reference.isfinite()
    if not torch.equal(value.isfinite(), finite):
        return torch.inf
    if not finite.any():
        return 0.0
    largest = max(reference[finite].abs().max().item(), scale)
    return ((value - reference)[finite].abs().max() / largest).item()


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
    mixed = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64, device="cpu").sin()
    return rows[(rows.real @ mixed).argsort()]


def varying_axes(values: Values, sizes: Sizes) -> list[str]:
    """Return the axes along which ranks have different values."""
    varying, stride = [], 1
    for axis, size in reversed(sizes.items()):
        first_ranks = [rank - rank // stride % size * stride for rank in range(len(values))]
        pairs = [(values[rank], values[first]) for rank, first in enumerate(first_ranks)]
        if any(distance(value, first) > tolerance_of(first.dtype) for value, first in pairs):
            varying.insert(0, axis)
        stride *= size
    return varying


def relation(values: Values, sizes: Sizes, reference: torch.Tensor) -> dict[str, str] | None:
    """Return how the values of ranks make up that of one rank, axis by axis.

    Returns:
        ``"copy"``, ``"cut"`` (joined along a dimension) or a key of ``PARTIAL`` for each axis of
        several ranks; ``None`` if none of these gives the reference.
    """
    ways = _combinations(values, sizes, reference)
    return next((by_axis for by_axis, whole in ways if _same_rows(whole, reference)), None)


def scale_of(values: Values, sizes: Sizes, reference: torch.Tensor) -> float | None:
    """Return the factor between ranks' copies or joined parts and one rank's, if there is one."""
    if reference.numel() < 2 or not reference.is_floating_point():
        return None
    for by_axis, whole in _combinations(values, sizes, reference):
        factor = factor_of(whole, reference) if {*by_axis.values()} <= {"copy", "cut"} else None
        if factor is not None:
            return factor
    return None


def _combinations(
    values: Values, sizes: Sizes, reference: torch.Tensor
) -> Iterator[tuple[dict[str, str], torch.Tensor]]:
    long_sizes = {axis: size for axis, size in sizes.items() if size > 1}
    if not long_sizes:
        yield {}, values[0]
        return
    axis, size = long_sizes.popitem()
    ways = list(_ways(list(zip(*[iter(values)] * size, strict=True)), reference))
    if axis not in AXES:  # terms are more likely than parts, if both make up the whole
        ways.sort(key=lambda way: {"copy": 0, "sum": 1}.get(way[0], 2))
    for way, joined in ways:
        for outer_ways, whole in _combinations(joined, long_sizes, reference):
            yield outer_ways | {axis: way}, whole


def _ways(
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
            yield "cut", [torch.cat(line, dim) for line in lines]
    if len(shapes) > 1 or first.dtype == torch.bool:
        return
    stacks = [torch.stack([_wide(value) for value in line]) for line in lines]
    # Why: equal terms are counts; other equal values are wholes that are too small.
    if not are_equal or first.numel() == 1:
        yield "sum", [stack.sum(0).to(first.dtype) for stack in stacks]
    if not are_equal:
        yield "mean", [stack.mean(0).to(first.dtype) for stack in stacks]
    if not are_equal and not first.is_complex():
        yield "norm", [stack.square().sum(0).sqrt().to(first.dtype) for stack in stacks]
        largest = [stack.amax(0).to(first.dtype) for stack in stacks]
        # Why: a few elements may all be largest on one rank by chance.
        is_one_rank = any(torch.equal(value, largest[0]) for value in lines[0])
        if first.numel() == 1 or not is_one_rank:
            yield "max", largest


def partial_cause(relations: Sequence[Mapping[str, str] | None]) -> tuple[str, list[str]] | None:
    """Return the cause and the axes if values are used before the collective that they need."""
    ways = [way for by_axis in relations for way in (by_axis or {}).items()]
    for name, cause in PARTIAL.items():
        axes = {axis for axis, axis_way in ways if axis_way == name}
        if axes:
            return cause, sorted(axes)
    return None


def factor_of(value: torch.Tensor, reference: torch.Tensor) -> float | None:
    """Return the number by which the reference has to be multiplied, if there is one."""
    limit = 10 * tolerance_of(reference.dtype)  # Why 10: the factor is rounded too.
    value, reference = _wide(value), _wide(reference)
    if value.shape != reference.shape or not value.isfinite().all() or not reference.any():
        return None
    factor = ((value * reference.conj()).sum() / reference.abs().square().sum()).real.item()
    return factor if factor and distance(value, factor * reference) <= limit else None


def powers(factors: Sequence[tuple[Sizes, float]]) -> dict[str, int] | None:
    """Return the power of each axis's size whose product is the factor, on every mesh.

    Arguments:
        factors: sizes of mesh axes, and the factor on this mesh.
    """
    axes = sorted({axis for sizes, _ in factors for axis, size in sizes.items() if size > 1})
    # Note: few powers first, and of model axes, whose collectives you write yourself.
    weights = [1.5 if axis in AXES else 1.0 for axis in axes]
    choices = sorted(
        itertools.product(range(-2, 3), repeat=len(axes)),
        key=lambda choice: sum(p * p * weight for p, weight in zip(choice, weights, strict=True)),
    )
    for choice in choices:
        exponents = dict(zip(axes, choice, strict=True))
        products = [
            math.prod(sizes[axis] ** exponents[axis] for axis in axes) for sizes, _ in factors
        ]
        if all(
            math.isclose(a, b, rel_tol=1e-3) for a, (_, b) in zip(products, factors, strict=True)
        ):
            return {axis: power for axis, power in exponents.items() if power}
    return None
