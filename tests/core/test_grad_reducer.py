"""What a step holds of gradients, and when it lets go of them."""

from __future__ import annotations

import weakref

import pytest
import torch

from funcshard.comm.group import DONE
from funcshard.comm.mesh import Mesh
from funcshard.core.buffer_comm import Link, Pending
from funcshard.core.grad_reducer import Step, open_step

LINK = Link(Mesh(), None, "", False)


class Together:
    """Reductions that two units share."""

    def start_reduce(self, fulls):
        raise AssertionError("the second has not come")


def pending(parts: list[torch.Tensor]) -> Pending:
    return Pending(parts[0], DONE, LINK)


def under_way(opened: Step, full: torch.Tensor) -> torch.Tensor:
    opened.add(0, [full], pending)
    return full


def kept_for_the_next_micro_batch(opened: Step, full: torch.Tensor) -> torch.Tensor:
    opened.once = opened.keeping = True
    opened.add(0, [full], pending)
    return opened._kept[0][0][0]


def held_until_another_comes(opened: Step, full: torch.Tensor) -> torch.Tensor:
    joint = Together()
    for number in range(2):
        opened.await_gradient(number, joint)
    opened.add(0, [full], pending, joint, "a")
    return opened._held[joint][0][0][0]


def fail(hold, gone: list[weakref.ref[torch.Tensor]]) -> None:
    with open_step([torch.ones(2), torch.ones(2)]) as opened:
        gone.append(weakref.ref(hold(opened, torch.ones(4))))
        assert gone[0]() is not None
        raise ZeroDivisionError


@pytest.mark.parametrize("hold", [under_way, kept_for_the_next_micro_batch, held_until_another_comes])
def test_after_an_error_nothing_keeps_full_gradients(hold) -> None:
    gone: list[weakref.ref[torch.Tensor]] = []
    with pytest.raises(ZeroDivisionError) as raised:
        fail(hold, gone)
    assert raised.value.__traceback__ is not None  # which keeps the step
    assert gone[0]() is None


AS_THEY_ARE = {
    "as they are": (lambda opened: None, True),
    "shown": (lambda opened: setattr(opened, "before", lambda number, full: full.mul_(2)), False),
    "void": (lambda opened: setattr(opened, "void", True), False),
    "once": (lambda opened: setattr(opened, "once", True), False),
}


@pytest.mark.parametrize(("prepare", "same"), AS_THEY_ARE.values(), ids=AS_THEY_ARE)
def test_parts_of_a_gradient_are_put_together_only_to_be_written_to_or_held(prepare, same) -> None:
    reduced: list[list[torch.Tensor]] = []

    def start(parts: list[torch.Tensor]) -> Pending:
        reduced.append(parts)
        return Pending(torch.cat(parts).float(), DONE, LINK)

    with open_step([torch.ones(4)]) as opened:
        prepare(opened)
        parts = [torch.full((3,), torch.nan if opened.void else 1.0).bfloat16(), torch.ones(1).bfloat16()]
        copies = [part.clone() for part in parts]
        opened.add(0, parts, start, dtype=torch.float32)
        opened.finish()
        assert (reduced[0] is parts) == same
        assert same or [part.dtype for part in reduced[0]] == [torch.float32]  # one, to be donated
        # others may have the leaves' gradients
        assert all(torch.equal(part, copy) or part.isnan().all() for part, copy in zip(parts, copies, strict=True))
        wanted = [0.0, 0.0, 0.0, 1.0] if opened.void else [2.0] * 4 if opened.before else [1.0] * 4
        assert opened.sums[0].tolist() == wanted


def test_a_reduction_is_over_before_the_next_takes_memory() -> None:
    order: list[str] = []

    class Work:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait(self) -> None:
            order.append(f"{self.name} is waited for")

    def start(name: str):
        def begin(parts: list[torch.Tensor]) -> Pending:
            order.append(f"{name} starts")
            return Pending(parts[0], Work(name), LINK)

        return begin

    with open_step([torch.ones(2), torch.ones(2)]) as opened:
        opened.add(0, [torch.ones(2)], start("first"))
        opened.add(1, [torch.ones(2)], start("second"))
        assert order[:3] == ["first starts", "first is waited for", "second starts"]
        opened.finish()
