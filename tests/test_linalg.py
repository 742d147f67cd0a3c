"""Linear algebra on shards has the results of torch.linalg on the dense matrix, on every mesh."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard import linalg
from funcshard._utils import tree
from tests.ranks import on_ranks, run_ranks, run_simulated

WORLDS: dict[str, tuple[Any, dict[str, int]]] = {
    "2 x 2": (run_simulated, {"replicate": 2, "shard": 2}),
    "2 processes": (run_ranks, {"shard": 2}),
    "2 ranks": (run_simulated, {"shard": 2}),
}
SHAPES = {"c": (2, 3), "a": (5, 3), "b": (5,)}
SIZE = sum(map(math.prod, SHAPES.values()))
# Eigenvalues of both signs, of which those of largest magnitude and at both ends are apart.
VALUES = torch.cat([torch.linspace(-2, 2, SIZE - 4), torch.tensor([-5.0, 4.0, 7.0, 11.0])]).double()


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


VECTORS = torch.linalg.qr(random(SIZE, SIZE)).Q
SYMMETRIC = VECTORS * VALUES @ VECTORS.T
POSITIVE = VECTORS * (VALUES.abs() + 0.1) @ VECTORS.T
RIGHT, GUESS, START = (random(SIZE, seed=seed) for seed in (1, 2, 3))


def as_tree(vector: torch.Tensor) -> dict[str, torch.Tensor]:
    parts = vector.split([math.prod(shape) for shape in SHAPES.values()])
    return {name: part.view(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def as_vector(whole: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([whole[name].flatten() for name in SHAPES])


class Space:
    """Vectors as trees of shards, or as trees of whole tensors where there is no mesh."""

    def __init__(self, mesh: fs.Mesh | None) -> None:
        self.mesh = mesh
        self.plan = mesh and fs.make_plan(as_tree(RIGHT), mesh, units=["a"])
        self.on = self.plan, mesh  # what every function takes after its vectors

    def put(self, vector: torch.Tensor) -> Any:
        return fs.shard(as_tree(vector), self.plan, self.mesh, check=False) if self.mesh else as_tree(vector)

    def take(self, tree: Any) -> torch.Tensor:
        return as_vector(fs.gather(tree, self.plan, self.mesh) if self.mesh else tree)

    def operator(self, matrix: torch.Tensor) -> Callable[[Any], Any]:
        return lambda v: self.put(matrix @ self.take(v))

    def randn(self, seed: int) -> tuple[torch.Tensor, torch.Generator]:
        """Return the next random vector of a generator, and another generator in the same state."""
        first, second = (torch.Generator().manual_seed(seed) for _ in range(2))
        if self.mesh:
            return self.take(fs.randn_like(self.put(RIGHT), self.plan, self.mesh, generator=first)), second
        normal = tree.map(lambda leaf: torch.randn(leaf.shape, dtype=leaf.dtype, generator=first), as_tree(RIGHT))
        return as_vector(normal), second


def solved(space: Space) -> list[float]:
    multiply, b, expected = space.operator(POSITIVE), space.put(RIGHT), torch.linalg.solve(POSITIVE, RIGHT)
    cases: dict[str, dict[str, Any]] = {
        "no options": {},
        "a guess": {"x0": space.put(GUESS)},
        "the solution": {"x0": space.put(expected)},
        "a preconditioner": {"M": space.operator(torch.linalg.inv(POSITIVE))},
    }
    steps = dict.fromkeys(cases, 0)
    for name, options in cases.items():

        def counted(v: Any, name: str = name) -> Any:
            steps[name] += 1
            return multiply(v)

        x, info = linalg.cg(counted, b, *space.on, rtol=1e-12, maxiter=60, **options)
        assert info == 0
        assert (POSITIVE @ space.take(x) - RIGHT).norm() <= 2e-12 * RIGHT.norm()
        torch.testing.assert_close(space.take(x), expected, rtol=1e-10, atol=1e-10)
    # A guess costs a product. The inverse as preconditioner solves in a step, or two by rounding.
    assert steps["the solution"] == 1
    assert steps["a preconditioner"] <= 2
    assert 10 < steps["no options"] < 60
    indefinite = linalg.cg(space.operator(SYMMETRIC), b, *space.on, rtol=1e-10)
    assert indefinite[1] == 0
    torch.testing.assert_close(SYMMETRIC @ space.take(indefinite[0]), RIGHT, rtol=1e-8, atol=1e-8)
    return [float(count) for count in steps.values()]


def ended_early(space: Space) -> list[float]:
    """Return what the solver says where it does not solve."""
    multiply, b, zeros = space.operator(POSITIVE), space.put(RIGHT), space.put(torch.zeros(SIZE).double())
    x, info = linalg.cg(multiply, b, *space.on, rtol=1e-12, maxiter=3)
    assert info == 3
    assert 0.1 < (POSITIVE @ space.take(x) - RIGHT).norm() / RIGHT.norm() < 1
    loose = linalg.cg(multiply, b, *space.on, rtol=0.0, atol=2.0 * RIGHT.norm().item())
    assert loose[1] == 0
    assert not space.take(loose[0]).any()  # zeros are close enough
    for matrix in (0 * POSITIVE, POSITIVE * math.nan):
        x, info = linalg.cg(space.operator(matrix), b, *space.on)
        assert info == -1
        assert not space.take(x).any()
    x, info = linalg.cg(multiply, zeros, *space.on, x0=b)
    assert info == 0
    assert not space.take(x).any()
    return [0.0]


def eigenpairs(space: Space) -> list[float]:
    multiply, v0, ascending = space.operator(SYMMETRIC), space.put(START), VALUES.sort().values
    for which, k, expected in (
        ("LM", 4, ascending[VALUES.sort().values.abs() > 3]),
        ("LA", 3, ascending[-3:]),
        ("SA", 1, ascending[:1]),
    ):
        # Room for 12 vectors of 26, so that it restarts.
        w, vs, residuals = linalg.eigsh(multiply, v0, *space.on, k=k, which=which, ncv=12, tol=1e-8)
        torch.testing.assert_close(w, expected, rtol=1e-11, atol=1e-11)
        whole = torch.stack([space.take(v) for v in vs])
        torch.testing.assert_close(whole @ whole.T, torch.eye(k).double(), rtol=1e-11, atol=1e-11)
        assert ((SYMMETRIC @ whole.T - whole.T * w).norm(dim=0) <= 1e-8 * w.abs() + 1e-12).all()
    # A residual is the one that is measured, also of pairs that have not converged.
    w, vs, residuals = linalg.eigsh(multiply, v0, *space.on, k=4, ncv=8, maxiter=1)
    whole = torch.stack([space.take(v) for v in vs])
    measured = (SYMMETRIC @ whole.T - whole.T * w).norm(dim=0)
    torch.testing.assert_close(residuals, measured, rtol=1e-10, atol=1e-10)
    assert residuals.max() > 1e-3
    value, v, residual = linalg.power_iteration(multiply, v0, *space.on, tol=1e-6, maxiter=200)
    assert residual <= 1e-6 * 11
    torch.testing.assert_close(value.item(), 11.0, rtol=1e-11, atol=0)
    torch.testing.assert_close(space.take(v).abs(), VECTORS[:, -1].abs(), rtol=0, atol=residual.item() / 4)
    value, v, residual = linalg.power_iteration(multiply, v0, *space.on, maxiter=2)
    normalized = torch.nn.functional.normalize(SYMMETRIC @ START, dim=0)
    torch.testing.assert_close(space.take(v), normalized, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((SYMMETRIC @ space.take(v) - value * space.take(v)).norm(), residual, rtol=1e-12, atol=0)
    return [*w.tolist(), value.item()]


def of_few_vectors(space: Space) -> list[float]:
    """Return the eigenvalues that a vector of a small invariant space reaches."""
    multiply, v0 = space.operator(SYMMETRIC), space.put(VECTORS[:, -2:].sum(1))
    w, _, residuals = linalg.eigsh(multiply, v0, *space.on, k=2, tol=1e-12)
    torch.testing.assert_close(w, VALUES[-2:], rtol=1e-12, atol=0)
    assert residuals.max() < 1e-10
    w, vs, _ = linalg.eigsh(lambda v: v, space.put(START), *space.on, k=26, ncv=40)
    assert len(w) == len(vs) <= SIZE
    torch.testing.assert_close(w, torch.ones(len(w)).double(), rtol=1e-12, atol=0)
    return [0.0]


def estimates(space: Space) -> list[float]:
    multiply, like = space.operator(SYMMETRIC), space.put(GUESS)
    for distribution in ("rademacher", "normal"):
        v, generator = space.randn(seed=4)
        v = v.sign() if distribution == "rademacher" else v
        trace = linalg.hutchinson_trace(multiply, like, *space.on, generator=generator, distribution=distribution)
        torch.testing.assert_close(trace, v @ SYMMETRIC @ v, rtol=1e-12, atol=1e-12)
        diagonal = linalg.hutchinson_diag(
            multiply, like, *space.on, generator=torch.Generator().manual_seed(4), distribution=distribution
        )
        torch.testing.assert_close(space.take(diagonal), v * (SYMMETRIC @ v), rtol=1e-12, atol=1e-12)
    # The mean of many is the trace; of a diagonal matrix each one is.
    generator = torch.Generator().manual_seed(5)
    many = linalg.hutchinson_trace(multiply, like, *space.on, generator=generator, num_matvecs=25)
    deviation = (2 * (SYMMETRIC.square().sum() - SYMMETRIC.diagonal().square().sum()) / 25).sqrt()
    assert (many - VALUES.sum()).abs() < 3 * deviation
    scale = space.operator(torch.diag(VALUES))
    some = linalg.hutchinson_diag(scale, like, *space.on, generator=generator, num_matvecs=3)
    torch.testing.assert_close(space.take(some), VALUES, rtol=1e-12, atol=0)

    nodes, weights = [], []
    for reorthogonalize in (True, False):
        v, generator = space.randn(seed=6)
        options = {"generator": generator, "ncv": 6, "num_repeats": 2, "reorthogonalize": reorthogonalize}
        both = linalg.lanczos_quadrature(multiply, like, *space.on, **options)
        nodes.append(both[0]), weights.append(both[1])
        # Six nodes are exact up to the eleventh power; the weights of the first repeat belong to v.
        for power in range(12):
            exact = v.sign() @ torch.linalg.matrix_power(SYMMETRIC, power) @ v.sign() / SIZE
            of_nodes = (both[1] * both[0] ** power).sum(1)[0]
            torch.testing.assert_close(of_nodes, exact, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(nodes[0], nodes[1], rtol=1e-10, atol=1e-10)
    return [many.item(), *nodes[0].flatten().tolist(), *weights[0].flatten().tolist()]


LAWS = {law.__name__: law for law in (solved, ended_early, eigenpairs, of_few_vectors, estimates)}


def on_mesh(mesh: fs.Mesh | None, law: str) -> list[float]:
    return LAWS[law](Space(mesh))


@functools.cache
def on_one_rank(law: str) -> list[float]:
    return on_mesh(fs.Mesh(), law)


@pytest.mark.parametrize("law", LAWS)
def test_results_of_whole_tensors_are_those_of_the_dense_matrix(law: str) -> None:
    on_mesh(None, law)


@pytest.mark.nightly(one_in=7)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("law", LAWS)
def test_results_of_shards_are_those_of_the_dense_matrix_and_the_same_on_every_mesh(law: str, world: str) -> None:
    run, shape = WORLDS[world]
    results = run(on_mesh, math.prod(shape.values()), law, shape=shape)
    assert results == results[:1] * len(results)
    torch.testing.assert_close(results[0], on_one_rank(law), rtol=1e-10, atol=1e-10)


def collectives(mesh: fs.Mesh) -> list[int]:
    """Return the number of all-reduces of ten steps, of an operator that communicates nothing."""
    plan = fs.make_plan(as_tree(RIGHT), mesh, units=["a", "b"])
    b, scales = (fs.shard(as_tree(vector), plan, mesh) for vector in (RIGHT, VALUES.abs() + 0.1))
    multiply = lambda v: tree.map(torch.mul, scales, v)  # noqa: E731
    counts = []
    for run in (
        lambda: linalg.cg(multiply, b, plan, mesh, rtol=0.0, maxiter=10),
        lambda: linalg.power_iteration(multiply, b, plan, mesh, tol=0.0, maxiter=10),
        lambda: linalg.eigsh(multiply, b, plan, mesh, k=2, ncv=10, maxiter=1),
    ):
        with fs.record_events() as events:
            run()
        assert {event.kind for event in events} == {"all_reduce"}
        counts.append(len(events))
    return counts


def test_a_step_takes_the_all_reduces_that_the_docstrings_say() -> None:
    (conjugate, power, lanczos), other = run_simulated(collectives, 2)
    assert conjugate == 2 * 10 + 2  # the norm of b, and that of the last residual
    assert power == 3 * 10
    assert 1 + 2 * 10 <= lanczos <= 1 + 4 * 10
    assert other == [conjugate, power, lanczos]


def test_a_gradient_goes_through_a_solution() -> None:
    def loss(scale: torch.Tensor) -> torch.Tensor:
        x, _ = linalg.cg(lambda v: scale * (POSITIVE @ v), RIGHT, rtol=1e-13)
        return x.square().sum()

    scale = torch.tensor(2.0, dtype=torch.float64)
    slope = torch.func.grad(loss)(scale)
    torch.testing.assert_close(slope, -2 / scale * loss(scale), rtol=1e-9, atol=0)


@on_ranks(2)
def test_frozen_leaves_have_no_part_in_a_vector(mesh: fs.Mesh) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).double()
    net[0].weight.requires_grad_(False)
    _, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["0", "1"])
    shards, generator = fs.shard(params, plan, mesh), torch.Generator().manual_seed(0)
    twice = lambda v: fs.axpy(1.0, v, v)  # noqa: E731
    v0 = fs.randn_like(shards, plan, mesh, generator=generator)
    w, (v,), _ = linalg.eigsh(twice, v0, plan, mesh, k=1)
    x, _ = linalg.cg(twice, v0, plan, mesh)
    trace = linalg.hutchinson_trace(twice, shards, plan, mesh, generator=generator)
    _, weights = linalg.lanczos_quadrature(twice, shards, plan, mesh, generator=generator, ncv=1)
    diagonal = linalg.hutchinson_diag(twice, shards, plan, mesh, generator=generator)
    numbers = [w.item(), fs.norm(v, plan, mesh).item(), trace.item(), weights.item()]
    torch.testing.assert_close(numbers, [2.0, 1.0, 18.0, 1.0])  # of 9 elements that are trained
    torch.testing.assert_close(fs.norm(fs.axpy(-2.0, x, v0), plan, mesh).item(), 0.0)
    torch.testing.assert_close(fs.norm(diagonal, plan, mesh).item(), 6.0)


def test_an_inner_product_of_the_user_decides() -> None:
    weight = torch.diag(VALUES.abs() + 1)
    similar = torch.linalg.inv(weight) @ POSITIVE  # symmetric in the inner product of the weight
    inner = lambda a, b: a @ weight @ b  # noqa: E731
    b = similar @ GUESS
    x, info = linalg.cg(lambda v: similar @ v, b, rtol=1e-13, inner=inner)
    assert info == 0
    torch.testing.assert_close(x, GUESS, rtol=1e-9, atol=1e-9)
    w, _, _ = linalg.eigsh(lambda v: similar @ v, START, k=2, which="LA", tol=1e-12, inner=inner)
    torch.testing.assert_close(w, torch.linalg.eigvals(similar).real.sort().values[-2:], rtol=1e-10, atol=0)


@pytest.mark.parametrize("solve", [fs.linalg.cg, fs.linalg.eigsh, fs.linalg.power_iteration], ids=lambda f: f.__name__)
def test_a_matrix_in_place_of_an_operator_is_told(solve):
    with pytest.raises(TypeError, match=r"A must be a function of a vector; found .*: pass lambda v: A @ v for a matrix"):
        solve(torch.eye(3), torch.ones(3))
