"""A module that is changed between ``make_functional`` and ``fully_shard``."""

from __future__ import annotations

import gc
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs

MESH = fs.Mesh()


def made() -> tuple[nn.Module, Any, fs.Plan]:
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    apply, params, _ = fs.make_functional(net)
    return net, apply, fs.make_plan(params, 1)


def trained(net: nn.Module) -> None:
    net(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


CHANGES = {  # tests/misuse/documented.py has more
    "one module in evaluation": (lambda net: net[1].eval(), "train\\(\\) or eval\\(\\) was called"),
    "training": (trained, "its parameters were written"),
    "two changes": (lambda net: net.requires_grad_(False).eval(), "frozen or unfrozen, and train"),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
def test_a_change_that_reaches_nothing_is_told_once(change: Any, words: str) -> None:
    net, apply, plan = made()
    change(net)
    with pytest.warns(UserWarning, match=f"Sequential was changed after make_functional had copied it: .*{words}"):
        fs.fully_shard(apply.eval(), plan, MESH)
    fs.fully_shard(apply, plan, MESH)


def test_a_module_that_stays_or_changes_after_fully_shard_is_no_mistake() -> None:
    net, apply, plan = made()
    net(torch.ones(1, 2))
    net[0].register_forward_hook(lambda *_: None)  # as calls of models by Hugging Face do
    fs.fully_shard(apply, plan, MESH)
    net.eval().requires_grad_(False)
    fs.fully_shard(apply, plan, MESH)


def test_nothing_keeps_the_module_and_a_pickled_function_knows_none() -> None:
    net, apply, plan = made()
    again = pickle.loads(pickle.dumps(apply))
    assert again.late_changes is None
    apply.late_changes.module()  # there still
    del net
    gc.collect()
    assert apply.late_changes.module() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.fully_shard(apply, plan, MESH)
        fs.fully_shard(again, plan, MESH)


def test_a_module_that_drops_its_values_to_free_memory_is_no_mistake() -> None:
    net, apply, plan = made()
    net.to("meta")
    fs.fully_shard(apply, plan, MESH)
    net, apply, plan = made()
    net.to("meta").eval()
    with pytest.warns(UserWarning, match=r"copied it: train\(\) or eval\(\) was called\. Neither"):
        fs.fully_shard(apply, plan, MESH)
