"""Making a plan: leaves are claimed by units, then laid out in flat buffers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import callers_level, tree
from funcshard.plan.plan import AXES, BufferPlan, LeafSpec, Plan, UnitPlan, check_strategy, dtype_name
from funcshard.plan.precision import MixedPrecision, is_one_of

__all__ = ["make_plan", "match", "mesh_shape_of"]


def make_plan(
    params: Any,
    mesh: Any,
    *,
    units: Iterable[str] = (),
    strategy: str = "full_shard",
    ties: Iterable[Sequence[str]] = (),
    local: Iterable[str] | Mapping[str, str | Sequence[str]] = (),
    offload: bool = False,
    precision: MixedPrecision | None = None,
    bucket_bytes: int = 0,
) -> Plan:
    """Plan how a parameter tree is sharded: which leaves form a unit, and where each lies in its flat buffer.

    Every leaf is in exactly one unit. A unit owns the leaves under its path that no unit inside it owns; what no unit
    claims belongs to the root unit ``""``. A tied leaf belongs to the innermost unit that holds all of its uses. Within
    a unit, leaves that differ in dtype or in ``requires_grad`` get flat buffers of their own; where no leaf of the whole
    tree requires a gradient, the tree says nothing about it and every floating-point leaf is trainable.

    Arguments:
        params: any pytree of tensors, real or on the meta device; only shapes, dtypes and ``requires_grad`` are read.
        mesh: number of ranks, ``{"replicate": R, "shard": S}``, or a ``Mesh``.
        units: paths, as the policies in ``wrap`` return them, with their overrides of single units, or globs in which
            ``*`` stands for any part of one dotted component and ``**`` for any number of components. Units may be
            nested.
        strategy: ``"full_shard"``: gathered for forward and again for backward; ``"shard_grad_op"``: gathered once,
            kept until backward; ``"no_shard"``: replicated. On a mesh with a replicate axis, the hybrid of each.
        ties: groups of paths of one tensor, for trees in which a tied tensor appears once. ``make_functional`` marks
            its tied parameters itself, and one tensor at two places of a tree is seen without being named.
        local: paths or globs of nodes whose leaves each rank keeps for itself, such as its own experts: they are neither
            sharded nor gathered, and their gradient is that of this rank's loss, neither added nor averaged. Or a mapping
            from such to the mesh axis along which values differ: with ``{"experts.*": "replicate"}`` each row of ranks along
            the shard axis has values of its own, sharded in the row, their gradient the mean over the row; with ``"shard"``
            each rank of a row has its own whole, their gradient the mean over the ranks along the replicate axis that have
            the same; with ``("replicate", "shard")`` they are each rank's own.
        offload: whether shards live on the CPU, and with them gradients and optimizer state, on a mesh of another device:
            gathering moves the shard to the device first, and the reduced gradient is moved back. A unit may override it.
        precision: in which dtypes units compute and communicate, and what is cast for them; a unit may override it. Where
            the params come from ``make_functional``, modules of its ``ignored_classes`` become units of their own, in
            full precision, which a warning says.
        bucket_bytes: bytes of gathered buffers up to which units that follow one another, and agree in everything that their
            collectives depend on, share these: small units, whose collectives take longer to start than to run. They are
            gathered all at once, and reduced when the last of their gradients has come; the numbers are the same to
            the bit where reductions add in the order of ranks, which all but NCCL's do. 0: each unit has its own. The
            root always has.

    Returns:
        The plan; see ``Plan``.

    Raises:
        ValueError: a unit matches nothing or is named twice, an unknown strategy or axis, a mesh of a wrong form, a size
            that is none.
        TypeError: a leaf is not a dense tensor, or a container cannot be written down as data.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"blocks": [{"w": torch.zeros(4, 4)} for _ in range(3)], "head": torch.zeros(4, 2)}
        >>> plan = fs.make_plan(params, 2, units=["blocks.*"])
        >>> list(plan.units)
        ['', 'blocks.0', 'blocks.1', 'blocks.2']
        >>> [leaf.path for leaf in plan.units[""].leaves]
        ['head']

    Source: the unit corresponds to a FlatParameter of Zhao et al., "PyTorch FSDP" (2023), https://arxiv.org/abs/2304.11277
    """
    check_strategy(strategy)
    _check_offload(offload)
    _check_precision(precision)
    if type(bucket_bytes) is not int or bucket_bytes < 0:
        raise ValueError(f"bucket_bytes must be a whole number of bytes, at least 0; found {bucket_bytes!r}")
    mesh_shape = mesh_shape_of(mesh)
    structure, leaves, uses = _tied(*tree.describe(params), ties)
    for leaf, paths in zip(leaves, uses, strict=True):
        _check_leaf(leaf, paths[0])
    names = match(units, uses, "unit")
    overrides = _overrides(units, names)
    full_precision = _full_precision_modules(
        leaves, uses, names, lambda name: overrides.get(name, {}).get("precision", precision)
    )
    names = _with_full_precision(names, full_precision, uses)
    own = _local(local, uses)
    trainable = _trainable(leaves)
    owned: dict[str, list[int]] = {name: [] for name in ("", *names)}
    for i, paths in enumerate(uses):
        holding = [name for name in owned if all(tree.is_under(path, name) for path in paths)]
        owned[max(holding, key=len)].append(i)

    def layout(name: str, members: list[int]) -> UnitPlan:
        options = {"strategy": strategy, "offload": offload, "precision": precision, **overrides.get(name, {})}
        inside = any(tree.is_under(name, outer) for outer in full_precision)
        if name in full_precision or (inside and "precision" not in overrides.get(name, {})):
            options["precision"] = None
        chosen = options["strategy"]
        groups: dict[tuple[tuple[str, ...], bool, str], list[int]] = {}
        for i in members:
            groups.setdefault((own[i], not trainable[i], dtype_name(leaves[i].dtype)), []).append(i)
        buffers, order = [], []
        for (axes, frozen, dtype), group in sorted(groups.items()):
            specs, offset = [], 0
            for i in group:
                spec = LeafSpec(uses[i][0], tuple(leaves[i].shape), offset, i, uses[i][1:])
                specs.append(spec)
                offset += spec.numel
            where = "" if not axes else ".local" if axes == AXES else f".local_{axes[0]}"
            shards = mesh_shape[1] if chosen != "no_shard" and "shard" not in axes else 1
            buffers.append(BufferPlan(dtype + ".frozen" * frozen + where, dtype, not frozen, tuple(specs), shards, axes))
            order += group
        part = tree.subtree(structure, name, {leaf: position for position, leaf in enumerate(order)})
        reshard = chosen == "full_shard" and name != ""
        dtypes = (options["precision"], name in full_precision)
        return UnitPlan(name, chosen, reshard, mesh_shape, part, tuple(buffers), options["offload"], *dtypes)

    planned = tuple(layout(name, m) for name, m in owned.items() if m)
    return Plan(mesh_shape, structure, planned, precision, _buckets(planned, bucket_bytes))


def _buckets(units: Sequence[UnitPlan], most: int) -> tuple[tuple[str, ...], ...]:
    """Runs of units that share their collectives: each as long as it stays within so many bytes."""
    runs: list[list[str]] = []
    last, size = None, 0
    for unit in units:
        own = sum(buffer.padded_numel * unit.gathered_dtype(buffer).itemsize for buffer in unit.buffers)
        fits = own <= most and unit.name != ""
        if fits and unit.bucket_key == last and size + own <= most:
            runs[-1].append(unit.name)
            size += own
        elif fits:
            runs.append([unit.name])
            last, size = unit.bucket_key, own
        else:
            last = None
    return tuple(tuple(run) for run in runs if len(run) > 1)


def mesh_shape_of(mesh: Any) -> tuple[int, int]:
    """Return the sizes ``(replicate, shard)`` of a mesh given as an int, a mapping, or a ``Mesh``."""
    sizes: Any = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        sizes = {"shard": mesh}
    if not isinstance(sizes, Mapping) or not sizes or set(sizes) - {"replicate", "shard"}:
        raise ValueError(
            f'mesh must be a number of ranks, {{"replicate": R, "shard": S}} or a funcshard.Mesh; found {mesh!r}'
        )
    replicate, shard = sizes.get("replicate", 1), sizes.get("shard", 1)
    if not all(type(n) is int and n >= 1 for n in (replicate, shard)):
        raise ValueError(f"mesh axes must be whole numbers of ranks, at least one each; found {dict(sizes)}")
    return replicate, shard


def _tied(
    structure: tree.Structure, leaves: list[Any], paths: list[str], ties: Iterable[Sequence[str]]
) -> tuple[tree.Structure, list[Any], list[tuple[str, ...]]]:
    """Number each tensor once, whatever the number of places it stands at, and list the paths of its uses."""
    named: dict[str, tuple[str, ...]] = {}
    for group in ties:
        there = dict.fromkeys(id(leaf) for leaf, path in zip(leaves, paths, strict=True) if path in group)
        if len(there) != 1:
            found = "several tensors there" if there else "no leaf there"
            raise ValueError(
                f"each group of ties must name the paths of one tensor, which stands in the tree under at least one of "
                f"them; for {tuple(group)} found {found}: the leaves are {_some(paths)}"
            )
        named |= {path: tuple(group) for path in group}
    first: dict[int, int] = {}
    renumbered: dict[int, int] = {}
    kept: list[Any] = []
    uses: list[dict[str, None]] = []
    for i, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
        new = first.setdefault(id(leaf), len(kept))
        if new == len(kept):
            kept.append(leaf)
            uses.append({})
        renumbered[i] = new
        uses[new].update(dict.fromkeys((path, *_marked(leaf, path), *named.get(path, ()))))
    return _renumber(structure, renumbered), kept, [tuple(use) for use in uses]


def _modules_of(leaf: Any, path: str) -> list[tuple[str, type]]:
    """The modules that ``make_functional`` marked a leaf to stand in, the outermost first: paths in this tree, classes."""
    marks: dict[str, tuple[type, ...]] = getattr(leaf, "funcshard_modules", {})
    place = next((place for place in marks if f".{path}".endswith(f".{place}")), None)
    if place is None:
        return []
    parts, depth = path.split("."), len(place.split("."))
    above = len(parts) - depth
    return [(".".join(parts[: above + i]), cls) for i, cls in enumerate(marks[place])]


def _marked(leaf: Any, path: str) -> tuple[str, ...]:
    """The further paths that ``make_functional`` marked a tied parameter with, from where its tree stands in this one."""
    first, *others = getattr(leaf, "funcshard_paths", ("",))
    if not others or not f".{path}".endswith(f".{first}"):
        return ()  # no mark, or one that the leaf carries under another name than the module's
    above = path[: len(path) - len(first)]
    return tuple(above + other for other in others)


def _renumber(structure: tree.Structure, new: Mapping[int, int]) -> tree.Structure:
    if structure is None or isinstance(structure, int):
        return None if structure is None else new[structure]
    kind, meta, children = structure
    return (kind, meta, tuple(_renumber(child, new) for child in children))


def _check_leaf(leaf: Any, path: str) -> None:
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(
            f"leaf {path!r} must be a torch.Tensor; found {type(leaf).__name__}: move what is not a parameter out of "
            f"params, or make it a tensor"
        )
    if leaf.layout != torch.strided:
        raise TypeError(f"leaf {path!r} must be a dense tensor; found layout {leaf.layout}: call .to_dense() on it")


def _trainable(leaves: Sequence[torch.Tensor]) -> list[bool]:
    says = any(leaf.requires_grad for leaf in leaves)
    return [leaf.requires_grad if says else leaf.is_floating_point() or leaf.is_complex() for leaf in leaves]


def _local(local: Any, uses: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The mesh axes along which each leaf's values differ."""
    chosen = dict(local) if isinstance(local, Mapping) else None
    nodes: dict[str, tuple[str, ...]] = {}
    for glob, node in _chosen(local, uses, "local node"):
        given = AXES if chosen is None else chosen[glob]
        axes = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
        if not axes or set(axes) - set(AXES):
            raise ValueError(
                f"local node {glob!r} must be local along 'replicate', 'shard' or both of these mesh axes; found {given!r}"
            )
        nodes[node] = tuple(axis for axis in AXES if axis in axes)
    found: list[tuple[str, ...]] = []
    for paths in uses:
        holding = {axes for node, axes in nodes.items() if any(tree.is_under(path, node) for path in paths)}
        if len(holding) > 1:
            raise ValueError(
                f"local nodes overlap: leaf {paths[0]!r} lies under nodes that are local along different axes, "
                f"{sorted(holding)}; name each leaf's axes once"
            )
        found.append(next(iter(holding), ()))
    return found


