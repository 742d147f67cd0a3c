"""Linear algebra with operators on trees of shards, as ``fs.linalg``.

An operator is a function ``A(v) -> A v``, such as a product with a Hessian. Its vectors are
trees like shards, so no rank holds a whole one. With a plan and a mesh, inner products are those of
``fs.vdot``; without, trees hold whole tensors. All ranks read the same inner products,
so all of them take the same number of steps.

Example:
    >>> import torch, funcshard as fs
    >>> matrix = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
    >>> x, info = fs.linalg.cg(lambda v: matrix @ v, torch.tensor([1.0, 2.0]))
    >>> info, x
    (0, tensor([0.0909, 0.6364]))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from funcshard._utils import tree
from funcshard._utils.options import (
    check_choice,
    check_count,
    check_flag,
    check_number,
    outline,
)
from funcshard.comm import Mesh
from funcshard.core import axpy, randn_like, vdot
from funcshard.plan import Plan

__all__ = [
    "cg", "eigsh", "hutchinson_diag", "hutchinson_trace", "lanczos_quadrature", "power_iteration"
]  # fmt: skip

Operator = Callable[[Any], Any]
InnerProduct = Callable[[Any, Any], torch.Tensor]
Distribution = Literal["rademacher", "normal"]

# Why three: a pass removes a vector's part in the basis up to rounding, and the second removes the
# part that was left by rounding. A third that still removes most of it shows a vector in the basis.
_MOST_PASSES = 3


def cg(
    A: Operator,
    b: Any,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    *,
    x0: Any = None,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int = 100,
    M: Operator | None = None,
    inner: InnerProduct | None = None,
) -> tuple[Any, int]:
    """Solve ``A x = b`` by conjugate gradients, for a symmetric positive definite ``A``.

    A step takes one product with ``A`` and two inner products, or three with ``M``.

    Arguments:
        A: the operator.
        b: the right-hand side, a tree like shards.
        plan: the plan of the shards; ``None`` for trees of whole tensors.
        mesh: the ranks.
        x0: the first guess; zeros by default.
        rtol: stop once the norm of ``b - A x`` is at most this part of the norm of ``b``.
        atol: the same as an absolute number; the larger bound counts.
        maxiter: the most steps.
        M: a preconditioner, which is an operator close to the inverse of ``A``.
        inner: ``inner(a, b)``, an inner product in place of ``fs.vdot``, such as a sum over the
            trees of two models. It has to be the same number on all ranks.

    Returns:
        ``(x, info)``, as SciPy does. ``info`` is 0 if the norm is small enough, and otherwise the
        number of steps. It is -1 if a product is NaN or orthogonal to its vector; then ``x`` is the
        result of the steps before.

    Raises:
        ValueError: a number is out of range, or there is a plan without a mesh.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0, 3.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     b = scales = fs.shard(params, plan, mesh)
        ...     A = lambda v: {"": {"float32": scales[""]["float32"] * v[""]["float32"]}}
        ...     x, info = fs.linalg.cg(A, b, plan, mesh)
        ...     return fs.gather(x, plan, mesh)["w"].round(decimals=4).tolist(), info
        >>> fs.simulate(main, world_size=2)[0]
        ([1.0, 1.0, 1.0], 0)

    Source: Hestenes and Stiefel, "Methods of conjugate gradients for solving linear systems", 1952;
    ``scipy.sparse.linalg.cg``.
    """
    check_number("rtol", rtol, least=0)
    check_number("atol", atol, least=0)
    check_count("maxiter", maxiter, of="steps")
    dot = _inner_product(A, plan, mesh, inner)
    x, residual = tree.map(torch.zeros_like, b), b
    rhs_norm = dot(b, b).sqrt().item()
    if rhs_norm == 0:
        return x, 0
    residual_bound = max(rtol * rhs_norm, atol)
    if x0 is not None:
        x, residual = x0, axpy(-1.0, A(x0), b)
    search_direction = old_fall = None
    for _ in range(maxiter):
        residual_square = dot(residual, residual)
        if residual_square.sqrt() <= residual_bound:
            return x, 0
        descent, new_fall = residual, residual_square
        if M is not None:
            descent = M(residual)
            new_fall = dot(residual, descent)
        if old_fall is not None:
            descent = axpy(new_fall / old_fall, search_direction, descent)
        search_direction, old_fall = descent, new_fall
        product = A(search_direction)
        curvature = dot(search_direction, product)
        # Note: written so that NaN ends the loop too. Negative curvature doesn't, as in SciPy: the
        # residual says whether the solution is right.
        if not curvature.abs() > 0:
            return x, -1
        step_length = new_fall / curvature
        x, residual = (
            axpy(step_length, search_direction, x),
            axpy(-step_length, product, residual),
        )
    return x, 0 if dot(residual, residual).sqrt() <= residual_bound else maxiter


def power_iteration(
    A: Operator,
    v0: Any,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    *,
    tol: float = 1e-3,
    maxiter: int = 100,
    inner: InnerProduct | None = None,
) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Return the eigenvalue of a symmetric ``A`` of largest magnitude, with its eigenvector.

    It keeps two vectors. ``eigsh`` needs fewer products, and keeps twenty.

    Arguments:
        A: the operator.
        v0: the first vector, a tree like shards, such as one of ``fs.randn_like``.
        plan: the plan of the shards; ``None`` for trees of whole tensors.
        mesh: the ranks.
        tol: stop once the residual is at most this part of the eigenvalue.
        maxiter: the most products.
        inner: an inner product in place of ``fs.vdot``; see ``cg``.

    Returns:
        ``(w, v, residual)``: the eigenvalue, the eigenvector of norm 1, and the norm of
        ``A v - w v``. Some eigenvalue is as close to ``w`` as the residual says.

    Raises:
        ValueError: a number is out of range, there is a plan without a mesh, or ``v0`` is zero.

    Example:
        >>> import torch, funcshard as fs
        >>> A = lambda v: torch.tensor([1.0, -4.0, 2.0]) * v
        >>> w, v, residual = fs.linalg.power_iteration(A, torch.ones(3))
        >>> round(w.item(), 3), v.abs().round(decimals=2).tolist(), bool(residual < 4e-3)
        (-4.0, [0.0, 1.0, 0.0], True)

    Source: von Mises and Pollaczek-Geiringer, "Praktische Verfahren der Gleichungsauflösung", 1929.
    """
    check_number("tol", tol, least=0)
    check_count("maxiter", maxiter, of="products")
    dot = _inner_product(A, plan, mesh, inner)
    v = _normalized(v0, dot)
    for number in range(1, maxiter + 1):
        product = A(v)
        eigenvalue = dot(v, product)
        residual_vector = axpy(-eigenvalue, v, product)
        residual_norm = dot(residual_vector, residual_vector).sqrt()
        if residual_norm <= tol * eigenvalue.abs() or number == maxiter:
            break
        v = _normalized(product, dot)
    return eigenvalue, v, residual_norm


