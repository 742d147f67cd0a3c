"""``broadcast_object`` sends what JSON holds exactly, and says what it does not hold; ``agree`` gives one value."""

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
    "a tuple": ({"a": [1, (2, 3)]}, r"which JSON holds exactly; found {'a': \[1, \(2, 3\)\]}: convert it"),
    "a key": ({"a": {1: 2}}, "with strings as keys.*found {'a': {1: 2}}: convert it"),
    "a tensor": (torch.ones(1), "Tensor is not JSON serializable"),
    "a number of NumPy": (np.float64(1), r"found np.float64\(1.0\): convert it"),
    "bytes": (b"a", "bytes is not JSON serializable"),
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


def agreed(mesh: fs.Mesh) -> list[Any]:
    own = float(mesh.rank)
    values = [own < 9, own < 1, torch.tensor([own > 0]), own, -mesh.rank, torch.tensor(own).bfloat16(), 2**60, math.inf]
    inside = torch.func.grad_and_value(lambda x: x * fs.agree(x > 1, mesh) + fs.agree(x + own, mesh))(torch.tensor(2.0))
    return [fs.agree(value, mesh) for value in values] + [x.item() for x in inside]


def test_all_ranks_agree_on_a_condition_and_on_the_largest_number() -> None:
    for world, last in (({"replicate": 2, "tensor": 2}, 3.0), ({"shard": 1}, 0.0)):
        rest = [last, 0.0, last, 2.0**60, math.inf, 1.0, 4.0 + last]
        for found in fs.simulate(agreed, world):
            assert found == [True, last < 1, last < 1 and False, *rest]
            assert [type(x) for x in found[:4]] == [bool, bool, bool, float]
    assert run_ranks(agreed, 2) == [[True, False, False, 1.0, 0.0, 1.0, 2.0**60, math.inf, 1.0, 5.0]] * 2
    assert math.isnan(fs.simulate(lambda mesh: fs.agree(math.nan if mesh.rank else 1, mesh), 2)[0])


@pytest.mark.parametrize("value", [torch.ones(2), None, "yes", 1j])
def test_ranks_agree_on_bools_and_real_numbers_only(value: Any) -> None:
    with pytest.raises(TypeError, match="agree takes a bool, a real number, or a tensor of one; found"):
        fs.agree(value, fs.Mesh())
