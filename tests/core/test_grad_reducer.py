"""GradReducer: which gradients it holds, when it copies them, and when it frees them."""

from __future__ import annotations

import contextlib
import weakref
from functools import partial

import pytest
import torch

from funcshard.comm.group import DONE, DeferredWork, LocalGroup
from funcshard.comm.mesh import Mesh
from funcshard.comm.topology import CommDtypes, Topology
from funcshard.core import grad_reducer
from funcshard.core.buffer_comm import BufferComm, ReduceHandle
from funcshard.core.grad_reducer import GradReducer, activate

ALONE = Topology(Mesh(), False)
COMM = BufferComm(ALONE)


def two_leaves() -> list[torch.Tensor]:
    return [torch.ones(2), torch.ones(2)]


@pytest.mark.parametrize("reduce", ["each", "once"])
def test_after_an_error_nothing_keeps_full_gradients(reduce, monkeypatch) -> None:
    # Without the copy that cat makes, the test sees the reducer's own reference.
    monkeypatch.setattr(grad_reducer.torch, "cat", lambda parts: parts[0])
    monkeypatch.setattr(grad_reducer, "start_reduce_parts", lambda parts, comm: ReduceHandle(parts[0], DONE, comm))
    reducer, full = GradReducer(two_leaves(), reduce=reduce), torch.ones(4)
    if reduce == "once":  # it is kept for the next micro-batch
        reducer.accumulating = True
    gone = weakref.ref(full)
    with contextlib.suppress(ZeroDivisionError), activate(reducer):
        reducer.add(reducer.leaves[0], [full], COMM)
        del full
        assert gone() is not None
        raise ZeroDivisionError
    assert gone() is None


def doubled(unit, buffer, full) -> None:
    full.mul_(2)


def shown(leaves: list[torch.Tensor]) -> GradReducer:
    reducer = GradReducer(leaves, on_grad=doubled)
    reducer.note_gather(leaves[0], COMM)
    return reducer


def of_zero_weight(leaves: list[torch.Tensor]) -> GradReducer:
    reducer = GradReducer(leaves)
    reducer.zero_weight = True
    return reducer


AS_THEY_ARE = {
    "as they are": (GradReducer, True, [1.0] * 4),
    "shown": (shown, False, [2.0] * 4),
    "of zero weight": (of_zero_weight, False, [0.0, 0.0, 0.0, 1.0]),
    "once": (partial(GradReducer, reduce="once"), False, [1.0] * 4),
}


@pytest.mark.parametrize(("make", "same", "wanted"), AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_parts_of_a_gradient_are_put_together_only_to_be_written_to_or_held(make, same, wanted, monkeypatch) -> None:
    reduced: list[list[torch.Tensor]] = []

    def start(parts: list[torch.Tensor], comm: BufferComm) -> ReduceHandle:
        reduced.append(parts)
        return ReduceHandle(torch.cat(parts).float(), DONE, comm)

    monkeypatch.setattr(grad_reducer, "start_reduce_parts", start)
    comm = BufferComm(ALONE, dtypes=CommDtypes(reduced=torch.float32))
    with activate(make([torch.ones(4)])) as reducer:
        fill = torch.nan if make is of_zero_weight else 1.0
        parts = [torch.full((3,), fill).bfloat16(), torch.ones(1).bfloat16()]
        copies = [part.clone() for part in parts]
        reducer.add(reducer.leaves[0], parts, comm)
        reducer.post_backward()
        assert (reduced[0] is parts) == same
        assert same or [part.dtype for part in reduced[0]] == [torch.float32]  # one new tensor, to be donated
        # Other code may hold the gradients of the leaves, so they must not change.
        assert all(torch.equal(part, copy) or part.isnan().all() for part, copy in zip(parts, copies, strict=True))
        assert reducer.leaves[0].total.tolist() == wanted


class Recorded(LocalGroup):
    """A group of two ranks, of which this process is one, that records when all-reduces start and are waited for."""

    order: list[str] = []  # noqa: RUF012
    size = 2  # type: ignore[assignment]

    def all_reduce(self, tensor, *, label=""):
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
            reducer.expect(shards[0], torch.ones(2, requires_grad=True))
        reducer.add(leaf, [torch.ones(2)], COMM)
        assert (leaf.held is None) is (forwards == 1)
        reducer.post_backward()
