"""Groups of leaves with options of their own, and where each group's elements lie in a rank's flat shards.

A flat shard holds leaves one after another, so the leaves of one group are a few contiguous runs of it. A run is a view:
what updates it in place updates the shard, and nothing is gathered or copied.

Optimizers as pairs of functions: TorchOpt's as they are, and ``torch.optim``'s through ``torch_optimizer``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard.comm import Mesh
from funcshard.plan import BufferPlan, Plan, UnitPlan, match

__all__ = [
    "Layout",
    "Run",
    "TorchOptimizer",
    "TorchStep",
    "apply_optimizer",
    "group_leaves",
    "grouped",
    "leaves_under",
    "torch_optimizer",
    "trainable",
]


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


# each updates an element from that element's own gradient and state, so it may work on flat shards as on matrices
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip


class TorchOptimizer(NamedTuple):
    """A ``torch.optim`` class as a pair of functions; made by ``torch_optimizer``.

    Attributes:
        init: ``init(params) -> state``.
        step: ``step(grads, state, params) -> (params, state)``; the tensors of ``state`` and ``params`` are donated.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]


def torch_optimizer(
    cls: type[torch.optim.Optimizer],
    /,
    *,
    elementwise: bool | None = None,
    groups: Sequence[Mapping[str, Any]] = (),
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> TorchOptimizer:
    """Make a pair of functions of a ``torch.optim`` class, its fused kernels included.

    The state is a tree like the parameters, with a dictionary of the class's own state (``exp_avg``, ``step`` …) at each
    leaf; it is empty until the first step, as in ``torch.optim``. A step *donates* its parameters and state: they are
    updated in place and returned, so that no second copy of them ever exists, and what was passed in must not be used
    afterwards.

    Arguments:
        cls: an optimizer that updates each element by itself: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad,
            RMSprop, Rprop, ASGD, or a subclass of one.
        elementwise: ``True`` vouches for a class that is not known to be elementwise.
        groups: leaves with options of their own, ``{"paths": [paths or globs of nodes], "weight_decay": 0.0}`` each;
            leaves that no glob matches have ``options``. Each group's runs of a flat shard are updated as views, so nothing
            is gathered. The state's tensors stay whole; its scalars become a tuple, with one for each group.
        plan: the plan of the shards, if there are groups.
        mesh: the ranks, if there are groups.
        options: what the class takes (``lr``, ``weight_decay``, ``fused`` …). An option may be a function of the number
            of steps taken, which makes a schedule.

    Returns:
        The pair ``(init, step)``, for ``make_train_step``.

    Raises:
        ValueError: the class is not known to be elementwise: on flat shards it would compute something else. Groups overlap,
            match nothing, or come without plan and mesh.

    Example:
        >>> import torch, funcshard as fs
        >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=lambda step: 0.5 / (1 + step))
        >>> params = {"w": torch.ones(2)}
        >>> params, state = optimizer.step({"w": torch.ones(2)}, optimizer.init(params), params)
        >>> params["w"]
        tensor([0.5000, 0.5000])
        >>> tree = {"layer": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}
        >>> plan, mesh = fs.make_plan(tree, 1), fs.Mesh()
        >>> no_decay = {"paths": ["**.bias"], "weight_decay": 0.0}
        >>> optimizer = fs.torch_optimizer(torch.optim.AdamW, weight_decay=0.1, groups=[no_decay], plan=plan, mesh=mesh)
    """
    known = isinstance(cls, type) and issubclass(cls, _ELEMENTWISE)
    if not (known if elementwise is None else elementwise):
        names = ", ".join(c.__name__ for c in _ELEMENTWISE)
        raise ValueError(
            f"torch_optimizer takes an optimizer that updates each element by itself, because it works on flat shards; "
            f"found {getattr(cls, '__name__', cls)!r}, known are {names}: pass elementwise=True if it is one too"
        )
    if not groups:
        return TorchOptimizer(_init, TorchStep(cls, (options,), None, None))
    if plan is None or mesh is None:
        raise ValueError(
            "groups of leaves lie in flat shards as a plan says, on each rank elsewhere; found groups without both: pass "
            "plan=plan and mesh=mesh"
        )
    return TorchOptimizer(_init, grouped(cls, options, groups, plan, mesh))


def grouped(
    cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    plan: Plan,
    mesh: Mesh,
    left_out: Iterable[str] = (),
) -> TorchStep:
    """Return the step of a class with groups of leaves; those ``left_out`` are somebody else's to update."""
    group_of, more = group_leaves(plan, groups, left_out)
    return TorchStep(cls, (dict(options), *more[1:]), plan, Layout(group_of, len(more), mesh.shard.rank))


def _init(params: Any) -> Any:
    return {"steps": 0, "leaves": tree.map(lambda _: {}, params)}


@dataclass(frozen=True, slots=True)
class TorchStep:
    """The step of a ``torch.optim`` class.

    Attributes:
        cls: the class.
        options: its options, and what each further group of leaves has instead.
        plan: the plan of the shards, ``None`` where every leaf has the same options and trees are any.
        layout: which runs of the shards belong to which group.
    """

    cls: type[torch.optim.Optimizer]
    options: tuple[Mapping[str, Any], ...]
    plan: Plan | None
    layout: Layout | None

    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, unflatten = tree.flatten(params)
        owns = tree.leaves_up_to(params, state["leaves"])
        cuts: list[tuple[Run, ...] | None] = [None] * len(leaves)
        used: frozenset[int] = frozenset() if self.layout is None else frozenset(self.layout.group_of.values())
        if self.plan is not None and self.layout is not None:
            runs: dict[str, dict[str, Any]] = {name: {} for name in params}
            for unit, buffer in trainable(self.plan):
                runs[unit.name][buffer.key] = self.layout.runs(buffer)
            cuts = tree.leaves_up_to(params, runs)
        pieces = [
            _pieces(leaf.detach(), grad, cut, used) for leaf, grad, cut in zip(leaves, tree.leaves(grads), cuts, strict=True)
        ]
        if not any(pieces):  # every leaf is left out
            return params, {**state, "steps": state["steps"] + 1}
        optimizer = self._optimizer([piece for each in pieces for piece in each], state["steps"])
        for mine, own in zip(pieces, owns, strict=True):
            for piece, part in zip(mine, _split(own, mine, self.layout), strict=True):
                optimizer.state[piece.parameter] = part
        optimizer.step()
        new = [
            _join(own, mine, [optimizer.state.pop(piece.parameter, {}) for piece in mine], self.layout)
            for mine, own in zip(pieces, owns, strict=True)
        ]
        return unflatten([leaf.detach() for leaf in leaves]), {"steps": state["steps"] + 1, "leaves": unflatten(new)}

    def param_groups(self, steps: int, paths: Sequence[str]) -> list[dict[str, Any]]:
        """Return the options of each group as ``torch.optim`` writes them, with the paths of its leaves.

        Arguments:
            steps: number of steps taken, which schedules depend on.
            paths: the trainable leaves, in the order that they are wanted in.
        """
        nobody = [_Piece(torch.nn.Parameter(torch.empty(0)), group, 0, 0) for group in range(len(self.options))]
        group_of = dict.fromkeys(paths, 0) if self.layout is None else self.layout.group_of
        return [
            {**options, "params": [path for path in paths if group_of.get(path) == number]}
            for number, options in enumerate(self._optimizer(nobody, steps).param_groups)
        ]

    def _optimizer(self, pieces: Sequence[_Piece], steps: int) -> torch.optim.Optimizer:
        now = [{k: v(steps) if callable(v) else v for k, v in options.items()} for options in self.options]
        members = [[piece.parameter for piece in pieces if piece.group == group] for group in range(len(now))]
        if len(now) == 1:
            return self.cls(members[0], **now[0])
        return self.cls([{"params": own, **more} for own, more in zip(members, [{}, *now[1:]], strict=True)], **now[0])


class _Piece(NamedTuple):
    """A run of a leaf, as a parameter; or a whole leaf.

    Attributes:
        parameter: a view of the leaf.
        group: number of its group.
        start: where its elements begin among those of the leaf's state.
        stop: where they end.
    """

    parameter: torch.nn.Parameter
    group: int
    start: int
    stop: int


def _pieces(
    leaf: torch.Tensor, grad: torch.Tensor | None, runs: tuple[Run, ...] | None, groups: frozenset[int]
) -> list[_Piece]:
    grad = None if grad is None else grad.to(leaf.dtype)  # where it was kept in lower precision
    if runs is None:
        whole = torch.nn.Parameter(leaf)
        whole.grad = grad
        return [_Piece(whole, 0, 0, leaf.numel())]
    # a group that this rank has nothing of takes part with no elements: its scalars count steps like everyone's
    absent = groups - {run.group for run in runs}
    found, done = [], 0
    for run in (*runs, *(Run(group, 0, 0) for group in sorted(absent))):
        piece = torch.nn.Parameter(leaf[run.start : run.stop])
        piece.grad = None if grad is None else grad[run.start : run.stop]
        found.append(_Piece(piece, run.group, done, done := done + run.stop - run.start))
    return found


def _split(own: Mapping[str, Any], pieces: Sequence[_Piece], layout: Layout | None) -> list[dict[str, Any]]:
    """What of a leaf's state belongs to each of its pieces; ``_join`` is the inverse."""
    if layout is None:
        return [dict(own)]
    parts: list[dict[str, Any]] = [{} for _ in pieces]
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            for part, piece in zip(parts, pieces, strict=True):
                part[name] = value[piece.start : piece.stop]
            continue
        for group, scalar in enumerate(value if isinstance(value, tuple) else (value,)):
            members = [part for part, piece in zip(parts, pieces, strict=True) if piece.group == group]
            if not members:
                continue  # nobody is in that group
            further = len(members) - 1  # each piece counts for itself, so they cannot share one
            copies = scalar.expand(further).clone().unbind() if isinstance(scalar, torch.Tensor) else [scalar] * further
            for part, copy in zip(members, [scalar, *copies], strict=True):
                part[name] = copy
    return parts


def _join(
    own: Mapping[str, Any], pieces: Sequence[_Piece], parts: list[dict[str, Any]], layout: Layout | None
) -> dict[str, Any]:
    if layout is None:
        return parts[0]
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        found = [part.pop(name, None) for part in parts]
        first = next((value for value in found if value is not None), None)
        if not isinstance(first, torch.Tensor) or not first.ndim:
            of_group = {piece.group: value for piece, value in reversed(list(zip(pieces, found, strict=True)))}
            scalars = tuple(of_group.get(group) for group in range(layout.count))
            joined[name] = scalars if layout.count > 1 else scalars[0]
            continue
        flat = own[name] if name in own else first.new_zeros(pieces[-1].stop)
        for piece, value in zip(pieces, found, strict=True):
            place = flat[piece.start : piece.stop]
            if value is not None and value.data_ptr() != place.data_ptr():
                place.copy_(value)
        joined[name] = flat
    return joined


def apply_optimizer(optimizer: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Return the parameters and state after one update by either kind of pair.

    Arguments:
        optimizer: what ``torch_optimizer`` returned, or a pair ``(init, update)`` as TorchOpt and optax write it:
            ``update(grads, state, params) -> (updates, state)``, where updates are added to the parameters.
        grads: a tree like ``params``.
        state: the optimizer's state.
        params: the tree to update.
    """
    if isinstance(optimizer, TorchOptimizer):
        return optimizer.step(grads, state, params)
    _, update = optimizer
    takes = inspect.signature(update).parameters
    by_keyword = "params" in takes and takes["params"].kind is inspect.Parameter.KEYWORD_ONLY
    extra: dict[str, Any] = {"inplace": False} if "inplace" in takes else {}
    updates, state = update(grads, state, params=params, **extra) if by_keyword else update(grads, state, params, **extra)
    return tree.map(lambda leaf, change: leaf + change.to(leaf.dtype), params, updates), state
