"""How the values that ranks have make up the value that one rank has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from funcshard.plan import AXES

# The largest difference that rounding explains, as part of the largest element.
_TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float16: 0.03,
    torch.bfloat16: 0.03,
}


class RankValues(NamedTuple):
    """A value as ranks have it.

    Attributes:
        values: a tensor for each position along ``axes``, the last axis innermost.
        axes: name and size of the mesh axes along which ranks might differ.
    """

    values: tuple[torch.Tensor, ...]
    axes: tuple[tuple[str, int], ...]


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the difference that counts as rounding, as part of the largest element."""
    return _TOLERANCES.get(dtype, 1e-4)


def distance(value: torch.Tensor, reference: torch.Tensor, scale: float = 0.0) -> float:
    """Return the largest difference as part of the largest element, or of ``scale``."""
    if value.shape != reference.shape:
        return torch.inf
    if not value.numel():
        return 0.0
    value, reference = _wide(value), _wide(reference)
    same_places = torch.equal(value.isfinite(), reference.isfinite())
    finite = reference.isfinite()
    if not same_places or not finite.any():
        return 0.0 if same_places else torch.inf
    largest = max(reference[finite].abs().max().item(), scale, 1e-300)
    return ((value - reference)[finite].abs().max() / largest).item()


def same_rows(value: torch.Tensor, reference: torch.Tensor) -> bool:
    """Return whether two tensors are equal up to rounding and the order of rows."""
    limit = tolerance_of(reference.dtype)
    if distance(value, reference) <= limit:
        return True
    if value.shape != reference.shape or not value.ndim or not value.numel():
        return False
    return distance(_sorted_rows(value), _sorted_rows(reference)) <= limit


