"""Simulated ranks: results in order, errors instead of hangs, random numbers as in processes."""

import random
import threading

import pytest
import torch

import funcshard as fs
from funcshard.comm.group import DeferredWork


@pytest.mark.parametrize("world", [1, 2, 3, 8, {"replicate": 2, "shard": 4}, {"replicate": 3}])
def test_results_come_in_the_order_of_ranks(world: int | dict) -> None:
    results = fs.simulate(lambda mesh: (mesh.rank, mesh.world_size), world)
    size = world if isinstance(world, int) else world.get("replicate", 1) * world.get("shard", 1)
    assert results == [(rank, size) for rank in range(size)]


def test_a_hybrid_mesh_counts_along_the_shard_axis_first() -> None:
    results = fs.simulate(lambda m: (m.rank, m.replicate.rank, m.shard.rank, m.shape), {"replicate": 2, "shard": 3})
    shape = {"replicate": 2, "shard": 3}
    assert results == [(3 * r + s, r, s, shape) for r in range(2) for s in range(3)]


@pytest.mark.parametrize("world", [0, -1, True, 2.0, {"shard": 0}, {"tensor": 0}, {"a b": 2}, {1: 2}])
def test_a_world_of_another_form_is_refused(world: int | dict) -> None:
    with pytest.raises(ValueError, match=r"world_size (must be a number|axes must be whole numbers).*; found .*: "):
        fs.simulate(lambda mesh: None, world)


@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("collectives", [0, 1, 5])
def test_an_exception_ends_every_rank_and_names_the_first(failing: int, collectives: int) -> None:
    finished = []

    def main(mesh: fs.Mesh) -> None:
        for i in range(10):
            if mesh.rank == failing and i == collectives:
                raise KeyError("the very one")
            fs.psum(torch.ones(1), mesh)
        finished.append(mesh.rank)

    before = threading.enumerate()
    with pytest.raises(KeyError, match="the very one") as caught:
        fs.simulate(main, 4)
    assert caught.value.__notes__ == [f"raised on rank {failing} of 4 simulated ranks"]
    assert finished == []
    assert set(threading.enumerate()) <= set(before)


def test_a_rank_whose_turn_comes_after_a_failure_does_not_begin() -> None:
    begun = []

    def main(mesh: fs.Mesh) -> None:
        begun.append(mesh.rank)
        if mesh.rank == 0:
            raise ValueError("gone")

    with pytest.raises(ValueError, match="gone"):
        fs.simulate(main, 3)
    assert begun == [0]


def test_a_rank_that_catches_exceptions_cannot_go_on_in_a_world_that_has_failed() -> None:
    went_on = []

    def main(mesh: fs.Mesh) -> None:
        if mesh.rank == 1:
            raise ValueError("gone")
        for _ in range(3):
            try:
                fs.psum(torch.ones(1), mesh)
            except Exception as error:
                went_on.append(error)

    with pytest.raises(ValueError, match="gone"):
        fs.simulate(main, 2)
    assert went_on == []


def test_keyboard_interrupt_on_a_rank_reaches_the_caller() -> None:
    def main(mesh: fs.Mesh) -> None:
        if mesh.rank == 1:
            raise KeyboardInterrupt
        fs.psum(torch.ones(1), mesh)

    with pytest.raises(KeyboardInterrupt):
        fs.simulate(main, 2)


def test_cleanup_runs_on_ranks_that_are_ended() -> None:
    cleaned = []

    def main(mesh: fs.Mesh) -> None:
        try:
            if mesh.rank == 0:
                raise ValueError("gone")
            fs.psum(torch.ones(1), mesh)
        finally:
            cleaned.append(mesh.rank)

    with pytest.raises(ValueError, match="gone"):
        fs.simulate(main, 3)
    # a rank that has not had a turn yet does not start
    assert 0 in cleaned


