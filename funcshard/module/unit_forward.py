"""How the module of a unit runs inside one call of ``fully_shard``.

Every call has its own module objects (see ``skeleton``). During a call, attributes of a unit's
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
    unshard_with,
)
from funcshard.core import remat as rematerialised
from funcshard.module.skeleton import Skeleton
from funcshard.plan import UnitPlan

Forward = Callable[[Any, Any], Any]  # of args and kwargs
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Inputs = tuple[nn.Module, Forward, Args, Kwargs]  # what runs in a unit
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
        shard_state = [(version(local), address(local)) for local in shard.values()]
        if not again:
            self.used[unit.name] = shard_state
        elif self.used.get(unit.name, shard_state) != shard_state:
            raise RuntimeError(
                f"a shard of unit {unit.title!r} was modified in place, or got other data, between "
                "forward and backward, which computes a part of forward again, with other values; "
                "update shards after backward"
            )


@dataclass(frozen=True, slots=True, eq=False)
class ModuleRun:
    """How one module of a unit runs: where it is, and its forward through the combinators.

    Attributes:
        path: path of the module.
        index: index of the module in the skeleton.
        f: ``unshard`` of the module's forward, or ``reshard``, if the unit is freed after forward.
        remat: whether backward computes the forward again.
    """

    path: str
    index: int
    f: Unshard
    remat: bool


@dataclass(frozen=True, slots=True, eq=False)
class UnitRun:
    """How one unit runs inside a call.

    Attributes:
        f: gathers the unit.
        modules: the unit's module, or those of a group.
    """

    f: Unshard
    modules: tuple[ModuleRun, ...]

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
        f = unshard_with(forward_with_leaves, unit, mesh, comms, listed=True)
        f = reshard(f) if unit.reshard_after_forward else f
        modules = [
            ModuleRun(
                path=path,
                index=_check_module(unit, path, indices.get(path), skeleton, methods),
                f=dataclasses.replace(f, apply=functools.partial(forward_with_leaves, tables)),
                remat=path in remat,
            )
            for path, tables in table_entries(unit, skeleton).items()
        ]
        return cls(f, tuple(modules))

    @untraced
    def enter(
        self,
        call: UnitCall,
        number: int,
        module: nn.Module,
        forward: Forward,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run one module of the unit as part of a call: the only way in.

        The module of a group that comes first gathers the group, which is freed when all of its
        modules have run, or at the end of the call. A module that backward computes again, or that
        is inside a transform that the call is not, gathers the group for itself.
        """
        member, prefetcher = self.modules[number], call.prefetcher
        inputs = module, forward, args, kwargs
        if len(self.modules) > 1:
            if prefetcher is None:
                alone = member.remat or transform_level() != call.level
            else:
                alone = prefetcher.returned or not hooks_allowed()
            if not alone:
                return self._run_in_group(call, number, inputs)
        if member.remat:
            return _run_recomputed(call, member, inputs)
        return _run_alone(call, member, inputs)

    def _run_in_group(
        self,
        call: UnitCall,
        number: int,
        inputs: Inputs,
    ) -> Any:
        name, member = self.f.unit.name, self.modules[number]
        group, waiting = call.groups.get(name) or (None, set(range(len(self.modules))))
        if group is None or group.mode != grad_mode():
            if group is not None:
                group.close()
            # Why not by the inputs: they are those of the first module alone.
            group = _gather(call, self.f, needed=torch.is_grad_enabled())
            call.groups[name] = group, waiting
        try:
            run = group.run_recomputed if member.remat else group.run
            return run(member.f, *inputs)
        finally:
            waiting.discard(number)
            if not waiting and name in call.groups and call.groups[name][1] is waiting:
                call.groups.pop(name)[0].close()


def _run_alone(
    call: UnitCall,
    member: ModuleRun,
    inputs: Inputs,
) -> Any:
    """Gather the unit for one module, and run that."""
    needed = torch.is_grad_enabled() and (
        member.f.trainable or any(tensor.requires_grad for tensor in tensors_in(inputs[2:]))
    )
    gathered = _gather(call, member.f, needed=needed)
    try:
        return gathered.run(member.f, *inputs)
    finally:
        gathered.close()


