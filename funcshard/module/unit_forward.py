"""How the module of a unit runs inside one call of ``fully_shard``.

Every call has module objects of its own (see ``skeleton``). During a call, attributes of a unit's
module object hide ``forward`` and the methods of ``methods=``, and enter the unit (``UnitEntry``);
its class stays as it is. User code calls the module as before, in any order, any number of times.

While the unit runs, the object has no such attributes. So a method that calls another one, or
``forward``, of the same module does not gather the unit again, and neither does a checkpoint inside
the method, which calls another one again from backward.

``UnitRun.enter`` asks the prefetcher of the call (``UnitCall``) for the unit's all-gathers, and
runs the forward through the combinators ``unshard`` and ``reshard``. They call
``forward_with_leaves``, which puts the gathered leaves into the parameter tables of the unit's
modules while it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from funcshard._utils import (
    address,
    forget_parametrized,
    is_transformed,
    tensors_in,
    transform_level,
    transforms_active,
    tree,
    untraced,
    version,
)
from funcshard.comm import Mesh, check_same
from funcshard.core import (
    BufferComm,
    Gathered,
    Prefetcher,
    RecomputeParams,
    ScheduleLearner,
    Shards,
    Unshard,
    current_unit,
    grad_mode,
    hooks_allowed,
    reshard,
    start_unit,
    unshard_list,
)
from funcshard.core import remat as rematerialised
from funcshard.module.skeleton import Skeleton
from funcshard.plan import UnitPlan

Forward = Callable[[Any, Any], Any]  # of args and kwargs
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
UnitMethods = Mapping[str, Callable[..., Any]]  # name -> the method that runs through the unit

# The parameter tables that hold a unit's leaves: path of a module below the unit's module -> (key
# in the module's parameter table -> index of the leaf in the unit).
TableEntries = tuple[tuple[tuple[str, ...], dict[str, int]], ...]


@dataclass(slots=True, eq=False)
class UnitCall:
    """The part of one call that its units share.

    Attributes:
        runs: how each unit runs, by name.
        shards: the shards that the units read.
        prefetcher: gathers the units; ``None`` under a transform, where each unit gathers itself.
        mesh: the ranks, while they still compare the order of units.
        level: the number of ``torch.func`` transforms around the call.
        used: by unit, version and address of each shard that forward used.
        groups: the groups that are gathered now, and the numbers of the modules that have not run.
    """

    runs: Mapping[str, UnitRun]
    shards: dict[str, Mapping[str, torch.Tensor]]
    prefetcher: Prefetcher | None
    mesh: Mesh | None
    level: int
    used: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    groups: dict[str, tuple[Gathered, set[int]]] = field(default_factory=dict)

    @classmethod
    def start(
        cls, runs: Mapping[str, UnitRun], shards: Shards, learner: ScheduleLearner, mesh: Mesh
    ) -> UnitCall:
        """Return the shared part of a new call."""
        prefetcher = None
        if not transforms_active():
            prefetcher = Prefetcher(
                learner.schedule,
                lambda name: start_unit(runs[name].f, shards[name]),
                known=learner.known,
                inside=learner.inside,
            )
        return cls(
            runs, dict(shards), prefetcher, None if learner.known else mesh, transform_level()
        )

    def close_groups(self) -> None:
        """Free the groups of which a module was not called."""
        while self.groups:
            self.groups.popitem()[1][0].close()

    def note_used(self, unit: UnitPlan, shard: Mapping[str, torch.Tensor], *, again: bool) -> None:
        """Note which data forward uses; raise if backward would compute again from other data."""
        if not torch.is_grad_enabled():  # in inference mode tensors have no version
            return
        if any(map(is_transformed, shard.values())):
            raise ValueError(
                f"a shard of unit {unit.title!r} belongs to a torch.func transform that has ended: "
                "it left the transform, or torch.utils.checkpoint computes again outside of it; "
                "use fs.remat, which computes again inside"
            )
        versions_now = [(version(local), address(local)) for local in shard.values()]
        if not again:
            self.used[unit.name] = versions_now
        elif self.used.get(unit.name, versions_now) != versions_now:
            raise RuntimeError(
                f"a shard of unit {unit.title!r} was modified in place, or got other data, between "
                "forward and backward, which computes a part of forward again, with other values; "
                "update shards after backward"
            )


@dataclass(frozen=True, slots=True, eq=False)
class UnitRun:
    """How one unit runs inside a call: which module it is, and its forward through the combinators.

    Attributes:
        path: path of the module.
        index: index of the module in the skeleton.
        f: ``unshard`` of the module's forward, or ``reshard``, if the unit is freed after forward.
        remat: whether backward computes the forward again.
        members: how each module of a group runs by itself. The other attributes are then those of
            the first one.
    """

    path: str
    index: int
    f: Unshard
    remat: bool
    members: tuple[UnitRun, ...] = ()

    @classmethod
    def of(
        cls,
        unit: UnitPlan,
        skeleton: Skeleton,
        mesh: Mesh,
        comms: Sequence[BufferComm],
        *,
        remat: Collection[str],
        indices: Mapping[str, int],
        methods: Mapping[int, Sequence[str]],
    ) -> UnitRun:
        """Return how a unit runs.

        Arguments:
            unit: the unit.
            skeleton: the module tree.
            mesh: the ranks.
            comms: the communication of the unit's buffers.
            remat: the paths of the modules that backward computes again.
            indices: the index of each module, by its path; it lacks paths at which there is none.
            methods: the methods besides ``forward`` that enter units, by index of the module.

        Raises:
            ValueError: the unit is not a module with a forward, or a hook of ``torch.nn.utils``
                needs its parameters before forward.
        """
        table_modules = []
        for path in unit.paths:
            index = _check_module(unit, path, indices.get(path), skeleton, methods)
            apply = functools.partial(forward_with_leaves, table_entries(unit, path, skeleton))
            f = unshard_list(apply, unit, mesh, comms)
            table_modules.append(
                cls(path, index, reshard(f) if unit.reshard_after_forward else f, path in remat)
            )
        return (
            dataclasses.replace(table_modules[0], members=tuple(table_modules))
            if unit.members
            else table_modules[0]
        )

    @property
    def modules(self) -> tuple[UnitRun, ...]:
        """How each module of the unit runs: those of a group, or the only one."""
        return self.members or (self,)

    def entries(self, call: UnitCall) -> list[tuple[int, Callable[..., Any]]]:
        """Return the index of each module, and the function by which a call enters it."""
        if not self.members:
            return [
                (
                    self.index,
                    functools.partial(self.enter_recomputed if self.remat else self.enter, call),
                )
            ]
        return [
            (member.index, functools.partial(self.enter_member, call, number))
            for number, member in enumerate(self.members)
        ]

    @untraced
    def enter(
        self, call: UnitCall, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs
    ) -> Any:
        """Gather the unit and run one module of it as part of a call."""
        gathered = self._gather(call, args, kwargs)
        try:
            return gathered.run(self.f, module, forward, args, kwargs)
        finally:
            gathered.close()

    def _gather(self, call: UnitCall, args: Args, kwargs: Kwargs) -> Gathered:
        unit, shard, prefetcher = self.f.unit, call.shards[self.f.unit.name], call.prefetcher
        # A transform inside the call has to see the all-gather, which the unit then starts itself.
        if prefetcher is None or transforms_active():
            return self.f.open(shard)
        if call.mesh is not None:
            check_order(call.mesh, f"unit {unit.title!r}", prefetcher)
        handles = prefetcher.pre_forward(unit.name, stays=not self.f.freed)
        if not self.f.freed:  # a unit that is gathered again in backward compares for itself
            call.note_used(unit, shard, again=handles is None)
            handles = self.f.stay_gathered(
                shard, handles, needed=self._backward_needs(args, kwargs)
            )
        return self.f.open(shard, handles, prefetcher)

    @untraced
    def enter_member(
        self,
        call: UnitCall,
        number: int,
        module: nn.Module,
        forward: Forward,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run one module of a group as part of a call.

        The module that comes first gathers the group, which is freed when all of its modules have
        run, or at the end of the call. A module that backward computes again, or that is inside a
        transform that the call is not, gathers the group for itself.
        """
        member, prefetcher = self.members[number], call.prefetcher
        if prefetcher is None:
            alone = member.remat or transform_level() != call.level
        else:
            alone = prefetcher.returned or not hooks_allowed()
        if alone:
            enter = member.enter_recomputed if member.remat else member.enter
            return enter(call, module, forward, args, kwargs)
        name = self.f.unit.name
        group, members_left = call.groups.get(name) or (None, set(range(len(self.members))))
        if group is None or group.mode != grad_mode():
            if group is not None:
                group.close()
            group = self._gather(call, args, kwargs)
            call.groups[name] = group, members_left
        try:
            run = group.run_recomputed if member.remat else group.run
            return run(member.f, module, forward, args, kwargs)
        finally:
            members_left.discard(number)
            if not members_left and name in call.groups and call.groups[name][1] is members_left:
                call.groups.pop(name)[0].close()

    def _backward_needs(self, args: Any, kwargs: Any) -> bool:
        """Return whether backward may need the leaves of a unit that runs with these inputs."""
        if not torch.is_grad_enabled():
            return False
        # Why members: these are the inputs of the first module of a group alone.
        return (
            self.f.trainable
            or bool(self.members)
            or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        )

    @untraced
    def enter_recomputed(
        self, call: UnitCall, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs
    ) -> Any:
        """Run the unit under ``remat``, as a function of every tensor to differentiate by."""
        # Why buffers: under a transform the call's copies of buffers belong to the transform, so
        # they have to be arguments and results.
        entries = (
            []
            if hooks_allowed()
            else [
                (submodule, name) for submodule in module.modules() for name in submodule._buffers
            ]
        )

        def unit(shards: dict[str, Any], buffers: list[Any], args: Args, kwargs: Kwargs) -> Any:
            shards_before = call.shards
            call.shards = {**shards_before, **shards}
            own_buffers = {
                id(buffer): buffer if buffer is None else buffer.clone() for buffer in buffers
            }
            try:
                _set_buffers(entries, [own_buffers[id(buffer)] for buffer in buffers])
                out = self.enter(call, module, forward, args, kwargs)
                return out, _get_buffers(entries)
            finally:
                call.shards = shards_before
                # They have no graph in forward, and another one in backward.
                forget_parametrized(module)

        below = {
            name: shard
            for name, shard in call.shards.items()
            if any(
                tree.is_under(unit_module.path, self.path)
                for unit_module in call.runs[name].modules
            )
        }
        out, buffers = rematerialised(unit)(below, _get_buffers(entries), args, kwargs)
        _set_buffers(entries, buffers)
        return out


