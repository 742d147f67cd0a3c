"""Groups of leaves with options of their own, and where each group's elements lie in a rank's flat shards.

A flat shard holds leaves one after another, so the leaves of one group are a few contiguous runs of it. A run is a view:
what updates it in place updates the shard, and nothing is gathered or copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard.plan import BufferPlan, Plan, UnitPlan
from funcshard.planner import match

__all__ = ["Layout", "Run", "group_leaves", "leaves_under", "trainable"]


@dataclass(frozen=True, slots=True)
class Run:
    """Elements ``start`` to ``stop`` of a shard, all of one group.

    Attributes:
        group: number of the group.
        start: first element.
        stop: one past the last.
    """

    group: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Where groups of leaves lie in the shards of one rank; leaves that are in no group are left out.

    Attributes:
        group_of: path of a leaf -> number of its group.
        count: number of groups.
        position: this rank's position on the shard axis.
    """

    group_of: Mapping[str, int]
    count: int
    position: int

    def runs(self, buffer: BufferPlan) -> tuple[Run, ...]:
        """The runs of this rank's shard of ``buffer``, in order; padding belongs to the last leaf."""
        begin = self.position * buffer.shard_numel if buffer.shards > 1 else 0
        end = begin + buffer.shard_numel
        found: list[Run] = []
        for leaf in buffer.leaves:
            group = self.group_of.get(leaf.path)
            stop = buffer.padded_numel if leaf is buffer.leaves[-1] else leaf.offset + leaf.numel
            low, high = max(begin, leaf.offset) - begin, min(end, stop) - begin
            if group is None or low >= high:
                continue
            if found and found[-1].group == group and found[-1].stop == low:
                found[-1] = Run(group, found[-1].start, high)
            else:
                found.append(Run(group, low, high))
        return tuple(found)

    def pick(self, flat: torch.Tensor, buffer: BufferPlan) -> torch.Tensor:
        """Return the elements of a shard that are in some group, one run after another; ``spread`` is the inverse."""
        parts = [flat[run.start : run.stop] for run in self.runs(buffer)]
        if sum(part.numel() for part in parts) == flat.numel():
            return flat
        return torch.cat([flat[:0], *parts])

    def spread(self, picked: torch.Tensor, buffer: BufferPlan) -> torch.Tensor:
        """Return a flat tensor like the shard, with zeros where no group is."""
        if picked.numel() == buffer.shard_numel:
            return picked
        flat = picked.new_zeros(buffer.shard_numel)
        done = 0
        for run in self.runs(buffer):
            flat[run.start : run.stop] = picked[done : done + run.stop - run.start]
            done += run.stop - run.start
        return flat


def group_leaves(
    plan: Plan, groups: Sequence[Mapping[str, Any]], left_out: Iterable[str] = ()
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return the group of each trainable leaf by path, and each group's options; group 0 is of those that no glob matches.

    Arguments:
        plan: the plan.
        groups: ``{"paths": [paths or globs of nodes], option: value, ...}`` each.
        left_out: paths of leaves that are in no group, not even group 0.
    """
    paths = {leaf.path for _, buffer in trainable(plan) for leaf in buffer.leaves} - set(left_out)
    group_of = dict.fromkeys(sorted(paths), 0)
    options: list[dict[str, Any]] = [{}]
    for number, group in enumerate(groups, start=1):
        if not isinstance(group, Mapping) or "paths" not in group:
            raise ValueError(
                f'a group must be a dictionary with the paths or globs of its leaves, such as {{"paths": ["**.bias"], '
                f'"weight_decay": 0.0}}; found {group!r}'
            )
        for path in leaves_under(plan, group["paths"], "group path"):
            if path not in group_of:
                continue  # frozen, or somebody else's
            if group_of[path]:
                raise ValueError(
                    f"groups overlap: leaf {path!r} is in group {group_of[path]} and in group {number}; each leaf can have "
                    f"one group's options: take it out of one of the two"
                )
            group_of[path] = number
        options.append({key: value for key, value in group.items() if key != "paths"})
    return group_of, options


def leaves_under(plan: Plan, globs: Iterable[str], what: str) -> list[str]:
    """Return the paths of the leaves that lie under nodes matched by ``globs``, in the order of the tree."""
    leaves = sorted(plan.leaves, key=lambda leaf: leaf.index)
    uses = [(leaf.path, *leaf.aliases) for leaf in leaves]
    if isinstance(globs, str):
        match(globs, uses, what)  # which says what to write instead
    chosen = {node for glob in globs for node in match([glob], uses, what)}  # a leaf may be under several of one group

    def ancestors(path: str) -> Iterable[str]:
        parts = path.split(".")
        return (".".join(parts[:n]) for n in range(1, len(parts) + 1))

    return [leaf.path for leaf in leaves if any(node in chosen for p in (leaf.path, *leaf.aliases) for node in ancestors(p))]


def trainable(plan: Plan) -> list[tuple[UnitPlan, BufferPlan]]:
    """Every flat buffer that has gradients, with its unit, in plan order."""
    return [(unit, buffer) for unit in plan.unit_list for buffer in unit.buffers if buffer.trainable]