def _gather(call: UnitCall, f: Unshard, *, needed: bool) -> Gathered:
    """Gather a unit; ``needed`` says whether backward may need its leaves."""
    unit, shard, prefetcher = f.unit, call.shards[f.unit.name], call.prefetcher
    # A transform inside the call has to see the all-gather, which the unit then starts itself.
    if prefetcher is None or transforms_active():
        return f.open(shard)
    if call.mesh is not None:
        check_order(call.mesh, f"unit {unit.title!r}", prefetcher)
    handles = prefetcher.pre_forward(unit.name, stays=not f.freed)
    if not f.freed:  # a unit that is gathered again in backward compares for itself
        call.note_used(unit, shard, again=handles is None)
        handles = f.stay_gathered(shard, handles, needed=needed)
    return f.open(shard, handles, prefetcher)


def _run_recomputed(
    call: UnitCall,
    member: ModuleRun,
    inputs: Inputs,
) -> Any:
    """Run a module under ``remat``, as a function of every tensor to differentiate by."""
    module, forward, args, kwargs = inputs
    # Why buffers: under a transform the call's copies of buffers belong to the transform, so they
    # have to be arguments and results.
    entries = [(m, name) for m in module.modules() for name in m._buffers]
    if hooks_allowed():
        entries = []

    def run(shards: dict[str, Any], buffers: list[Any], args: Args, kwargs: Kwargs) -> Any:
        before = call.shards
        call.shards = {**before, **shards}
        copies = {id(buffer): buffer if buffer is None else buffer.clone() for buffer in buffers}
        try:
            _set_buffers(entries, [copies[id(buffer)] for buffer in buffers])
            out = _run_alone(call, member, (module, forward, args, kwargs))
            return out, _get_buffers(entries)
        finally:
            call.shards = before
            # They have no graph in forward, and another one in backward.
            forget_parametrized(module)

    below = {
        name: shard
        for name, shard in call.shards.items()
        if any(tree.is_under(inner.path, member.path) for inner in call.runs[name].modules)
    }
    out, buffers = rematerialised(run)(below, _get_buffers(entries), args, kwargs)
    _set_buffers(entries, buffers)
    return out


def check_order(mesh: Mesh, reached: str, prefetcher: Prefetcher) -> None:
    """Raise on every rank unless all come to the same unit; ``reached`` is that of this rank."""
    remedy = (
        "let every rank call the same units in one order, equally often; if generate() stops at "
        "different times, ask for equally many tokens"
    )
    check_same(
        mesh, f"{reached} at position {len(prefetcher.ran)}", "the order of units", remedy=remedy
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
    title = repr(unit.title)
    if unit.members:
        title += f", its module {path!r},"
    kind = "no module of this model"
    if index is not None:
        cls = skeleton.specs[index].cls
        kind = f"a {cls.__name__}, which has no forward of its own"
    if index is None or (path and cls.forward is nn.Module.forward and not methods.get(index)):
        raise ValueError(
            f"unit {title} is {kind}; a unit's parameters are gathered when its forward is called: "
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


def table_entries(unit: UnitPlan, skeleton: Skeleton) -> dict[str, TableEntries]:
    """Return the entries at and below each module of ``unit`` that hold leaves of the unit."""
    tables: dict[str, dict[tuple[str, ...], dict[str, int]]] = {path: {} for path in unit.paths}
    for index, leaf in enumerate(unit.leaves):
        for name in skeleton.parameters[leaf.path]:
            for path in filter(tables.__contains__, tree.upwards(name)):
                *modules, key = name.removeprefix(f"{path}." if path else "").split(".")
                tables[path].setdefault(tuple(modules), {})[key] = index
    return {path: tuple(entries.items()) for path, entries in tables.items()}


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
