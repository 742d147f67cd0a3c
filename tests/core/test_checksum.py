"""Ranks that pass different leaves are told so, by checksums that see every bit and the order of elements."""

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import funcshard as fs
from funcshard.comm import Op, simulation
from funcshard.core import checksum as checksums
from funcshard.core.checksum import checksum
from tests.core.units import same_bits
from tests.pairwise import crossed
from tests.ranks import on_ranks

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
    torch.complex128, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
]  # fmt: skip
SHAPES = [(), (1,), (3, 5), (2, 3, 7), (129, 257), (5_001,)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_ROWS", 4)  # so that small tensors take every way through the code
    monkeypatch.setattr(checksums, "_COLUMNS", 13)


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 50
    return values > 0 if dtype == torch.bool else values.to(dtype)


def of(values: torch.Tensor) -> int:
    return int(checksum(values))


@pytest.mark.nightly(one_in=3)
@crossed(dtype={str(dtype): dtype for dtype in DTYPES}, shape=SHAPES)
def test_every_bit_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = filled(shape, dtype)
    before, raw = of(values), values.view(-1).view(torch.uint8)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        at = int(torch.randint(len(raw), (), generator=generator))
        bit = 1 if dtype == torch.bool else 1 << int(torch.randint(8, (), generator=generator))
        raw[at] ^= bit
        assert of(values) != before, (at, bit)
        raw[at] ^= bit
    assert of(values) == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int8])
@pytest.mark.parametrize("numel", [2, 100, 5000])
def test_changes_of_many_elements_do_not_cancel_out(numel: int, dtype: torch.dtype) -> None:
    values = filled((numel,), dtype)
    shuffled = values[torch.randperm(numel, generator=torch.Generator().manual_seed(1))]
    swapped = torch.cat([values[numel // 2 :], values[: numel // 2]])
    others = [values.flip(0), swapped, -values, values * 2, values.roll(1), torch.where(values == values[0], values, 0)]
    others += [shuffled] if numel > 2 else []
    others += [values.conj()] if dtype.is_complex else []
    for number, other in enumerate(others):
        assert of(other) != of(values), number


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(0, 40), max_size=3), st.sampled_from(DTYPES), st.data())
def test_any_view_has_the_checksum_of_its_copy(shape: list[int], dtype: torch.dtype, data: st.DataObject) -> None:
    view = filled(tuple(shape), dtype).permute(data.draw(st.permutations(range(len(shape)))))
    view = view[tuple(slice(data.draw(st.integers(0, n)), None, data.draw(st.integers(1, 3))) for n in view.shape)]
    assert of(view) == of(view.clone(memory_format=torch.contiguous_format))


def test_a_contiguous_tensor_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_COLUMNS", 509)
    large = torch.randn(400_000)
    for values in (large, large[:-1], large.view(400, 1000), large.view(torch.float64)):
        with torch.profiler.profile(profile_memory=True) as profile:
            checksum(values)
        largest = max(event.self_cpu_memory_usage for event in profile.events())
        assert largest < large.nbytes / 20, (values.shape, values.dtype, largest)


GRID = {"replicate": 2, "shard": 2}


LOCAL = {"row": "replicate", "column": "shard", "own": ("replicate", "shard")}


def of_rank(mesh: fs.Mesh, strange: str = "") -> dict[str, torch.Tensor]:
    """Return leaves that differ along their local axes; the leaf ``strange`` differs on rank 3 besides."""
    index = {"all": 0, "row": mesh.replicate.rank, "column": mesh.shard.rank, "own": mesh.rank}
    return {name: torch.full((3,), 10.0 * i + (mesh.rank == 3 and name == strange)) for name, i in index.items()}


@pytest.mark.parametrize(
    ("strange", "words"),
    [
        ("", None),
        ("own", None),
        (
            "all",
            "on every rank; found 2 different ones, on ranks 0, 1, 2; rank 3 (1 of 3 leaves differ): call torch.manual_seed",
        ),
        ("row", "on ranks 2, 3, which share it; found 2 different ones, on rank 2; rank 3 (1 of 3"),
        ("column", "on ranks 1, 3, which share it; found 2 different ones, on rank 1; rank 3 (1 of 3"),
    ],
)
@on_ranks(GRID)
def test_local_leaves_are_compared_by_the_ranks_that_share_them(mesh: fs.Mesh, strange: str, words: str | None) -> None:
    params = of_rank(mesh, strange)
    plan = fs.make_plan(params, mesh, local=LOCAL)
    if words is None:
        same_bits(dict(fs.gather(fs.shard(params, plan, mesh), plan, mesh)), params)
    else:
        with pytest.raises(ValueError, match=re.escape(words)):
            fs.shard(params, plan, mesh)


@on_ranks(2)
def test_unchecked_leaves_are_cut_as_they_are(mesh: fs.Mesh) -> None:
    params = {"w": torch.arange(4.0) + 10 * mesh.rank}
    plan = fs.make_plan(params, mesh)
    assert fs.gather(fs.shard(params, plan, mesh, check=False), plan, mesh)["w"].tolist() == [0.0, 1.0, 12.0, 13.0]


def test_ranks_that_agree_send_nothing_that_grows_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    start = simulation._SimulatedGroup.start

    def checked(group: Any, op: Op) -> Any:
        assert op.kind != "all_gather", "a message has a part for each rank"
        return start(group, op)

    monkeypatch.setattr(simulation._SimulatedGroup, "start", checked)

    def main(mesh: fs.Mesh) -> None:
        plan = fs.make_plan({"w": torch.arange(4.0)}, mesh)
        fs.shard({"w": torch.arange(4.0)}, plan, mesh)
        with pytest.raises(ValueError, match="must have the same values on every rank"):
            fs.shard({"w": torch.arange(4.0) + mesh.rank}, plan, mesh)

    fs.simulate(main, GRID)


A, B = torch.zeros(3), torch.zeros(2)
FAULTS: dict[str, tuple[Any, Any, str]] = {
    "missing": ({"a": A}, ValueError, r"params must be the tree that the plan was made for; missing: \['b'\]"),
    "no tensor": ({"a": A, "b": None}, ValueError, r"missing: \['b'\]"),
    "a number": ({"a": A, "b": 3.0}, TypeError, "leaf 'b' of params must be a tensor; found float: convert it"),
    "meta": ({"a": A, "b": B.to("meta")}, ValueError, "leaf 'b' of params is on the meta"),
    "another shape": ({"a": A, "b": A}, ValueError, r"leaf 'b' of params must have shape \(2,\) .* or make a new plan"),
}


@crossed(fault=list(FAULTS), failing=[0, 3], src=[None, 0])
@on_ranks(GRID)
def test_a_fault_of_one_rank_is_raised_on_all_of_them(mesh: fs.Mesh, fault: str, failing: int, src: int | None) -> None:
    (params, kind, words), good = FAULTS[fault], {"a": A, "b": B}
    if fault == "meta" and src not in (None, failing):
        return  # the other ranks need no values
    whose = "" if mesh.rank == failing else rf" \(found on rank {failing}\)"
    with pytest.raises(kind, match=f"{words}.*{whose}$"):
        fs.shard(params if mesh.rank == failing else good, fs.make_plan(good, mesh), mesh, src=src)
