"""The units that the user names: paths, globs and groups of them, and options of single units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils import tree
from funcshard.plan.leaves import found_by, nodes_of, policy_hint, some
from funcshard.plan.wrap import Units

# A path or glob, or a group of them; a mapping gives each one options.
UnitNames = Iterable[str | Sequence[str]] | Mapping[str | tuple[str, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Choice:
    """The units that the user chose.

    Attributes:
        paths: the paths of each unit by its name, in the order of the plan. A group has several.
        overrides: the options of make_plan that each unit overrides, by its name.
    """

    paths: dict[str, tuple[str, ...]]
    overrides: dict[str, Any]


def read_units(units: UnitNames, uses: Sequence[tuple[str, ...]]) -> Choice:
    """Return the units that ``units`` names; the docstring of ``make_plan`` describes the forms.

    Arguments:
        units: the argument of ``make_plan``.
        uses: the paths of each leaf of the tree.

    Raises:
        TypeError: ``units`` is not made of paths, globs and groups.
        ValueError: a path or glob matches no node, or a node is named twice; a group is empty, or
            one of its paths lies inside another.
    """
    if isinstance(units, str):
        raise TypeError(f"units must be a list of paths or globs; found the string {units!r}: write [{units!r}]")
    if not isinstance(units, Iterable):
        raise TypeError(f"units must be a list of paths or globs; found {units!r}{policy_hint(units)}")
    nodes = dict.fromkeys(nodes_of(uses))
    given = list(units)
    # Why written: in a mapping, a path with options of its own may stand beside a glob.
    written = {each for each in given if isinstance(each, str) and "*" not in each and isinstance(units, Mapping)}
    paths: dict[str, tuple[str, ...]] = {}
    named_by: dict[str, Any] = {}
    names: dict[Any, list[str]] = {}  # a path, glob or group as given -> the units that it names
    for each in given:
        if isinstance(each, Units):
            raise TypeError(
                f"units hold the result of a policy, {list(each)[:4]}, as one of them; pass it as units, or add to it: "
                f"units=policy(module) + [...]"
            )
        group = isinstance(each, Sequence) and not isinstance(each, str)
        found = _members(each, nodes) if group else found_by(each, nodes, "unit")
        own = [path for path in found if group or path not in written or path == each]
        for path in own:
            if path in named_by:
                raise ValueError(
                    f"units overlap: {path!r} is matched by {named_by[path]!r} and by {each!r}; remove one of the two"
                )
            named_by[path] = each
        if group and len(own) > 1:
            name = _group_name(each, nodes, paths)
            paths[name], names[tuple(each)] = tuple(own), [name]
        else:
            for path in found:  # a path written out takes its place among those of the glob
                paths.setdefault(path, (path,))
            names[tuple(each) if group else each] = own or [""] * (each == "")
    return Choice(paths, _options(units, names))


def _members(group: Sequence[str], nodes: Collection[str]) -> list[str]:
    """Return the paths of a group, in the order given."""
    if not group:
        raise ValueError("units hold an empty group; name the paths of its modules, or leave it out")
    found: dict[str, None] = {}
    for glob in group:
        matched = found_by(glob, nodes, "unit")
        twice = next((path for path in matched if path in found), None)
        if not matched or twice is not None:
            what = "the root ''" if not matched else f"{twice!r} twice"
            raise ValueError(f"the group {list(group)} of units names {what}; name each path below the root once")
        found |= dict.fromkeys(matched)
    for path in found:
        outer = next((above for above in tree.upwards(path) if above != path and above in found), None)
        if outer is not None:
            raise ValueError(
                f"the group {list(group)} of units names {path!r}, which lies inside {outer!r} of the same group; leave the "
                f"inner path out"
            )
    return list(found)


def _group_name(group: Sequence[str], nodes: Collection[str], units: Collection[str]) -> str:
    """Return a name for a group that is no node of the tree and no other unit."""
    name = "+".join(group)
    while name in nodes or name in units:
        name += "+"
    return name


def _options(units: UnitNames, names: Mapping[Any, Sequence[str]]) -> dict[str, Mapping[str, Any]]:
    """Return the options that single units override, by the name of the unit."""
    given = units if isinstance(units, Mapping) else getattr(units, "overrides", {})
    found: dict[str, Mapping[str, Any]] = {}
    known = dict.fromkeys(["", *(name for each in names.values() for name in each)])
    for key, options in given.items():
        if not isinstance(options, Mapping):
            raise TypeError(
                f"the options of unit {key!r} must be a dictionary, such as {{'strategy': 'no_shard'}}, or {{}} for those "
                f"of make_plan; found {options!r}"
            )
        matched: Sequence[Any] = names.get(key, [key])
        unknown = next((name for name in matched if name not in known), None)
        if unknown is not None:
            found_units = some(list(known)[1:])
            raise ValueError(
                f"units override options of {unknown!r}, which is not among them; found the units {found_units}: remove "
                f"the entry from units.overrides too, or name the unit"
            )
        found |= dict.fromkeys(matched, options)
    return {name: options for name, options in found.items() if options}
