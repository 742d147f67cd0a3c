"""The Muon assignment as data: each matrix has an owner, work is balanced, traffic is known."""

import pytest
import torch

import funcshard as fs


def plan_of(ranks, **options):
    sizes = {f"m{i}": (2 + i, 3 + 2 * i) for i in range(9)} | {"v": (50,), "t": (2, 3, 4), "e": (0, 4)}
    return fs.make_plan({name: torch.zeros(shape) for name, shape in sizes.items()}, ranks, **options)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
def test_every_matrix_has_an_owner_and_no_rank_has_much_more_work(ranks):
    plan = plan_of(ranks)
    owners = fs.assign_owners(plan)
    shapes = {leaf.path: leaf.shape for leaf in plan.leaves}
    assert list(owners.of) == [f"m{i}" for i in range(9)]
    assert owners == fs.assign_owners(fs.Plan.from_json(plan.to_json()))
    work = [0] * ranks
    heaviest = 0
    for path, rank in owners.of.items():
        rows, columns = shapes[path]
        work[rank] += rows * columns * min(rows, columns)
        heaviest = max(heaviest, rows * columns * min(rows, columns))
    assert max(work) <= sum(work) / ranks + heaviest


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 12])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_each_element_goes_to_its_owner_once_and_back_to_every_rank_that_holds_it(ranks, strategy):
    for matrix in fs.assign_owners(plan_of(ranks, strategy=strategy)).matrices:
        arrived = [matrix.sent(rank, matrix.owner) for rank in range(ranks)]
        assert [i for elements in arrived for i in elements] == list(range(matrix.leaf.numel))
        assert not any(matrix.sent(a, b) for a in range(ranks) for b in range(ranks) if b != matrix.owner)
        for rank in range(ranks):
            assert matrix.returned(matrix.owner, rank) == matrix.held(rank)


def test_traffic_is_that_of_the_busiest_rank_in_bfloat16():
    plan = fs.make_plan({"a": torch.zeros(4, 4), "b": torch.zeros(2, 4)}, 2)  # 12 elements on each of two ranks
    owners = fs.assign_owners(plan)
    assert owners.of == {"a": 0, "b": 1}
    # Rank 0 holds all of a but its last 4 elements. So 4 elements are sent to it, and sent back.
    event = fs.Event("all_to_all", None, "", "bfloat16", bytes=8, axis="shard", ranks=2)
    assert owners.events == (event, event)
    assert event.traffic == 8


def test_without_shards_only_the_updates_are_sent():
    plan = fs.make_plan({"a": torch.zeros(4, 4), "b": torch.zeros(2, 4)}, 3, strategy="no_shard")
    (event,) = fs.assign_owners(plan).events
    assert event.bytes == 2 * 2 * 16  # the owner of a sends its update to the two other ranks


def test_owners_are_printed_by_rank():
    text = str(fs.assign_owners(plan_of(2)))
    assert text.startswith("Owners of 9 matrices, ")
    assert [line.split()[:2] for line in text.splitlines()[4:6]] or "rank" in text
