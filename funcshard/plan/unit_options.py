"""The units that the user names, by paths, globs and groups of them, and the options of units."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from funcshard._utils import check_count, check_flag, tree
from funcshard.plan.globs import found_by, list_of_globs, nodes_of, some
from funcshard.plan.precision import MixedPrecision
from funcshard.plan.unit_plan import check_strategy
from funcshard.plan.wrap import Units

# A path or glob, or a group of them; a mapping gives each one options.
UnitNames = Iterable[str | Sequence[str]] | Mapping[str | tuple[str, ...], Mapping[str, Any]]

# The options that a unit can override.
_OPTIONS = ("strategy", "offload", "precision", "reshard_after_forward", "reshard_after_backward")


def read_units(
    units: UnitNames, uses: Sequence[tuple[str, ...]], strategy: str = "full_shard"
) -> tuple[dict[str, tuple[str, ...]], dict[str, Mapping[str, Any]]]:
    """Return the units that ``units`` names; the docstring of ``make_plan`` describes the forms.

    Arguments:
        units: the argument of ``make_plan``.
        uses: the paths of each leaf of the tree.
        strategy: that of units which override none.

    Returns:
        The paths of each unit by its name, in the order of the plan, where a group has several; and
        the options that units override, by name.

    Raises:
        TypeError: ``units`` is not made of paths, globs and groups.
        ValueError: a path or glob matches no node, or a path is written twice; a group is empty, or
            one of its paths lies inside another.
    """
    entries = list_of_globs(units, "units")
    nodes = dict.fromkeys(nodes_of(uses))
    matched_paths = [_matched_paths(entry, nodes) for entry in entries]
    # Note: a path that an entry writes out counts before one that a glob matches.
    written = [{entry} if isinstance(entry, str) else {*entry} for entry in entries]
    owners: dict[str, int] = {}  # by path: the index of the entry that counts
    for entry_index, entry_paths in enumerate(matched_paths):
        for path in entry_paths:
            before = owners.get(path)
            if before is None or path not in written[before]:
                owners[path] = entry_index
            elif path in written[entry_index]:
                raise ValueError(
                    f"units name {path!r} twice, in {entries[before]!r} and in "
                    f"{entries[entry_index]!r}; remove one of the two"
                )
    paths: dict[str, tuple[str, ...]] = {}
    names: dict[Any, list[str]] = {"": [""]}  # the units that each entry names
    for entry_index, entry in enumerate(entries):
        own_paths = [path for path in matched_paths[entry_index] if owners[path] == entry_index]
        if isinstance(entry, str):
            # A path that is written out takes its place among those of a glob before it.
            for path in matched_paths[entry_index]:
                if isinstance(entries[owners[path]], str):
                    paths.setdefault(path, (path,))
            names[entry] = own_paths or names.get(entry, [])
        elif len(own_paths) > 1:
            name = free_name("+".join(entry), nodes, paths)
            paths[name], names[tuple(entry)] = tuple(own_paths), [name]
        else:
            # A group of one module is a plain unit.
            paths |= {path: (path,) for path in own_paths}
            names[tuple(entry)] = own_paths
    return paths, _read_overrides(units, names, strategy)


def _matched_paths(entry: Any, nodes: Collection[str]) -> list[str]:
    """Return the paths that one entry of ``units`` names."""
    if isinstance(entry, Units):
        raise TypeError(
            f"units hold the result of a policy, {list(entry)[:4]}, as one of them; pass it as "
            "units, or add to it: units=policy(module) + [...]"
        )
    if isinstance(entry, str) or not isinstance(entry, Sequence):
        return found_by(entry, nodes, "unit")
    if not entry:
        raise ValueError(
            "units hold an empty group; name the paths of its modules, or leave it out"
        )
    group = f"the group {list(entry)} of units names"
    members: dict[str, None] = {}
    for glob in entry:
        glob_paths = found_by(glob, nodes, "unit")
        twice = [path for path in glob_paths if path in members]
        if twice or not glob_paths:
            mistake = f"{twice[0]!r} twice" if twice else "the root ''"
            raise ValueError(f"{group} {mistake}; name each path below the root once")
        members |= dict.fromkeys(glob_paths)
    for path in members:
        # Why not: a unit's forward gathers all of its leaves, the inner module's among them.
        for outer in tree.upwards(path):
            if outer != path and outer in members:
                raise ValueError(
                    f"{group} {path!r}, which lies inside {outer!r} of the same group; leave the "
                    "inner path out"
                )
    return list(members)


def free_name(name: str, *taken: Collection[str]) -> str:
    """Return the name of a group, with signs at its end until nothing else has it."""
    while any(name in names for names in taken):
        name += "+"
    return name


def _read_overrides(
    units: UnitNames, names: Mapping[Any, Sequence[str]], strategy: str
) -> dict[str, Mapping[str, Any]]:
    """Return the options that single units override, by the name of the unit."""
    given_options = units if isinstance(units, Mapping) else getattr(units, "overrides", {})
    known_units = dict.fromkeys(name for entry_units in names.values() for name in entry_units)
    overrides: dict[str, Mapping[str, Any]] = {}
    for key, options in given_options.items():
        if not isinstance(options, Mapping):
            raise TypeError(
                f"the options of unit {key!r} must be a dictionary, such as {{'strategy': "
                f"'no_shard'}}, or {{}} for those of make_plan; found {options!r}"
            )
        for name in names.get(key, [key]):
            if name not in known_units:
                raise ValueError(
                    f"units override options of {name!r}, which is not among them; found the units "
                    f"{some([known for known in known_units if known])}: remove the entry from "
                    "units.overrides too, or name the unit"
                )
            check_options(options, strategy, name)
            overrides[name] = options
    return overrides


def check_options(options: Mapping[str, Any], strategy: str, unit: str | None = None) -> None:
    """Raise unless options are valid.

    Arguments:
        options: those of ``make_plan``, or those that a unit overrides.
        strategy: the strategy where the options hold none.
        unit: the unit that overrides them; ``None`` for the options of ``make_plan``.
    """
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise ValueError(
            f"unit {unit!r} overrides {unknown[0]!r}; a unit can override "
            f"{', '.join(map(repr, _OPTIONS))}"
        )
    strategy = options.get("strategy", strategy)
    check_strategy(strategy)
    remedy = "use the overrides of a policy to offload single units"
    check_flag("offload", options.get("offload", False), remedy)
    precision = options.get("precision")
    if precision is not None and not isinstance(precision, MixedPrecision):
        raise TypeError(
            f"precision must be a funcshard.MixedPrecision, or None; found {precision!r}: for "
            "units that compute in bfloat16 pass fs.MixedPrecision(param_dtype=torch.bfloat16)"
        )
    forward = options.get("reshard_after_forward")
    if forward is not None and not isinstance(forward, bool):
        remedy = "pass True, False, or the ranks of a machine; leave it out if the strategy decides"
        check_count("reshard_after_forward", forward, of="ranks", remedy=remedy)
    check_flag("reshard_after_backward", options.get("reshard_after_backward", True))
    # Why only both together: for a unit that overrides the strategy alone, the option of the plan
    # means nothing.
    if forward and strategy == "no_shard":
        where = "" if unit is None else f"unit {unit or '(root)'!r}: "
        raise ValueError(
            f"{where}reshard_after_forward={forward!r} frees gathered leaves, and the strategy "
            "'no_shard' gathers none; found both: leave it out, or choose 'full_shard'"
        )


def decided_options(name: str, options: Mapping[str, Any], shards: int) -> dict[str, Any]:
    """Return the options of a unit, with the decision when its gathered leaves are freed.

    ``shards`` is the number of ranks on the shard axis. A number of ranks for
    ``reshard_after_forward`` stays one if it is neither 1, which frees nothing, nor ``shards``,
    which frees all but the shard.

    Raises:
        ValueError: the unit is freed after forward, but should stay gathered after backward, or a
            number of ranks does not divide that of the shard axis.
    """
    strategy, freed = options["strategy"], options["reshard_after_forward"]
    if strategy == "no_shard":
        return {**options, "reshard_after_forward": False, "reshard_after_backward": True}
    title = f"unit {name or '(root)'!r}"
    if freed is None:
        # Why not the root: backward would gather it again right after forward.
        freed = strategy == "full_shard" and name != ""
    elif not isinstance(freed, bool):
        freed = int(freed)
        if shards % freed:
            raise ValueError(
                f"reshard_after_forward must be a number of ranks that divides the {shards} ranks "
                f"of the shard axis; found {freed} for {title}: pass a divisor, such as the ranks "
                "of one machine, or True"
            )
        if freed in (1, shards):
            freed = freed > 1
    if freed and not options["reshard_after_backward"]:
        raise ValueError(
            "reshard_after_backward=False keeps a unit gathered until the next micro-batch, so it "
            f"must stay gathered after forward too; found that {title} is freed after forward: "
            "pass strategy='shard_grad_op' or reshard_after_forward=False, or override the option "
            "for single units only"
        )
    return {**options, "reshard_after_forward": freed}
