"""The collectives along named axes, against the same functions of all ranks' tensors in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import funcshard as fs
from tests.collective_oracle import OPERATIONS, line, whole_number_tensor
from tests.core.units import forward_mode, recorded
from tests.ranks import on_ranks, run_ranks

pytestmark = forward_mode

GRID, CUBE = {"shard": 2, "tensor": 2}, {"replicate": 2, "shard": 2, "tensor": 2}
AXES: list[tuple[Any, Any]] = [({"tensor": 3}, "tensor"), (CUBE, ("tensor", "shard", "replicate")), (GRID, None)]
on_some_axes = pytest.mark.parametrize(("world", "axis"), AXES, ids=str)
AXES += [({"tensor": 3}, None), (CUBE, ("replicate", "tensor")), (GRID, "shard"), (GRID, ("shard", "tensor"))]
on_every_axis = pytest.mark.parametrize(("world", "axis"), AXES, ids=str)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.complex64, torch.bool)


LINEAR = [name for name, operation in OPERATIONS.items() if operation.linear]


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", OPERATIONS)
@on_every_axis
@on_ranks()
def test_the_result_is_the_function_of_all_ranks_tensors(mesh: fs.Mesh, world: Any, axis: Any, name: str) -> None:
    operation, ranks = OPERATIONS[name], line(mesh.rank, dict(mesh.shape), axis)
    own = ranks.index(mesh.rank)
    for dtype in set(DTYPES) - set(operation.but):
        xs = [whole_number_tensor(rank, operation.sizes(len(ranks)), dtype) for rank in ranks]
        before, found, wanted = xs[own].clone(), operation.run(xs[own], mesh, axis), operation.plain(xs, own)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), dtype
        assert torch.equal(found, wanted), dtype
        assert torch.equal(xs[own], before)
        assert found.untyped_storage().data_ptr() != xs[own].untyped_storage().data_ptr()


VIEWS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second element": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "a negative view": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "a conjugate view": lambda x: torch.complex(x, 2 * x).conj(),
    "a parameter": torch.nn.Parameter,
}


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("view", VIEWS)
@on_ranks({"shard": 1, "tensor": 2})
def test_a_view_gives_what_its_contiguous_copy_gives(mesh: fs.Mesh, view: str, name: str) -> None:
    operation = OPERATIONS[name]
    x = VIEWS[view](whole_number_tensor(mesh.rank, operation.sizes(2)))
    if x.dtype not in operation.but and (operation.linear or not x.is_complex()):
        copy = x.resolve_neg().resolve_conj().clone()
        assert torch.equal(operation.run(x, mesh, "tensor"), operation.run(copy, mesh, "tensor"))


@on_every_axis
@on_ranks()
def test_tensors_without_elements_or_dimensions_are_tensors(mesh: fs.Mesh, world: Any, axis: Any) -> None:
    ranks, along = line(mesh.rank, dict(mesh.shape), axis), {"mesh": mesh, "axis": axis}
    n, x, none = len(ranks), torch.tensor(float(mesh.rank)), torch.zeros(0, len(ranks), 2)
    ring, every = [(i, (i + 1) % n) for i in range(n)], torch.tensor([float(rank) for rank in ranks])
    assert torch.equal(fs.psum(x, **along), every.sum())
    assert torch.equal(fs.pmean(x, **along), every.mean())
    assert torch.equal(fs.pmax(x, **along), every.max())
    assert torch.equal(fs.all_gather(x, **along), every)
    assert torch.equal(fs.all_gather(x, dim=-1, **along), every)
    assert torch.equal(fs.ppermute(x, perm=ring, **along), every[ranks.index(mesh.rank) - 1])
    assert torch.equal(fs.psum_scatter(every, **along), n * x)
    assert torch.equal(fs.all_to_all(x.expand(n), **along), every)
    assert fs.psum(none, **along).shape == fs.pmax(none, **along).shape == none.shape
    assert fs.ppermute(none, perm=ring, **along).shape == none.shape
    assert fs.all_gather(none, **along).shape == (n, *none.shape)
    assert fs.all_gather(none, dim=1, tiled=True, **along).shape == (0, n * n, 2)
    assert fs.psum_scatter(none, dim=1, **along).shape == (0, 2)
    assert fs.psum_scatter(none, dim=0, tiled=True, **along).shape == none.shape
    assert fs.all_to_all(none, split_dim=1, concat_dim=2, **along).shape == (0, 2, n)
    assert fs.all_to_all(none, split_dim=1, concat_dim=0, tiled=True, **along).shape == (0, 1, 2)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if "," not in name] + ["ppermute, one pair"])
@on_ranks({"tensor": 2})
def test_a_tree_is_mapped_leaf_by_leaf_and_keeps_its_form(mesh: fs.Mesh, name: str) -> None:
    operation = OPERATIONS[name]
    call = lambda tree: operation.run(tree, mesh, "tensor")  # noqa: E731
    first, second = (whole_number_tensor(mesh.rank, operation.sizes(2), salt=salt) for salt in (0, 1))
    found = call({"b": [first, (second,)], "a": second, "none": None})
    assert list(found) == ["b", "a", "none"]
    assert isinstance(found["b"][1], tuple)
    assert found["none"] is None
    for leaf, alone in ((found["b"][0], first), (found["b"][1][0], second), (found["a"], second)):
        assert torch.equal(leaf, call(alone))
    assert call(()) == ()


@on_ranks(CUBE)
def test_the_index_along_several_axes_counts_the_first_one_slowest(mesh: fs.Mesh) -> None:
    two = [("shard", "tensor"), ("tensor", "shard"), ("tensor", "replicate")]
    for axis in ("tensor", "shard", "replicate", None, *two):
        assert fs.axis_index(mesh, axis=axis) == line(mesh.rank, dict(mesh.shape), axis).index(mesh.rank), axis
    assert fs.axis_index(mesh, axis=tuple(mesh.shape)) == mesh.rank


@on_ranks({"tensor": 2})
def test_a_maximum_is_nan_where_any_rank_has_nan(mesh: fs.Mesh) -> None:
    found = fs.pmax(torch.tensor([mesh.rank, math.nan if mesh.rank == 0 else 1.0]), mesh, axis="tensor")
    torch.testing.assert_close(found, torch.tensor([1.0, math.nan]), equal_nan=True)


def whole(name: str, axis: Any, sizes: dict[str, int]) -> Callable[[torch.Tensor], list[torch.Tensor]]:
    """Return an operation as a function of the stack of all ranks' tensors."""
    lines, plain = [line(rank, sizes, axis) for rank in range(math.prod(sizes.values()))], OPERATIONS[name].plain
    return lambda stack: [plain([stack[r] for r in ranks], ranks.index(own)) for own, ranks in enumerate(lines)]


