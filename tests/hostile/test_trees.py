"""Random trees and plans: everything that a plan accepts comes back to the bit, everywhere."""

from __future__ import annotations

import collections
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import optree
import pytest
import torch

import funcshard as fs
from tests.hostile.blame import outcome_of
from tests.hostile.campaign import Campaign

pytestmark = pytest.mark.hostile

KEYS: tuple[Any, ...] = (
    "a", "b", "w", "weight", "a.b", "", "a@0", "0", "1", "*", "**", "a.*", "[0]", "ä", "\n", " ", "__proto__", "x" * 300,
    0, 1, -1, 10,
)  # fmt: skip
ODD_KEYS: tuple[Any, ...] = ((1, 2), None, True, 1.5, b"a", frozenset({1}), torch.float32, 2**70)
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
ODD_DTYPES = (torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn)
SHAPES = ((), (1,), (2,), (3,), (5, 3), (0,), (0, 4), (2, 2, 2), (17,), (1, 1))
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
WORLDS: tuple[Any, ...] = (1, 2, 3, {"replicate": 2, "shard": 2})


class Pair(NamedTuple):
    first: Any
    second: Any


def draw_leaf(draw: Random, earlier: list[torch.Tensor]) -> Any:
    if earlier and draw.random() < 0.08:
        return draw.choice(earlier)  # a tie
    dtype = draw.choice(ODD_DTYPES if draw.random() < 0.1 else DTYPES)
    shape = draw.choice(SHAPES)
    generator = torch.Generator().manual_seed(draw.getrandbits(31))
    leaf = torch.randint(0, 100, shape, generator=generator).to(dtype)
    if len(shape) == 2 and draw.random() < 0.3:
        leaf = leaf.T.contiguous().T
    if leaf.is_floating_point() and draw.random() < 0.1:
        leaf.requires_grad_(False)
    earlier.append(leaf)
    return leaf


def draw_tree(draw: Random, depth: int, earlier: list[torch.Tensor]) -> Any:
    """Return a random tree of many kinds of containers."""
    if depth == 0 or draw.random() < 0.15:
        return None if draw.random() < 0.08 else draw_leaf(draw, earlier)
    count = draw.choice([0, 1, 1, 2, 2, 3, 4])
    kind = draw.choice(["dict", "dict", "dict", "list", "tuple", "ordered", "default", "deque", "pair"])
    if kind == "pair":
        return Pair(draw_tree(draw, depth - 1, earlier), draw_tree(draw, depth - 1, earlier))
    children = [draw_tree(draw, depth - 1, earlier) for _ in range(count)]
    if kind in ("dict", "ordered", "default"):
        keys = draw.sample(KEYS, count)
        if keys and draw.random() < 0.03:
            keys[0] = draw.choice(ODD_KEYS)
        pairs = list(zip(keys, children, strict=True))
        made = {"dict": dict, "ordered": collections.OrderedDict}.get(kind, lambda each: collections.defaultdict(list, each))
        return made(pairs)
    return {"list": list, "tuple": tuple, "deque": collections.deque}[kind](children)


def draw_units(draw: Random, paths: list[str]) -> list[str]:
    nodes = sorted({path.rpartition(".")[0] for path in paths} - {""})
    chosen = draw.sample(nodes, min(len(nodes), draw.choice([0, 0, 1, 2])))
    return [*chosen, *(["*"] if draw.random() < 0.1 else [])]


def same(one: Any, other: Any) -> bool:
    """Return whether two trees have the same structure and the same bits."""
    if optree.tree_structure(one) != optree.tree_structure(other):
        return False
    pairs = zip(optree.tree_leaves(one), optree.tree_leaves(other), strict=True)
    return all(
        a.dtype == b.dtype and a.shape == b.shape and bytes(a.detach().contiguous().view(-1).view(torch.uint8).numpy())
        == bytes(b.detach().contiguous().view(-1).view(torch.uint8).numpy())
        for a, b in pairs
    )  # fmt: skip


def round_trip(mesh: fs.Mesh, params: Any, plan: fs.Plan, folder: Path) -> str:
    """Return what of a tree does not come back from shards, a state dict and a checkpoint."""
    shards = fs.shard(params, plan, mesh)
    faults = []
    if not same(fs.gather(shards, plan, mesh), params):
        faults.append("gather")
    by_name = fs.to_state_dict(shards, plan, mesh)
    if not same(fs.gather(fs.from_state_dict(by_name, plan, mesh), plan, mesh), params):
        faults.append("the state dict")
    fs.save(folder / "saved", {"shards": shards, "step": 1}, plan, mesh)
    if not same(fs.gather(fs.restore(folder / "saved", plan, mesh)["shards"], plan, mesh), params):
        faults.append("the checkpoint")
    return ", ".join(faults)


def one_tree(draw: Random) -> dict[str, int]:
    earlier: list[torch.Tensor] = []
    params = draw_tree(draw, draw.choice([1, 2, 3, 4]), earlier)
    world, what = draw.choice(WORLDS), f"a tree of {len(earlier)} leaves: {optree.tree_structure(params)}"
    options: dict[str, Any] = {"strategy": draw.choice(STRATEGIES)}
    if draw.random() < 0.2:
        options["bucket_bytes"] = draw.choice([0, 100, "auto"])
    if draw.random() < 0.15:
        options["precision"] = fs.MixedPrecision(param_dtype=torch.bfloat16)
    kinds = (ValueError, TypeError)
    plan = outcome_of(lambda: fs.make_plan(params, world, **options), f"make_plan of {what}", kinds)
    if isinstance(plan, Exception):
        return {"trees": 1, "refused": 1}
    if draw.random() < 0.6:
        units = draw_units(draw, [path for leaf in plan.leaves for path in (leaf.path,)])
        with_units = outcome_of(lambda: fs.make_plan(params, world, units=units, **options), f"{units} of {what}", kinds)
        plan = plan if isinstance(with_units, Exception) else with_units
    text = outcome_of(plan.to_json, f"to_json of {what}", kinds)
    if isinstance(text, Exception):
        return {"trees": 1, "refused by to_json": 1}
    again = fs.Plan.from_json(text)
    assert again == plan, f"the plan that comes back from JSON is another one, of {what}"
    assert again.fingerprint() == plan.fingerprint(), what
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        for each in (plan, again):
            call = lambda each=each: fs.simulate(lambda mesh: round_trip(mesh, params, each, Path(folder)), world)  # noqa: E731
            found = outcome_of(call, f"round trip of {what}", kinds)
            if isinstance(found, Exception):
                return {"trees": 1, "refused by functions": 1}
            assert not any(found), f"{found[0]} gives other bits, of {what}"
    return {"trees": 1, "accepted": 1}


def test_a_tree_that_a_plan_accepts_comes_back_to_the_bit(campaign: Campaign) -> None:
    def one(draw: Random) -> dict[str, int]:
        counts = Counter[str]()
        for _ in range(10):
            counts.update(one_tree(draw))
        return counts

    campaign.run(one, short=12, full=1000, limit=120)
