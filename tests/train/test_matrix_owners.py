"""The Muon assignment as data: each matrix has an owner, work is balanced, traffic is known."""

import math
import random
import time

import pytest
import torch

import funcshard as fs
from funcshard.plan import position_of, rank_at


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 12])
def test_every_matrix_has_an_owner_and_no_rank_has_much_more_work(ranks):
    shapes = {f"m{i}": (2 + i, 3 + 2 * i) for i in range(9)}
    others = {"v": (50,), "t": (2, 3, 4), "e": (0, 4)}
    plan = fs.make_plan({name: torch.zeros(shape) for name, shape in (shapes | others).items()}, ranks)
    owners = fs.assign_owners(plan)
    assert list(owners.of) == list(shapes)
    assert owners == fs.assign_owners(fs.Plan.from_json(plan.to_json()))
    work = [0] * ranks
    heaviest = 0
    for path, rank in owners.of.items():
        rows, columns = shapes[path]
        work[rank] += rows * columns * min(rows, columns)
        heaviest = max(heaviest, rows * columns * min(rows, columns))
    assert max(work) <= sum(work) / ranks + heaviest


MESHES = [1, 2, 5, 8, {"replicate": 2, "shard": 3}, {"shard": 3, "tensor": 2}, {"expert": 2, "shard": 2, "tensor": 2}]
CUTS = [{"0.w0": {"tensor": 0}}, {"0.w0": {"expert": 1, "tensor": 0}, "1.w0": {"tensor": 1}}, {"0.w0": {"shard": 0}}]


@pytest.mark.parametrize("seed", range(24))
def test_what_a_rank_sends_is_what_its_peer_receives_and_events_count_the_busiest_rank(seed):
    draw = random.Random(seed)
    mesh = MESHES[seed % len(MESHES)]
    axes = mesh if isinstance(mesh, dict) else {"shard": mesh}
    draw_leaf = lambda: torch.zeros(draw.randint(1, 9), draw.randint(1, 9))  # noqa: E731
    params = {f"{i}": {f"w{j}": draw_leaf() for j in range(draw.randint(1, 4))} for i in range(4)}
    cuts = [cut for cut in CUTS if axes.keys() >= {axis for dims in cut.values() for axis in dims}]
    plan = fs.make_plan(
        params, mesh, units=draw.choice([["*"], []]), strategy=draw.choice(["full_shard", "full_shard", "no_shard"]),
        local=draw.choice([*cuts, {}]) if axes.keys() & {"tensor", "expert"} else draw.choice([[], ["0.w0"]]),
    )  # fmt: skip
    owners, events = fs.assign_owners(plan), []
    positions = [position_of(rank, plan.mesh_axes) for rank in range(math.prod(plan.mesh_axes.values()))]
    for stage, back in [*((s, False) for s in owners.stages), *((s, True) for s in reversed(owners.stages))]:
        steps = [owners.all_to_all(stage, position, back) for position in positions]
        axis, crossing = steps[0].axis, []
        for position, step in zip(positions, steps, strict=True):
            line = [steps[rank_at({**position, axis: peer}, plan.mesh_axes)] for peer in range(plan.mesh_axes[axis])]
            for peer, other in enumerate(line):
                sent = [(part.path, *part[2:]) for part in step.sent if part.peer == peer]
                assert sent == [(part.path, *part[2:]) for part in other.received if part.peer == position[axis]]
                assert step.send_sizes[peer] == other.receive_sizes[position[axis]] == sum(math.prod(p[-1]) for p in sent)
            for sizes in (step.send_sizes, step.receive_sizes):
                crossing.append(sum(sizes) - sizes[position[axis]])
        assert len({step.event for step in steps}) == 1
        busiest = {"bytes": 2 * max(crossing), "axis": axis, "ranks": len(line)}
        assert steps[0].event == (fs.Event("all_to_all", None, "", "bfloat16", **busiest) if max(crossing) else None)
        assert steps[0].event is None or steps[0].event.traffic == 2 * max(crossing)
        events += [steps[0].event] * bool(max(crossing))
    assert owners.events == tuple(events)


@pytest.mark.parametrize("mesh", [1024, {"shard": 1024, "tensor": 8}])
def test_the_start_of_muon_is_soon_over_on_a_thousand_ranks(mesh):
    params = {f"{i}": {"w": torch.empty(4096, 4096, device="meta")} for i in range(300)}
    local = {f"{i}.w": {"tensor": 0} for i in range(300)} if isinstance(mesh, dict) else {}
    plan = fs.make_plan(params, mesh, units=["*"], local=local)
    begun = time.process_time()
    owners = fs.assign_owners(plan)
    start = owners.all_to_all(None, position_of(0, plan.mesh_axes), back=False)
    assert start.event == owners.events[0] == owners.events[-1]
    assert time.process_time() - begun < 3  # it takes 0.1 s and 0.6 s; pair by pair it took minutes