def check_order(mesh: Mesh, found: str, prefetcher: Prefetcher) -> None:
    """Raise on every rank unless all come to the same unit; ``found`` is that of this rank."""
    remedy = (
        "let every rank call the same units in one order, equally often; if generate() stops at "
        "different times, ask for equally many tokens"
    )
    check_same(
        mesh, f"{found} at position {len(prefetcher.ran)}", "the order of units", remedy=remedy
    )


def _get_buffers(entries: list[tuple[nn.Module, str]]) -> list[Any]:
    return [module._buffers[name] for module, name in entries]


def _set_buffers(entries: list[tuple[nn.Module, str]], buffers: list[Any]) -> None:
    for (module, name), buffer in zip(entries, buffers, strict=True):
        module._buffers[name] = buffer


def _check_module(
    unit: UnitPlan,
    path: str,
    index: int | None,
    skeleton: Skeleton,
    methods: Mapping[int, Sequence[str]],
) -> int:
    """Return the index of a module of ``unit``, after checking that it has something to enter."""
    title = repr(unit.title) if not unit.members else f"{unit.title!r}, its module {path!r},"
    own_class = None if index is None else skeleton.specs[index].cls
    if (
        index is None
        or own_class is None
        or (path and own_class.forward is nn.Module.forward and not methods.get(index))
    ):
        found_module = (
            "no module of this model"
            if own_class is None
            else f"a {own_class.__name__}, which has no forward of its own"
        )
        raise ValueError(
            f"unit {title} is {found_module}; a unit's parameters are gathered when its forward is called: "
            "choose the modules that are called, such as its children, or name its methods in "
            "fully_shard(methods=...)"
        )
    for hook in skeleton.specs[index].attributes.get("_forward_pre_hooks", {}).values():
        if path and type(hook).__module__.startswith("torch.nn.utils."):
            raise ValueError(
                f"unit {title} has a hook of {type(hook).__module__} ({type(hook).__name__}), "
                "which computes a weight from parameters before the unit's forward, and they are "
                "gathered only during that forward: use the functions of "
                "torch.nn.utils.parametrizations, call prune.remove, or make a module around "
                f"{path!r} the unit"
            )
    return index


