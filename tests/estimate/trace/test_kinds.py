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