def _overrides(units: Iterable[str], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """What a policy's result says of single units besides their paths."""
    found: dict[str, Mapping[str, Any]] = dict(getattr(units, "overrides", {}))
    for name, options in found.items():
        unknown = sorted(options.keys() - {"strategy", "offload", "precision"})
        if unknown:
            raise ValueError(
                f"unit {name!r} overrides {unknown[0]!r}; a unit can override 'strategy', 'offload' and 'precision'"
            )
        check_strategy(options.get("strategy", "full_shard"))
        _check_offload(options.get("offload", False))
        _check_precision(options.get("precision"))
        assert name in names, f"a policy overrides {name!r}, which it did not choose"
    return found


def _check_offload(offload: Any) -> None:
    if not isinstance(offload, bool):
        raise ValueError(f"offload must be True or False; found {offload!r}: a unit's own is given by a policy's overrides")


def _check_precision(precision: Any) -> None:
    if precision is not None and not isinstance(precision, MixedPrecision):
        raise TypeError(f"precision must be a funcshard.MixedPrecision, or None; found {precision!r}")


def _full_precision_modules(
    leaves: Sequence[torch.Tensor],
    uses: Sequence[tuple[str, ...]],
    names: Sequence[str],
    precision_of: Callable[[str], MixedPrecision | None],
) -> list[str]:
    """Paths of the outermost modules that compute in full precision, because the units they are in ignore their classes."""
    found: dict[str, str] = {}
    for leaf, paths in zip(leaves, uses, strict=True):
        for path in paths:
            for module, cls in _modules_of(leaf, path):
                if any(tree.is_under(module, outer) for outer in found):
                    break
                unit = max((name for name in ("", *names) if tree.is_under(module, name)), key=len)
                precision = precision_of(unit)
                if module and precision is not None and is_one_of(cls, precision.ignored_classes):
                    found[module] = cls.__name__
                    break
    if found:
        classes = ", ".join(sorted(set(found.values())))
        warnings.warn(
            f"ignored_classes of the precision hold {classes}: {_some(list(found))} become units of their own, in full "
            f"precision",
            stacklevel=callers_level(),
        )
    return list(found)


def _with_full_precision(names: list[str], full_precision: Iterable[str], uses: Sequence[tuple[str, ...]]) -> list[str]:
    """Put each module where the leaves of its module stand among those of the units, which is where most models run it."""

    def first(name: str) -> int:
        return next(i for i, paths in enumerate(uses) if any(tree.is_under(path, name) for path in paths))

    names = list(names)
    for module in full_precision:
        if module not in names:
            after = (i for i, name in enumerate(names) if first(name) > first(module))
            names.insert(next(after, len(names)), module)
    return names


def match(globs: Iterable[str], uses: Sequence[tuple[str, ...]], what: str) -> list[str]:
    """Return the nodes of the tree that ``globs`` match; ``uses`` are the paths of each leaf, ``what`` is said in errors."""
    return [node for _, node in _chosen(globs, uses, what)]


def _chosen(globs: Iterable[str], uses: Sequence[tuple[str, ...]], what: str) -> list[tuple[str, str]]:
    """Pairs of a glob and a node that it matches."""
    if isinstance(globs, str):
        raise TypeError(f"{what}s must be a list of paths or globs; found the string {globs!r}: write [{globs!r}]")
    if not isinstance(globs, Iterable):
        hint = ": a policy is applied to the module, as in units=policy(module)" if callable(globs) else ""
        raise TypeError(f"{what}s must be a list of paths or globs; found {globs!r}{hint}")
    nodes: dict[str, None] = {}
    for path in (path for paths in uses for path in paths):
        parts = path.split(".")
        nodes.update(dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts) + 1)))
    candidates = sorted(nodes, key=tree.natural_key)
    chosen: dict[str, str] = {}
    for glob in globs:
        if not isinstance(glob, str):
            raise TypeError(f"{what}s must be a list of paths or globs; found {glob!r} in it")
        pattern = _pattern(glob)
        found = [node for node in candidates if pattern.fullmatch(node)]
        if not found and glob != "":
            raise ValueError(
                f"{what} {glob!r} matches no part of the tree; {what}s are paths or globs of nodes that hold leaves, such "
                f"as {_some(candidates)}"
            )
        for name in found:
            if name in chosen:
                raise ValueError(
                    f"{what}s overlap: {name!r} is matched by {chosen[name]!r} and by {glob!r}; remove one of the two"
                )
            chosen[name] = glob
    return [(glob, node) for node, glob in chosen.items()]


def _pattern(glob: str) -> re.Pattern[str]:
    stands_for = {"**.": r"(?:.*\.)?", ".**": r"(?:\..*)?", "**": ".*", "*": "[^.]*"}
    parts = (stands_for.get(part, re.escape(part)) for part in re.split(r"(\*\*\.|\.\*\*|\*\*|\*)", glob))
    return re.compile("".join(parts))


def _some(paths: Sequence[str], most: int = 4) -> str:
    return ", ".join(repr(p) for p in paths[:most]) + (f" and {len(paths) - most} more" if len(paths) > most else "")
