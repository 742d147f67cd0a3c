"""Every argument of every public function is replaced by junk: an error of ours, or nothing happens."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.hostile.blame import outcome_of
from tests.hostile.campaign import Campaign
from tests.right_calls import RIGHT_CALLS, World

pytestmark = pytest.mark.hostile

KINDS = (ValueError, TypeError, OSError, RuntimeError)
HANG = 30.0


class Odd:
    """An object that is of no use as an argument."""


JUNK: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "zero": lambda: 0, "minus one": lambda: -1, "a big int": lambda: 2**70,
    "a float": lambda: 1.5, "nan": lambda: float("nan"), "inf": lambda: float("inf"), "a complex": lambda: 1j,
    "an empty text": lambda: "", "a text": lambda: "shard", "bytes": lambda: b"shard", "a list": list,
    "a list of texts": lambda: ["a", "b"], "a nested list": lambda: [[1], [2]], "a tuple": lambda: (1, 2), "a dict": dict,
    "a dict of numbers": lambda: {1: 2}, "a set": lambda: {1}, "a class": lambda: dict,
    "a function": lambda: lambda *a, **k: None,
    "a function that returns its input": lambda: lambda *a: a[0] if a else None, "an object": Odd,
    "a generator": lambda: (i for i in range(3)), "a module": lambda: nn.Linear(2, 2), "a tensor": lambda: torch.ones(3),
    "a scalar tensor": lambda: torch.tensor(1.0), "an int tensor": lambda: torch.ones(2, dtype=torch.int64),
    "a tensor on meta": lambda: torch.ones(3, device="meta"),
    "a dtype": lambda: torch.float32, "a device": lambda: torch.device("cpu"), "a tree": lambda: {"w": torch.ones(2)},
    "a mesh": fs.Mesh, "a path": lambda: Path("nowhere"), "a folder": lambda: tempfile.gettempdir(),
    "an exception": lambda: ValueError("no"), "the module itself": lambda: fs,
}  # fmt: skip


# These take junk in other words than ours.
LEFT_OUT = {"GradScaler.unscale", "Mesh.from_device_mesh", "delayed", "profile"}


def misuse(mesh: fs.Mesh, seed: int, folder: Path) -> str:
    """Call some public function with one or two arguments replaced; return what came of it."""
    draw = Random(seed)
    name = draw.choice(sorted(RIGHT_CALLS.keys() - LEFT_OUT))
    function, positional, named = RIGHT_CALLS[name](World(mesh, folder))
    places: list[Any] = [*range(len(positional)), *named]
    changes = {place: draw.choice(list(JUNK)) for place in draw.sample(places, min(len(places), draw.choice([1, 1, 2])))}
    arguments = [JUNK[changes[i]]() if i in changes else value for i, value in enumerate(positional)]
    options = {key: JUNK[changes[key]]() if key in changes else value for key, value in named.items()}
    if draw.random() < 0.1:
        options["no_such_option"] = 1
        changes["no_such_option"] = "1"
    what = f"{name}({', '.join(f'{place}: {junk}' for place, junk in changes.items())})"
    try:
        found = outcome_of(lambda: function(*arguments, **options), what, KINDS)
    except AssertionError as fault:
        # Python tells it of our functions, and of classes of torch that take what ours pass on.
        if "unexpected keyword argument 'no_such_option'" in str(fault):
            return "rejected by Python"
        raise
    return "rejected" if isinstance(found, Exception) else "accepted"


def test_junk_in_any_argument_of_any_function_gets_a_clear_error(campaign: Campaign, monkeypatch: Any) -> None:
    def one(draw: Random) -> dict[str, int]:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder, monkeypatch.context() as patch:
            patch.chdir(folder)  # junk may be a relative path
            outcome = fs.simulate(lambda mesh: misuse(mesh, draw.getrandbits(32), Path(folder)), 1)[0]
            return {"calls": 1, outcome: 1}

    campaign.run(one, short=60, full=10_000, limit=HANG)
