"""Forward-mode differentiation on simulated ranks: each rank has its own nesting of ``jvp``."""

import pytest
import torch
from torch.autograd import forward_ad

import funcshard as fs
from tests.core.units import forward_mode

pytestmark = forward_mode

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


def test_a_level_by_hand_is_refused_as_torch_refuses_a_second_one():
    def main(mesh):
        with forward_ad.dual_level():
            pass

    with pytest.raises(RuntimeError, match="Nested forward mode AD is not supported"):
        fs.simulate(main, 2)
    check_outside()


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


def linearized(mesh):
    out, push = torch.func.linearize(torch.sin, X)
    torch.testing.assert_close((out, push(V)), (X.sin(), X.cos() * V))


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch.func.linearize's
def test_one_simulated_rank_may_linearize():
    fs.simulate(linearized, 1)
    check_outside()


def test_several_simulated_ranks_are_told_what_to_call_in_place_of_linearize():
    with pytest.raises(RuntimeError) as caught:
        fs.simulate(linearized, 2)
    assert any("which the simulated ranks share: call torch.func.jvp" in note for note in caught.value.__notes__)