def curved(x: torch.Tensor) -> torch.Tensor:
    """A function with derivatives of all orders, so that the second ones are not zero."""
    return x + 0.1 * x.sin()


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize("name", LINEAR)
@on_some_axes
def test_the_gradient_is_the_exact_adjoint(world: Any, axis: Any, name: str) -> None:
    operation = OPERATIONS[name]

    def main(mesh: fs.Mesh, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        shape = operation.sizes(len(line(mesh.rank, dict(mesh.shape), axis)))
        x = whole_number_tensor(mesh.rank, shape, dtype).clone().requires_grad_()
        out = operation.run(x, mesh, axis)
        y = whole_number_tensor(mesh.rank, tuple(out.shape), dtype, salt=1)
        (back,) = torch.autograd.grad(out, x, y)
        return torch.vdot(y.flatten(), out.detach().flatten()), torch.vdot(back.flatten(), x.detach().flatten())

    for dtype in (torch.float64, torch.complex128):
        products = fs.simulate(lambda mesh, dtype=dtype: main(mesh, dtype), world)
        left, right = (sum(side) for side in zip(*products, strict=True))  # type: ignore[arg-type]
        torch.testing.assert_close(left, right, rtol=1e-14, atol=1e-12)


def derivatives(
    f: Callable[[torch.Tensor], Any], x: torch.Tensor, v: torch.Tensor, dot: Callable[[Any], torch.Tensor]
) -> list[Any]:
    """Return derivatives of a program and of its product with cotangents, in all orders of modes up to the second.

    Arguments:
        f: the program.
        x, v: where the derivatives are taken, and along which tangent.
        dot: the product of the program's result with cotangents, a number.
    """
    loss = lambda x: dot(f(curved(x) * x))  # noqa: E731
    grad = torch.func.grad(loss)
    push = lambda f, x: torch.func.jvp(f, (x,), (v,))[1]  # noqa: E731
    twice = x.detach().requires_grad_()
    (first,) = torch.autograd.grad(loss(twice), twice, create_graph=True)
    (second,) = torch.autograd.grad((first * v).sum(), twice)
    return [
        push(f, x),  # of the outputs
        push(lambda x: push(f, x), x),
        grad(x),
        push(grad, x),
        torch.func.grad(lambda x: (grad(x) * v).sum())(x),
        torch.func.grad(lambda x: push(loss, x))(x),
        second,
    ]


CURVED = ["psum", "pmean", "pmax", "all_gather, dim -1", "all_gather, tiled", "psum_scatter, dim 1", "psum_scatter, tiled",
          "all_to_all, 0 to 2", "all_to_all, tiled, 2 to 0", "ppermute, a ring", "ppermute, one pair"]  # fmt: skip


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize(
    ("name", "world", "axis"),
    [(name, GRID, ("tensor", "shard")) for name in CURVED]
    + [(name, {"tensor": 3}, "tensor") for name in ("pmax", "psum_scatter, tiled", "ppermute, a ring")],
    ids=str,
)
def test_first_and_second_derivatives_are_those_of_the_function_of_all_ranks(name: str, world: Any, axis: Any) -> None:
    shape = OPERATIONS[name].sizes(len(line(0, world, axis)))
    stack, v = (torch.randn(math.prod(world.values()), *shape, dtype=torch.float64) for _ in range(2))
    plain = whole(name, axis, world)
    ys = [torch.randn_like(out) for out in plain(stack)]
    dot = lambda outs: sum((out * y).sum() for out, y in zip(outs, ys, strict=True))  # noqa: E731
    wanted = derivatives(lambda s: plain(curved(s)), stack, v, dot)

    def main(mesh: fs.Mesh) -> None:
        x, dx, y = stack[mesh.rank], v[mesh.rank], ys[mesh.rank]
        run = lambda x: OPERATIONS[name].run(curved(x), mesh, axis)  # noqa: E731
        found = derivatives(run, x, dx, lambda out: (out * y).sum())
        torch.testing.assert_close(found, [theirs[mesh.rank] for theirs in wanted], rtol=1e-10, atol=1e-10)

    fs.simulate(main, world)


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", CURVED)
@on_ranks(GRID)
def test_vmap_over_any_dimension_is_a_loop_with_one_collective(mesh: fs.Mesh, name: str) -> None:
    axis = ("tensor", "shard")
    shape = OPERATIONS[name].sizes(len(line(0, GRID, axis)))
    each = [whole_number_tensor(mesh.rank, shape, salt=salt) for salt in range(3)]
    f = lambda x: OPERATIONS[name].run(x, mesh, axis)  # noqa: E731
    slope = lambda x: torch.func.grad(lambda x: (f(x) * f(x)).sum())(x)  # noqa: E731
    wanted, slopes = torch.stack([f(x) for x in each]), torch.stack([slope(x) for x in each])
    _, alone = recorded(f, each[0])
    for dim in range(len(shape) + 1):
        stacked = torch.stack(each, dim)
        found, events = recorded(torch.vmap(f, in_dims=dim), stacked)
        assert torch.equal(found, wanted)
        assert [event.bytes for event in events] == [3 * event.bytes for event in alone]
        if dim == 1:
            torch.testing.assert_close(torch.vmap(slope, in_dims=dim)(stacked), slopes)
        twice = torch.vmap(torch.vmap(f, in_dims=dim))(torch.stack([stacked, 2 * stacked]))
        assert torch.equal(twice, torch.stack([found, 2 * found]))


LOOPS = {
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
    "hessian": torch.func.hessian,
    "functional": lambda f: lambda x: torch.autograd.functional.jacobian(f, x),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "name"),
    [("jacrev", name) for name in OPERATIONS if "," not in name]
    + [(loop, name) for loop in LOOPS if loop != "jacrev" for name in ("psum", "all_to_all")],
)
@on_ranks({"shard": 2, "tensor": 2, "expert": 1})
def test_a_loop_over_unit_vectors_is_refused_where_it_would_mix_ranks(mesh: fs.Mesh, loop: str, name: str) -> None:
    """Along an axis of one rank nothing is mixed, and the result is right."""
    f = lambda x: curved(OPERATIONS[name].run(x, mesh, "tensor"))  # noqa: E731
    alone = lambda x: curved(OPERATIONS[name].run(x, mesh, "expert"))  # noqa: E731
    x = whole_number_tensor(mesh.rank, OPERATIONS[name].sizes(2))
    title = "psum or pmean" if name in ("psum", "pmean") else f"{'pmax' if name == 'pmax' else name} along 'tensor'"
    words = rf"would mix (rows|columns) at {title} on 2 ranks: .* Take the collective of the result"
    with pytest.raises(RuntimeError, match=words):
        LOOPS[loop](f)(x)
    x = whole_number_tensor(mesh.rank, OPERATIONS[name].sizes(1))
    plain = lambda x: curved(OPERATIONS[name].plain([x], 0))  # noqa: E731
    torch.testing.assert_close(LOOPS[loop](alone)(x), LOOPS[loop](plain)(x))


