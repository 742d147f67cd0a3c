"""Which modules are of one kind."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.estimate.trace.kinds import kinds_of, order_below


class Tree:
    """The parts of a module tree that kinds are made from."""

    def __init__(self, skeleton: Any) -> None:
        for name in ("specs", "parameters", "paths", "modules"):
            setattr(self, name, getattr(skeleton, name))


@pytest.mark.usefixtures("without_garbage_collection")
def test_kinds_that_nobody_holds_free_the_model() -> None:
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)))
    tree = Tree(fs.make_functional(net)[0].skeleton)
    held = weakref.ref(tree)
    assert kinds_of(tree, lambda name: None)[1] == {}
    assert order_below(tree.specs)(0) == (0, 1, 2, 3, 4)
    del tree
    assert held() is None


class Seeded(torch.nn.Module):
    """A module that draws values, whose shapes are always the same."""

    def __init__(self, seed: int, scale: int) -> None:
        super().__init__()
        self.seed, self.scale = seed, scale


def test_only_a_seed_may_differ_and_be_read() -> None:
    net = torch.nn.Sequential(*(Seeded(seed=index, scale=index) for index in range(2)))
    differing = kinds_of(fs.make_functional(net)[0].skeleton, lambda name: None)[1]
    assert differing == {index: {"scale": (int, index - 1)} for index in (1, 2)}
