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
