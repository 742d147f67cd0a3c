"""How a pass is applied: to a copy of each recording, with a check of the result."""

from __future__ import annotations

from collections.abc import Callable

from funcshard.graph.checking import check_graph
from funcshard.graph.step_graph import StepGraph
from funcshard.graph.tidying import drop_unused_nodes
from funcshard.graph.traced import Traced


def applied(
    traced: Traced, edit: Callable[[StepGraph], None], name: str, *, keeps_order: bool = True
) -> Traced:
    """Return a traced step whose graphs are changed by ``edit``, now and when it records again.

    Arguments:
        traced: the step.
        edit: changes a graph in place; nodes without users are taken out afterwards.
        name: name of the pass, for errors.
        keeps_order: whether the collectives stay in their order.

    Raises:
        TypeError: ``traced`` is no traced step.
    """
    if not isinstance(traced, Traced):
        raise TypeError(
            f"{name} takes the traced step that fs.trace returned; found {type(traced).__name__}"
        )

    def change(step_graph: StepGraph) -> StepGraph:
        new = step_graph.copy()
        edit(new)
        drop_unused_nodes(new.graph)
        check_graph(new.graph, before=step_graph.graph, keeps_order=keeps_order)
        return new

    return traced.changed(change)