def test_a_rank_that_returns_early_is_a_deadlock_of_the_others() -> None:
    def main(mesh: fs.Mesh) -> None:
        if mesh.rank != 1:
            fs.psum(torch.ones(2), mesh)

    words = (
        r"simulated ranks wait for each other and none can go on: rank 0 waits in all_reduce of float32\[2\] \(number 1 on "
        r"mesh axis 'shard'\), which ranks 0, 2 have joined; rank 1 has returned; rank 2 waits in all_reduce"
    )
    with pytest.raises(RuntimeError, match=words):
        fs.simulate(main, 3)


def test_a_rank_may_return_early_when_no_rank_waits_for_it() -> None:
    def main(mesh: fs.Mesh) -> int:
        if mesh.replicate.rank == 0:
            return -1
        buffer = torch.tensor([mesh.rank])
        mesh.shard.all_reduce(buffer).wait()
        return buffer.item()

    assert fs.simulate(main, {"replicate": 2, "shard": 2}) == [-1, -1, 5, 5]


def test_a_world_can_be_run_again_after_a_failure() -> None:
    for _ in range(3):
        with pytest.raises(RuntimeError, match="none can go on"):
            fs.simulate(lambda mesh: fs.psum(torch.ones(1), mesh) if mesh.rank else None, 2)
        assert fs.simulate(lambda mesh: fs.psum(torch.ones(1), mesh).item(), 2) == [2.0, 2.0]


def test_waiting_twice_ends_a_collective_once() -> None:
    def main(mesh: fs.Mesh) -> float:
        total = torch.ones(1)
        work = mesh.shard.all_reduce(total)
        work.wait()
        total += 1
        work.wait()
        return total.item()

    ended: list[int] = []
    work = DeferredWork(lambda: ended.append(1))
    work.wait()
    work.wait()
    assert ended == [1]
    assert fs.simulate(main, 2) == [3.0, 3.0]


def test_collectives_of_every_kind_give_what_their_names_say() -> None:
    def main(mesh: fs.Mesh) -> dict:
        group, rank = mesh.shard, mesh.rank
        mine = torch.tensor([10 * rank, 10 * rank + 1])
        gathered, total, from_one = torch.empty(6, dtype=mine.dtype), mine.clone(), mine.clone()
        scattered = torch.empty(1, dtype=mine.dtype)
        group.all_gather(gathered, mine).wait()
        group.reduce_scatter(scattered, [torch.arange(3) * (rank + 1)]).wait()
        group.all_reduce(total).wait()
        group.broadcast(from_one, 1).wait()
        text = group.all_gather_text(f"rank {rank}")
        return {"g": gathered.tolist(), "s": scattered.tolist(), "t": total.tolist(), "b": from_one.tolist(), "x": text}

    for rank, got in enumerate(fs.simulate(main, 3)):
        assert got == {
            "g": [0, 1, 10, 11, 20, 21],
            "s": [rank * 6],
            "t": [30, 33],
            "b": [10, 11],
            "x": ["rank 0", "rank 1", "rank 2"],
        }


def test_a_collective_may_be_waited_for_late_and_twice() -> None:
    def main(mesh: fs.Mesh) -> list[float]:
        buffers = [torch.tensor([float(mesh.rank + i)]) for i in range(3)]
        works = [mesh.shard.all_reduce(buffer) for buffer in buffers]
        for work in reversed([*works, works[0]]):
            work.wait()
        return [buffer.item() for buffer in buffers]

    assert fs.simulate(main, 3) == [[3.0, 6.0, 9.0]] * 3


