"""``make_plan``: assign the leaves of a tree to units, and lay them out in flat buffers."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from funcshard._utils import callers_level, check_flag, table, tree, without_collection
from funcshard.plan.choice import Choice, UnitNames, read_units
from funcshard.plan.dtensor_leaves import with_placements
from funcshard.plan.freeing import FREEING, check_freeing, freeing_of
from funcshard.plan.layout import Layout, lay_out
from funcshard.plan.leaves import Leaf, names_in_order, nodes_of, read_leaves, some
from funcshard.plan.local_leaves import Local, with_local_axes
from funcshard.plan.mesh_axes import AXES, Axes, mesh_axes_of
from funcshard.plan.plan import Plan
from funcshard.plan.precision import MixedPrecision, is_one_of
from funcshard.plan.small_units import SmallGroup, check_bucket_bytes, joined_name, small_groups
from funcshard.plan.unit_plan import BufferPlan, UnitPlan, check_strategy, innermost_in

_LARGE = 2**30  # bytes of a model that is better gathered in units

_log = logging.getLogger("funcshard.plan")


def make_plan(
    params: Any,
    mesh: Any,
    *,
    units: UnitNames = (),
    strategy: str = "full_shard",
    ties: Iterable[Sequence[str]] = (),
    local: Local = (),
    offload: bool = False,
    precision: MixedPrecision | None = None,
    bucket_bytes: int | str = "auto",
    reshard_after_forward: bool | int | None = None,
    reshard_after_backward: bool = True,
) -> Plan:
    """Plan how a parameter tree is sharded: which leaves form a unit, and where each leaf lies.

    A *unit* is a group of leaves that are gathered and freed together, typically one layer of a
    model. Every leaf belongs to exactly one unit:

    - A unit owns the leaves under its path, except those that belong to a unit nested inside it.
    - The root unit ``""`` owns all leaves that lie under no other unit.
    - A tied leaf belongs to the innermost unit that holds all of its uses. A group is a unit of
      several paths.

    Each unit ravels and concatenates its leaves into flat buffers. Each buffer is padded at its end
    and cut into equal shards, one for each rank of the shard axis. Leaves that differ in dtype, or
    in whether they are trainable, lie in different buffers.

    An ``nn.Parameter``, or a parameter from ``make_functional``, is trainable if it requires a
    gradient. Other tensors are too, unless none of them requires one: then those that are floating
    point or complex are trainable. ``params["w"].to(dtype)`` and ``.detach()`` return such other
    tensors, so cast a module before ``make_functional``, or plan first.

    Planning needs no process group and no tensor data, so it works for a mesh and a model of any
    size.

    Arguments:
        params: a pytree of tensors, real or on the meta device. The planner reads only shapes,
            dtypes and ``requires_grad``. Of a DTensor it also reads the placements: the leaf is
            local along each model axis that cuts it, and the model gets a DTensor again.
        mesh: a number of ranks, ``{"replicate": R, "shard": S}`` with further axes of any name, or
            a ``Mesh``. Leaves are cut along ``shard``, and repeated along every other axis.
        units: paths of the units, which may be nested. A path may be a glob: ``*`` matches any part
            of one dotted component, ``**`` matches any number of components. If several entries
            name a module, a path counts before a glob, and a later glob before an earlier one; so
            it is for all options that take globs. The policies in ``wrap`` choose units from a
            module, and can override options for single units.

            A list or tuple of paths or globs among them is a *group*: one unit for modules that are
            neither neighbours nor under one path, such as ``["embed", "lm_head"]``. Its leaves are
            gathered and reduced in one collective, and its name joins what the list holds with
            ``+``: ``"embed+lm_head"``. A group owns a tied leaf that all of its uses lie in.

            A mapping gives units their own options: ``{"blocks.*": {}, "blocks.0": {"strategy":
            "no_shard"}, ("embed", "lm_head"): {"offload": True}}``, with ``""`` for the root. A
            unit can override ``strategy``, ``offload``, ``precision``, ``reshard_after_forward``
            and ``reshard_after_backward``.
        strategy: how units are sharded:

            - ``"full_shard"``: a unit is gathered for forward, freed, and gathered again for
              backward. The root unit is kept until its backward.
            - ``"shard_grad_op"``: a unit is gathered for forward and kept until its backward.
            - ``"no_shard"``: every rank holds all leaves, and gradients are all-reduced.

            On a mesh with a replicate axis these are hybrid strategies: units are sharded along the
            shard axis and replicated along the replicate axis. A unit may override the strategy.
        ties: groups of paths at which one tensor is used, for a tree that holds the tensor at only
            one of them. The planner finds two other kinds of ties itself: one tensor at several
            positions of the tree, and tied parameters from ``make_functional``.
        local: paths or globs of nodes whose leaves each rank keeps for itself, such as its own
            experts. The library neither shards nor gathers these leaves. Their gradient is that of
            this rank's loss, neither summed nor averaged over ranks.

            A mapping from paths or globs to mesh axes, a name or several, says along which axes the
            values differ. Call the ranks along the shard axis a row:

            - ``"replicate"``: each row has its own values, sharded over the row. The gradient is
              the mean over the row.
            - ``"shard"``: each rank of a row holds its own whole values. The gradient is the
              mean over the ranks along the replicate axis, which hold the same values.
            - ``("replicate", "shard")``: each rank has its own values.
            - a model axis, such as ``"tensor"``: the ranks along it hold different parts of one
              model. The gradient is that of the mean of all losses, as for leaves that are not
              local. It is added over the ranks that hold the same values, and not along this axis.
            - ``{"tensor": 0}``: the same, and the leaf is a slice of a larger tensor, cut along dim
              0 into equal slices. State dicts and checkpoints then hold the whole tensor.

            Without a mapping, the values differ along all axes of the mesh.
        offload: whether shards, gradients and optimizer state live on the CPU while the mesh has
            another device. A gather first moves the shard to the device, and the reduced gradient
            is moved back. A unit may override it.
        precision: dtypes in which units compute and communicate. A unit may override it. If
            ``params`` come from ``make_functional``, modules of ``precision.ignored_classes``
            become their own units in full precision, and a warning names them.
        bucket_bytes: makes groups of small units, whose collectives take longer to start than to
            run. The planner joins adjacent units of the same options and dtypes while the gathered
            buffers of the group take at most this many bytes. The name of such a group says where
            it begins and ends: ``"blocks.0…blocks.31"``. Results are the same to the bit, except
            with NCCL, which does not add in the order of ranks. ``0`` makes no groups.

            ``"auto"`` makes groups of at most 1 MiB where at least 32 adjacent modules of at most
            32 KiB each are units, and none elsewhere. If all of these units together take at most
            1 MiB, those whose ``reshard_after_forward`` is ``None`` stay gathered until their
            backward, as the root does. It only joins parameters from ``make_functional``.
        reshard_after_forward: whether units, the root included, are freed between forward and
            backward. ``None`` leaves the decision to the strategy, as described there. A number of
            ranks frees all but one slice of a unit: so many neighbours on the shard axis, such as
            the ranks of one machine, hold the unit together, and backward gathers it from them
            alone. The number divides that of the shard axis. A unit may override it.
        reshard_after_backward: whether a unit that stays gathered after forward is freed after the
            backward of every micro-batch. With ``False``, ``accumulate`` gathers the unit for the
            first micro-batch, and frees it after the last. A unit may override it.

    Returns:
        The plan. ``print(plan)`` shows its units, buffers and sizes as a table; see ``Plan``.

    Raises:
        ValueError: a path or glob matches no leaf, or a path is written twice; a group is empty, or
            one of its paths lies inside another; a strategy or axis is unknown; the mesh or
            ``bucket_bytes`` has no valid size; a unit should stay gathered after backward, but is
            freed after forward, or should be freed, but has ``"no_shard"``; a
            DTensor is placed along a data axis, along an axis that the mesh does not have, or
            otherwise than in equal slices and copies.
        TypeError: an option is of another type; a leaf is not a dense tensor, or is of a tensor
            class with its own operations, other than DTensor; a container cannot be described as
            data.

    Example:
        >>> import torch, funcshard as fs
        >>> blocks = [{"w": torch.zeros(4, 4)} for _ in range(3)]
        >>> params = {"blocks": blocks, "head": torch.zeros(4, 2)}
        >>> plan = fs.make_plan(params, 2, units=["blocks.*"])
        >>> list(plan.units)
        ['', 'blocks.0', 'blocks.1', 'blocks.2']
        >>> [leaf.path for leaf in plan.units[""].leaves]
        ['head']

    Source: the unit corresponds to a FlatParameter of Zhao et al., "PyTorch FSDP" (2023),
    https://arxiv.org/abs/2304.11277
    """
    check_strategy(strategy)
    _check_offload(offload)
    _check_precision(precision)
    limit = check_bucket_bytes(bucket_bytes)
    mesh_axes = mesh_axes_of(mesh)
    mesh_shape = (mesh_axes["replicate"], mesh_axes["shard"])
    axes = () if tuple(mesh_axes) == AXES else tuple(mesh_axes.items())
    with without_collection():
        structure, leaves = read_leaves(params, ties)
        leaves = with_placements(with_local_axes(leaves, local, mesh_axes), mesh, mesh_axes)
        uses = [leaf.paths for leaf in leaves]
        choice = read_units(units, uses)
        freeing = {
            "reshard_after_forward": reshard_after_forward,
            "reshard_after_backward": reshard_after_backward,
        }
        check_freeing(freeing, strategy)
        names, overrides = list(choice.paths), _overrides(choice, strategy)
        # Why without: the output_dtype of a plan's precision is that of the whole model's outputs.
        inner = precision and dataclasses.replace(precision, output_dtype=None)
        defaults = {"strategy": strategy, "offload": offload, **freeing}
        options: dict[str, dict[str, Any]] = {
            name: {**defaults, "precision": inner if name else precision, **overrides.get(name, {})}
            for name in ("", *names)
        }
        precisions = {name: unit_options["precision"] for name, unit_options in options.items()}
        ignored = _full_precision_modules(leaves, precisions, choice.paths)
        full_precision = set(ignored)
        paths = {"": ("",), **_inserted(ignored, choice.paths, uses)}
        chosen: dict[str, dict[str, Any]] = {}
        planned = []
        for name, layout in lay_out(structure, leaves, paths).items():
            # A module that was inserted has no options of its own.
            unit_options = chosen[name] = dict(options.get(name, {**options[""], **freeing}))
            around = full_precision.intersection(tree.upwards(paths[name][0]))
            inside = any(
                all(tree.is_under(path, module) for path in paths[name]) for module in around
            )
            if name in full_precision or (inside and "precision" not in overrides.get(name, {})):
                unit_options["precision"] = None
            unit_options["full_precision"] = name in full_precision
            planned.append(_plan_unit(name, layout, mesh_shape, axes, **unit_options))
        undecided = {
            unit.name
            for unit in planned
            if options.get(unit.name, freeing)["reshard_after_forward"] is None
        }
        modules = {leaf.index for leaf in leaves if leaf.of_module}
        groups = small_groups(planned, limit, undecided, modules)
        if groups:
            paths = _joined(groups, paths, chosen, nodes_of(uses))
            planned = [
                _plan_unit(name, layout, mesh_shape, axes, **chosen[name])
                for name, layout in lay_out(structure, leaves, paths).items()
            ]
        names_of_tree = names_in_order(params, leaves)
        plan = Plan(
            mesh_shape, structure, tuple(planned), options[""]["precision"], axes, names_of_tree
        )
    _warn_of_one_large_unit(plan)
    if _log.isEnabledFor(logging.DEBUG):
        sizes = len(plan.unit_list), len(plan.leaves), plan.world_size
        _log.debug("plan %s: %d units, %d leaves, %d ranks", plan.fingerprint(), *sizes)
    return plan


# --- units and buffers ----------------------------------------------------------------------------


def _warn_of_one_large_unit(plan: Plan) -> None:
    """Warn of a plan that gathers a large model at once: it has no units, or one for all layers."""
    if plan.mesh_shape[1] == 1 or not plan.unit_list:
        return
    sizes = [
        sum(b.padded_numel * b.itemsize for b in unit.buffers if b.shards > 1)
        for unit in plan.unit_list
    ]
    size = max(sizes)
    if size < _LARGE or 2 * size <= sum(sizes):
        return
    name = plan.unit_list[sizes.index(size)].name
    inside = (
        leaf.path.removeprefix(f"{name}.")
        for leaf in plan.leaves
        if leaf.path.startswith(f"{name}.")
    )
    children = {path.partition(".")[0] for path in inside}
    if name and len(children) > 1 and all(child.isdecimal() for child in children):
        warnings.warn(
            f"unit {name!r} holds {len(children)} modules, {table.size(size)} of the model's "
            f"{table.size(sum(sizes))}, and each call gathers all of them at once: write "
            f"units=[{name + '.*'!r}] for one unit each",
            stacklevel=callers_level(),
        )
    elif len(sizes) == 1 and not name:
        warnings.warn(
            "the plan has no units, so each call gathers the whole model at once, "
            f"{table.size(size)} on every rank: pass units=, such as units=['blocks.*'] or "
            "units=fs.wrap.by_class(Block)(module)",
            stacklevel=callers_level(),
        )


def _plan_unit(
    name: str,
    layout: Layout,
    mesh_shape: tuple[int, int],
    axes: Axes,
    *,
    strategy: str,
    offload: bool,
    precision: MixedPrecision | None,
    full_precision: bool,
    **freeing: Any,
) -> UnitPlan:
    members, part, buffers = layout
    shards = 1 if strategy == "no_shard" else mesh_shape[1]
    if shards > 1:
        buffers = tuple(
            BufferPlan(
                buffer.key,
                buffer.dtype,
                buffer.trainable,
                buffer.leaves,
                1 if "shard" in buffer.local else shards,
                buffer.local,
            )
            for buffer in buffers
        )
    forward, backward = freeing_of(name, strategy, mesh_shape[1], **freeing)
    return UnitPlan(
        name,
        strategy,
        forward,
        mesh_shape,
        part,
        buffers,
        offload,
        precision,
        full_precision,
        backward,
        members,
        axes,
    )


# --- options of single units ----------------------------------------------------------------------


def _joined(
    groups: Sequence[SmallGroup],
    paths: Mapping[str, tuple[str, ...]],
    options: dict[str, dict[str, Any]],
    nodes: Collection[str],
) -> dict[str, tuple[str, ...]]:
    """Return the paths of all units, with small ones as groups; add the options of the groups."""
    group_of = {group.units[0]: group for group in groups}
    inside = {name for group in groups for name in group.units[1:]}
    joined: dict[str, tuple[str, ...]] = {}
    for name, unit_paths in paths.items():
        group = group_of.get(name)
        if group is None:
            joined |= {} if name in inside else {name: unit_paths}
            continue
        title = joined_name(group.units)
        while title in nodes or title in paths:
            title += "+"
        joined[title] = group.units
        options[title] = options[name] | ({"reshard_after_forward": False} if group.stays else {})
    return joined


def _overrides(choice: Choice, strategy: str) -> dict[str, Mapping[str, Any]]:
    """Return the options that units override, by unit, after checking them."""
    for name, options in choice.overrides.items():
        unknown = sorted(options.keys() - {"strategy", "offload", "precision", *FREEING})
        if unknown:
            raise ValueError(
                f"unit {name!r} overrides {unknown[0]!r}; a unit can override 'strategy', "
                f"'offload', 'precision', {' and '.join(map(repr, FREEING))}"
            )
        check_strategy(options.get("strategy", strategy))
        check_freeing(options, options.get("strategy", strategy), name)
        _check_offload(options.get("offload", False))
        _check_precision(options.get("precision"))
    return choice.overrides


def _check_offload(offload: Any) -> None:
    check_flag("offload", offload, "use the overrides of a policy to offload single units")


def _check_precision(precision: Any) -> None:
    if precision is not None and not isinstance(precision, MixedPrecision):
        raise TypeError(
            f"precision must be a funcshard.MixedPrecision, or None; found {precision!r}: for "
            "units that compute in bfloat16 pass fs.MixedPrecision(param_dtype=torch.bfloat16)"
        )


def _full_precision_modules(
    leaves: Sequence[Leaf],
    precisions: Mapping[str, MixedPrecision | None],
    paths: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the paths of the outermost modules whose class the precision of their unit ignores.

    Arguments:
        leaves: all leaves.
        precisions: the precision of each unit by name, including the root.
        paths: the paths of each unit by name, without the root.
    """
    class_names: dict[str, str] = {}
    # Why first: most models have no module of these classes, and few classes.
    ignored = {
        name
        for precision in precisions.values()
        if precision is not None
        for name in precision.ignored_classes
    }
    around = {classes for leaf in leaves for classes in leaf.classes()} if ignored else set()
    if not any(is_one_of(cls, ignored) for cls in {cls for classes in around for cls in classes}):
        return []
    unit_of = innermost_in(paths)
    for leaf in leaves:
        for path in leaf.paths:
            for module, cls in leaf.modules(path):
                if any(node in class_names for node in tree.upwards(module)):
                    break
                precision = precisions[unit_of(module) or ""]
                if module and precision is not None and is_one_of(cls, precision.ignored_classes):
                    class_names[module] = cls.__name__
                    break
    if class_names:
        names = ", ".join(sorted(set(class_names.values())))
        warnings.warn(
            f"ignored_classes of the precision hold {names}: {some(list(class_names))} become units of "
            "their own, in full precision",
            stacklevel=callers_level(),
        )
    return list(class_names)


