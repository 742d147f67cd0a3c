"""GradReducer: which gradients it holds, when it copies them, and when it frees them."""

from __future__ import annotations

import torch

from funcshard.comm.group import DeferredWork, LocalGroup
from funcshard.comm.mesh import Mesh, Topology
from funcshard.core.buffer_comm import BufferComm
from funcshard.core.grad_reducer import GradReducer, activate

ALONE = Topology(Mesh(), False)
COMM = BufferComm(ALONE)


def two_leaves() -> list[torch.Tensor]:
    return [torch.ones(2), torch.ones(2)]


class Recorded(LocalGroup):
    """A group of two ranks, of which this process is one, that records when all-reduces start and are waited for."""

    order: list[str] = []  # noqa: RUF012
    size = 2  # type: ignore[assignment]

    def start(self, op):
        number = len(self.order)
        self.order.append(f"{number} starts")
        return DeferredWork(lambda: self.order.append(f"{number} is waited for"))


def test_a_reduction_is_over_before_the_next_takes_memory() -> None:
    order, comm = Recorded.order, BufferComm(Topology(Mesh({"shard": Recorded(size=2)}), False))
    with activate(GradReducer(two_leaves())) as reducer:
        for leaf in reducer.leaves:
            reducer.add(leaf, [torch.ones(2)], comm)
        assert order[:3] == ["0 starts", "0 is waited for", "2 starts"]
        reducer.post_backward()


def test_what_one_backward_did_not_bring_is_not_awaited_in_the_next() -> None:
    shards = two_leaves()
    reducer = GradReducer(shards, reduce="once")
    leaf = reducer.leaves[0]
    for forwards in (2, 1):  # the first backward leaves out one of two gradients
        reducer.accumulating = False
        for _ in range(forwards):
            leaf.awaited += 1
        reducer.add(leaf, [torch.ones(2)], COMM)
        assert (leaf.held is None) is (forwards == 1)
        reducer.post_backward()