# --- entering a unit ------------------------------------------------------------------------------


def through_unit(
    cls: type[nn.Module], name: str, compiled: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a method that runs a method of ``cls`` through the unit of the module.

    Arguments:
        cls: the class.
        name: the name of the method.
        compiled: what runs in place of the class's method.
    """

    @functools.wraps(getattr(cls, name))
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        module: Any = self() if type(self) is weakref.ref else self

        # Why around the method: backward may run it again, without entering the unit here.
        def inside(args: Any, kwargs: Any) -> Any:
            with _as_made(module):
                if compiled is None or name in module.__dict__:
                    return getattr(module, name)(*args, **kwargs)
                return compiled(module, *args, **kwargs)

        entry = module.__dict__.get(_ENTRY)
        return inside(args, kwargs) if entry is None else entry.enter(module, inside, args, kwargs)

    return run


@dataclass(slots=True, eq=False)
class UnitEntry:
    """How a module of one call enters its unit.

    Attributes:
        enter: runs a method in the unit; a function of the module, the method, args and kwargs.
        methods: the methods that enter the unit.
        hidden: what the user set on the module object in place of these methods.
    """

    enter: Callable[..., Any]
    methods: UnitMethods
    hidden: dict[str, Any] = field(default_factory=dict)

    def begin(self, module: nn.Module) -> None:
        """Let the methods of ``module`` enter the unit."""
        state = module.__dict__
        self.hidden = {name: state.pop(name) for name in self.methods if name in state}
        state.update(
            {name: types.MethodType(method, module) for name, method in self.methods.items()}
        )
        state[_ENTRY] = self

    def end(self, module: nn.Module) -> None:
        """Let the methods refer to ``module`` weakly, so that it is freed without ``gc``.

        Why not from the beginning: a checkpoint may keep the forward of a unit for backward, and
        nothing else of the unit.
        """
        state = module.__dict__
        for name, method in self.methods.items():
            if getattr(state.get(name), "__func__", None) is method:
                state[name] = types.MethodType(method, weakref.ref(module))


_ENTRY = "_funcshard_entry"  # the key of the entry in the module's __dict__


@contextlib.contextmanager
def _as_made(module: nn.Module) -> Iterator[None]:
    """Within this context, the object is as the user made it."""
    state = module.__dict__
    entry = state.pop(_ENTRY, None)
    if entry is None:
        yield  # it is already
        return
    outside = {name: state.pop(name) for name in entry.methods if name in state}
    state.update(entry.hidden)
    try:
        yield
    finally:
        entry.hidden = {name: state.pop(name) for name in entry.methods if name in state}
        state.update(outside)
        state[_ENTRY] = entry


# --- parameters -----------------------------------------------------------------------------------


def table_entries(unit: UnitPlan, path: str, skeleton: Skeleton) -> TableEntries:
    """Return the entries of parameter tables at and below ``path`` that hold leaves of ``unit``."""
    entries_by_paths: dict[tuple[str, ...], dict[str, int]] = {}
    for index, leaf in enumerate(unit.leaves):
        for name in skeleton.parameters[leaf.path]:
            if tree.is_under(name, path):
                *modules, key = name[len(path) + 1 if path else 0 :].split(".")
                entries_by_paths.setdefault(tuple(modules), {})[key] = index
    return tuple(entries_by_paths.items())


def forward_with_leaves(
    tables: TableEntries,
    leaves: list[torch.Tensor],
    module: nn.Module,
    forward: Callable[[Any, Any], Any],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Run ``forward`` while the tables below ``module`` hold the unit's gathered ``leaves``.

    Afterwards, or after an exception, the tables hold the placeholders again.
    """
    # Dictionary, key, and the value that the dictionary holds after forward.
    afterwards: list[tuple[dict[str, Any], str, Any]] = []
    saved = current_unit.get() if torch.is_grad_enabled() else None
    try:
        for path, entries in tables:
            owner = module
            for name in path:
                owner = owner._modules[name]  # type: ignore[assignment]
            table = owner._parameters
            # Why another table afterwards: a checkpoint inside the unit runs parts of this forward
            # again from backward, and then has to read the leaves, gathered again. All other code
            # has to read the placeholders. Why another one during forward: the table that is there
            # may be such a one, which would answer in backward with leaves that it gathers itself.
            later = table if saved is None else RecomputeParams.of(table, saved, entries)
            afterwards.append((owner.__dict__, "_parameters", later))
            table = owner.__dict__["_parameters"] = dict(table)
            for key, index in entries.items():
                table[key] = leaves[index]  # type: ignore[assignment]
            if isinstance(owner, nn.RNNBase):
                # Why: an RNN keeps a second list of its weights, which would keep the gathered
                # leaves alive.
                afterwards.append((owner.__dict__, "_flat_weights", []))
        return forward(args, kwargs)
    finally:
        # Why reversed: a module at two paths is filled twice, the second time over its leaves.
        for table, key, value in reversed(afterwards):
            table[key] = value
