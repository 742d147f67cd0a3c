"""A run of a graph keeps what later operations read."""

from __future__ import annotations

import pytest

import funcshard as fs
from funcshard.graph import StepGraph
from funcshard.graph.step_graph import collective_of
from tests.graph.test_traced import batch_of, made


def returning_the_data_of_its_all_reduce(step_graph: StepGraph) -> StepGraph:
    """Return a graph whose local loss is the copy that the all-reduce of the loss reads."""
    new = step_graph.copy()
    start = next(node for node in new.graph.nodes if collective_of(node) == "all_reduce")
    (data,) = start.all_input_nodes
    (loss,) = data.all_input_nodes
    (output,) = new.graph.find_nodes(op="output")
    output.replace_input_with(loss, data)
    return new


@pytest.mark.slow
def test_a_collective_does_not_overwrite_data_that_is_read_later() -> None:
    def main(mesh: fs.Mesh) -> None:
        step, state = made(mesh)
        batch = batch_of(mesh, 0)
        changed = fs.trace(step, state, batch).changed(returning_the_data_of_its_all_reduce)
        _, found = changed(fs.copy(state), batch)
        _, expected = step(state, batch)
        assert found["local_loss"].equal(expected["local_loss"])
        assert not found["local_loss"].equal(found["loss"]), "batches of ranks differ"

    fs.simulate(main, 2)
