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
        ValueError: a path or glob matches no node, or a path is written twice; a group is empty, or
            one of its paths lies inside another.
    """
    if isinstance(units, str):
        raise TypeError(
            f"units must be a list of paths or globs; found the string {units!r}: write [{units!r}]"
        )
    if not isinstance(units, Iterable):
        raise TypeError(
            f"units must be a list of paths or globs; found {units!r}{policy_hint(units)}"
        )
    nodes = dict.fromkeys(nodes_of(uses))
    entries = list(units)
    matched = [_matched(entry, nodes) for entry in entries]
    owner: dict[str, int] = {}  # by path: the number of the entry that counts
    for entry_index, (entry, matched_paths) in enumerate(zip(entries, matched, strict=True)):
        for path in matched_paths:
            owner_before = owner.get(path)
            if owner_before is None or not _is_written(path, entries[owner_before]):
                owner[path] = entry_index
            elif _is_written(path, entry):
                raise ValueError(
                    f"units name {path!r} twice, in {entries[owner_before]!r} and in {entry!r}; remove "
                    "one of the two"
                )
    paths: dict[str, tuple[str, ...]] = {}
    names: dict[Any, list[str]] = {}  # a path, glob or group as given -> the units that it names
    for entry_index, (entry, matched_paths) in enumerate(zip(entries, matched, strict=True)):
        own_paths = [path for path in matched_paths if owner[path] == entry_index]
        if isinstance(entry, str):
            # A path that is written out takes its place among those of a glob before it.
            paths |= {
                path: (path,)
                for path in matched_paths
                if isinstance(entries[owner[path]], str) and path not in paths
            }
            names[entry] = own_paths or [""] * (entry == "")
        elif len(own_paths) > 1:
            name = _group_name(entry, nodes, paths)
            paths[name], names[tuple(entry)] = tuple(own_paths), [name]
        else:
            paths |= {path: (path,) for path in own_paths}
            names[tuple(entry)] = own_paths
    return Choice(paths, _options(units, names))


def _matched(entry: Any, nodes: Collection[str]) -> list[str]:
    """Return the paths that one entry of ``units`` names."""
    if isinstance(entry, Units):
        raise TypeError(
            f"units hold the result of a policy, {list(entry)[:4]}, as one of them; pass it as "
            "units, or add to it: units=policy(module) + [...]"
        )
    if isinstance(entry, Sequence) and not isinstance(entry, str):
        return _members(entry, nodes)
    return found_by(entry, nodes, "unit")


def _is_written(path: str, entry: str | Sequence[str]) -> bool:
    """Return whether an entry writes a path out, not as part of a glob."""
    return path == entry if isinstance(entry, str) else path in entry


def _members(group: Sequence[str], nodes: Collection[str]) -> list[str]:
    """Return the paths of a group, in the order given."""
    if not group:
        raise ValueError(
            "units hold an empty group; name the paths of its modules, or leave it out"
        )
    member_paths: dict[str, None] = {}
    for glob in group:
        matched = found_by(glob, nodes, "unit")
        twice = next((path for path in matched if path in member_paths), None)
        if not matched or twice is not None:
            wrong_paths = "the root ''" if not matched else f"{twice!r} twice"
            raise ValueError(
                f"the group {list(group)} of units names {wrong_paths}; name each path below the root once"
            )
        member_paths |= dict.fromkeys(matched)
    for path in member_paths:
        outer = next(
            (above for above in tree.upwards(path) if above != path and above in member_paths), None
        )
        if outer is not None:
            raise ValueError(
                f"the group {list(group)} of units names {path!r}, which lies inside {outer!r} of "
                "the same group; leave the inner path out"
            )
    return list(member_paths)


def _group_name(group: Sequence[str], nodes: Collection[str], units: Collection[str]) -> str:
    """Return a name for a group that is no node of the tree and no other unit."""
    name = "+".join(group)
    while name in nodes or name in units:
        name += "+"
    return name


def _options(units: UnitNames, names: Mapping[Any, Sequence[str]]) -> dict[str, Mapping[str, Any]]:
    """Return the options that single units override, by the name of the unit."""
    given_options = units if isinstance(units, Mapping) else getattr(units, "overrides", {})
    options_by_path: dict[str, Mapping[str, Any]] = {}
    known_paths = dict.fromkeys(
        ["", *(name for entry_paths in names.values() for name in entry_paths)]
    )
    for key, options in given_options.items():
        if not isinstance(options, Mapping):
            raise TypeError(
                f"the options of unit {key!r} must be a dictionary, such as {{'strategy': "
                f"'no_shard'}}, or {{}} for those of make_plan; found {options!r}"
            )
        matched: Sequence[Any] = names.get(key, [key])
        unknown = next((name for name in matched if name not in known_paths), None)
        if unknown is not None:
            found_units = some(list(known_paths)[1:])
            raise ValueError(
                f"units override options of {unknown!r}, which is not among them; found the units "
                f"{found_units}: remove the entry from units.overrides too, or name the unit"
            )
        options_by_path |= dict.fromkeys(matched, options)
    return {name: options for name, options in options_by_path.items() if options}