def _inserted(
    modules: Sequence[str], units: Mapping[str, tuple[str, ...]], uses: Sequence[tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return the paths of ``units`` with each of ``modules`` inserted in the order of leaves.

    Most models call their modules in this order, and plan order is the default order of the
    schedule.
    """
    if not modules:
        return dict(units)
    first: dict[str, int] = {}  # the first leaf of each node
    for leaf_index, used in enumerate(uses):
        for path in used:
            for node in tree.upwards(path):
                first.setdefault(node, leaf_index)
    # A module that leaves its group becomes a unit.
    alone = set(modules)
    groups = {
        name: tuple(path for path in nodes if path not in alone)
        for name, nodes in units.items()
        if nodes != (name,)
    }
    inserted = [
        (name, groups.get(name, nodes)) for name, nodes in units.items() if groups.get(name, nodes)
    ]
    # The highest first leaf of the units up to each one: it rises, so a place is found without a
    # search, before the first unit that begins after the module.
    highest = list(
        itertools.accumulate((min(first[node] for node in nodes) for _, nodes in inserted), max)
    )
    for module in modules:
        if module not in units:
            place = bisect.bisect_right(highest, first[module])
            inserted.insert(place, (module, (module,)))
            highest.insert(place, first[module])
    return dict(inserted)