def eigsh(
    A: Operator,
    v0: Any,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    *,
    k: int = 6,
    which: Literal["LM", "LA", "SA"] = "LM",
    ncv: int | None = None,
    maxiter: int = 20,
    tol: float = 1e-4,
    inner: InnerProduct | None = None,
) -> tuple[torch.Tensor, list[Any], torch.Tensor]:
    """Return ``k`` eigenvalues of a symmetric ``A`` with their eigenvectors, by Lanczos.

    It keeps ``ncv`` vectors, and restarts from the best combinations of them. A product comes with
    two to four inner products. They are all-reduces of at most ``ncv`` numbers.

    Arguments:
        A: the operator. No gradient goes through the result.
        v0: the first vector, a tree like shards, such as one of ``fs.randn_like``.
        plan: the plan of the shards; ``None`` for trees of whole tensors.
        mesh: the ranks.
        k: the number of eigenvalues.
        which: ``"LM"`` for those of largest magnitude, ``"LA"`` for the largest, or ``"SA"`` for
            the smallest.
        ncv: the number of vectors; the larger of 20 and ``2 * k + 1`` by default.
        maxiter: the most times that the function fills the ``ncv`` vectors.
        tol: stop once each residual is at most this part of its eigenvalue. Errors of eigenvalues
            shrink with the square of residuals.
        inner: an inner product in place of ``fs.vdot``; see ``cg``. ``torch.vmap`` maps it.

    Returns:
        ``(w, v, residuals)``. ``w`` holds the eigenvalues in ascending order, ``v[i]`` is the
        eigenvector of ``w[i]`` of norm 1, a tree like ``v0``, and ``residuals[i]`` is the norm of
        ``A v[i] - w[i] v[i]``; SciPy raises an error if one is too large. ``w`` and ``residuals``
        are float64 tensors on the CPU. There are fewer than ``k`` eigenvalues if products of
        ``v0`` span a smaller space.

    Raises:
        ValueError: a number is out of range, there is a plan without a mesh, ``v0`` is zero, or a
            product isn't finite.

    Example:
        >>> import torch, funcshard as fs
        >>> diagonal = torch.arange(1.0, 101)
        >>> w, v, residuals = fs.linalg.eigsh(lambda v: diagonal * v, torch.ones(100), k=2)
        >>> w.round(decimals=3).tolist(), v[1].abs().argmax().item(), bool(residuals.max() < 1e-2)
        ([99.0, 100.0], 99, True)

    Source: Wu and Simon, "Thick-restart Lanczos method for large symmetric eigenvalue problems",
    2000; ``scipy.sparse.linalg.eigsh``.
    """
    check_count("k", k, of="eigenvalues")
    check_choice("which", which, ("LM", "LA", "SA"))
    basis_size = max(2 * k + 1, 20) if ncv is None else ncv
    check_count("ncv", basis_size, k + 1, of="vectors", none="for the default")
    check_count("maxiter", maxiter, of="restarts")
    check_number("tol", tol, least=0)
    dot = _inner_product(A, plan, mesh, inner)
    basis = _room_for(_normalized(v0, dot), basis_size)
    projected = torch.zeros(basis_size, basis_size, dtype=torch.float64, device="cpu")
    num_kept = 0
    for restart_number in range(1, maxiter + 1):
        num_vectors, rest_norm, next_vector = _extend(A, basis, projected, num_kept, dot)
        values, vectors = torch.linalg.eigh(projected[:num_vectors, :num_vectors])
        residual_norms = rest_norm * vectors[-1].abs()
        # Why stable: of equal eigenvalues, each rank has to keep the same ones.
        best_first = {"LM": -values.abs(), "LA": -values, "SA": values}[which].argsort(
            stable=True
        )
        # Why: the largest eigenvalue sets the rounding that every residual has.
        rounding = torch.finfo(tree.leaves(v0)[0].dtype).eps * values.abs().max()
        residual_bounds = torch.maximum(tol * values.abs(), rounding)
        if (
            restart_number == maxiter
            or (residual_norms <= residual_bounds)[best_first[:k]].all()
        ):
            break
        # Why more than k: the eigenvectors beside the k best ones make these converge faster.
        num_kept = (k + basis_size) // 2
        best = best_first[:num_kept]
        _put(basis, slice(num_kept), _combine(vectors[:, best].T, basis))
        _put(basis, num_kept, next_vector)
        # Note: ``_extend`` fills in the row that couples these to the next vector.
        projected.zero_().diagonal()[:num_kept] = values[best]
    best = best_first[:k].sort().values
    return (
        values[best],
        [_combine(row, basis) for row in vectors[:, best].T],
        residual_norms[best],
    )


