"""Parameter groups on flat shards: the group of each leaf, and a group's ranges of a shard.

A slice of such a range is a view: an optimizer that updates it in place updates the shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard.plan import BufferPlan, Plan, match, trainable_buffers

# Why groups are ranges and not flat buffers of their own: every further flat buffer of a unit costs
# an all-gather and a reduce-scatter of its own. Ranges cost no communication at all.


class GroupRange(NamedTuple):
    """A contiguous range of a shard whose elements all belong to one group.

    Attributes:
        group: number of the group.
        start: index of the first element in the shard.
        stop: index after the last element.
    """

    group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ParamGroupLayout:
    """The ranges that each group occupies in the shards of one rank.

    Attributes:
        group_of: number of each leaf's group, by path; leaves of no group are missing.
        count: number of groups.
        shard_rank: this rank's index along the shard axis.
    """

    group_of: Mapping[str, int]
    count: int
    shard_rank: int

    def ranges(self, buffer: BufferPlan) -> tuple[GroupRange, ...]:
        """Return the ranges of this rank's shard of ``buffer``, in order."""
        group_ranges: list[GroupRange] = []
        for leaf in buffer.leaves:
            group = self.group_of.get(leaf.path)
            begin, end, in_shard = buffer.part(leaf, self.shard_rank)
            start = max(
                in_shard.start, 0
            )  # negative in a shard that holds nothing but padding
            stop = start + end - begin
            if leaf is buffer.leaves[-1]:
                # Note: the padding belongs to the group of the last leaf.
                stop = buffer.shard_numel
            if group is None or start >= stop:
                continue
            if group_ranges and group_ranges[-1][::2] == (group, start):
                start = group_ranges.pop().start  # the leaf before is of this group too
            group_ranges.append(GroupRange(group, start, stop))
        return tuple(group_ranges)

    def numel(self, buffer: BufferPlan) -> int:
        """Return the number of elements of these ranges."""
        return sum(group_range.numel for group_range in self.ranges(buffer))

    def pick(self, flat: torch.Tensor, buffer: BufferPlan) -> torch.Tensor:
        """Return the elements of a shard that belong to a group; ``spread`` is the inverse."""
        picked_parts = [flat[start:stop] for _, start, stop in self.ranges(buffer)]
        if sum(part.numel() for part in picked_parts) == flat.numel():
            return flat
        return torch.cat([flat[:0], *picked_parts])

    def spread(self, picked: torch.Tensor, buffer: BufferPlan) -> torch.Tensor:
        """Return a flat tensor as long as the shard, with zeros outside the ranges."""
        if picked.numel() == buffer.shard_numel:
            return picked
        flat = picked.new_zeros(buffer.shard_numel)
        self.put(picked, flat, buffer)
        return flat

    def put(self, picked: torch.Tensor, flat: torch.Tensor, buffer: BufferPlan) -> None:
        """Write what ``pick`` returns into a shard."""
        group_ranges = self.ranges(buffer)
        picked_parts = picked.split([group_range.numel for group_range in group_ranges])
        for (_, start, stop), part in zip(group_ranges, picked_parts, strict=True):
            flat[start:stop] = part


def group_leaves(
    plan: Plan, groups: Sequence[Mapping[str, Any]], left_out: Iterable[str] = ()
) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Return the number of each trainable leaf's group by path, and the options of each group.

    Group 0 holds the leaves that no group matches, and has no options.

    Arguments:
        plan: the plan.
        groups: ``{"paths": [paths or globs of nodes], option: value, ...}`` for each group.
        left_out: paths of leaves of no group, not even group 0.
    """
    trainable_paths = {
        leaf.path for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves
    }
    group_of = dict.fromkeys(sorted(trainable_paths.difference(left_out)), 0)
    group_options: list[dict[str, Any]] = [{}]
    for group_index, group in enumerate(check_groups(groups), start=1):
        for path in leaves_under(plan, group["paths"], "group path"):
            if path not in group_of:
                continue  # the leaf is frozen, or another optimizer updates it
            # Group 0 may give leaves away, others may not.
            if group_of[path]:
                raise ValueError(
                    f"groups overlap: leaf {path!r} is in group {group_of[path]} and in group "
                    f"{group_index}; a leaf can have the options of one group only: take it out of "
                    "one of the two"
                )
            group_of[path] = group_index
        group_options.append({key: value for key, value in group.items() if key != "paths"})
    return group_of, group_options


def check_groups(groups: Any) -> Sequence[Any]:
    """Return parameter groups; raise ``TypeError`` unless they are a list of groups."""
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, Mapping) and "paths" in group for group in groups
    ):
        raise TypeError(
            "groups must be a list of dictionaries, each with the paths or globs of its leaves, "
            f'such as [{{"paths": ["**.bias"], "weight_decay": 0.0}}]; found {groups!r:.200}'
        )
    return groups


def leaves_under(plan: Plan, globs: Iterable[str], kind: str) -> list[str]:
    """Return the paths of the leaves under the nodes that ``globs`` match, in tree order.

    ``kind`` names the globs in errors. A tied leaf is there if any of its paths is.
    """
    leaf_uses = [leaf.names for leaf in sorted(plan.leaves, key=lambda leaf: leaf.index)]
    nodes = {*match(globs, leaf_uses, kind)}
    return [
        uses[0]
        for uses in leaf_uses
        if any(not nodes.isdisjoint(tree.upwards(path)) for path in uses)
    ]
