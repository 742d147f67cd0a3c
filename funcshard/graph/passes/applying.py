"""Apply a pass: change a copy of each recording, and check the result."""

from __future__ import annotations

from collections.abc import Callable

from funcshard.graph.checking import check_order
from funcshard.graph.step_graph import StepGraph
from funcshard.graph.tidying import drop_unused_nodes
from funcshard.graph.traced import Traced


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


def drop_unused(traced: Traced) -> Traced:
    """Take out operations whose results no operation reads.

    You need it after your own changes only: recordings and other passes leave no such operations.
    Writes, random numbers and collectives stay.

    Arguments:
        traced: your step, which doesn't change.

    Returns:
        The changed step, with the bits and the collectives of ``traced``.

    Raises:
        TypeError: ``traced`` is no traced step.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(3, 1))
        >>> def add_cosine(step_graph):
        ...     new = step_graph.copy()
        ...     first, *_, output = new.graph.nodes
        ...     with new.graph.inserting_before(output):
        ...         cosine = new.graph.call_function(torch.ops.aten.cos.default, (first,))
        ...     cosine.meta["val"] = first.meta["val"].cos()
        ...     return new
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
        ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        ...     state = step.init(fs.shard(params, plan, mesh), buffers)
        ...     more = fs.trace(step, state, torch.ones(2, 3)).changed(add_cosine)
        ...     return "cos" in str(more), "cos" in str(fs.passes.drop_unused(more))
        >>> fs.simulate(main, world_size=2)[0]
        (True, False)

    Source: dead code elimination.
    """
    return applied(traced, lambda step_graph: None, "drop_unused")