def lanczos_quadrature(
    A: Operator,
    like: Any,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    *,
    generator: torch.Generator,
    ncv: int = 20,
    num_repeats: int = 1,
    reorthogonalize: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate the spectrum of a symmetric ``A``, by stochastic Lanczos quadrature.

    A weight is about the part of all eigenvalues that are near its node. So
    ``(weights * f(nodes)).sum(1).mean()`` estimates the mean of ``f`` over the eigenvalues. Times
    the number of elements, it estimates the trace of ``f(A)``.

    Arguments:
        A: the operator. No gradient goes through the result.
        like: a tree of the form of the vectors, such as the shards; its values don't matter.
        plan: the plan of the shards; ``None`` for trees of whole tensors.
        mesh: the ranks.
        generator: the generator of the first vectors, which are random signs; see
            ``fs.randn_like``.
        ncv: the number of products of a repeat, and of its nodes.
        num_repeats: the number of first vectors.
        reorthogonalize: keep ``ncv`` vectors and make each new one orthogonal to all of them. If
            false, keep the last two; nodes then repeat, and their weights add up to the same.

    Returns:
        ``(nodes, weights)`` in float64 on the CPU, each of shape ``[num_repeats, ncv]``. The
        weights of a repeat are at least 0, and add up to 1.

    Raises:
        ValueError: a number is out of range, there is a plan without a mesh, or a product isn't
            finite.

    Example:
        >>> import torch, funcshard as fs
        >>> diagonal = torch.arange(1.0, 101)
        >>> nodes, weights = fs.linalg.lanczos_quadrature(
        ...     lambda v: diagonal * v, torch.ones(100), generator=torch.Generator().manual_seed(0)
        ... )
        >>> round((weights * nodes).sum().item(), 3), round((weights * nodes**2).sum().item(), 1)
        (50.5, 3383.5)

    Source: Ubaru, Chen and Saad, "Fast estimation of tr(f(A)) via stochastic Lanczos quadrature",
    2017; Ghorbani, Krishnan and Xiao, "An investigation into neural net optimization via Hessian
    eigenvalue density", 2019.
    """
    check_count("ncv", ncv, of="products")
    check_count("num_repeats", num_repeats, of="repeats")
    check_flag("reorthogonalize", reorthogonalize)
    dot = _inner_product(A, plan, mesh, None)
    nodes, weights = torch.zeros(2, num_repeats, ncv, dtype=torch.float64, device="cpu")
    for repeat in range(num_repeats):
        first_vector = _normalized(_probe(like, plan, mesh, generator, "rademacher"), dot)
        basis = _room_for(first_vector, ncv if reorthogonalize else min(ncv, 2))
        projected = torch.zeros(ncv, ncv, dtype=torch.float64, device="cpu")
        num_nodes, _, _ = _extend(A, basis, projected, 0, dot)
        values, vectors = torch.linalg.eigh(projected[:num_nodes, :num_nodes])
        nodes[repeat, :num_nodes], weights[repeat, :num_nodes] = (
            values,
            vectors[0].square(),
        )
    return nodes, weights


def hutchinson_trace(
    A: Operator,
    like: Any,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    *,
    generator: torch.Generator,
    num_matvecs: int = 1,
    distribution: Distribution = "rademacher",
) -> torch.Tensor:
    """Estimate the trace of ``A``, as the mean of ``v @ A v`` over random vectors ``v``.

    Arguments:
        A: the operator.
        like: a tree of the form of the vectors, such as the shards; its values don't matter.
        plan: the plan of the shards; ``None`` for trees of whole tensors.
        mesh: the ranks.
        generator: the generator of the vectors; see ``fs.randn_like``.
        num_matvecs: the number of vectors.
        distribution: ``"rademacher"`` for random signs, or ``"normal"``.

    Returns:
        The estimate, a tensor without dimensions.

    Raises:
        ValueError: a number is out of range, or there is a plan without a mesh.

    Example:
        >>> import torch, funcshard as fs
        >>> generator = torch.Generator().manual_seed(0)
        >>> A = lambda v: torch.tensor([1.0, 2.0, 3.0]) * v
        >>> fs.linalg.hutchinson_trace(A, torch.ones(3), generator=generator)
        tensor(6.)

    Source: Hutchinson, "A stochastic estimator of the trace of the influence matrix", 1989;
    ``curvlinops.hutchinson_trace``.
    """
    dot = _inner_product(A, plan, mesh, None)
    total: Any = 0.0
    for v in _probes(A, like, plan, mesh, generator, num_matvecs, distribution):
        total = total + dot(v, A(v)) / num_matvecs
    return total


def hutchinson_diag(
    A: Operator,
    like: Any,
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    *,
    generator: torch.Generator,
    num_matvecs: int = 1,
    distribution: Distribution = "rademacher",
) -> Any:
    """Estimate the diagonal of ``A``, as the mean of ``v * A v`` over random vectors ``v``.

    The arguments and errors are those of ``hutchinson_trace``.

    Returns:
        The estimate, a tree like ``like``.

    Example:
        >>> import torch, funcshard as fs
        >>> generator = torch.Generator().manual_seed(0)
        >>> A = lambda v: torch.tensor([1.0, 2.0, 3.0]) * v
        >>> fs.linalg.hutchinson_diag(A, torch.ones(3), generator=generator)
        tensor([1., 2., 3.])

    Source: Bekas, Kokiopoulou and Saad, "An estimator for the diagonal of a matrix", 2007;
    ``curvlinops.hutchinson_diag``.
    """
    parts = (
        tree.map(lambda left, right: left * right / num_matvecs, v, A(v))
        for v in _probes(A, like, plan, mesh, generator, num_matvecs, distribution)
    )
    return functools.reduce(functools.partial(axpy, 1.0), parts)


def _extend(
    A: Operator, basis: Any, projected: torch.Tensor, first: int, dot: InnerProduct
) -> tuple[int, float, Any]:
    """Extend an orthonormal basis by products with its last vector, until it is full.

    Arguments:
        A: the operator.
        basis: a tree of stacked vectors, of which those up to ``first`` are there. If it has less
            room than ``projected``, it holds the last vectors, and new ones take the place of old.
        projected: the matrix of ``A`` in the basis; its rows from ``first`` on are filled in.
        first: the number of the vector to begin with.
        dot: the inner product.

    Returns:
        The number of vectors, the norm of the last product's part outside of the basis, and that
        part at norm 1. Where the part is zero, the basis may not be full.
    """
    size, num_slots = len(projected), len(tree.leaves(basis)[0])
    for vector_number in range(first, size):
        slot, num_filled = vector_number % num_slots, min(vector_number + 1, num_slots)
        # The number of the vector in each slot.
        slot_numbers = torch.tensor(
            [
                vector_number - (slot - other_slot) % num_slots
                for other_slot in range(num_filled)
            ],
            dtype=torch.long,
            device="cpu",
        )
        known_vectors = _at(basis, slice(num_filled))
        product = tree.map(torch.Tensor.detach, A(_at(basis, slot)))
        matrix_row = torch.zeros(num_filled, dtype=torch.float64, device="cpu")
        for _ in range(_MOST_PASSES):
            basis_parts = _dots(known_vectors, product, dot)
            product = axpy(-1.0, _combine(basis_parts, known_vectors), product)
            matrix_row += basis_parts.cpu()
            rest_norm = dot(product, product).sqrt().item()
            # Why this test: a part that is no larger than the rest was removed up to rounding.
            if basis_parts.norm() <= rest_norm:
                break
        else:
            rest_norm = 0.0
        if not (math.isfinite(rest_norm) and matrix_row.isfinite().all()):
            raise ValueError(
                "a product with A has values that are not finite: check the loss at these parameters"
            )
        projected[vector_number, slot_numbers] = projected[slot_numbers, vector_number] = (
            matrix_row
        )
        if rest_norm == 0:
            return vector_number + 1, 0.0, product
        product = _scaled(1 / rest_norm, product)
        if vector_number + 1 < size:
            _put(basis, (vector_number + 1) % num_slots, product)
    return size, rest_norm, product


def _dots(basis: Any, v: Any, dot: InnerProduct) -> torch.Tensor:
    """Return the inner products of stacked vectors with ``v``, in one call."""
    # Why of leaves: vmap takes no None, which frozen leaves are in a vector.
    stacks, build = tree.flatten(basis)
    return torch.vmap(lambda leaves: dot(build(leaves), v))(stacks)


def _inner_product(
    A: Operator, plan: Plan | None, mesh: Mesh | None, inner: InnerProduct | None
) -> InnerProduct:
    """Return the inner product of shards, of trees of whole tensors, or the user's."""
    _check_call(A, plan, mesh)
    if inner is not None:
        return inner
    if plan is not None and mesh is not None:
        return lambda a, b: vdot(a, b, plan, mesh)
    return lambda a, b: torch.stack(tree.leaves(tree.map(_whole_product, a, b))).sum()


def _check_call(A: Operator, plan: Plan | None, mesh: Mesh | None) -> None:
    if not callable(A):
        raise TypeError(
            f"A must be a function of a vector; found {outline(A)}: pass lambda v: A @ v for a matrix"
        )
    if (plan is None) != (mesh is None):
        raise ValueError(
            f"shards need both a plan and a mesh; found plan {plan!r} and mesh {mesh!r}: pass both, "
            "or neither for trees of whole tensors"
        )


def _whole_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    # Why at least float32: as in ``fs.vdot``.
    wide_dtype = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide_dtype) * y.to(wide_dtype)).sum()


