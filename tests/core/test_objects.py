"""``broadcast_object`` sends what JSON holds exactly, and says what it doesn't hold on every rank."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import funcshard as fs
from tests.ranks import on_ranks, run_ranks

VALUE = {"name": "ä\U0001f600", "numbers": [1, 2**200, 0.1, -0.0, math.inf, True, None], "empty": [{}, []]}


def sent(mesh: fs.Mesh, src: int) -> Any:
    return fs.broadcast_object(VALUE if mesh.rank == src else mesh, mesh, src)


@pytest.mark.parametrize("src", [0, 1])
def test_every_rank_gets_the_value_of_one(src: int) -> None:
    for found in [*fs.simulate(lambda mesh: sent(mesh, src), {"replicate": 2, "shard": 2}), *run_ranks(sent, 2, src)]:
        assert repr(found) == repr(VALUE)


BAD: dict[str, tuple[Any, str]] = {
    "a tuple": ({"a": [1, (2, 3)]}, r"value\['a'\]\[1\] must be None, a bool, .*; found tuple: pass a list"),
    "a key": ({"a": {1: 2}}, r"the keys of value\['a'\] must be strings, as JSON has no others; found 1: convert it"),
    "a tensor": (torch.ones(1), r"value must be None, .*; found Tensor: convert it, or send a tensor"),
    "a number of NumPy": (np.float64(1), r"value must be None, .*; found float64: convert it"),
    "bytes": (b"a", r"value must be None, .*; found bytes: convert it"),
}


@pytest.mark.parametrize("name", BAD)
@on_ranks(2)
def test_what_json_cannot_hold_is_said_on_every_rank_and_the_mesh_goes_on(mesh: fs.Mesh, name: str) -> None:
    value, words = BAD[name]
    with pytest.raises(TypeError, match=words):
        fs.broadcast_object(value if mesh.rank == 0 else None, mesh)
    assert fs.psum(torch.ones(1), mesh).item() == 2


def test_the_source_is_a_rank() -> None:
    with pytest.raises(ValueError, match="src must be a rank of the world, from 0 to 0; found 1"):
        fs.broadcast_object(1, fs.Mesh(), 1)
    with pytest.raises(TypeError, match="mesh must be a Mesh"):
        fs.broadcast_object(1, None)  # type: ignore[arg-type]