N = 3 * 4 * 8  # bytes of a tensor [4, 3] of float64
OTHERS = N * 3 // 4  # of the rows for 3 of 4 ranks
RECORDED = {  # the operation, and what each rank of {"shard": 2, "tensor": 4} records: kind, bytes, axis, traffic
    "psum": (lambda x, mesh: fs.psum(x, mesh, axis="tensor"), [("all_reduce", N, "tensor", 2 * N * 3 // 4)]),
    "psum of both": (
        lambda x, mesh: fs.psum(x, mesh, axis=("tensor", "shard")),
        [("all_reduce", N, "shard", N), ("all_reduce", N, "tensor", 2 * N * 3 // 4)],
    ),
    "pmean": (lambda x, mesh: fs.pmean(x, mesh), [("all_reduce", N, "shard", N)]),
    "pmax": (lambda x, mesh: fs.pmax(x, mesh, axis="tensor"), [("all_gather", 4 * N, "tensor", 3 * N)]),
    "all_gather": (lambda x, mesh: fs.all_gather(x, mesh, axis="tensor"), [("all_gather", 4 * N, "tensor", 3 * N)]),
    "all_gather of both": (
        lambda x, mesh: fs.all_gather(x, mesh, axis=("tensor", "shard")),
        [("all_gather", 2 * N, "shard", N), ("all_gather", 8 * N, "tensor", 6 * N)],
    ),
    "psum_scatter": (lambda x, mesh: fs.psum_scatter(x, mesh, axis="tensor"), [("reduce_scatter", N, "tensor", OTHERS)]),
    "all_to_all": (lambda x, mesh: fs.all_to_all(x, mesh, axis="tensor"), [("all_to_all", OTHERS, "tensor", OTHERS)]),
    "ppermute, a ring": (
        lambda x, mesh: fs.ppermute(x, mesh, [(0, 1), (1, 2), (2, 3), (3, 0)], axis="tensor"),
        [("ppermute", N, "tensor", N)],
    ),
    "ppermute, one pair": (lambda x, mesh: fs.ppermute(x, mesh, [(2, 1)], axis="tensor"), [("ppermute", N, "tensor", N)]),
    "ppermute, nothing moves": (lambda x, mesh: fs.ppermute(x, mesh, [(2, 2)], axis="tensor"), []),
    "ppermute along one of two axes": (
        lambda x, mesh: fs.ppermute(x, mesh, [(i, (i + 4) % 8) for i in range(8)], axis=("shard", "tensor")),
        [("ppermute", N, "shard", N)],
    ),
    "an axis of one rank": (lambda x, mesh: fs.all_gather(fs.psum(x, mesh, axis="replicate"), mesh, axis="replicate"), []),
    "no elements": (lambda x, mesh: fs.psum_scatter(x[:0], mesh, axis="tensor", tiled=True), []),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
@on_ranks({"shard": 2, "tensor": 4})
def test_every_rank_of_an_axis_records_the_same_events(mesh: fs.Mesh, name: str) -> None:
    run, wanted = RECORDED[name]
    x = torch.ones(4, 3, dtype=torch.float64, requires_grad=True)
    out, events = recorded(run, x, mesh)
    adjoint = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}
    _, backward = recorded(torch.autograd.grad, out.sum(), x)
    expected = [(adjoint.get(event.kind, event.kind), event.axis, event.ranks) for event in events]
    assert sorted((event.kind, event.axis, event.ranks) for event in backward) == sorted(expected)
    assert [(event.kind, event.bytes, event.axis, event.traffic) for event in events] == wanted
    assert all((event.unit, event.buffer, event.dtype) == (None, "", "float64") for event in events)
    assert all(event.ranks == mesh.shape[event.axis] for event in events)


@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "all_to_all"])
@on_ranks({"shard": 2, "tensor": 2})
def test_the_old_vmap_is_refused_and_the_collective_named(mesh: fs.Mesh, name: str) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    out = getattr(fs, name)(x, mesh, axis="tensor")
    words = r"along 'tensor' on 4 ranks: use torch.vmap over the cotangents of torch.func.vjp"
    with pytest.raises(RuntimeError, match=words):
        torch.autograd.grad(out, x, torch.ones(3, *out.shape), is_grads_batched=True)


def test_ranks_with_different_permutations_issue_different_collectives() -> None:
    words = r"is all_to_all of float32 of ppermute by \[\(0, 1\)\] along 'tensor' on rank 0 and .* by \[\(1, 0\)\] along"
    with pytest.raises(RuntimeError, match=words):
        fs.simulate(
            lambda mesh: fs.ppermute(torch.ones(1), mesh, [(mesh.rank, 1 - mesh.rank)], axis="tensor"), {"tensor": 2}
        )


# --- values of Python: broadcast_object and agree -------------------------------------------------


VALUE = {"name": "ä\U0001f600", "numbers": [1, 2**200, 0.1, -0.0, math.inf, True, None], "empty": [{}, []]}


def sent(mesh: fs.Mesh, src: int) -> Any:
    return fs.broadcast_object(VALUE if mesh.rank == src else mesh, mesh, src)


@pytest.mark.parametrize("src", [0, 1])
def test_every_rank_gets_the_value_of_one(src: int) -> None:
    for found in [*fs.simulate(lambda mesh: sent(mesh, src), {"replicate": 2, "shard": 2}), *run_ranks(sent, 2, src)]:
        assert repr(found) == repr(VALUE)


BAD: dict[str, tuple[Any, str]] = {
    "a tuple": ({"a": [1, (2, 3)]}, r"which JSON holds exactly; found {'a': \[1, \(2, 3\)\]}: convert it"),
    "a key": ({"a": {1: 2}}, "with strings as keys.*found {'a': {1: 2}}: convert it"),
    "a tensor": (torch.ones(1), "Tensor is not JSON serializable"),
    "a number of NumPy": (np.float64(1), r"found np.float64\(1.0\): convert it"),
    "bytes": (b"a", "bytes is not JSON serializable"),
}


@pytest.mark.parametrize("name", BAD)
@on_ranks(2)
def test_what_json_cannot_hold_is_said_on_every_rank_and_the_mesh_goes_on(mesh: fs.Mesh, name: str) -> None:
    value, words = BAD[name]
    with pytest.raises(TypeError, match=words):
        fs.broadcast_object(value if mesh.rank == 0 else None, mesh)
    assert fs.psum(torch.ones(1), mesh).item() == 2


def agreed(mesh: fs.Mesh) -> list[Any]:
    own = float(mesh.rank)
    values = [own < 9, own < 1, torch.tensor([own > 0]), own, -mesh.rank, torch.tensor(own).bfloat16(), 2**60, math.inf]
    inside = torch.func.grad_and_value(lambda x: x * fs.agree(x > 1, mesh) + fs.agree(x + own, mesh))(torch.tensor(2.0))
    return [fs.agree(value, mesh) for value in values] + [x.item() for x in inside]


def test_all_ranks_agree_on_a_condition_and_on_the_largest_number() -> None:
    for world, last in (({"replicate": 2, "tensor": 2}, 3.0), ({"shard": 1}, 0.0)):
        rest = [last, 0.0, last, 2.0**60, math.inf, 1.0, 4.0 + last]
        for found in fs.simulate(agreed, world):
            assert found == [True, last < 1, last < 1 and False, *rest]
            assert [type(x) for x in found[:4]] == [bool, bool, bool, float]
    assert run_ranks(agreed, 2) == [[True, False, False, 1.0, 0.0, 1.0, 2.0**60, math.inf, 1.0, 5.0]] * 2
    assert math.isnan(fs.simulate(lambda mesh: fs.agree(math.nan if mesh.rank else 1, mesh), 2)[0])


AGREE = "agree takes a bool, a real number, or a tensor of one; found"
WRONG: dict[str, tuple[Callable[[fs.Mesh], Any], type[Exception], str]] = {
    "a maximum of complex numbers": (
        lambda mesh: fs.pmax(torch.ones(2, dtype=torch.complex64), mesh), TypeError,
        r"pmax compares, and complex .*; found torch.complex64: pass x.abs\(\), or real and",
    ),
    "a number in a tree": (
        lambda mesh: fs.pmean({"n": [torch.ones(1), 3]}, mesh), TypeError, r"found int at 'n\.1': make it one with torch",
    ),
    "a source that is no rank": (
        lambda mesh: fs.broadcast_object(1, mesh, 2), ValueError, "src must be a rank of the world, from 0 to 1; found 2",
    ),
    "no mesh": (lambda mesh: fs.broadcast_object(1, None), TypeError, "mesh must be a Mesh"),  # type: ignore[arg-type]
    "several numbers": (lambda mesh: fs.agree(torch.ones(2), mesh), TypeError, AGREE),
    "a complex number": (lambda mesh: fs.agree(1j, mesh), TypeError, AGREE),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@on_ranks(2)
def test_what_ranks_cannot_add_compare_send_or_agree_on_is_refused(mesh: fs.Mesh, name: str) -> None:
    call, kind, words = WRONG[name]
    with pytest.raises(kind, match=words):
        call(mesh)
