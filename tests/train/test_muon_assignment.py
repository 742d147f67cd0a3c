"""The Muon assignment as data: each matrix has an owner, work is balanced, traffic is known."""

import itertools
import random
import time

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


def crossing(owners, elements, rank):
    """Return what one rank sends and receives, and the most that crosses at any rank, pair by pair."""
    ranks, between = range(owners.ranks), {}
    for a in ranks:
        for b in ranks:
            parts = [(matrix.leaf.path, elements(matrix, a, b)) for matrix in owners.matrices]
            between[a, b] = [part for part in parts if part[1]]
    size = {pair: sum(len(part) for _, part in parts) for pair, parts in between.items()}
    busiest = [[sum(size[b, a] for b in ranks if b != a), sum(size[a, b] for b in ranks if b != a)] for a in ranks]
    sent, received = [between[rank, b] for b in ranks], [between[b, rank] for b in ranks]
    sizes = [size[rank, b] for b in ranks], [size[b, rank] for b in ranks]
    return [*itertools.chain(*sent)], [*itertools.chain(*received)], *sizes, max(map(max, busiest))


@pytest.mark.parametrize("seed", range(12))
def test_the_parts_of_every_rank_and_the_events_are_those_of_all_pairs_of_ranks(seed):
    draw = random.Random(seed)
    mesh = draw.choice([1, 2, 5, 8, {"replicate": 2, "shard": 3}, {"shard": 3, "tensor": 2}])
    draw_leaf = lambda: torch.zeros(draw.randint(1, 9), draw.randint(1, 9))  # noqa: E731
    params = {f"{i}": {f"w{j}": draw_leaf() for j in range(draw.randint(1, 4))} for i in range(4)}
    local = {"0.w0": {"tensor": 0}} if isinstance(mesh, dict) and "tensor" in mesh else draw.choice([[], ["0.w0"]])
    strategy = draw.choice(["full_shard", "full_shard", "no_shard"])
    plan = fs.make_plan(params, mesh, units=draw.choice([["*"], []]), strategy=strategy, local=local)
    owners = fs.assign_owners(plan)
    kind = type(owners.matrices[0])
    for rank in range(owners.ranks):
        for part, elements in ((owners.to_owners(rank), kind.sent), (owners.from_owners(rank), kind.returned)):
            listed = lambda parts: [(each.matrix.leaf.path, each.elements) for each in parts]  # noqa: E731
            result = listed(part.sent), listed(part.received), [*part.send_sizes], [*part.receive_sizes]
            assert (*result, (part.event.bytes if part.event else 0) // 2) == crossing(owners, elements, rank)


@pytest.mark.parametrize("mesh", [1024, {"shard": 1024, "tensor": 8}])
def test_the_start_of_muon_is_soon_over_on_a_thousand_ranks(mesh):
    params = {f"{i}": {"w": torch.empty(4096, 4096, device="meta")} for i in range(300)}
    local = {f"{i}.w": {"tensor": 0} for i in range(300)} if isinstance(mesh, dict) else {}
    plan = fs.make_plan(params, mesh, units=["*"], local=local)
    begun = time.process_time()
    owners = fs.assign_owners(plan)
    assert owners.to_owners(0).event == owners.from_owners(0).event == owners.events[0]
    assert time.process_time() - begun < 3  # it takes 0.1 s and 0.6 s; pair by pair it took minutes
