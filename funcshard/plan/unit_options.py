"""What options name by paths and globs: the nodes of a tree, and units with their own options.

``*`` matches any part of one dotted component, and ``**`` any number of components: ``**.w`` is
``w`` at any depth, and ``blocks.**`` is ``blocks`` and all below it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import (
    check_choice,
    check_count,
    check_flag,
    did_you_mean,
    some,
)
from funcshard.plan.precision import MixedPrecision
from funcshard.plan.unit_plan import STRATEGIES
from funcshard.plan.wrap import Units

_PATTERNS = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": "[^.]*"}


@functools.lru_cache(maxsize=256)
def matcher(glob: str) -> Callable[[str], object]:
    """Return a function that is true of the paths that a path or glob matches.

    Example:
        >>> from funcshard.plan.unit_options import matcher
        >>> [path for path in ("w", "a.w", "a.b.w", "a.wx") if matcher("**.w")(path)]
        ['w', 'a.w', 'a.b.w']
    """
    # The stars with the dots beside them: "**." may match nothing, its dot included.
    glob_parts = re.split(r"(\*\*\.|\.\*\*|\*\*|\*)", glob)
    regex_text = "".join(_PATTERNS.get(part, re.escape(part)) for part in glob_parts)
    return re.compile(regex_text, re.DOTALL).fullmatch


def matches(glob: str, path: str) -> bool:
    """Return whether a path or glob matches a path."""
    return matcher(glob)(path) is not None


def match(globs: Iterable[str], uses: Sequence[tuple[str, ...]], noun: str) -> list[str]:
    """Return the nodes of a tree that paths or globs name.

    Arguments:
        globs: paths or globs.
        uses: the paths of each leaf; a tied leaf has several.
        noun: the word for a glob in errors, such as ``"unit"``.

    Raises:
        TypeError: ``globs`` is not a list of strings.
        ValueError: a glob matches no node.
    """
    listed_globs = list_of_globs(globs, f"{noun}s")
    # Why so: most calls have no globs, and the nodes of a large tree take long.
    tree_nodes = dict.fromkeys(nodes_of(tuple(uses)) if listed_globs else ())
    return [node for glob in listed_globs for node in found_by(glob, tree_nodes, noun)]


def last_match(globs: Collection[str], names: Collection[str]) -> str | None:
    """Return the path or glob that counts for what has these names, if any.

    A path counts before a glob, and a later glob before an earlier one.
    """
    matching_globs = [glob for glob in globs if glob in names] or [
        glob for glob in globs if any(matches(glob, name) for name in names)
    ]
    return matching_globs[-1] if matching_globs else None


# Why a cache: a sweep plans one model again and again.
@functools.lru_cache(maxsize=4)
def nodes_of(uses: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    """Return the paths of all nodes that hold leaves, in natural order."""
    # Why no set: natural order has ties, such as "a1" and "a.1", and all ranks must agree.
    tree_nodes: dict[str, None] = {}
    for paths in uses:
        for path in paths:
            for node_path in tree.upwards(path):
                # The root is a node that globs find only if it is a leaf itself.
                if node_path in tree_nodes or (path and not node_path):
                    break
                tree_nodes[node_path] = None
    return tuple(sorted(tree_nodes, key=tree.natural_key))


def list_of_globs(globs: Any, option: str) -> list[Any]:
    """Return a list of paths or globs as a list; ``TypeError`` if it is none."""
    # Why tensors: they are iterable, and their elements are no better.
    if isinstance(globs, str | torch.Tensor) or not isinstance(globs, Iterable):
        raise _no_globs(option, globs)
    return list(globs)


def _no_globs(option: str, value: Any, place: str = "") -> TypeError:
    remedy = ""
    if isinstance(value, str):
        remedy = f": write [{value!r}]"
    # The usual mistakes: a class of modules, or a policy that was not called.
    elif isinstance(value, type):
        remedy = f": pass units=fs.wrap.by_class({value.__name__})(module)"
    elif callable(value):
        remedy = ": apply a policy to the module, as in units=policy(module)"
    return TypeError(
        f"{option} must be a list of paths or globs; found {value!r}{place}{remedy}"
    )


def found_by(glob: Any, nodes: Collection[str], noun: str) -> list[str]:
    """Return the nodes that one glob matches; raise if there is none. The root matches itself."""
    if not isinstance(glob, str):
        raise _no_globs(f"{noun}s", glob, " in it")
    # Note: callers pass dictionaries as ``nodes``, so that this is no search.
    matched_nodes = [glob] * (glob in nodes)
    if "*" in glob:
        matched_nodes = list(filter(matcher(glob), nodes))
    if not matched_nodes and glob != "":
        raise ValueError(
            f"{noun} {glob!r} matches no part of the tree; {noun}s are paths or globs of nodes "
            f"that hold leaves, such as {some(list(nodes))}{_remedy(glob, nodes)}"
        )
    return matched_nodes


def _remedy(glob: str, nodes: Collection[str]) -> str:
    above, _, last = glob.rpartition(".")
    # The usual mistake with layers as lax.scan has them: there is one leaf, not L.
    if last.isdecimal() and above in nodes:
        return f"; if {above!r} holds stacked layers, call unstack(params, {above!r}) first"
    known_names = list(nodes)
    otherwise = ""
    if "*" in glob:
        known_names = [
            re.sub(r"(?<![^.])\d+(?![^.])", "*", node_path) for node_path in nodes
        ]
        # Note: a glob is usually meant for repeated layers, such as vit.layers.*.
        repeated = [name for name in dict.fromkeys(known_names) if name.endswith(".*")]
        otherwise = f"repeated modules are {some(repeated)}" if repeated else ""
    name_question = did_you_mean(glob, known_names, otherwise=otherwise)
    # peft's modules lie under a prefix.
    deeper_name = next((name for name in known_names if name.endswith(f".{glob}")), None)
    if deeper_name is not None:
        name_question = f"did you mean {deeper_name!r}?"
    return name_question and f": {name_question}"


# --- the units that the user names ----------------------------------------------------------------


# A path or glob, or a group of them; a mapping gives each one options.
UnitNames = (
    Iterable[str | Sequence[str]] | Mapping[str | tuple[str, ...], Mapping[str, Any]]
)

# The options that a unit can override.
OPTIONS = (
    "strategy",
    "offload",
    "precision",
    "reshard_after_forward",
    "reshard_after_backward",
)

_GRID = "pass a mesh of two axes, as in init_mesh({'replicate': R, 'shard': S}), and"
# The names that strategies have in other libraries, such as those of FSDP1's ShardingStrategy.
_USUAL_STRATEGIES = {
    **{strategy: f"did you mean {strategy!r}?" for strategy in STRATEGIES},
    "hybrid_shard": f"{_GRID} strategy='full_shard'",
    "hsdp": f"{_GRID} strategy='full_shard'",
    "hybrid_shard_zero2": f"{_GRID} strategy='shard_grad_op'",
    "_hybrid_shard_zero2": f"{_GRID} strategy='shard_grad_op'",
    **dict.fromkeys(("zero3", "zero-3", "fsdp"), "it is called 'full_shard' here"),
    **dict.fromkeys(("zero2", "zero-2"), "it is called 'shard_grad_op' here"),
    "ddp": "it is called 'no_shard' here",
}


def read_units(
    units: UnitNames, uses: tuple[tuple[str, ...], ...], strategy: str = "full_shard"
) -> tuple[dict[str, tuple[str, ...]], dict[str, Mapping[str, Any]]]:
    """Return the units that ``units`` of ``make_plan`` names.

    Arguments:
        units: the argument of ``make_plan``.
        uses: the paths of each leaf of the tree.
        strategy: that of units which override none.

    Returns:
        The paths of each unit by name, in plan order; and the options that units override, by name.
    """
    entries = list_of_globs(units, "units")
    nodes = dict.fromkeys(nodes_of(uses))
    matched_paths = [_matched_paths(unit_entry, nodes) for unit_entry in entries]
    entry_owners: dict[str, int] = {}  # by path: the index of the entry that counts
    written_paths: dict[str, int] = {}
    for entry_index, unit_entry in enumerate(entries):
        entry_owners.update(dict.fromkeys(matched_paths[entry_index], entry_index))
        for node_path in [unit_entry] if isinstance(unit_entry, str) else unit_entry:
            if node_path in written_paths:
                raise ValueError(
                    f"units name {node_path!r} twice, in {entries[written_paths[node_path]]!r} and "
                    f"in {unit_entry!r}; remove one of the two"
                )
            if node_path in nodes:
                written_paths[node_path] = entry_index
    # Note: a path that an entry writes out counts before one that a glob matches.
    entry_owners |= written_paths
    paths: dict[str, tuple[str, ...]] = {}
    names: dict[Any, list[str]] = {"": [""]}  # the units that each entry names
    for entry_index, unit_entry in enumerate(entries):
        own_paths = [
            node_path
            for node_path in matched_paths[entry_index]
            if entry_owners[node_path] == entry_index
        ]
        if isinstance(unit_entry, str):
            # A path that is written out takes its place among those of a glob before it.
            for node_path in matched_paths[entry_index]:
                if isinstance(entries[entry_owners[node_path]], str):
                    paths.setdefault(node_path, (node_path,))
            names[unit_entry] = own_paths or names.get(unit_entry, [])
        elif len(own_paths) > 1:
            unit_name = free_name("+".join(unit_entry), nodes, paths)
            paths[unit_name], names[tuple(unit_entry)] = tuple(own_paths), [unit_name]
        else:
            # A group of one module is a plain unit.
            paths |= {node_path: (node_path,) for node_path in own_paths}
            names[tuple(unit_entry)] = own_paths
    return paths, _read_overrides(units, names, strategy)


def _matched_paths(entry: Any, nodes: Collection[str]) -> list[str]:
    """Return the paths that one entry of ``units`` names."""
    # Units is a list, so it would pass for a group.
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
    member_paths: dict[str, None] = {}
    for member_glob in entry:
        glob_paths = found_by(member_glob, nodes, "unit")
        repeated_paths = [
            node_path for node_path in glob_paths if node_path in member_paths
        ]
        if repeated_paths or not glob_paths:
            mistake = f"{repeated_paths[0]!r} twice" if repeated_paths else "the root ''"
            raise ValueError(f"{group} {mistake}; name each path below the root once")
        member_paths |= dict.fromkeys(glob_paths)
    for node_path in member_paths:
        # Why not: a unit's forward gathers all of its leaves, the inner module's among them.
        for outer_path in tree.upwards(node_path):
            if outer_path != node_path and outer_path in member_paths:
                raise ValueError(
                    f"{group} {node_path!r}, which lies inside {outer_path!r} of the same group; "
                    "leave the inner path out"
                )
    return list(member_paths)


def free_name(name: str, *taken: Collection[str]) -> str:
    """Return the name of a group, with ``+`` at its end until nothing else has it."""
    while any(name in names for names in taken):
        name += "+"
    return name


def _read_overrides(
    units: UnitNames, names: Mapping[Any, Sequence[str]], strategy: str
) -> dict[str, Mapping[str, Any]]:
    given_options = units if isinstance(units, Mapping) else getattr(units, "overrides", {})
    known_units = dict.fromkeys(
        unit_name for entry_units in names.values() for unit_name in entry_units
    )
    overrides: dict[str, Mapping[str, Any]] = {}
    for key, options in given_options.items():
        if not isinstance(options, Mapping):
            raise TypeError(
                f"the options of unit {key!r} must be a dictionary, such as {{'strategy': "
                f"'no_shard'}}, or {{}} for those of make_plan; found {options!r}"
            )
        for unit_name in names.get(key, [key]):
            if unit_name not in known_units:
                raise ValueError(
                    f"units override options of {unit_name!r}, which is not among them; found the "
                    f"units {some([name for name in known_units if name])}: remove the entry from "
                    "units.overrides too, or name the unit"
                )
            check_options(options, strategy, unit_name)
            overrides[unit_name] = options
    return overrides


def check_options(
    options: Mapping[str, Any], strategy: str, unit: str | None = None
) -> None:
    """Raise unless the options of ``make_plan``, or those that a unit overrides, are valid."""
    unknown = sorted(options.keys() - set(OPTIONS))
    if unknown:
        raise ValueError(
            f"unit {unit!r} overrides {unknown[0]!r}; a unit can override "
            f"{', '.join(map(repr, OPTIONS))}"
        )
    strategy = options.get("strategy", strategy)
    check_choice("strategy", strategy, STRATEGIES, _USUAL_STRATEGIES)
    remedy = "use the overrides of a policy to offload single units"
    check_flag("offload", options.get("offload", False), remedy)
    precision = options.get("precision")
    if precision is not None and not isinstance(precision, MixedPrecision):
        raise TypeError(
            f"precision must be a funcshard.MixedPrecision, or None; found {precision!r}: for "
            "units that compute in bfloat16 pass fs.MixedPrecision(param_dtype=torch.bfloat16)"
        )
    after_forward = options.get("reshard_after_forward")
    if after_forward is not None and not isinstance(after_forward, bool):
        remedy = "pass True, False, or the ranks of a machine; leave it out if the strategy decides"
        check_count("reshard_after_forward", after_forward, of="ranks", remedy=remedy)
    check_flag("reshard_after_backward", options.get("reshard_after_backward", True))
    # Why only both together: for a unit that overrides the strategy alone, the option of the plan
    # means nothing.
    if after_forward and strategy == "no_shard":
        where = "" if unit is None else f"unit {unit or '(root)'!r}: "
        raise ValueError(
            f"{where}reshard_after_forward={after_forward!r} frees gathered leaves, and the "
            "strategy 'no_shard' gathers none; found both: leave it out, or choose 'full_shard'"
        )


def decided_options(name: str, options: Mapping[str, Any], shards: int) -> dict[str, Any]:
    """Return the options of a unit, with the decision when its gathered leaves are freed.

    Raises:
        ValueError: the unit is freed after forward, but should stay gathered after backward, or a
            number of ranks does not divide that of the shard axis.
    """
    strategy, freed_after = options["strategy"], options["reshard_after_forward"]
    # Copies have nothing to free; an option of the plan for all units passes them over.
    if strategy == "no_shard":
        return {**options, "reshard_after_forward": False, "reshard_after_backward": True}
    unit_title = f"unit {name or '(root)'!r}"
    if freed_after is None:
        # Why not the root: backward would gather it again right after forward.
        freed_after = strategy == "full_shard" and name != ""
    elif not isinstance(freed_after, bool):
        freed_after = int(freed_after)
        if shards % freed_after:
            raise ValueError(
                f"reshard_after_forward must be a number of ranks that divides the {shards} ranks "
                f"of the shard axis; found {freed_after} for {unit_title}: pass a divisor, such as "
                "the ranks of one machine, or True"
            )
        # Note: one rank frees nothing, and all of them free all but the shard, so these are flags.
        if freed_after in (1, shards):
            freed_after = freed_after > 1
    if freed_after and not options["reshard_after_backward"]:
        raise ValueError(
            "reshard_after_backward=False keeps a unit gathered until the next micro-batch, so it "
            f"must stay gathered after forward too; found that {unit_title} is freed after forward: "
            "pass strategy='shard_grad_op' or reshard_after_forward=False, or give the "
            "option to single units"
        )
    return {**options, "reshard_after_forward": freed_after}
