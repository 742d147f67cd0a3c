"""What a step holds of gradients, and when it lets go of them."""

from __future__ import annotations

import weakref

import pytest
import torch

from funcshard.group import DONE
from funcshard.mesh import Mesh
from funcshard.step import Step, open_step
from funcshard.transfer import Link, Pending

LINK = Link(Mesh(), None, "", False)


class Together:
    """Reductions that two units share."""

    def start_reduce(self, fulls):
        raise AssertionError("the second has not come")


def under_way(opened: Step, full: torch.Tensor) -> None:
    opened.add(0, full, lambda held: Pending(held, DONE, LINK))


def kept_for_the_next_micro_batch(opened: Step, full: torch.Tensor) -> None:
    opened.once = opened.keeping = True
    opened.add(0, full, lambda held: Pending(held, DONE, LINK))


def held_until_another_comes(opened: Step, full: torch.Tensor) -> None:
    joint = Together()
    for number in range(2):
        opened.await_gradient(number, joint)
    opened.add(0, full, lambda held: Pending(held, DONE, LINK), joint, "a")


def fail(hold, gone: list[weakref.ref[torch.Tensor]]) -> None:
    with open_step([torch.ones(2), torch.ones(2)]) as opened:
        full = torch.ones(4)
        gone.append(weakref.ref(full))
        hold(opened, full)
        del full
        assert gone[0]() is not None
        raise ZeroDivisionError


@pytest.mark.parametrize("hold", [under_way, kept_for_the_next_micro_batch, held_until_another_comes])
def test_after_an_error_nothing_keeps_full_gradients(hold) -> None:
    gone: list[weakref.ref[torch.Tensor]] = []
    with pytest.raises(ZeroDivisionError) as raised:
        fail(hold, gone)
    assert raised.value.__traceback__ is not None  # which keeps the step
    assert gone[0]() is None
