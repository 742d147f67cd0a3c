"""Simulated ranks: results in order, errors instead of hangs, random numbers and nestings of jvp as in processes."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import funcshard as fs
from tests.core.units import forward_mode

pytestmark = forward_mode
GRID = {"replicate": 2, "shard": 2}


def add_up(mesh: fs.Mesh) -> float:
    return fs.psum(torch.ones(1), mesh).item()


@pytest.mark.parametrize(("failing", "collectives"), [(0, 0), (1, 0), (3, 5)])
@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_an_exception_ends_every_rank_and_names_the_first(kind: Any, failing: int, collectives: int) -> None:
    begun, ended, went_on = [], [], []

    def main(mesh: fs.Mesh) -> None:
        begun.append(mesh.rank)
        try:
            for i in range(10):
                if mesh.rank == failing and i == collectives:
                    torch.rand(5)
                    raise kind("the very one")
                add_up(mesh)
        except Exception as error:  # a rank cannot go on in a world that has failed
            went_on.append(mesh.rank)
            raise error
        finally:
            ended.append(mesh.rank)

    before, state = threading.enumerate(), torch.get_rng_state()
    with pytest.raises(kind, match="the very one") as caught:
        fs.simulate(main, 4)
    assert caught.value.__notes__ == [f"raised on rank {failing} of 4 simulated ranks"]
    assert sorted(begun) == sorted(ended) == list(range(4) if collectives else range(failing + 1))
    assert went_on == [failing] * (kind is KeyError)
    assert set(threading.enumerate()) <= set(before)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_rank_that_returns_early_is_a_deadlock_of_the_others_after_which_a_world_can_run() -> None:
    words = (
        r"ranks wait for each other and none can continue: rank 0 waits in all_reduce of float32\[1\] \(number 1 on "
        r"mesh axis 'shard'\), which ranks 0, 2 have joined; rank 1 has returned; rank 2 waits in all_reduce"
    )
    for _ in range(3):
        with pytest.raises(RuntimeError, match=words):
            fs.simulate(lambda mesh: mesh.rank == 1 or add_up(mesh), 3)
        assert fs.simulate(add_up, 3) == [3.0] * 3


def test_a_rank_may_return_early_when_no_rank_waits_for_it() -> None:
    def main(mesh: fs.Mesh) -> int:
        if mesh.replicate.rank == 0:
            return -1
        return int(fs.psum(torch.tensor(mesh.rank), mesh["shard"]))

    assert fs.simulate(main, GRID) == [-1, -1, 5, 5]


@pytest.mark.slow
def test_the_interleaving_is_always_the_same() -> None:
    def run() -> list[tuple[int, int]]:
        order: list[tuple[int, int]] = []

        def main(mesh: fs.Mesh) -> None:
            for i in range(4):
                order.append((mesh.rank, i))
                add_up(mesh)

        fs.simulate(main, 8)
        return order

    first = run()
    assert len(first) == 32
    assert all(run() == first for _ in range(5))


def draw(mesh: fs.Mesh, seed: int | None = None) -> list[float]:
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
    drawn = []
    for _ in range(3):
        drawn += [torch.rand(()).item(), random.random()]
        add_up(mesh)
    return drawn


def test_each_rank_has_the_random_numbers_of_a_process_of_its_own() -> None:
    draw(fs.Mesh(), 7)
    state, python_state = torch.get_rng_state(), random.getstate()
    same = fs.simulate(draw, 3)
    different = fs.simulate(lambda mesh: draw(mesh, mesh.rank), 3)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python_state
    assert same == [draw(fs.Mesh())] * 3
    assert different == [draw(fs.Mesh(), rank) for rank in range(3)]


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_mode_is_the_callers_until_a_rank_sets_it(enabled: bool) -> None:
    def main(mesh: fs.Mesh) -> tuple[bool, bool]:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(mesh.rank == 0)
        add_up(mesh)
        return before, torch.is_grad_enabled()

    with torch.set_grad_enabled(enabled):
        assert fs.simulate(main, 2) == [(enabled, True), (enabled, False)]
        assert torch.is_grad_enabled() == enabled


def test_init_mesh_inside_a_rank_is_the_mesh_of_the_rank() -> None:
    def main(mesh: fs.Mesh) -> tuple:
        assert fs.init_mesh() is mesh
        grid = fs.init_mesh(GRID)
        with pytest.raises(ValueError, match="must have as many ranks as the world: 4"):
            fs.init_mesh({"shard": 2})
        inner = fs.simulate(lambda own: (fs.init_mesh() is own, fs.init_mesh().world_size), 2)
        return inner, fs.init_mesh() is mesh, grid.shape, add_up(fs.init_mesh())

    assert fs.simulate(main, 4) == [([(True, 2)] * 2, True, GRID, 4.0)] * 4
    assert fs.init_mesh().world_size == 1


X, V = torch.tensor([0.5, 2.0]), torch.tensor([1.0, -1.0])


def waiting(mesh, x):
    """A function of this rank's ``x`` during which every other rank gets a turn."""
    return x.sin() * fs.psum(torch.ones(()), mesh)


