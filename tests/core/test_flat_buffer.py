"""Leaves and their flat buffer: views without a copy, exact adjoints, every transform."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from funcshard.core.flat_buffer import Flatten, Unflatten, ravel, views
from funcshard.plan.unit_plan import BufferPlan, LeafSpec

# The first use of forward-mode AD makes torch import a file that calls a deprecated function of
# torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

CPU = torch.device("cpu")
shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=5)
worlds = st.integers(1, 5)
SIMPLE = settings(deadline=None, derandomize=True, max_examples=60)


def buffer_of(shapes: Any, shards: int = 2, dtype: str = "float64") -> BufferPlan:
    leaves, offset = [], 0
    for i, shape in enumerate(shapes):
        leaves.append(LeafSpec(f"leaf{i}", tuple(shape), offset, i))
        offset += leaves[-1].numel
    return BufferPlan(dtype, dtype, True, tuple(leaves), shards)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_leaves(buffer: BufferPlan, seed: int = 0) -> list[torch.Tensor]:
    return [random(seed + i, *leaf.shape) for i, leaf in enumerate(buffer.leaves)]


@SIMPLE
@given(shapes, worlds)
def test_views_of_the_ravelled_leaves_are_the_leaves(shapes: Any, shards: int) -> None:
    buffer = buffer_of(shapes, shards)
    leaves = random_leaves(buffer)
    full = ravel(leaves, buffer)
    assert full.shape == (buffer.padded_numel,)
    assert not full[buffer.numel :].any()
    for leaf, view in zip(leaves, views(full, buffer), strict=True):
        assert torch.equal(leaf, view)
        assert view.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()


@SIMPLE
@given(shapes, worlds)
def test_flatten_and_unflatten_are_adjoint(shapes: Any, shards: int) -> None:
    buffer = buffer_of(shapes, shards)
    full, leaves = random(99, buffer.padded_numel), random_leaves(buffer)
    left = sum((a * b).sum() for a, b in zip(Unflatten.apply(full, buffer), leaves, strict=True))
    right = (full * Flatten.apply(buffer, CPU, *leaves)).sum()
    torch.testing.assert_close(left, right)


@pytest.mark.slow
@SIMPLE
@given(shapes, worlds, st.data())
def test_the_backward_of_each_is_the_other(shapes: Any, shards: int, data: st.DataObject) -> None:
    buffer = buffer_of(shapes, shards)
    full, leaves = random(99, buffer.padded_numel).requires_grad_(), random_leaves(buffer)
    used = data.draw(st.lists(st.booleans(), min_size=len(leaves), max_size=len(leaves)))
    out = Unflatten.apply(full, buffer)
    pairs = [(o, g) for o, g, u in zip(out, leaves, used, strict=True) if u]
    if pairs:
        (grad,) = torch.autograd.grad([o for o, _ in pairs], full, [g for _, g in pairs])
        given = [leaf if u else None for leaf, u in zip(leaves, used, strict=True)]
        assert torch.equal(grad, Flatten.apply(buffer, CPU, *given))
    wanted = [leaf.requires_grad_() for leaf in leaves]
    grads = torch.autograd.grad(Flatten.apply(buffer, CPU, *wanted), wanted, full.detach())
    for grad, view in zip(grads, views(full.detach(), buffer), strict=True):
        assert torch.equal(grad, view)


def test_leaves_without_a_gradient_count_as_zeros() -> None:
    buffer = buffer_of([(2,), (0,), (2, 2)], 4)
    assert torch.equal(Flatten.apply(buffer, CPU, None, None, None), torch.zeros(8, dtype=torch.float64))
    one = Flatten.apply(buffer, CPU, None, None, torch.ones(2, 2, dtype=torch.float64))
    assert one.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_unflatten_copies_nothing_out() -> None:
    buffer = buffer_of([(2, 3), (4,)], 3)
    full = random(0, buffer.padded_numel)
    a, b = Unflatten.apply(full, buffer)
    assert (a.data_ptr(), b.data_ptr()) == (full.data_ptr(), full.data_ptr() + 6 * 8)


def plain_flatten(leaves: Any, buffer: BufferPlan) -> torch.Tensor:
    flat = torch.cat([leaf.reshape(-1) for leaf in leaves])
    return torch.nn.functional.pad(flat, (0, buffer.padded_numel - buffer.numel))


def plain_unflatten(full: torch.Tensor, buffer: BufferPlan) -> list[torch.Tensor]:
    return [full[leaf.offset : leaf.offset + leaf.numel].reshape(leaf.shape) for leaf in buffer.leaves]


BUFFER = buffer_of([(2, 2), (), (0, 3), (3,)], 3)


def ours(full: torch.Tensor) -> torch.Tensor:
    leaves = Unflatten.apply(full.sin(), BUFFER)
    return Flatten.apply(BUFFER, CPU, *(leaf**2 for leaf in leaves))


def theirs(full: torch.Tensor) -> torch.Tensor:
    return plain_flatten([leaf**2 for leaf in plain_unflatten(full.sin(), BUFFER)], BUFFER)


x, v, batch = random(0, 9), random(1, 9), random(2, 5, 9)
TRANSFORMS = {
    "value": lambda f: f(x),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f: torch.func.jvp(f, (x,), (v,))[1],
    "hvp": lambda f: torch.func.jvp(torch.func.grad(lambda x: f(x).sum()), (x,), (v,))[1],
    "hessian": lambda f: torch.func.hessian(lambda x: f(x).sum())(x),
    "jacrev": lambda f: torch.func.jacrev(f)(x),
    "jacfwd": lambda f: torch.func.jacfwd(f)(x),
    "vmap": lambda f: torch.vmap(f)(batch),
    "vmap of dim 1": lambda f: torch.vmap(f, in_dims=1)(batch.t()),
    "vmap of vmap": lambda f: torch.vmap(torch.vmap(f))(batch.expand(2, 5, 9)),
    "per-sample gradients": lambda f: torch.vmap(torch.func.grad(lambda x: f(x).sum()))(batch),
    "grad of grad": lambda f: torch.func.grad(lambda x: torch.func.grad(lambda y: f(y).sum())(x).square().sum())(x),
    "forward AD of vmap": lambda f: torch.func.jvp(torch.vmap(f), (batch,), (batch.cos(),))[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_give_what_plain_torch_gives(transform: Any) -> None:
    torch.testing.assert_close(transform(ours), transform(theirs))


def test_vmap_over_some_of_the_leaves_only() -> None:
    leaves = random_leaves(BUFFER)
    stacked = random(7, 5, 3)
    out = torch.vmap(lambda last: Flatten.apply(BUFFER, CPU, *leaves[:3], last))(stacked)
    expected = torch.stack([plain_flatten([*leaves[:3], last], BUFFER) for last in stacked])
    assert torch.equal(out, expected)


def test_jvp_along_some_of_the_leaves_only() -> None:
    leaves = random_leaves(BUFFER)
    tangent = random(8, 3)
    _, out = torch.func.jvp(lambda last: Flatten.apply(BUFFER, CPU, *leaves[:3], last), (leaves[3],), (tangent,))
    expected = plain_flatten([*(torch.zeros_like(leaf) for leaf in leaves[:3]), tangent], BUFFER)
    assert torch.equal(out, expected)


def test_finite_differences_agree() -> None:
    assert torch.autograd.gradcheck(ours, (x.clone().requires_grad_(),), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(ours, (x.clone().requires_grad_(),))


def test_second_derivatives_when_some_leaves_are_unused() -> None:
    def cubed(full: torch.Tensor) -> torch.Tensor:
        return (Unflatten.apply(full, BUFFER)[3] ** 3).sum()

    full = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(cubed(full), full, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), full)
    expected = torch.zeros(9, dtype=torch.float64)
    expected[5:8] = 6 * x[5:8]
    torch.testing.assert_close(second, expected)