def contains_rows(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Return whether every row of the parts is a row of the whole, which has at least as many."""
    if not whole.ndim or any(part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    if len(whole) < 2 or any(not part.numel() for part in parts):
        return False
    wide = _wide(whole).reshape(len(whole), -1)
    scale = tolerance_of(whole.dtype) * max(wide.abs().max().item(), 1e-300)
    rows = [row for part in parts for row in _wide(part).reshape(len(part), -1)]
    return all(((wide - row).abs().amax(1) <= scale).any() for row in rows)


def _sorted_rows(value: torch.Tensor) -> torch.Tensor:
    rows = _wide(value).reshape(len(value), -1)
    mixed = torch.linspace(1, 2, rows.shape[1], dtype=torch.float64, device="cpu").sin()
    return rows[(rows.real @ mixed).argsort()]


def _wide(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def along(axis: str, rank_values: RankValues) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the values on each line of ranks along an axis."""
    sizes = dict(rank_values.axes)
    grid = list(itertools.product(*(range(size) for size in sizes.values())))
    by_position = dict(zip(grid, rank_values.values, strict=True))
    number = list(sizes).index(axis)
    for position in grid:
        if position[number] == 0:
            others = [(*position[:number], i, *position[number + 1 :]) for i in range(sizes[axis])]
            yield tuple(by_position[other] for other in others)


def varies(axis: str, rank_values: RankValues) -> bool:
    """Return whether ranks along an axis have different values."""
    return any(
        distance(other, line[0]) > tolerance_of(other.dtype)
        for line in along(axis, rank_values)
        for other in line[1:]
    )


def varying_axes(rank_values: RankValues) -> list[str]:
    """Return the axes along which ranks have different values."""
    return [axis for axis, size in rank_values.axes if size > 1 and varies(axis, rank_values)]


def relation(rank_values: RankValues, reference: torch.Tensor) -> dict[str, str] | None:
    """Return how the values of ranks make up that of one rank, axis by axis.

    Returns:
        ``"copy"``, ``"cut"`` (joined along a dimension), ``"mean"``, ``"sum"``, ``"norm"`` or
        ``"max"`` for each axis of several ranks; ``None`` if none of these gives the reference.
    """
    if not rank_values.axes:
        same = same_rows(rank_values.values[0], reference)
        return {} if same else None
    *outer, (axis, size) = rank_values.axes
    lines = list(zip(*[iter(rank_values.values)] * size, strict=True))
    ways = list(_ways(lines, reference)) if size > 1 else [("", [v for (v,) in lines])]
    if axis not in AXES:  # terms are more likely than parts, if both make up the whole
        ways.sort(key=lambda way: {"copy": 0, "sum": 1}.get(way[0], 2))
    for how, joined in ways:
        rest = relation(RankValues(tuple(joined), tuple(outer)), reference)
        if rest is not None:
            return rest | ({axis: how} if how else {})
    return None


def scaled_relation(rank_values: RankValues, reference: torch.Tensor) -> float | None:
    """Return the factor between ranks' copies or joined parts and one rank's, if there is one."""
    if not rank_values.axes:
        if reference.numel() < 2 or not reference.is_floating_point():
            return None
        return factor_of(rank_values.values[0], reference, tolerance_of(reference.dtype))
    *outer, (_, size) = rank_values.axes
    lines = list(zip(*[iter(rank_values.values)] * size, strict=True))
    for how, joined in _ways(lines, reference) if size > 1 else [("", [v for (v,) in lines])]:
        if how in ("", "copy", "cut"):
            found = scaled_relation(RankValues(tuple(joined), tuple(outer)), reference)
            if found is not None:
                return found
    return None


def _ways(lines: Sequence[tuple[torch.Tensor, ...]], reference: torch.Tensor) -> Iterator[Any]:
    first = lines[0][0]
    equal = all(
        distance(value, line[0]) <= tolerance_of(value.dtype) for line in lines for value in line
    )
    if equal:
        yield "copy", [line[0] for line in lines]
    if first.ndim != reference.ndim:
        return
    for dim in range(first.ndim):
        if all(sum(value.shape[dim] for value in line) <= reference.shape[dim] for line in lines):
            rest = {
                (*value.shape[:dim], *value.shape[dim + 1 :]) for line in lines for value in line
            }
            if len(rest) == 1:
                yield "cut", [torch.cat(line, dim) for line in lines]
    if len({value.shape for line in lines for value in line}) > 1 or first.dtype == torch.bool:
        return
    stacks = [torch.stack([_wide(value) for value in line]) for line in lines]
    if not equal:
        yield "mean", [stack.mean(0).to(first.dtype) for stack in stacks]
    # Why: equal terms are counts; other equal values are wholes that are too small.
    if not equal or first.numel() == 1:
        yield "sum", [stack.sum(0).to(first.dtype) for stack in stacks]
    if not equal and not first.is_complex():
        yield "norm", [stack.square().sum(0).sqrt().to(first.dtype) for stack in stacks]
        yield "max", [stack.amax(0).to(first.dtype) for stack in stacks]


def mean_of(rank_values: RankValues) -> torch.Tensor:
    """Return the mean of all ranks' values."""
    return torch.stack([_wide(value) for value in rank_values.values]).mean(0)


def factor_of(value: torch.Tensor, reference: torch.Tensor, limit: float) -> float | None:
    """Return the number by which the reference has to be multiplied, if there is one."""
    value, reference = _wide(value), _wide(reference)
    if value.shape != reference.shape or not value.isfinite().all() or not reference.any():
        return None
    factor = ((value * reference.conj()).sum() / reference.abs().square().sum()).real.item()
    # Why 10: the factor is rounded too.
    return factor if factor and distance(value, factor * reference) <= 10 * limit else None


def powers(factors: Sequence[tuple[Mapping[str, int], float]]) -> dict[str, int] | None:
    """Return the power of each axis's size whose product is the factor, on every mesh.

    Arguments:
        factors: sizes of mesh axes, and the factor on this mesh.
    """
    axes = sorted({axis for sizes, _ in factors for axis, size in sizes.items() if size > 1})
    # Note: few powers first, and of model axes, whose collectives you write yourself.
    weights = [1.5 if axis in AXES else 1.0 for axis in axes]
    choices = itertools.product(range(-2, 3), repeat=len(axes))
    weight = lambda choice: sum(p * p * w for p, w in zip(choice, weights, strict=True))  # noqa: E731
    for choice in sorted(choices, key=weight):
        expected = [_product(dict(zip(axes, choice, strict=True)), sizes) for sizes, _ in factors]
        pairs = zip(expected, factors, strict=True)
        if all(abs(number - factor) <= 1e-3 * number for number, (_, factor) in pairs):
            return {axis: power for axis, power in zip(axes, choice, strict=True) if power}
    return None


def _product(powers: Mapping[str, int], sizes: Mapping[str, int]) -> float:
    product = 1.0
    for axis, power in powers.items():
        product *= sizes.get(axis, 1) ** power
    return product