def _probes(
    A: Operator,
    like: Any,
    plan: Plan | None,
    mesh: Mesh | None,
    generator: torch.Generator,
    num_matvecs: int,
    distribution: Distribution,
) -> Iterator[Any]:
    """Yield the random vectors of an estimate, after checking its arguments."""
    check_count("num_matvecs", num_matvecs, of="vectors")
    check_choice("distribution", distribution, ("rademacher", "normal"))
    _check_call(A, plan, mesh)
    for _ in range(num_matvecs):
        yield _probe(like, plan, mesh, generator, distribution)


def _probe(
    like: Any,
    plan: Plan | None,
    mesh: Mesh | None,
    generator: torch.Generator,
    distribution: Distribution,
) -> Any:
    """Return a random vector of independent elements with mean 0 and variance 1."""
    if plan is not None and mesh is not None:
        v = randn_like(like, plan, mesh, generator=generator)
    else:
        v = tree.map(
            lambda leaf: torch.randn(
                leaf.shape, dtype=leaf.dtype, device=leaf.device, generator=generator
            ),
            like,
        )
    if distribution == "rademacher":
        v = tree.map(torch.sign, v)
    return v


def _normalized(v: Any, dot: InnerProduct) -> Any:
    norm = dot(v, v).sqrt().item()
    if not (math.isfinite(norm) and norm > 0):
        raise ValueError(
            f"v0 must be a vector with a finite norm above 0; found the norm {norm}: pass one of "
            "fs.randn_like"
        )
    return _scaled(1 / norm, v)


def _scaled(scale: float, x: Any) -> Any:
    return tree.map(lambda leaf: scale * leaf, x)


def _room_for(v: Any, size: int) -> Any:
    """Return a tree of ``size`` stacked vectors, of which ``v`` is the first."""
    basis = tree.map(lambda leaf: leaf.new_zeros(size, *leaf.shape), v)
    _put(basis, 0, v)
    return basis


def _at(basis: Any, index: Any) -> Any:
    """Return one or several vectors of a basis."""
    return tree.map(lambda stack: stack[index], basis)


def _put(basis: Any, index: Any, vectors: Any) -> None:
    """Write vectors into their place in a basis."""
    for stack, values in zip(tree.leaves(basis), tree.leaves(vectors), strict=True):
        stack[index] = values


def _combine(scales: torch.Tensor, basis: Any) -> Any:
    """Return one or several sums of a basis' first vectors, each times a number."""
    count = scales.shape[-1]
    return tree.map(
        lambda stack: torch.tensordot(scales.to(stack), stack[:count], dims=1), basis
    )
