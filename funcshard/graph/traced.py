"""``trace``: a training step as a graph, which is run in place of the step."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_count, check_path
from funcshard._utils.torch_private import untraced_with_warning
from funcshard.comm import UNDO, Mesh
from funcshard.graph.compiling import Backend, CompilingBind
from funcshard.graph.effects import check_graph, check_order
from funcshard.graph.memory import StepCost, StepMemory, cost_of, memory_of
from funcshard.graph.recording import record
from funcshard.graph.replay import bind
from funcshard.graph.saving import graphs_text, save_together, text_digest
from funcshard.graph.show import StepDifference, graph_html, graph_text
from funcshard.graph.signatures import (
    NamedSizes,
    Signature,
    nearest_difference,
    signature_of,
    sizes_of,
    sizes_text,
)
from funcshard.graph.step_graph import (
    Place,
    StepGraph,
    collective_of,
    filled,
    starts_and_waits,
)
from funcshard.graph.tidying import drop_unused_nodes
from funcshard.plan import Event, Plan
from funcshard.train import DONATED_STATE, TrainStep, copy, donate

_log = logging.getLogger("funcshard.graph")
_MANY = 8  # recordings, as many as torch.compile makes before it gives up


def trace(step: TrainStep, state: Any, batch: Any, *, dynamic_shapes: Any = None) -> Traced:
    """Record your training step as one graph: forward, backward, collectives and optimizer.

    You call the result like the step. It gives the same bits and issues the same collectives.
    Recording communicates nothing and needs no data.

    Other shapes, dtypes, trees or constants in the batch make a new recording. See docs/tracing.md
    for what is an input and what a constant.

    Arguments:
        step: your step of ``make_train_step``.
        state: a state to record with, which stays as it is.
        batch: a batch to record with, on this rank.
        dynamic_shapes: names of the sizes that later batches may change. ``"b, ..."`` names dim 0
            of all tensors, ``"b, t"`` both dims; ``_`` is a fixed one, ``...`` all further ones. A
            tree in the form of the batch has a text or ``None`` for each part.

    Returns:
        The step as a graph.

    Raises:
        TypeError: ``step`` isn't a step of ``make_train_step``.
        ValueError: the step uses a tensor from outside of state and batch; ``dynamic_shapes``
            doesn't fit the batch, or the new state depends on its sizes.
        RuntimeError: your Python code depends on values, or ``torch.utils.checkpoint`` draws random
            numbers again.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(3, 1))
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
        ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        ...     state = step.init(fs.shard(params, plan, mesh), buffers)
        ...     traced = fs.trace(step, state, torch.ones(2, 3))
        ...     state, metrics = traced(state, torch.ones(2, 3))
        ...     return [event.kind for event in traced.events]
        >>> fs.simulate(main, world_size=2)[0]
        ['all_gather', 'reduce_scatter', 'all_reduce']

    Source: ``jax.make_jaxpr``; ``dynamic_shapes`` are those of ``torch.export``, written as in
    ``jax.export.symbolic_shape``.
    """
    if not isinstance(step, TrainStep):
        raise TypeError(
            f"trace takes the step that make_train_step returned; found {type(step).__name__}"
        )
    traced = Traced(step, step.mesh, _names=NamedSizes(dynamic_shapes))
    traced.graph_for(state, batch)
    return traced


class Entry(NamedTuple):
    """A recording, and its graph as a function."""

    step_graph: StepGraph
    run: Callable[..., list[Any]]


def by_signature(entries: Iterable[Entry]) -> dict[Signature, Entry]:
    """Return recordings by the arguments that they serve."""
    return {entry.step_graph.signature: entry for entry in entries}


Change = Callable[[StepGraph], StepGraph]  # a pass: it leaves its argument as it is
Bind = Callable[[StepGraph, Mesh], Callable[..., list[Any]]]


@dataclass(slots=True, eq=False, repr=False)
class Traced:
    """A step as a graph, made by ``trace``. You call it like the step.

    Attributes:
        step: the step.
        mesh: the ranks.
    """

    step: Any
    mesh: Mesh
    _entries: dict[Signature, Entry] = field(default_factory=dict)  # after all changes
    _names: NamedSizes = field(default_factory=lambda: NamedSizes(None))
    _changes: tuple[Change, ...] = ()  # of each recording, in order
    _bind: Bind = bind  # makes a graph a function that runs
    _fixed: str = ""  # why it can't record again, if it can't
    _earlier: int = 0  # number of changes before it was loaded

    def changed(self, change: Change) -> Traced:
        """Return a new step with one more change of its graphs.

        Arguments:
            change: your function from a graph to a new one, for later recordings too.

        Raises:
            ValueError: a new graph may not run: a node comes before its inputs, or a collective is
                used before its wait.
        """

        def checked(step_graph: StepGraph) -> StepGraph:
            new_graph = change(step_graph)
            check_graph(new_graph.graph)
            return new_graph

        def entry(step_graph: StepGraph) -> Entry:
            # Why in the first call: fx takes a while to make a function, and most passes are not
            # the last.
            make_run = functools.cache(functools.partial(self._bind, step_graph, self.mesh))
            return Entry(step_graph, lambda *inputs: make_run()(*inputs))

        new_entries = by_signature(map(entry, map(checked, self._graphs)))
        return dataclasses.replace(
            self, _entries=new_entries, _changes=(*self._changes, checked)
        )

    def compile(self, backend: Backend = "inductor") -> Traced:
        """Return a new step with compiled operations.

        It compiles regions between collectives, equal ones once, and equals your step up to
        rounding. See docs/tracing.md, "Compiled steps".

        Arguments:
            backend: a backend of ``torch.compile``, by its name or as a function. For
                ``"inductor"`` you need a C++ compiler; it keeps its code on disk.

        Raises:
            TypeError: ``backend`` is neither a name nor a function, or returns no function.
            ValueError: no backend has this name.

        Example:
            >>> import torch, funcshard as fs
            >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(3, 1))
            >>> def main(mesh):
            ...     plan = fs.make_plan(params, mesh)
            ...     sharded = fs.fully_shard(apply, plan, mesh)
            ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
            ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
            ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
            ...     state = step.init(fs.shard(params, plan, mesh), buffers)
            ...     fast = fs.trace(step, state, torch.ones(2, 3)).compile(backend="eager")
            ...     state, metrics = fast(state, torch.ones(2, 3))
            ...     return state.step
            >>> fs.simulate(main, world_size=2)
            [1, 1]
        """
        bind = CompilingBind(backend)
        new_entries = [
            Entry(step_graph, bind(step_graph, self.mesh)) for step_graph in self._graphs
        ]
        return dataclasses.replace(self, _entries=by_signature(new_entries), _bind=bind)

    def with_sizes(self, **sizes: int) -> Traced:
        """Return this step with ``memory()``, ``cost()`` and text for other sizes.

        It records nothing, and runs for all sizes as before.

        Arguments:
            sizes: a size for each name of ``trace(dynamic_shapes=...)``.

        Raises:
            ValueError: a name is missing or unknown, or no recording serves these sizes.

        Example:
            >>> import torch, funcshard as fs
            >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(3, 1))
            >>> mesh = fs.Mesh()
            >>> plan = fs.make_plan(params, mesh)
            >>> sharded = fs.fully_shard(apply, plan, mesh)
            >>> loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
            >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
            >>> step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
            >>> state = step.init(fs.shard(params, plan, mesh), buffers)
            >>> traced = fs.trace(step, state, torch.ones(2, 3), dynamic_shapes="b, ...")
            >>> more = traced.with_sizes(b=100)
            >>> more.memory().arguments - traced.memory().arguments
            1176
        """
        for name, size in sizes.items():
            check_count(name, size, 0, of="elements")
        if sizes.keys() != self.sizes.keys():
            known_names = ", ".join(self.sizes)
            raise ValueError(
                "with_sizes takes a size for each name of trace(dynamic_shapes=...), which gave "
                f"{known_names and 'the names '}{known_names or 'none'}; found "
                f"{', '.join(sizes) or 'none'}"
            )
        new_entries = [
            # Note: one function runs all sizes; only the forms for memory, cost and text are
            # others.
            Entry(filled(entry.step_graph, sizes), entry.run)
            for entry in self._entries.values()
            if not entry.step_graph.conditions.failing(sizes)
        ]
        if not new_entries:
            failing = self.graph.conditions.failing(sizes)
            raise ValueError(
                f"no recording serves {sizes_text(sizes)}; the last one needs {failing}: call it "
                "with such a batch"
            )
        return dataclasses.replace(self, _entries=by_signature(new_entries))

    @property
    def sizes(self) -> dict[str, int]:
        """The recorded size of each name of ``dynamic_shapes``."""
        return dict(self.graph.sizes)

    @property
    def conditions(self) -> tuple[str, ...]:
        """The rules of other sizes without a new recording, such as ``"b % 2 == 0"``."""
        return self.graph.conditions.texts

    @untraced_with_warning(
        "torch.compile compiles nothing of a traced step, which is a graph already: use its "
        "method compile, traced.compile()"
    )
    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Take one step; return the new state and the metrics."""
        (step_graph, run), leaves = self.graph_for(state, batch)
        # Note: a step that may be skipped makes its optimizer state in Python, in its first call.
        if not step_graph.replayable:
            return self.step(state, batch)
        # Why: in an attempt, the step may run again with this state.
        keeps_state = UNDO.get() is not None
        if keeps_state:
            # Note: a copy of the state would also copy frozen shards, which the graph only reads.
            spent_states = [_node_at(state, path) for path in step_graph.spent]
            taken_leaves = [
                *tree.leaves(spent_states),
                *(leaves[i] for i in step_graph.donated),
            ]
            copies = {id(leaf): copy(leaf) for leaf in taken_leaves}
            leaves = [copies.get(id(leaf), leaf) for leaf in leaves]
        with torch.no_grad():
            # Note: backward is part of the graph, so autograd has nothing to record.
            outputs = run(*[leaves[i] for i in step_graph.inputs])
            # Why detach: a donated argument and the result that has its memory are two objects.
            outputs = [
                output.detach() if isinstance(output, torch.Tensor) else output
                for output in outputs
            ]
        # Note: as in the step itself, whoever uses the old state afterwards gets an error.
        donate([leaves[i] for i in step_graph.donated])
        if not keeps_state:
            for *path, key in step_graph.spent:
                _node_at(state, path)[key] = DONATED_STATE
        step_results = [
            outputs[result.number] if isinstance(result, Place) else result.value
            for result in step_graph.results
        ]
        state, metrics = tree.build_form(step_graph.form, step_results)
        return state, metrics

    def graph_for(self, state: Any, batch: Any) -> tuple[Entry, list[Any]]:
        """Return the graph for some arguments, recorded if need be, and their leaves."""
        leaves, dim_names, sizes, signature = self._facts(state, batch)
        step_entry = self._find(signature, sizes)
        if step_entry is None:
            step_entry, state_after = self._record(
                signature, sizes, dim_names, state, batch
            )
            # The next step's state may have another form. Why no further: a number in it may change
            # with every step.
            _, dim_names, _, ahead = self._facts(state_after, batch)
            if self._find(ahead, sizes) is None:
                self._record(
                    ahead, sizes, dim_names, state_after, batch, what="the step after it"
                )
        return step_entry, leaves

    def _find(self, signature: Signature, sizes: Mapping[str, int]) -> Entry | None:
        """Return the recording that serves arguments, or ``None``."""
        # Note: without names the arguments' own facts are the key, which is the fast way.
        if not sizes:
            return self._entries.get(signature)
        for entry in self._alike(signature):
            if not entry.step_graph.conditions.failing(sizes):
                return entry
        return None

    def _difference(self, signature: Signature, sizes: Mapping[str, int]) -> str:
        """Return why no recording serves arguments; ``""`` if there's no recording."""
        if entries := self._alike(signature):
            failing_rule = entries[-1].step_graph.conditions.failing(sizes)
            return f"found {sizes_text(sizes)}; the recording needs {failing_rule}"
        return nearest_difference(signature, self._entries) if self._entries else ""

    def _alike(self, signature: Signature) -> list[Entry]:
        """Return the recordings for a signature, whatever their sizes."""
        entries = self._entries.items()
        # Note: arguments have no conditions, so those of the recording don't count here.
        return [entry for key, entry in entries if key._replace(conditions=()) == signature]

    def _facts(
        self, state: Any, batch: Any
    ) -> tuple[list[Any], dict[int, Any], dict[str, int], Signature]:
        """Return the leaves, the names and sizes of dims, and the signature."""
        leaves, form = tree.flatten_with_form((state, batch))
        dim_names = self._names.of(leaves, form)
        return (
            leaves,
            dim_names,
            sizes_of(leaves, dim_names),
            signature_of(leaves, form, len(tree.leaves(state)), dim_names),
        )

    @property
    def graph(self) -> StepGraph:
        """The graph of the last recording: that of all steps but the first."""
        return self._graphs[-1]

    @property
    def _graphs(self) -> list[StepGraph]:
        return [entry.step_graph for entry in self._entries.values()]

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives of a step, in order."""
        return self.graph.events

    def memory(self) -> StepMemory:
        """Return the bytes that a step holds on this rank."""
        return memory_of(self.graph)

    def diff(self, other: Traced) -> StepDifference:
        """Return how another traced step differs from this one, for you to print.

        Raises:
            TypeError: ``other`` isn't a traced step.
        """
        if not isinstance(other, Traced):
            raise TypeError(
                "diff takes another traced step, such as the result of a pass; found "
                f"{type(other).__name__}"
            )
        return StepDifference.of(self.graph, other.graph)

    def cost(self) -> StepCost:
        """Return the work of a step on this rank: FLOPs, bytes and collectives."""
        return cost_of(self.graph)

    def __str__(self) -> str:
        return graph_text(self.graph)

    def __repr__(self) -> str:
        return f"<Traced step: {len(self.graph.graph.nodes)} operations, {len(self.events)} collectives; print it for all>"

    def _repr_html_(self) -> str:
        return graph_html(self.graph)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graphs to one file for all ranks, which ``load_traced`` reads.

        You have to call it on every rank. The file is text: JSON without pickles.

        Arguments:
            path: the file, which appears once it's complete. If graphs of ranks differ, as with
                ``muon`` and with groups of an optimizer, it holds each of them.

        Raises:
            ValueError: the collectives of two ranks differ, or a file can't hold a value of batch
                or metrics.
            OSError: the file can't be written.
        """
        path = check_path("path", path)
        # Why no error yet: the other ranks already wait for this one's text.
        own_text = error = ""
        try:
            own_text = self._text()
        except ValueError as problem:
            error = str(problem)
        file_facts = {
            "torch": torch_version(),
            "mesh": self.mesh.shape,
            "plan": json.loads(self.plan.to_json()),
            "changes": self._earlier + len(self._changes),
            "dynamic_shapes": self._names.spec,
        }
        collectives = [
            f"{collective_of(start)} {start.meta.get('event')}"
            for step_graph in self._graphs
            for start, _ in starts_and_waits(step_graph.graph)
        ]
        # Note: a rank with an error calls this too, because the others wait for it there.
        save_together(
            path, file_facts, own_text, "\n".join(collectives), self.mesh, error=error
        )

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that are the same for equal graphs, on all ranks.

        Raises:
            ValueError: see ``save``.
        """
        return text_digest(self._text())[:16]

    def _text(self) -> str:
        return graphs_text(self._graphs, self.step.schedules)

    @property
    def plan(self) -> Plan:
        """The plan of the step."""
        step_plan: Plan = self.step.plan
        return step_plan

    def _record(
        self,
        signature: Signature,
        sizes: dict[str, int],
        names: dict[int, Any],
        state: Any,
        batch: Any,
        *,
        what: str = "a step again",
    ) -> tuple[Entry, Any]:
        difference = self._difference(signature, sizes)
        if self._fixed:
            raise ValueError(
                f"this traced step has no graph for these arguments ({difference}), and "
                f"{self._fixed}"
            )
        step_graph, state_after = record(self.step, state, batch, names)
        # Note: passes see later recordings too, so a changed step stays changed.
        for change in self._changes:
            step_graph = change(step_graph)
        entry = Entry(step_graph, self._bind(step_graph, self.mesh))
        self._entries[step_graph.signature] = entry
        _log.debug(
            "trace records %s; it has %d recordings",
            f"{what}: {difference}" if difference else "a step",
            len(self._entries),
        )
        # Why: a loader without padding would record in each step, and nobody would see why it is
        # slow.
        if len(self._entries) == _MANY:
            warnings.warn(
                f"the step was recorded for {_MANY} kinds of arguments, and records again for "
                "each further one: pad batches to a few lengths, or name the sizes that change "
                "with dynamic_shapes=",
                stacklevel=3,
            )
        return entry, state_after


def applied(traced: Traced, edit: Callable[[StepGraph], None], name: str) -> Traced:
    """Return a traced step whose graphs ``edit`` changes, later recordings too.

    Arguments:
        edit: changes a graph in place; unused nodes go afterwards.
    """
    if not isinstance(traced, Traced):
        raise TypeError(
            f"{name} takes the traced step that fs.trace returned; found {type(traced).__name__}"
        )

    def change(step_graph: StepGraph) -> StepGraph:
        changed_graph = step_graph.copy()
        edit(changed_graph)
        drop_unused_nodes(changed_graph.graph)
        check_order(changed_graph.graph, step_graph.graph)
        return changed_graph

    # Note: changed checks that the graph may run.
    return traced.changed(change)


def torch_version() -> str:
    """Return the version of torch without its build."""
    return str(torch.__version__).partition("+")[0]


def _node_at(node: Any, path: Iterable[Any]) -> Any:
    return functools.reduce(operator.getitem, path, node)
