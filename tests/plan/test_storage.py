"""Pairs of functions that store leaves small, and what plans say about packed leaves."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.plan.storage import Packing
from tests.jobs import decoded
from tests.json_damage import changed_once

PAIR = fs.Storage(lambda x: (x.half(), x[:, 0].half().double()), lambda low, _: low.double(), 6, "pair")
STORAGES = {"nf4": fs.nf4(4), "int8": fs.int8(), "fp8": fs.fp8(7), "pair": PAIR}


def values(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).mul(0.02).to(dtype)


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_records_are_those_of_blocks_and_packing_what_they_decode_to_changes_no_byte(name: str, dtype: torch.dtype) -> None:
    storage = STORAGES[name]
    packing = Packing.of(storage, str(dtype).removeprefix("torch."))
    for numel in (0, 1, storage.block, storage.block + 1, 500):
        leaf = values(numel, dtype)
        packed = packing.pack(leaf)
        assert packed.numel() == packing.bytes_of(numel) == math.ceil(numel / storage.block) * packing.record
        unpacked = packing.unpack(packed)[:numel]
        assert unpacked.dtype == dtype
        assert torch.equal(unpacked, decoded(leaf, storage))
        assert torch.equal(packing.pack(unpacked), packed)
        assert torch.equal(packing.unpack(packed, torch.float64)[:numel], unpacked.double())  # rounded to dtype first
        if numel > storage.block:  # any whole number of records is packed and decoded alone
            rest = packing.pack(leaf[storage.block :])
            assert torch.equal(rest, packed[packing.record :])
            assert torch.equal(packing.unpack(rest, torch.float64), packing.unpack(packed, torch.float64)[storage.block :])


def test_a_long_leaf_is_packed_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    packing, leaf = Packing.of(fs.nf4(), "float32"), values(64 * 9 + 5)
    whole = packing.pack(leaf)
    monkeypatch.setattr("funcshard.plan.storage.step_numel", lambda *, accelerator: 128)
    assert torch.equal(packing.pack(leaf), whole)
    assert torch.equal(packing.unpack(whole)[: len(leaf)], decoded(leaf, fs.nf4()))


NEAR = {"nf4": (fs.nf4(), 0.1522), "int8": (fs.int8(), 0.5 / 127), "fp8": (fs.fp8(), 16 / 448)}


@pytest.mark.parametrize(("storage", "most"), NEAR.values(), ids=NEAR)
def test_an_element_is_as_near_as_its_levels_and_zeros_are_zeros(storage: fs.Storage, most: float) -> None:
    blocks = values(64 * 100).view(100, 64)
    blocks[0] = 0
    error = (storage.decode(*storage.encode(blocks)) - blocks).abs() / blocks.abs().amax(1, keepdim=True).clamp_min(1e-30)
    assert not error[0].any()
    assert most / 3 < error.max() <= most * 1.001


def test_nf4_has_the_bytes_of_bitsandbytes() -> None:
    codes, scales = fs.nf4(4).encode(torch.tensor([[-3.0, 3.0, 0.0, 0.3], [0.0, 0.0, 0.0, -1.0]]))
    # Levels 0, 15, 7 and 8; the first element of a pair is in the high bits.
    assert codes.tolist() == [[0x0F, 0x78], [0x77, 0x70]]
    assert scales.tolist() == [[3.0], [1.0]]


PARAMS = {
    "base": {name: torch.nn.Parameter(torch.zeros(size), False) for name, size in (("w", (5, 13)), ("norm", 3))},
    "adapter": torch.nn.Parameter(torch.zeros(4)),
}
BUILT_IN = fs.make_plan(PARAMS, 3, storage={"base.w": fs.nf4(8)})


def test_shards_are_whole_records_and_a_plan_says_what_they_mean() -> None:
    _, frozen, packed = BUILT_IN.units[""].buffers
    assert (frozen.key, packed.key) == ("float32.frozen", "float32.frozen.nf4_8")
    assert (packed.dtype, packed.shard_numel, packed.leaves[0].shape) == ("uint8", 3 * 8, (9 * 8,))
    assert fs.Plan.from_json(BUILT_IN.to_json()) == BUILT_IN
    assert "decoded to float32" in str(BUILT_IN)
    assert fs.make_plan(PARAMS, 3, storage={"**": None}).to_json() == fs.make_plan(PARAMS, 3).to_json()


def test_json_holds_the_name_of_a_pair_and_from_json_takes_its_functions() -> None:
    plan = fs.make_plan(PARAMS, 1, storage={"base": PAIR})
    named = fs.Plan.from_json(plan.to_json())
    assert named.fingerprint() == plan.fingerprint()
    assert named != plan
    assert fs.Plan.from_json(plan.to_json(), {"base": PAIR}) == plan
    with pytest.raises(ValueError, match="stores leaves by 'pair', whose functions JSON does not hold"):
        fs.shard(PARAMS, named, fs.Mesh())


def test_damaged_json_of_a_packed_plan_is_read_or_refused() -> None:
    for where, data in changed_once(json.loads(BUILT_IN.to_json()), 300):
        try:
            plan = fs.Plan.from_json(json.dumps(data))
        except ValueError:
            continue
        assert fs.Plan.from_json(plan.to_json()) == plan, where


def test_a_path_counts_before_a_glob_and_a_later_entry_before_an_earlier_one() -> None:
    frozen, nf4, int8 = "float32.frozen", "float32.frozen.nf4_64", "float32.frozen.int8_64"
    of_base: list[tuple[Any, list[str]]] = [
        ({"": fs.nf4()}, [nf4, nf4]),  # what is trained is not packed
        ({"**": fs.nf4()}, [nf4, nf4]),
        ({"base": fs.nf4(), "base.norm": None}, [nf4, frozen]),
        ({"base": fs.int8(), "**": None}, [int8, int8]),
        ({"**": fs.nf4(), "*.norm": fs.int8()}, [nf4, int8]),
    ]
    for storage, keys in of_base:
        buffers = fs.make_plan(PARAMS, 1, storage=storage).units[""].buffers
        found = {leaf.path: buffer.key for buffer in buffers for leaf in buffer.leaves}
        assert found == dict(zip(("base.w", "base.norm", "adapter"), [*keys, "float32"], strict=True))
