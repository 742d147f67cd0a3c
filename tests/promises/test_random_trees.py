"""Random trees through a whole life: plan, JSON, shards, gather, state dict, save and restore.

Each tree comes back bit for bit, or an error of this library names the path. By hand, more trees:
``FUNCSHARD_TREES=0:10000 python -m pytest tests/promises/test_random_trees.py -n 0``.
"""

from __future__ import annotations

import os
import random
import re
import traceback
import warnings
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import funcshard as fs
from tests.trees import Pair, random_tree, random_units

SEEDS = range(*map(int, os.environ.get("FUNCSHARD_TREES", "0:20").split(":")))
SAVED = 1 if "FUNCSHARD_TREES" in os.environ else 10  # one of so many trees is saved, because disks are slow
PACKAGE = Path(fs.__file__).parent

# What an error says of a tree as a whole; every other error has to name a path or a key.
OF_THE_WHOLE = r"the root of the tree|of the tree|params must|units|two tensors of the state"


def same(one: Any, other: Any) -> bool:
    """Return whether two trees are of one structure, with the same bits."""
    if optree.tree_structure(one) != optree.tree_structure(other):
        return False
    pairs = zip(optree.tree_leaves(one), optree.tree_leaves(other), strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def is_ours(error: Exception) -> bool:
    """Return whether the library raised an error itself, and names a place in quotation marks."""
    frames = traceback.extract_tb(error.__traceback__)
    raised = Path(frames[-1].filename).is_relative_to(PACKAGE) and (frames[-1].line or "").startswith(("raise", "check"))
    return (
        isinstance(error, ValueError | TypeError) and raised and bool(re.search(rf"'.*'|{OF_THE_WHOLE}", str(error), re.S))
    )


def life(mesh: fs.Mesh, params: Any, units: Any, folder: Path | None) -> None:
    plan = fs.make_plan(params, mesh, units=units)
    again = fs.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.fingerprint() == plan.fingerprint()
    shards = fs.shard(params, again, mesh)
    gathered = fs.gather(shards, plan, mesh)
    assert same(gathered, params), "gather"
    state_dict = fs.to_state_dict(shards, plan, mesh)
    back = fs.from_state_dict(state_dict, plan, mesh)
    assert same(back, shards), "state dict"
    if folder is None:
        return
    fs.save(folder, {"step": 3, "shards": shards}, plan, mesh)
    # Another plan of the same tree: no units, so that leaves move between buffers.
    other = fs.make_plan(params, mesh)
    restored = fs.restore(folder, other, mesh)
    assert same(fs.gather(restored["shards"], other, mesh), params), "restored"


def outcome(seed: int, folder: Path) -> str:
    """Return how one random tree ends: ``"kept"``, or the first words of its error."""
    rng = random.Random(seed)
    params = random_tree(rng, odd=rng.choice([0.0, 0.0, 0.02, 0.3]))
    ranks = rng.choice([1, 2, 2, 3])
    try:
        units = random_units(rng, [leaf.path for leaf in fs.make_plan(params, ranks).leaves])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fs.make_plan(params, ranks, units=units)
        saved = None if seed % SAVED else folder / str(seed)
        fs.simulate(lambda mesh: life(mesh, params, units, saved), world_size=ranks)
    except Exception as error:
        cause = error
        while not is_ours(cause) and (cause.__cause__ or cause.__context__) is not None:
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        if not is_ours(cause):
            raise AssertionError(f"tree of seed {seed}: {type(error).__name__}: {error}") from error
        return str(cause)[:60]
    return "kept"


@pytest.mark.slow
def test_random_trees_come_back_bit_for_bit_or_an_error_names_the_path(tmp_path: Path) -> None:
    found = [outcome(seed, tmp_path) for seed in SEEDS]
    assert found.count("kept") > len(SEEDS) // 3
    assert any(each != "kept" for each in found)


def test_a_fault_in_a_tree_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"a": torch.ones(3), "b": Pair(torch.ones(1), None)}
    assert not same(tree, {**tree, "a": torch.tensor([1.0, 1.0, 2.0])})
    assert not same(tree, {**tree, "b": (torch.ones(1), None)})
    monkeypatch.setattr(fs, "gather", lambda *_: {})
    with pytest.raises(AssertionError, match=r"tree of seed .*gather"):
        [outcome(seed, tmp_path) for seed in range(10)]
