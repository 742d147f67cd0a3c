"""``make_plan``: assign the leaves of a tree to units, and lay them out in flat buffers."""

from __future__ import annotations

import itertools
import logging
import operator
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from funcshard._utils import table, tree
from funcshard._utils.options import check_count, some
from funcshard._utils.process_state import without_collection
from funcshard._utils.tensors import is_dtensor
from funcshard._utils.torch_private import callers_level
from funcshard.plan.layout import (
    Leaf,
    module_classes,
    names_in_order,
    plan_units,
    prefix_of,
    read_leaves,
)
from funcshard.plan.leaf_options import (
    Local,
    StorageByGlob,
    with_local_axes,
    with_packing,
    with_placements,
)
from funcshard.plan.mesh_axes import AXES, Axes, mesh_axes_of
from funcshard.plan.plan import Plan
from funcshard.plan.precision import MixedPrecision, is_one_of
from funcshard.plan.unit_options import (
    UnitNames,
    check_options,
    free_name,
    nodes_of,
    read_units,
)
from funcshard.plan.unit_plan import UnitPlan, innermost_in

_LARGE = 2**30  # bytes of a model that is better gathered in units

_log = logging.getLogger("funcshard.plan")


def make_plan(
    params: Any,
    mesh: Any,
    *,
    units: UnitNames = (),
    strategy: str = "full_shard",
    local: Local = (),
    offload: bool = False,
    precision: MixedPrecision | None = None,
    bucket_bytes: int | str = "auto",
    reshard_after_forward: bool | int | None = None,
    storage: StorageByGlob | None = None,
) -> Plan:
    """Plan how a parameter tree is sharded: which leaves form a unit, and where each leaf lies.

    A *unit* is a group of leaves that are gathered and freed together, typically one layer. It owns
    the leaves under its path, except those of a unit nested inside it. The root unit ``""`` owns
    the rest. A tied leaf belongs to the innermost unit that holds all of its uses. The planner
    knows the ties of ``make_functional``, and one tensor at several positions of the tree.

    Each unit ravels and concatenates its leaves into flat buffers, one for each dtype, and separate
    ones for frozen leaves. A buffer is padded at its end and cut into equal shards, one for each
    rank of the shard axis.

    An ``nn.Parameter``, or a parameter from ``make_functional``, is trainable if it requires a
    gradient. Other tensors are too, unless none of them requires one: then those that are floating
    point or complex are trainable. ``params["w"].to(dtype)`` and ``.detach()`` return such other
    tensors, so cast your module before ``make_functional``, or plan first.

    You need no process group and no tensor data, so you can plan for any mesh.

    Arguments:
        params: a pytree of tensors, real or on the meta device. The planner reads shapes, dtypes,
            ``requires_grad``, and the placements of DTensors: these are local along each model axis
            that cuts them, and the model gets DTensors again.
        mesh: a number of ranks, ``{"replicate": R, "shard": S}`` with further axes of any name, or
            a ``Mesh``. Leaves are cut along ``shard``, and repeated along every other axis.
        units: paths of the units, which may be nested. A path may be a glob: ``*`` matches any part
            of one dotted component, ``**`` any number of components. If several entries name a
            module, a path counts before a glob, and a later glob before an earlier one; so it is
            for all options that take globs. The policies in ``wrap`` choose units from your module.

            A list or tuple of paths or globs among them is a *group*: one unit for modules that are
            neither neighbours nor under one path. Its name joins them with ``+``:
            ``["embed", "lm_head"]`` is ``"embed+lm_head"``.

            With a mapping you give units their own options, with ``""`` for the root:
            ``{"blocks.*": {}, "blocks.0": {"strategy": "no_shard"}, ("embed", "lm_head"):
            {"offload": True}}``. A unit can override ``strategy``, ``offload``, ``precision`` and
            ``reshard_after_forward``. It also has the option ``reshard_after_backward``: with
            ``False``, ``accumulate`` gathers a unit that stays gathered after forward for the first
            micro-batch, and frees it after the last.
        strategy: how units are sharded:

            - ``"full_shard"``: a unit is gathered for forward, freed, and gathered again for
              backward. The root unit is kept until its backward.
            - ``"shard_grad_op"``: a unit is gathered for forward and kept until its backward.
            - ``"no_shard"``: every rank holds all leaves, and gradients are all-reduced.

            With a replicate axis these are hybrid strategies: units are sharded along the shard
            axis and replicated along the replicate axis.
        local: paths or globs of nodes whose leaves each rank keeps for itself, such as your
            experts. They are neither sharded nor gathered, and their gradient is that of this
            rank's loss.

            With a mapping you say along which axes the values differ. ``{"w": "replicate"}``: each
            row of ranks along the shard axis has its own values, sharded over the row.
            ``{"w": "shard"}``: each rank of a row holds its own whole values. ``{"w": "tensor"}``:
            the ranks along a model axis hold different parts of one model.
            ``{"w": {"tensor": 0}}``: the same, and the leaf is a slice of a larger tensor, cut
            along dim 0 into equal slices; state dicts and checkpoints then hold the whole tensor.
            See docs/gradients.md for the gradients.
        offload: whether shards, gradients and optimizer state live on the CPU while the mesh has
            another device. A gather first moves the shard to the device.
        precision: dtypes in which units compute and communicate. If ``params`` come from
            ``make_functional``, modules of ``precision.ignored_classes`` become their own units in
            full precision, and a warning names them.
        bucket_bytes: joins adjacent small units of the same options and dtypes into groups whose
            gathered buffers take at most this many bytes. ``0`` makes no groups. ``"auto"`` joins
            32 or more adjacent modules of at most 32 KiB of ``make_functional``; see
            docs/design.md.
        reshard_after_forward: whether units, the root included, are freed between forward and
            backward; ``None``: as the strategy says. With a number of ranks, which divides that of
            the shard axis, so many neighbours, such as the ranks of one machine, hold a unit
            together, and backward gathers it from them.
        storage: how frozen floating-point leaves are stored, by paths or globs of nodes:
            ``{"base": fs.nf4(), "base.*.norm": None}``. A value is ``fs.nf4()``, ``fs.int8()``,
            ``fs.fp8()``, a pair ``(encode, decode)`` as in ``Storage``, or ``None``. Leaves are
            stored and gathered packed, and decoded for each forward and backward of their unit.

    Returns:
        The plan. ``print(plan)`` shows you its units, buffers and sizes.

    Raises:
        ValueError: a path or glob matches no leaf, or a path is written twice; a group is empty, or
            one of its paths lies inside another; a strategy or axis is unknown; the mesh or
            ``bucket_bytes`` has no valid size; options of a unit contradict each other; a DTensor
            isn't in equal slices or copies along model axes; an entry of ``storage`` matches no
            frozen leaf, or a slice.
        TypeError: an option is of another type; a leaf is not a dense tensor or a DTensor; a
            container cannot be described as data.

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
    reshard_options = {
        "reshard_after_forward": reshard_after_forward,
        "reshard_after_backward": True,
    }
    defaults = {
        "strategy": strategy,
        "offload": offload,
        "precision": precision,
        **reshard_options,
    }
    check_options(defaults, strategy)
    group_bytes = None
    if not isinstance(bucket_bytes, str) or bucket_bytes != "auto":
        remedy = 'pass 0 for no groups, or "auto"'
        group_bytes = check_count(
            "bucket_bytes", bucket_bytes, 0, of="bytes", remedy=remedy
        )
    mesh_axes = mesh_axes_of(mesh)
    # Why () for the usual axes: plans were stored before there were others, and stay equal.
    axes: Axes = ()
    if tuple(mesh_axes) != AXES:
        axes = tuple(mesh_axes.items())
    with without_collection():
        structure, leaves, tensors = read_leaves(params)
        if local:
            leaves = with_local_axes(leaves, local, mesh_axes)
        if any(map(is_dtensor, tensors)):
            leaves = with_placements(leaves, tensors, mesh, mesh_axes)
        if storage:
            leaves = with_packing(leaves, storage)
        leaf_uses = tuple([leaf.paths for leaf in leaves])
        paths, overrides = read_units(units, leaf_uses, strategy)
        # Note: the options of all units by name; units that the planner makes are added below.
        options = {"": {**defaults, **overrides.get("", {})}}
        # Why without: the output_dtype of a plan's precision is that of the whole model's outputs.
        inner_precision = precision and replace(precision, output_dtype=None)
        for unit_name in paths:
            inner_options = {**defaults, "precision": inner_precision}
            options.setdefault(unit_name, {**inner_options, **overrides.get(unit_name, {})})
        root_precision = options[""]["precision"]
        full_precision: dict[str, str] = {}
        if any(unit_options["precision"] for unit_options in options.values()):
            full_precision = _full_precision_modules(leaves, tensors, options, paths)
        if full_precision:
            paths = _with_modules(paths, full_precision, leaf_uses)
        paths = {"": ("",), **paths}
        for unit_name in paths:
            # A module that has become a unit has no options of its own.
            unit_options = options.setdefault(unit_name, {**options[""], **reshard_options})
            unit_options["full_precision"] = unit_name in full_precision
        if full_precision:
            module_around = innermost_in({path: (path,) for path in full_precision})
            for unit_name, unit_paths in paths.items():
                modules_around = {module_around(path) for path in unit_paths}
                is_inside = len(modules_around) == 1 and None not in modules_around
                # Note: a unit inside a module of full precision has no precision either, unless the
                # user gave it one.
                has_precision = "precision" in overrides.get(unit_name, {})
                if unit_name in full_precision or (is_inside and not has_precision):
                    options[unit_name]["precision"] = None
        unit_plans = plan_units(structure, leaves, paths, options, axes, mesh_axes)
        unit_groups: dict[tuple[str, ...], bool] = {}
        if group_bytes or (group_bytes is None and len(unit_plans) >= _LEAST_UNITS):
            undecided_units = [
                name for name in paths if options[name]["reshard_after_forward"] is None
            ]
            from_modules = {
                leaf.leaf_index
                for leaf, leaf_tensor in zip(leaves, tensors, strict=True)
                if module_classes(leaf_tensor)
            }
            # Why planned twice: sizes decide which units join, and they follow from the layout.
            unit_groups = small_groups(
                unit_plans, group_bytes, undecided_units, from_modules
            )
        for names, stays_gathered in unit_groups.items():
            group_name = free_name(
                f"{names[0]}{_TO}{names[-1]}", nodes_of(leaf_uses), paths
            )
            # The group takes the place of its first unit, whose options are those of all.
            options[group_name] = dict(options[names[0]])
            if stays_gathered:
                options[group_name]["reshard_after_forward"] = False
            joined = {**dict.fromkeys(names), names[0]: (group_name, names)}
            placed = [joined.get(name, (name, paths[name])) for name in paths]
            paths = dict(filter(None, placed))
        if unit_groups:
            unit_plans = plan_units(structure, leaves, paths, options, axes, mesh_axes)
        plan = Plan(
            mesh_shape=(mesh_axes["replicate"], mesh_axes["shard"]),
            structure=structure,
            unit_list=unit_plans,
            precision=root_precision,
            axes=axes,
            names=names_in_order(params, leaves),
        )
    _warn_of_one_large_unit(plan)
    # Why asked first: the fingerprint of a large plan takes milliseconds.
    if _log.isEnabledFor(logging.DEBUG):
        sizes = len(plan.unit_list), len(plan.leaves), plan.world_size
        _log.debug("plan %s: %d units, %d leaves, %d ranks", plan.fingerprint(), *sizes)
    return plan


def _warn_of_one_large_unit(plan: Plan) -> None:
    """Warn of a plan that gathers a large model at once."""
    gathered_bytes = {
        unit.name: sum(b.padded_numel * b.itemsize for b in unit.buffers if b.shards > 1)
        for unit in plan.unit_list
    }
    unit_name = max(gathered_bytes, key=gathered_bytes.__getitem__, default="")
    unit_bytes, total_bytes = gathered_bytes.get(unit_name, 0), sum(gathered_bytes.values())
    if unit_bytes < _LARGE or 2 * unit_bytes <= total_bytes:
        return
    inside_paths = [
        leaf.path for leaf in plan.leaves if tree.is_under(leaf.path, unit_name)
    ]
    children = {
        path.removeprefix(f"{unit_name}.").partition(".")[0] for path in inside_paths
    }
    warning_text = ""
    # Modules with numbers are layers, most likely.
    if unit_name and len(children) > 1 and all(child.isdecimal() for child in children):
        warning_text = (
            f"unit {unit_name!r} holds {len(children)} modules, {table.size(unit_bytes)} of the "
            f"model's {table.size(total_bytes)}, and each call gathers all of them at once: write "
            f"units=[{unit_name + '.*'!r}] for one unit each"
        )
    elif not unit_name and len(gathered_bytes) == 1:
        warning_text = (
            "the plan has no units, so each call gathers the whole model at once, "
            f"{table.size(unit_bytes)} on every rank: pass units=, such as units=['blocks.*'] or "
            "units=fs.wrap.by_class(Block)(module)"
        )
    if warning_text:
        warnings.warn(warning_text, stacklevel=callers_level())


# --- units that the planner makes itself ----------------------------------------------------------


def _full_precision_modules(
    leaves: Sequence[Leaf],
    tensors: Sequence[torch.Tensor],
    options: Mapping[str, Mapping[str, Any]],
    paths: Mapping[str, Sequence[str]],
) -> dict[str, str]:
    """Return the outermost modules whose class the precision of their unit ignores, by path."""
    ignored = {
        unit: unit_options["precision"].ignored_classes
        for unit, unit_options in options.items()
        if unit_options["precision"]
    }
    all_ignored = {name for class_names in ignored.values() for name in class_names}
    # Why first: most models have no module of these classes, and few classes.
    class_chains = {
        chain for leaf_tensor in tensors for chain in module_classes(leaf_tensor).values()
    }
    if not any(is_one_of(cls, all_ignored) for chain in class_chains for cls in chain):
        return {}
    unit_of = innermost_in(paths)
    class_names: dict[str, str] = {}
    for leaf, leaf_tensor in zip(leaves, tensors, strict=True):
        for path in leaf.paths:
            for module_path, cls in _modules_around(path, leaf_tensor):
                # Modules inside one of full precision belong to it.
                if module_path in class_names:
                    break
                if module_path and is_one_of(
                    cls, ignored.get(unit_of(module_path) or "", ())
                ):
                    class_names[module_path] = cls.__name__
                    break
    if class_names:
        warnings.warn(
            f"ignored_classes of the precision hold {', '.join(sorted({*class_names.values()}))}: "
            f"{some(list(class_names))} become units of their own, in full precision",
            stacklevel=callers_level(),
        )
    return class_names


def _modules_around(path: str, tensor: torch.Tensor) -> Iterable[tuple[str, type]]:
    """Return path and class of each module around the use of a parameter, outermost first."""
    for use_name, classes in module_classes(tensor).items():
        if prefix_of(path, use_name) is not None:
            nodes = list(tree.upwards(path))[1:]
            # The module itself may be a subtree of the tree: its classes are the innermost ones.
            return reversed([*zip(nodes, reversed(classes), strict=False)])
    return ()


def _with_modules(
    units: Mapping[str, tuple[str, ...]],
    modules: Collection[str],
    uses: Sequence[tuple[str, ...]],
) -> dict[str, tuple[str, ...]]:
    """Return the paths of ``units`` with those of ``modules`` in the order of leaves."""
    # Why the order of leaves: most models call their modules in it, and it is the schedule's
    # default.
    first_leaves: dict[str, int] = {}  # by node
    for leaf_index, paths in enumerate(uses):
        for path in paths:
            for node in tree.upwards(path):
                first_leaves.setdefault(node, leaf_index)
    placed_units: list[tuple[int, str, tuple[str, ...]]] = []
    # The place of a unit: its first leaf, or that of an earlier unit, whichever is later.
    first_leaf = 0
    for unit_name, unit_paths in units.items():
        # A module that leaves its group becomes a unit.
        if unit_paths != (unit_name,):
            unit_paths = tuple(path for path in unit_paths if path not in modules)
        if unit_paths:
            # Why the highest so far: units keep the order in which the user names them.
            first_leaf = max(first_leaf, min(first_leaves[path] for path in unit_paths))
            placed_units.append((first_leaf, unit_name, unit_paths))
    placed_units += [
        (first_leaves[path], path, (path,)) for path in modules if path not in units
    ]
    placed_units.sort(key=operator.itemgetter(0))
    return {unit_name: unit_paths for _, unit_name, unit_paths in placed_units}


# --- small units ----------------------------------------------------------------------------------


_TO = "…"  # between the first and the last unit in the name of a group

# The rule of "auto": at least so many adjacent units of at most so many gathered bytes form
# groups, of at most so many bytes.
# Why sizes and options alone: every rank and every process has to make the same groups.
_LEAST_UNITS = 32
_GROUP_BYTES = 1 << 20
_SMALL_UNIT = _GROUP_BYTES // _LEAST_UNITS


def ends_of(name: str) -> list[str]:
    """Return the ends of a group of small units; for another unit, its name."""
    return name.split(_TO)


def small_groups(
    units: Sequence[UnitPlan],
    limit: int | None,
    undecided: Collection[str],
    modules: Collection[int],
) -> dict[tuple[str, ...], bool]:
    """Return the groups that small units of a plan form.

    Arguments:
        units: the units in plan order.
        limit: the most gathered bytes of a group; ``None`` for the rule.
        undecided: the units whose ``reshard_after_forward`` no option sets.
        modules: the indices of the leaves that ``make_functional`` returned.

    Returns:
        For the names of each group, whether it stays gathered until backward although its strategy
        frees it.
    """
    # Note: gathered bytes, with padding and in the dtype that travels.
    unit_bytes = [
        sum(
            buffer.model_numel * unit.dtypes(buffer).computed.itemsize
            for buffer in unit.buffers
        )
        for unit in units
    ]
    unit_keys = [_key(unit, undecided) for unit in units]
    kept_units: set[str] = set()
    if limit is None:
        limit = _GROUP_BYTES
        for i, unit in enumerate(units):
            # Why only modules: programs by hand look their units up by name.
            if unit_bytes[i] > _SMALL_UNIT or any(
                x.index not in modules for x in unit.leaves
            ):
                unit_keys[i] = None
        key_runs = [list(run) for _, run in itertools.groupby(unit_keys)]
        # Why a least number: the names of a few units are worth more than the microseconds.
        unit_keys = [
            key if len(run) >= _LEAST_UNITS else None for run in key_runs for key in run
        ]
        small_bytes = [
            unit_size
            for unit_size, unit_key in zip(unit_bytes, unit_keys, strict=True)
            if unit_key is not None
        ]
        if sum(small_bytes) <= limit:
            freed_units = {unit.name for unit in units if unit.reshard_after_forward}
            kept_units = freed_units.intersection(undecided)
    return {
        names: names[0] in kept_units
        for names in _filled(units, unit_bytes, unit_keys, limit)
    }


def _key(unit: UnitPlan, undecided: Collection[str]) -> tuple[Any, ...] | None:
    """Return all in which the units of a group agree; ``None`` for a unit that joins none."""
    # The root is gathered first anyway, and a group has its name from the user.
    if unit.name == "" or unit.members:
        return None
    buffers = [(buffer.key, buffer.local) for buffer in unit.buffers]
    reshard_options = (
        unit.reshard_after_forward,
        unit.name in undecided,
        unit.reshard_after_backward,
    )
    return (
        unit.strategy,
        reshard_options,
        unit.offload,
        unit.precision,
        unit.full_precision,
        buffers,
    )


def _filled(
    units: Sequence[UnitPlan], sizes: Sequence[int], keys: Sequence[Any], limit: int
) -> list[tuple[str, ...]]:
    """Return groups of adjacent units whose gathered buffers take at most ``limit`` bytes."""
    groups: list[dict[str, None]] = [{}]
    nodes_around: set[str] = set()  # the nodes that hold a unit of the last group
    last_key, total_bytes = None, 0
    for unit, unit_size, unit_key in zip(units, sizes, keys, strict=True):
        if unit_key is None or unit_size > limit:
            last_key = None
            continue
        nodes_above = [*tree.upwards(unit.name)]
        # Why: a unit and one inside it run at the same time, so they cannot be one.
        is_nested = unit.name in nodes_around or not groups[-1].keys().isdisjoint(
            nodes_above
        )
        if unit_key != last_key or total_bytes + unit_size > limit or is_nested:
            groups.append({})
            nodes_around, last_key, total_bytes = set(), unit_key, 0
        groups[-1][unit.name] = None
        nodes_around.update(nodes_above)
        total_bytes += unit_size
    return [tuple(unit_group) for unit_group in groups if len(unit_group) > 1]
