"""Flattening a state tells trees of shards, replicated values and values of a rank's own apart."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
import torchopt

import funcshard as fs
from funcshard._utils import tree
from funcshard.checkpoint.flatten_state import flatten_state
from tests.trees import Colour, Node

PLAN = fs.make_plan({"a": {"w": torch.zeros(2, 3)}, "b": torch.zeros(3)}, 2, units=["a"])  # shards of 3 and 2 elements
SINGLE = fs.make_plan({"w": torch.zeros(2)}, 2)  # shards of one element
ROOT, UNIT = torch.zeros(2), torch.zeros(3)
ScaleByTraceState = type(torchopt.sgd(0.1, momentum=0.9).init({"w": ROOT})[0])


CASES: dict[str, tuple[Any, fs.Plan, dict[str, str]]] = {
    "shards": ({"": {"float32": ROOT}, "a": {"float32": UNIT}}, PLAN, {"float32": "shard", "a.float32": "shard"}),
    "some units": ({"x": {"a": {"float32": UNIT}}}, PLAN, {"x.a.float32": "shard"}),
    "in another dtype": ({"a": {"float32": UNIT.double()}}, PLAN, {"a.float32": "shard"}),
    "things below a buffer": (
        {"a": {"float32": {"m": UNIT, "step": torch.tensor(1.0)}}}, PLAN,
        {"a.float32.m": "shard", "a.float32.step": "whole"},
    ),
    "a list, one a buffer": (
        {"o": fs.TrainState({}, {}, {"mu": [ROOT, UNIT]}, 0)}, PLAN,
        {"o.opt_state.mu.float32": "shard", "o.opt_state.mu.a.float32": "shard"},
    ),
    "a list in a state of TorchOpt": (
        (ScaleByTraceState([ROOT, UNIT]), ()), PLAN, {"0.trace.float32": "shard", "0.trace.a.float32": "shard"},
    ),
    "lists side by side": (
        fs.TrainState({}, {}, ([ROOT, UNIT], [torch.tensor(1), torch.tensor(1)]), 0), PLAN,
        {
            "opt_state.0.float32": "shard", "opt_state.0.a.float32": "shard",
            "opt_state.1.float32": "whole", "opt_state.1.a.float32": "whole",
        },
    ),
    "tensors of a shard's size in a dictionary": ({"o": {"x": ROOT, "y": UNIT}}, PLAN, {"o.x": "whole", "o.y": "whole"}),
    "a list of a shard's sizes in no optimizer": ({"o": {"mu": [ROOT, UNIT]}}, PLAN, {"o.mu.0": "whole", "o.mu.1": "whole"}),
    "a list of other sizes": ({"o": [[UNIT, ROOT]]}, PLAN, {"o.0.0": "whole", "o.0.1": "whole"}),
    "a counter of one element": (
        {"": {"float32": {"m": torch.zeros(1), "n": torch.ones(1, dtype=torch.int64)}}}, SINGLE,
        {"float32.m": "shard", "float32.n": "whole"},
    ),
    "a rank's own": ({"x": fs.PerRank([{"a": {"float32": UNIT}}, ROOT])}, PLAN, {"x.0.a.float32": "rank", "x.1": "rank"}),
    "the same name in a dictionary of one's own": ({"a": {"w": UNIT}}, PLAN, {"a.w": "whole"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kinds_are_told_apart(name: str) -> None:
    state, plan, expected = CASES[name]
    assert {name: tensor.kind for name, tensor in flatten_state(state, plan, rank=1).stored.items()} == expected


def test_ranks_store_each_element_once_and_copies_share_the_work() -> None:
    params = {"w": torch.zeros(5, 3), "b": torch.zeros(4), "c": torch.zeros(7)}
    for mesh in ({"replicate": 2, "shard": 2}, 3):
        for strategy in ("full_shard", "no_shard"):
            plan = fs.make_plan(params, mesh, strategy=strategy)
            buffer = plan.unit_list[0].buffers[0]
            tree = {"": {"float32": torch.zeros(buffer.shard_numel)}}
            ranks = [flatten_state({str(i): tree for i in range(4)}, plan, r).tensors for r in range(plan.world_size)]
            stored = Counter(name for tensors in ranks for name in tensors)
            assert stored == {f"{i}.float32": buffer.shards for i in range(4)}
            assert all(ranks)  # copies take turns


class Spread(torch.Tensor):
    """A tensor that has ``full_tensor``, by which a DTensor is recognised."""

    full_tensor = None


with warnings.catch_warnings(action="ignore"):  # torch's own, of prototypes
    QUANTIZED = torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8)
SPREAD = torch.zeros(2).as_subclass(Spread)
BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "a set": ({"x": {1}}, TypeError, r"leaf 'x' of the state cannot be stored; .* found a set: convert it"),
    "a PerRank in a PerRank": ({"x": fs.PerRank([fs.PerRank(1)])}, TypeError, r"leaf 'x\.0' .* found a PerRank"),
    **{
        f"a tensor, {what}": ({"x": value}, TypeError, rf"leaf '{path}' of .* found a \w+ of torch\.{words}")
        for what, value, path, words in (
            ("sparse", torch.eye(2).to_sparse(), "x", "float32 and torch.sparse_coo on cpu"),
            ("on meta", torch.empty(2, device="meta"), "x", "float32 and torch.strided on meta"),
            ("quantized, of a rank's own", fs.PerRank([QUANTIZED]), r"x\.0", "qint8"),
            ("quantized, a shard", {"": {"float32": QUANTIZED}}, r"x\.\.float32", "qint8"),
            ("of numbers below a byte", torch.empty(2, dtype=torch.uint4), "x", r"uint4 .* store tensor\.view\("),
            ("spread over ranks, as a DTensor", SPREAD, "x", "float32"),
        )
    },
    "Muon's state": ({"x": {"a": {"float32": UNIT[:-1]}}}, ValueError, r"of unit 'a' at 'x' .* per_matrix by optimizer_to"),
    "a container whose data no file holds": ({"x": Node({}, Colour.RED)}, TypeError, r"\.trees:Node at 'x' .*Colour\.RED"),
    "a key of another kind": ({(1, 2): 3}, TypeError, r"must be str or int; found \(1, 2\)"),
    "two tensors of one name": (
        {"x": {"": {"float32": ROOT}, "a": {"float32": UNIT}}, "x.float32": UNIT}, ValueError,
        r"two tensors of the state would be stored as 'x\.float32'; rename",
    ),
    "buffers of another plan": ({"x": {"a": {"bfloat16": UNIT}}}, ValueError, r"at 'x' of the state do not match the plan"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_stored_is_said(name: str) -> None:
    state, kind, words = BAD[name]
    with pytest.raises(kind, match=words):
        flatten_state(state, PLAN, 0)


def test_as_many_containers_as_a_tree_may_have_stand_inside_and_outside_of_a_value_of_a_rank() -> None:
    state: Any = 7
    for _ in range(tree.DEEPEST):
        state = [state]
    state = fs.PerRank(state)
    for _ in range(tree.DEEPEST):
        state = [state]
    again = fs.replan([state, state], SINGLE, SINGLE)[1]
    for _ in range(tree.DEEPEST):
        again = again[0]
    assert isinstance(again, fs.PerRank)
    assert tree.leaves(again.value) == [7]


def test_a_registered_container_comes_back_with_its_data() -> None:
    state = {"x": Node({"a": 1, "b": "y"}, (2.5, None))}
    assert fs.replan([state, state], PLAN, SINGLE)[1] == state
