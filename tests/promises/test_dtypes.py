"""Leaves of every dtype and kind: what works, and the words with the leaf's path where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs

WIDE = ("float16", "bfloat16", "float32", "float64", "complex64")
WHOLE = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool")
NO_NUMBERS = ("bits8", "bits16", "bits1x8", "float4_e2m1fn_x2")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


def leaf(dtype: str) -> torch.Tensor:
    values = torch.empty(5, dtype=getattr(torch, dtype))
    values.view(torch.uint8).copy_(torch.arange(5 * values.itemsize) % 2)
    return values


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*WIDE, *WHOLE, *FLOAT8])
def test_a_leaf_of_any_dtype_is_cut_gathered_and_saved_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    params = {"a": {"w": leaf(dtype)}, "b": torch.ones(3)}

    def main(mesh: fs.Mesh) -> list[torch.Tensor]:
        plan = fs.make_plan(params, mesh)
        shards = fs.shard(params, plan, mesh)
        state_dict = fs.to_state_dict(shards, plan, mesh)
        fs.save(tmp_path / "saved", shards, plan, mesh)
        found = [shards, fs.from_state_dict(state_dict, plan, mesh), fs.restore(tmp_path / "saved", plan, mesh)]
        average = fs.copy(shards)
        return [fs.gather(each, plan, mesh)["a"]["w"] for each in (*found, average)] + [state_dict["a.w"]]

    for found in fs.simulate(main, world_size=2):
        assert all(same(each, params["a"]["w"]) for each in found)


@pytest.mark.parametrize("dtype", NO_NUMBERS)
def test_shards_that_torch_neither_fills_nor_compares_are_stored_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    plans = {ranks: fs.make_plan({"v": torch.ones(7), "w": torch.ones(5, 2)}, ranks) for ranks in (2, 3)}
    flat = torch.empty(18, dtype=getattr(torch, dtype))
    flat.view(torch.uint8).copy_(torch.arange(18 * flat.itemsize) % 251)
    flat[17:].view(torch.uint8).zero_()  # padding
    code = leaf(dtype)[:4].view(2, 2)  # of the size of no shard, so each leaf has a copy in the checkpoint
    states = [{"": {"float32": {"m": flat[9 * rank : 9 * rank + 9], "code": code}}} for rank in range(2)]

    def save(mesh: fs.Mesh, state: Any) -> None:
        fs.save(tmp_path / "saved", state, plans[mesh.world_size], mesh)

    def restore(mesh: fs.Mesh) -> Any:
        return fs.restore(tmp_path / "saved", plans[mesh.world_size], mesh)

    fs.simulate(lambda mesh: save(mesh, states[mesh.rank]), 2)
    fs.simulate(lambda mesh: save(mesh, restore(mesh)), 3)
    for found in (fs.simulate(restore, 2), fs.replan(fs.replan(states, plans[2], plans[3]), plans[3], plans[2])):
        below = [state[""]["float32"] for state in found]
        assert same(torch.cat([each["m"] for each in below]), flat)
        assert all(same(each["code"].view(4), code.view(4)) for each in below)


def on_one_rank(dtype: str, use: Callable[[Any, fs.Plan, fs.Mesh], Any]) -> Any:
    params, mesh = {"a": {"w": leaf(dtype)}, "b": torch.ones(3)}, fs.Mesh()
    plan = fs.make_plan(params, mesh)
    return use(fs.shard(params, plan, mesh), plan, mesh)


@pytest.mark.parametrize("dtype", [*WHOLE, *FLOAT8])
def test_a_norm_of_a_leaf_without_a_norm_names_the_leaf(dtype: str) -> None:
    words = rf"a norm needs floating-point or complex numbers .* found torch\.{dtype} for leaf 'a\.w': pass None for shard"
    for use in (fs.global_norm, lambda *args: fs.clip_by_global_norm(*args, 1.0)):
        with pytest.raises(TypeError, match=words):
            on_one_rank(dtype, use)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8), "is a quantized tensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is a nested tensor"),
    "sparse": (lambda: torch.ones(3).to_sparse(), "must be a dense tensor; found layout torch.sparse_coo"),
    "CSR": (lambda: torch.ones(3, 3).to_sparse_csr(), "must be a dense tensor; found layout torch.sparse_csr"),
    "uint4": (lambda: torch.empty(3, dtype=torch.uint4), "has dtype torch.uint4, which torch can neither copy nor fill"),
    "int1": (lambda: torch.empty(3, dtype=torch.int1), "has dtype torch.int1, which"),
    "bits8": (lambda: torch.empty(3, dtype=torch.bits8), "has dtype torch.bits8, which"),
    "float4": (lambda: torch.empty(3, dtype=torch.float4_e2m1fn_x2), "has dtype torch.float4_e2m1fn_x2, which"),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, of prototypes
@pytest.mark.parametrize(("make", "words"), REFUSED.values(), ids=REFUSED)
def test_a_leaf_that_no_shard_can_hold_is_refused_when_planned(make: Callable[[], torch.Tensor], words: str) -> None:
    with pytest.raises(TypeError, match=rf"leaf 'a\.w' {words}"):
        fs.make_plan({"a": {"w": make()}, "b": torch.ones(3)}, 2)