def test_each_rank_has_the_random_numbers_of_a_process_of_its_own() -> None:
    def draw(mesh: fs.Mesh) -> list[float]:
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(()).item(), random.random()]
            fs.psum(torch.ones(1), mesh)
        return drawn

    def seeded(mesh: fs.Mesh) -> list[float]:
        torch.manual_seed(mesh.rank)
        random.seed(mesh.rank)
        return draw(mesh)

    torch.manual_seed(7)
    random.seed(7)
    state, python_state = torch.get_rng_state(), random.getstate()
    same = fs.simulate(draw, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert same == [draw(fs.Mesh())] * 3

    torch.set_rng_state(state)
    different = fs.simulate(seeded, 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert different == [seeded_alone(rank) for rank in range(3)]


def seeded_alone(rank: int) -> list[float]:
    torch.manual_seed(rank)
    random.seed(rank)
    return [x for _ in range(3) for x in (torch.rand(()).item(), random.random())]


def test_the_callers_random_state_is_left_also_when_a_rank_fails() -> None:
    def main(mesh: fs.Mesh) -> None:
        torch.rand(5)
        raise ValueError("gone")

    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="gone"):
        fs.simulate(main, 2)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.slow
def test_the_interleaving_is_always_the_same() -> None:
    def run() -> list[tuple[int, int]]:
        order: list[tuple[int, int]] = []

        def main(mesh: fs.Mesh) -> None:
            for i in range(4):
                order.append((mesh.rank, i))
                fs.psum(torch.ones(1), mesh)

        fs.simulate(main, 8)
        return order

    first = run()
    assert len(first) == 32
    assert all(run() == first for _ in range(5))


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_is_the_callers(enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        assert fs.simulate(lambda mesh: torch.is_grad_enabled(), 2) == [enabled, enabled]
        assert torch.is_grad_enabled() == enabled


def test_grad_mode_set_on_a_rank_stays_there() -> None:
    def main(mesh: fs.Mesh) -> bool:
        torch.set_grad_enabled(mesh.rank == 0)
        fs.psum(torch.ones(1), mesh)
        return torch.is_grad_enabled()

    assert fs.simulate(main, 2) == [True, False]
    assert torch.is_grad_enabled()


def test_events_are_recorded_for_the_rank_that_records() -> None:
    def main(mesh: fs.Mesh) -> int:
        with fs.record_events() as events:
            for _ in range(mesh.rank):
                fs.pmean(torch.ones(1), fs.Mesh())
            fs.psum(torch.ones(1), mesh)
        return len(events)

    with fs.record_events() as outside:
        assert fs.simulate(main, 3) == [1, 1, 1]
        assert len(outside) == 3


def test_a_world_inside_a_rank() -> None:
    def main(mesh: fs.Mesh) -> tuple[float, list[float], float]:
        torch.manual_seed(mesh.rank)
        first = fs.psum(torch.tensor(1.0), mesh).item()
        inner = fs.simulate(lambda m: fs.psum(torch.tensor(float(mesh.rank)), m).item(), 2)
        fs.psum(torch.tensor(1.0), mesh)
        return first, inner, torch.rand(()).item()

    def alone(rank: int) -> float:
        torch.manual_seed(rank)
        return torch.rand(()).item()

    assert fs.simulate(main, 3) == [(3.0, [2.0 * rank] * 2, alone(rank)) for rank in range(3)]


def test_init_mesh_inside_a_rank_is_the_mesh_of_the_rank() -> None:
    def main(mesh: fs.Mesh) -> tuple:
        assert fs.init_mesh() is mesh
        grid = fs.init_mesh({"replicate": 2, "shard": 2})
        with pytest.raises(ValueError, match="must have as many ranks as the world: 4"):
            fs.init_mesh({"shard": 2})
        inner = fs.simulate(lambda own: (fs.init_mesh() is own, fs.init_mesh().world_size), 2)
        return inner, fs.init_mesh() is mesh, grid.shape, fs.psum(torch.tensor(1), fs.init_mesh()).item()

    inner = [(True, 2)] * 2
    assert fs.simulate(main, 4) == [(inner, True, {"replicate": 2, "shard": 2}, 4)] * 4
    assert fs.init_mesh().world_size == 1


def test_an_error_in_a_world_inside_a_rank_names_both_ranks() -> None:
    def inner(mesh: fs.Mesh) -> None:
        if mesh.rank == 1:
            raise ValueError("deep")
        fs.psum(torch.ones(1), mesh)

    def main(mesh: fs.Mesh) -> None:
        if mesh.rank == 2:
            fs.simulate(inner, 2)
        fs.psum(torch.ones(1), mesh)

    with pytest.raises(ValueError, match="deep") as caught:
        fs.simulate(main, 3)
    assert caught.value.__notes__ == ["raised on rank 1 of 2 simulated ranks", "raised on rank 2 of 3 simulated ranks"]