def jvp(mesh):
    x = X + mesh.rank
    out, tangent = torch.func.jvp(lambda x: waiting(mesh, x), (x,), (V,))
    torch.testing.assert_close(out, x.sin() * mesh.world_size)
    torch.testing.assert_close(tangent, x.cos() * V * mesh.world_size)


def unequal(mesh):
    """Ranks enter and leave ``jvp`` at different times, and at different depths."""
    for _ in range(mesh.rank + 1):
        torch.func.jvp(torch.sin, (X,), (V,))
    f, expected = torch.sin, [X.sin(), X.cos() * V, -X.sin() * V * V, -X.cos() * V**3]
    for _ in range(mesh.rank):

        def f(x, f=f):
            return torch.func.jvp(f, (x,), (V,))[1]

    torch.testing.assert_close(f(X), expected[mesh.rank])

    def g(x):
        return f(x) * fs.psum(torch.ones(()), mesh)

    torch.testing.assert_close(torch.func.jvp(g, (X,), (V,))[1], mesh.world_size * expected[mesh.rank + 1])
    fs.psum(torch.ones(()), mesh)


def a_simulation_inside(mesh):
    fs.simulate(jvp, 2)
    fs.psum(torch.ones(()), mesh)


@pytest.mark.parametrize("main", [jvp, unequal, a_simulation_inside])
def test_each_rank_has_its_own_depth_of_jvp(main):
    fs.simulate(main, 3)
    check_outside()


def check_outside():
    """Check that no forward-mode level is open, and that torch can open one."""
    with forward_ad.dual_level():
        out = forward_ad.make_dual(X, V).sin()
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, X.cos() * V)
    assert forward_ad.unpack_dual(out).tangent is None


def test_a_simulation_inside_a_transform_is_refused():
    def f(x):
        return fs.simulate(lambda mesh: waiting(mesh, x), 2)[0]

    with pytest.raises(RuntimeError, match="call the transform inside the function that is simulated"):
        torch.func.jvp(f, (X,), (V,))
    check_outside()


@pytest.mark.parametrize("failing", [0, 2])
def test_a_rank_that_fails_inside_jvp_leaves_no_level_open(failing):
    def main(mesh):
        def f(x):
            y = waiting(mesh, x)
            if mesh.rank == failing:
                raise ValueError("gone")
            return waiting(mesh, y)

        torch.func.jvp(f, (X,), (V,))

    with pytest.raises(ValueError, match="gone"):
        fs.simulate(main, 3)
    check_outside()


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch.func.linearize's
def test_one_simulated_rank_may_linearize_and_several_are_told_what_to_call():
    def main(mesh):
        out, push = torch.func.linearize(torch.sin, X)
        torch.testing.assert_close((out, push(V)), (X.sin(), X.cos() * V))

    fs.simulate(main, 1)
    check_outside()
    with pytest.raises(RuntimeError) as caught:
        fs.simulate(main, 2)
    assert any("which the simulated ranks share: call torch.func.jvp" in note for note in caught.value.__notes__)
