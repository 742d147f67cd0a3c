"""``replan`` to another plan and back is exact, and says what it cannot cut anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcshard as fs
from tests.states import PARAMS, equal, make_plan

GRIDS = ({"replicate": 2, "shard": 2}, {"replicate": 3, "shard": 2})
# What leaves are local to, the meshes before and after, and of which rank's or index's leaf each rank has a copy then.
LOCAL: dict[str, tuple[Any, Any, list[float]]] = {
    "each rank": (["mine"], ({"shard": 2}, {"shard": 3}), [0.0, 1.0, 0.0]),
    "replicate": ({"mine": "replicate"}, GRIDS, [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]),
    "shard": ({"mine": "shard"}, GRIDS, [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]),
}


@pytest.mark.parametrize("axis", LOCAL)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_leaves_that_are_local_go_by_rank_or_by_their_index_along_the_axis(axis: str, strategy: str) -> None:
    local, meshes, expected = LOCAL[axis]
    params = {"a": torch.arange(3.0), "mine": torch.zeros(4)}
    old, new = (fs.make_plan(params, shape, local=local, strategy=strategy) for shape in meshes)

    def main(mesh: fs.Mesh) -> Any:
        value = float(mesh.replicate.rank if axis == "replicate" else mesh.shard.rank)
        return fs.shard({**params, "mine": torch.full((4,), value)}, old, mesh)

    states = fs.simulate(main, meshes[0])
    there = fs.replan(states, old, new)
    assert [next(v for key, v in state[""].items() if "local" in key)[0].item() for state in there] == expected
    assert all(map(equal, fs.replan(there, new, old), states))


def test_a_number_that_is_none_is_equal_to_itself_where_a_buffer_has_it_once() -> None:
    plan, other = (fs.make_plan({"w": torch.zeros(4), "v": torch.zeros(2, 3)}, ranks) for ranks in (2, 3))
    state = {"": {"float32": {"m": torch.ones(5), "norm": torch.tensor([[1.0, float("nan")]])}}}
    for new in (plan, other):
        norm = fs.replan([state, state], plan, new)[1][""]["float32"]["norm"]
        assert norm[0, 0] == 1
        assert norm[0, 1].isnan()


def test_nothing_is_shared_with_the_old_states_and_they_stay_as_they_were() -> None:
    plan = make_plan("one rank")
    state = {"shards": fs.shard(PARAMS, plan, fs.Mesh()), "count": torch.tensor(3)}
    before = fs.replan([state], plan, plan)[0]
    (new,) = fs.replan([state], plan, plan)
    new["count"] += 1
    for shard in new["shards"][""].values():
        shard += 1
    assert equal(state, before)


OLD, NEW = make_plan("4 ranks, every layer"), make_plan("3 ranks, one unit")
GOOD = fs.simulate(lambda mesh: fs.shard(PARAMS, OLD, mesh), 4)
# a value that the state keeps once per buffer, and that differs from unit to unit
BESIDE = {name: {key: {"seen": number} for key in unit} for number, (name, unit) in enumerate(GOOD[0].items())}
WIDE = fs.make_plan({"w": torch.zeros(4)}, 2)

TWO, ONE = (fs.make_plan({"w": torch.zeros(1), "v": torch.zeros(1)}, 2, units=units) for units in (["v"], []))


PAIR = {"w": torch.zeros(3), "v": torch.zeros(3)}
HALF_FROZEN = fs.make_plan({"w": PAIR["w"].requires_grad_(), "v": PAIR["v"]}, 2)
TRAINED = fs.make_plan({name: leaf.clone().requires_grad_() for name, leaf in PAIR.items()}, 2)


def root(numel: int) -> list[Any]:
    """Return states of two ranks with shards of the root alone."""
    return [{"": {"float32": torch.zeros(numel)}}] * 2


BAD: dict[str, tuple[list[Any], fs.Plan, fs.Plan, str]] = {
    "shards of another plan": (root(3), WIDE, WIDE, r"'float32' of unit '\(root\)' at '' .* \(2,\); found \(3,\): pass"),
    "a leaf that was frozen then": (root(2), HALF_FROZEN, TRAINED, "into one buffer, .* holds the first but not the second"),
    "a model without a unit": (
        [{**root(1)[0], "v": {"float32": torch.zeros(1)}}] * 2, TWO, fs.make_plan({"w": torch.zeros(1)}, 2),
        "leaf 'v' of the state is not in the plan",
    ),
    "a model with one more leaf": (root(2), WIDE, TRAINED, "leaf 'v' of the plan is not in the state"),
    "another structure": ([{}, {}, {}, {"x": None}], OLD, NEW, r"structure of the state must be .* and rank 3 has"),
    "what a buffer has once": ([BESIDE] * 4, OLD, NEW, r"buffer is .*'value', 1\].* for the first and .*'value', 2\]"),
    **{
        f"a tensor {name} that a buffer has once": (
            [{key: {"float32": {"m": torch.zeros(1), "seen": each}} for key, each in zip(("", "v"), seen, strict=True)}] * 2,
            TWO, ONE, rf"leaves 'v' and 'w' into one .* once per buffer is {words}",
        )
        for name, seen, words in (
            ("with NaN", (torch.tensor([[1.0, float("nan")]]), torch.tensor([[1.0, 2.0]])), r".*2\.0\]\] for .*nan\]\] f"),
            ("of another shape", (torch.ones(3), torch.ones(2, 2)), r"\[\[.*\]\] for .* and \[1.* for"),
            ("of bits", [torch.full((2, 3), number, dtype=torch.int16).view(torch.bits16) for number in (258, 2)],
             r"\[2, 0, .* for .* \[2, 1, .* for"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_cut_anew_is_said(name: str) -> None:
    states, old, new, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        fs.replan(states, old, new)
