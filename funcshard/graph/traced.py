"""``trace``: a training step as a graph, which is run in place of the step."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcshard._utils import DONATED_STATE, Warned, check_flag, donate, tree, untraced_with_warning
from funcshard.comm import Mesh
from funcshard.graph.compiling import Backend, CompilingBind
from funcshard.graph.cost import StepCost, cost_of
from funcshard.graph.difference import StepDifference
from funcshard.graph.memory import StepMemory, memory_of
from funcshard.graph.recording import record
from funcshard.graph.replay import bind
from funcshard.graph.saving import graph_to, recordings_text, save_together, text_digest
from funcshard.graph.show import graph_html, graph_text
from funcshard.graph.signatures import Signature, nearest_difference, signature_of
from funcshard.graph.step_graph import Place, StepGraph, collective_of, starts_and_waits
from funcshard.plan import Event, Plan
from funcshard.train import TrainStep

__all__ = ["Traced", "torch_version", "trace"]

_log = logging.getLogger("funcshard.graph")


def trace(step: TrainStep, state: Any, batch: Any) -> Traced:
    """Record a training step as one graph: forward, backward, collectives and optimizer.

    The recording runs the step on tensors without data, and communicates nothing. The result is
    called as the step is, gives the same bits, and issues the same collectives. An optimizer makes
    its state in the first step, so that step has a graph of its own.

    A run uses the operations of the recording, and not the Python code of the step: a value that
    Python computed from the arguments' shapes is in the graph as a constant. These stay inputs: the
    tensors of state and batch, the number of steps, and all that a schedule computes from it. Other
    shapes, dtypes, trees or constants in the batch make a new recording, and a log line says so.

    Arguments:
        step: the step of ``make_train_step``.
        state: a state to record with, such as that of ``step.init``. It stays as it is.
        batch: a batch to record with, on this rank.

    Returns:
        The step as a graph.

    Raises:
        TypeError: ``step`` is no step of ``make_train_step``.
        ValueError: the step uses a tensor that is in neither state nor batch.
        RuntimeError: the step computes with values in Python, or ``torch.utils.checkpoint`` draws
            random numbers again.

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

    Source: ``jax.make_jaxpr``.
    """
    if not isinstance(step, TrainStep):
        raise TypeError(f"trace takes the step that make_train_step returned; found {type(step).__name__}")
    traced = Traced(step, step.mesh)
    traced.graph_for(state, batch)
    return traced


Change = Callable[[StepGraph], StepGraph]  # a pass: it leaves its argument as it is
Bind = Callable[[StepGraph, Mesh], Callable[..., list[Any]]]


class _Entry(NamedTuple):
    step_graph: StepGraph
    run: Callable[..., list[Any]]


class _Later:
    """A function that is made when it is called for the first time."""

    def __init__(self, make: Callable[[], Callable[..., list[Any]]]) -> None:
        self._make = make
        self._run: Callable[..., list[Any]] | None = None

    def __call__(self, *inputs: Any) -> list[Any]:
        if self._run is None:
            self._run = self._make()
        return self._run(*inputs)


class Traced:
    """A step as a graph; made by ``trace``. Call it as the step.

    Attributes:
        step: the step.
        mesh: the ranks.
        warned: whether the step has said that ``torch.compile`` compiles nothing of it.
    """

    def __init__(
        self,
        step: Any,
        mesh: Mesh,
        *,
        changes: tuple[Change, ...] = (),
        bind: Bind = bind,
        fixed: str = "",
        earlier: int = 0,
    ) -> None:
        """Make a step without recordings; users call ``trace``.

        Arguments:
            step: the step.
            mesh: the ranks.
            changes: the changes of each recording before it runs, in order.
            bind: makes a graph a function that runs.
            fixed: why nothing can be recorded anew; ``""`` if it can.
            earlier: number of changes that the recordings had before they were loaded.
        """
        self.step, self.mesh = step, mesh
        self._changes, self._bind, self._fixed, self._earlier = changes, bind, fixed, earlier
        self._entries: dict[Signature, _Entry] = {}
        self.warned = Warned()

    @classmethod
    def of_graphs(cls, step: Any, mesh: Mesh, graphs: Iterable[StepGraph], *, fixed: str, earlier: int) -> Traced:
        """Return a step with recordings that were made before; see ``__init__``."""
        found = cls(step, mesh, fixed=fixed, earlier=earlier)
        for step_graph in graphs:
            found._add(step_graph.signature, step_graph)
        return found

    def changed(self, change: Change) -> Traced:
        """Return this step with one more change of its graphs; this one stays as it is.

        Arguments:
            change: a function from a graph to a new one. It sees each recording, later ones too.
        """
        return self._with((*self._changes, change), self._bind, later=self._bind is bind)

    def compile(self, backend: Backend = "inductor") -> Traced:
        """Return this step with compiled operations; this one stays as it is.

        The operations between collectives are cut into regions, and equal regions are compiled
        once: the blocks of a deep model take the time of one. Collectives, random numbers and fused
        optimizers run as before, in the same order. Results equal those of the step up to rounding.
        ``events`` and ``memory()`` are those of the graph. They leave out the memory that a
        compiled region takes inside.

        Arguments:
            backend: a backend of ``torch.compile``: its name, or a function from a graph module and
                inputs without data to a function. ``"inductor"`` needs a C++ compiler, and keeps
                its code on disk for later processes.

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
        return self._with(self._changes, CompilingBind(backend))

    def _with(self, changes: tuple[Change, ...], bind: Bind, *, later: bool = False) -> Traced:
        """Return this step with more changes, or with another way to run.

        Arguments:
            changes: those of this step, and more.
            bind: makes a graph a function that runs.
            later: whether it does so with the first call, because most passes are not the last. A
                compiled step is bound at once, since compiling takes long.
        """
        new = Traced(self.step, self.mesh, changes=changes, bind=bind, fixed=self._fixed, earlier=self._earlier)
        for signature, entry in self._entries.items():
            step_graph = entry.step_graph
            for change in changes[len(self._changes) :]:
                step_graph = change(step_graph)
            run = _Later(partial(bind, step_graph, self.mesh)) if later else bind(step_graph, self.mesh)
            new._entries[signature] = _Entry(step_graph, run)
        return new

    @untraced_with_warning(
        "torch.compile compiles nothing of a traced step, which is a graph already: use its method compile, traced.compile()"
    )
    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """Take one step; return the new state and the metrics."""
        (step_graph, run), leaves = self.graph_for(state, batch)
        if not step_graph.replayable:
            return self.step(state, batch)
        with torch.no_grad():
            outputs = run(*[leaves[i] for i in step_graph.inputs])
            # Why detach: a donated argument and the result that has its memory are two objects.
            outputs = [each.detach() if isinstance(each, torch.Tensor) else each for each in outputs]
        donate([leaves[i] for i in step_graph.donated])
        for path in step_graph.spent:
            _spend(state, path)
        results = [outputs[each.number] if isinstance(each, Place) else each.value for each in step_graph.results]
        state, metrics = tree.build_form(step_graph.form, results)
        return state, metrics

    def graph_for(self, state: Any, batch: Any) -> tuple[_Entry, list[Any]]:
        """Return the graph for some arguments, recorded if need be, and the arguments' leaves."""
        signature, leaves = _signature(state, batch)
        found = self._entries.get(signature)
        if found is None:
            found, after = self._record(signature, state, batch)
            # The next step's state may have another form. Why no further: a number in it may change
            # with every step.
            ahead, _ = _signature(after, batch)
            if ahead not in self._entries:
                self._record(ahead, after, batch, what="the step after it")
        return found, leaves

    @property
    def graph(self) -> StepGraph:
        """The graph that was recorded last: that of the second step and of all later ones."""
        return next(reversed(self._entries.values())).step_graph

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives of a step, in order."""
        return self.graph.events

    def memory(self) -> StepMemory:
        """Return the bytes that a step holds on this rank."""
        return memory_of(self.graph)

    def diff(self, other: Traced) -> StepDifference:
        """Return how another traced step differs from this one, for ``print``.

        Raises:
            TypeError: ``other`` is no traced step.
        """
        if not isinstance(other, Traced):
            raise TypeError(f"diff takes another traced step, such as the result of a pass; found {type(other).__name__}")
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

    def save(self, path: str | os.PathLike[str], *, per_rank: bool = False) -> None:
        """Write the graphs to one file for all ranks, which ``load_traced`` reads.

        Passes are part of the graphs that are written. The file is text: JSON without pickles, and
        one operation a line. Every rank of the mesh has to call this, and rank 0 writes.

        Arguments:
            path: the file. It appears under this name once it is complete.
            per_rank: whether ranks may have other graphs, as with ``muon`` and with groups of an
                optimizer. The file then holds one graph for each kind of rank. Their collectives
                have to be equal in any case.

        Raises:
            ValueError: the graphs of two ranks differ, and the message names the first line that
                does; or the batch or the metrics hold values that a file cannot hold.
            OSError: the file cannot be written.
        """
        check_flag("per_rank", per_rank)
        text, error = "", ""
        try:
            text = self._text()
        except ValueError as problem:
            error = str(problem)
        facts = {
            "torch": torch_version(),
            "mesh": self.mesh.shape,
            "plan": json.loads(self.plan.to_json()),
            "changes": self._earlier + len(self._changes),
        }
        starts = [node for entry in self._entries.values() for node, _ in starts_and_waits(entry.step_graph.graph)]
        collectives = "\n".join(f"{collective_of(node)} {node.meta.get('event')}" for node in starts)
        save_together(Path(path), facts, text, collectives, self.mesh, per_rank=per_rank, error=error)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits: the same for equal graphs, on all ranks, in all processes.

        They stand for all recordings after all passes, with their constants.

        Raises:
            ValueError: see ``save``.
        """
        return text_digest(self._text())[:16]

    def _text(self) -> str:
        graphs = [graph_to(entry.step_graph, self.step.schedules) for entry in self._entries.values()]
        return recordings_text(graphs)

    @property
    def plan(self) -> Plan:
        """The plan of the step."""
        found: Plan = self.step.plan
        return found

    def _record(self, signature: Signature, state: Any, batch: Any, *, what: str = "a step again") -> tuple[_Entry, Any]:
        differs = nearest_difference(signature, self._entries) if self._entries else ""
        if self._fixed:
            raise ValueError(f"this traced step has no graph for these arguments ({differs}), and {self._fixed}")
        recorded, after = record(self.step, state, batch)
        found = self._add(signature, recorded)
        _log.info(
            "trace records %s; it has %d recordings", f"{what}: {differs}" if differs else "a step", len(self._entries)
        )
        return found, after

    def _add(self, signature: Signature, step_graph: StepGraph) -> _Entry:
        for change in self._changes:
            step_graph = change(step_graph)
        found = self._entries[signature] = _Entry(step_graph, self._bind(step_graph, self.mesh))
        return found


def torch_version() -> str:
    """Return the version of torch without the name of its build."""
    return str(torch.__version__).partition("+")[0]


def _signature(state: Any, batch: Any) -> tuple[Signature, list[Any]]:
    leaves, form = tree.flatten_with_form((state, batch))
    return signature_of(leaves, form, len(tree.leaves(state))), leaves


def _spend(node: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = DONATED_STATE
