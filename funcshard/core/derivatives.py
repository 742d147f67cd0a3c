"""Derivatives of functions of shards by ``torch.func``, with the mean over ranks taken.

The function of the whole batch is the mean of the ranks' functions, as in ``value_and_grad``. What
comes back for shards, such as a gradient, a product with a Hessian or a pullback, is of that mean.
What comes back as an output, such as a loss or a tangent of outputs, is this rank's own.

``_Leaves`` turns a function of trees into one of tensors, which ``torch.func`` takes, and
``_means`` divides. Every operator is a few lines on top of these two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_count, check_flag, outline
from funcshard._utils.tensors import is_continuous
from funcshard._utils.torch_private import untraced
from funcshard.comm import Mesh
from funcshard.core.grad_reducer import ShardUse, note_collective
from funcshard.core.gradients import (
    CONSTANT,
    GradientOptions,
    check_callable,
    check_loss,
    local_divisor,
    named_results,
    world_of,
)
from funcshard.core.replaced_kernels import any_order

Tensors = Sequence[torch.Tensor]

# Why Any: torch's annotations do not know how many values has_aux adds.
_jvp: Any = torch.func.jvp
_vjp: Any = torch.func.vjp


def grad(
    loss_fn: Callable[..., Any], has_aux: bool = False, *, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """Turn a loss function of shards into one that returns the gradient, averaged over ranks.

    The gradient is that of ``value_and_grad``, which is faster, frees units between forward and
    backward, and takes hooks and weights. ``grad`` can be differentiated any number of times, and
    runs inside the transforms of ``torch.func`` and of this library.

    Arguments:
        loss_fn: ``loss_fn(shards, *rest, **kwargs)`` -> the loss of this rank, a floating-point
            scalar; with ``has_aux``, ``(loss, aux)``.
        has_aux: whether ``loss_fn`` also returns an ``aux``, a tree.
        mesh: the ranks that the mean runs over; by default, those of the collectives inside
            ``loss_fn``.

    Returns:
        ``f(shards, *rest, **kwargs)`` -> ``grads``, or ``(grads, aux)`` with ``has_aux``. ``grads``
        is a tree like ``shards``, with ``None`` for frozen shards and shards of integers. ``aux``
        is this rank's.

    Raises:
        TypeError: ``loss_fn`` did not return the values described above.
        ValueError: the loss depends on no shard of the argument, or nothing says over which ranks
            the mean runs; see ``value_and_grad``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: (leaves["w"] ** 3).sum() * x, plan.units[""], mesh)
        ...     slope = lambda s: fs.norm(fs.grad(lambda s: f(s[""], mesh.rank))(s), plan, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     return fs.gather(fs.grad(slope)(shards), plan, mesh)["w"].tolist()
        >>> [[round(x, 3) for x in grad] for grad in fs.simulate(main, world_size=2)]
        [[0.728, 5.821], [0.728, 5.821]]

    Source: ``jax.grad``; ``torch.func.grad``, which adds up the ranks' gradients.
    """
    check_callable("grad", loss_fn)
    GradientOptions(mesh=mesh, has_aux=has_aux).compare("grad")

    @untraced
    def run(shards: Any, /, *rest: Any, **kwargs: Any) -> Any:
        def loss_and_aux(shards: Any) -> Any:
            result = named_results(loss_fn(shards, *rest, **kwargs), has_aux=has_aux)
            loss = check_loss(result["loss"])
            # Note: in a transform, a loss that depends on no leaf requires no gradient.
            if not loss.requires_grad:
                raise ValueError(CONSTANT)
            return loss.reshape(()), result.get("aux")

        of_leaves = _Leaves(loss_and_aux, (shards,), has_aux=True, use=ShardUse(mesh))
        sums, aux_tensors = torch.func.grad(of_leaves.scalar, has_aux=True)(
            of_leaves.leaves
        )
        (grads,) = of_leaves.arguments(_means("grad", of_leaves, sums))
        if has_aux:
            return grads, of_leaves.build_aux(aux_tensors)
        return grads

    return run


@untraced
def jvp(
    f: Callable[..., Any], primals: Any, tangents: Any, *, has_aux: bool = False
) -> Any:
    """Return a function's outputs, and their derivative along tangents of its arguments.

    Both are this rank's own. For the slope of the mean loss, put ``pmean`` into the function:
    ``fs.jvp(lambda shards: fs.pmean(loss_fn(shards), mesh), (shards,), (v,))``.

    Arguments:
        f: ``f(*primals)`` -> a tree of tensors; with ``has_aux``, ``(outputs, aux)``.
        primals: a tuple of trees, such as shards or this rank's inputs.
        tangents: a tuple of trees like ``primals``, with keys in any order. ``None`` counts as
            zeros, and so do tangents of frozen shards.
        has_aux: whether ``f`` also returns an ``aux``, a tree.

    Returns:
        ``(outputs, tangents of the outputs)``, and ``aux`` with ``has_aux``.

    Raises:
        ValueError: the tangents aren't trees like the primals.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves: (leaves["w"] ** 2), plan.units[""], mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     outputs, tangents = fs.jvp(lambda s: f(s[""]), (shards,), (shards,))
        ...     return tangents.tolist()
        >>> fs.simulate(main, world_size=2)
        [[2.0, 8.0], [2.0, 8.0]]

    Source: ``jax.jvp``, ``torch.func.jvp``.
    """
    of_leaves = _Leaves(f, primals, has_aux=has_aux)
    vectors = of_leaves.aligned(tangents)
    outs, out_tangents, aux_tensors = _jvp(
        of_leaves, tuple(of_leaves.leaves), tuple(vectors), has_aux=True
    )
    results = of_leaves.build_outputs(outs), of_leaves.build_outputs(out_tangents)
    if has_aux:
        return *results, of_leaves.build_aux(aux_tensors)
    return results


@untraced
def vjp(
    f: Callable[..., Any], *primals: Any, has_aux: bool = False, mesh: Mesh | None = None
) -> Any:
    """Return a function's outputs, and a function that pulls cotangents of them back to shards.

    The pullback is the mean over ranks of each rank's cotangents times its Jacobian. So if a rank's
    cotangents are the gradient of its loss by its outputs, the result is the gradient of the mean
    loss. A pullback to a tree that each rank has for itself, such as inputs, is ``torch.func.vjp``.

    Arguments:
        f: ``f(*primals)`` -> a tree of floating-point tensors, this rank's outputs; with
            ``has_aux``, ``(outputs, aux)``. A function that returns shards, such as a gradient, has
            no mean over ranks: call ``jvp``, or ``torch.func.vjp``.
        primals: trees of shards.
        has_aux: whether ``f`` also returns an ``aux``, a tree.
        mesh: the ranks that the mean runs over; by default, those of the collectives inside ``f``.

    Returns:
        ``(outputs, pullback)``, and ``aux`` with ``has_aux``. ``pullback(cotangents)``, where the
        cotangents are a tree like the outputs, returns a tuple of trees like ``primals``, with
        ``None`` for frozen shards and shards of integers. Every rank has to call it.

    Raises:
        ValueError: nothing says over which ranks the mean runs; see ``value_and_grad``. Cotangents
            aren't a tree like the outputs.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves: leaves["w"] ** 2, plan.units[""], mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     outputs, pullback = fs.vjp(lambda s: f(s[""]), shards)
        ...     (grads,) = pullback(torch.tensor([1.0, 3.0 * mesh.rank]))
        ...     return fs.gather(grads, plan, mesh)["w"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[2.0, 6.0], [2.0, 6.0]]

    Source: ``jax.vjp``; ``torch.func.vjp``, which adds up the ranks' products.
    """
    of_leaves = _Leaves(f, primals, has_aux=has_aux, use=_use("vjp", mesh, has_aux))
    outs, pull, aux_tensors = _vjp(of_leaves, *of_leaves.leaves, has_aux=True)

    @untraced
    def pullback(cotangents: Any) -> Any:
        values = _aligned(
            "cotangents", cotangents, of_leaves.build_outputs(outs), "outputs"
        )
        pairs = zip(values, outs, strict=True)
        sums = pull(tuple([_or_zeros(value, out, "cotangent") for value, out in pairs]))
        return of_leaves.arguments(_means("vjp", of_leaves, sums))

    results = of_leaves.build_outputs(outs), pullback
    if has_aux:
        return *results, of_leaves.build_aux(aux_tensors)
    return results


@untraced
def linearize(f: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """Return a function's outputs, and the function of tangents that ``jvp`` computes there.

    The returned function computes no forward again, and each call gathers every unit once. For many
    tangents at one point it's faster than ``jvp``. ``fs.linearize(fs.grad(loss_fn), shards)``
    returns the gradient and the Hessian as a linear function. It takes second derivatives in
    reverse mode, and all units stay gathered as long as it lives.

    Arguments:
        f: ``f(*primals)`` -> a tree of floating-point tensors.
        primals: trees, such as shards or this rank's inputs.

    Returns:
        ``(outputs, f_jvp)``. ``f_jvp(*tangents)`` takes trees like ``primals`` and returns a tree
        like the outputs. Every rank has to call it.

    Raises:
        ValueError: see ``jvp``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves: (leaves["w"] ** 3).sum(), plan.units[""], mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     _, multiply = fs.linearize(fs.grad(lambda s: f(s[""])), shards)
        ...     return fs.gather(multiply(shards), plan, mesh)["w"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[6.0, 24.0], [6.0, 24.0]]

    Source: ``jax.linearize``, ``torch.func.linearize``.
    """
    of_leaves = _Leaves(f, primals)
    outs, pull, _ = _vjp(of_leaves, *of_leaves.leaves, has_aux=True)
    # The pullback is linear, so its own pullback at any point is the function of tangents.
    zeros = [torch.zeros_like(out) for out in outs]
    push = torch.func.vjp(lambda *cotangents: pull(cotangents), *zeros)[1]

    @untraced
    def f_jvp(*tangents: Any) -> Any:
        return of_leaves.build_outputs(push(tuple(of_leaves.aligned(tangents))))

    return of_leaves.build_outputs(outs), f_jvp


def hvp(
    loss_fn: Callable[..., Any], primals: Any, tangents: Any, *, mesh: Mesh | None = None
) -> Any:
    """Return the product of a Hessian and a vector: of the mean loss, by the first primal.

    It is the derivative of ``grad`` along the tangents, forward over reverse. ``fs.jvp(
    fs.grad(loss_fn), primals, tangents)`` returns the gradient too, at the same cost.

    Arguments:
        loss_fn: ``loss_fn(*primals)`` -> the loss of this rank.
        primals: a tuple of trees, shards first.
        tangents: a tuple of trees like ``primals``; ``None`` counts as zeros.
        mesh: see ``grad``.

    Returns:
        A tree like the first primal, with ``None`` for frozen shards and shards of integers.

    Raises:
        TypeError, ValueError: see ``grad`` and ``jvp``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves: (leaves["w"] ** 3).sum(), plan.units[""], mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     product = fs.hvp(lambda s: f(s[""]), (shards,), (shards,))
        ...     return fs.gather(product, plan, mesh)["w"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[6.0, 24.0], [6.0, 24.0]]

    Source: Pearlmutter, "Fast exact multiplication by the Hessian", 1994; JAX's autodiff cookbook.
    """
    return jvp(grad(loss_fn, mesh=mesh), primals, tangents)[1]


@untraced
def gnvp(
    f: Callable[..., Any],
    loss_fn: Callable[[Any], Any],
    primals: Any,
    tangents: Any,
    *,
    mesh: Mesh | None = None,
) -> Any:
    """Return the product of a Gauss-Newton matrix and a vector: the mean of the ranks' ``JᵀHJ v``.

    ``J`` is the Jacobian of a rank's outputs by the shards, and ``H`` the Hessian of its loss by
    the outputs. If the loss is a negative log-likelihood of an exponential family, such as
    cross-entropy of logits or squared errors, it is the product with the Fisher matrix.

    The other arguments, the result and the errors are those of ``hvp``.

    Arguments:
        f: ``f(*primals)`` -> this rank's outputs, a tree of floating-point tensors. It runs once.
        loss_fn: ``loss_fn(outputs)`` -> the loss of this rank.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves: leaves["w"] ** 2, plan.units[""], mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     half_square = lambda y: y.square().sum() / 2
        ...     product = fs.gnvp(lambda s: f(s[""]), half_square, (shards,), (shards,))
        ...     return fs.gather(product, plan, mesh)["w"].tolist()
        >>> fs.simulate(main, world_size=2)
        [[4.0, 32.0], [4.0, 32.0]]

    Source: Schraudolph, "Fast curvature matrix-vector products", 2002.
    """
    check_callable("gnvp", loss_fn)
    of_leaves = _Leaves(f, primals, use=_use("gnvp", mesh))
    vectors = tuple(of_leaves.aligned(tangents))

    def pushed(*leaves: torch.Tensor) -> Any:
        outs, out_tangents, _ = _jvp(of_leaves, leaves, vectors, has_aux=True)
        return outs, out_tangents

    # Why inside of vjp: both come of one forward, so the outputs may depend on random numbers.
    outs, pull, out_tangents = _vjp(pushed, *of_leaves.leaves, has_aux=True)

    def loss_of(outputs: Any) -> Any:
        return check_loss(loss_fn(outputs)).reshape(()), None

    outputs = of_leaves.build_outputs(outs)
    # Why the same use: the mean runs over the ranks of the loss's collectives too.
    of_outputs = _Leaves(loss_of, (outputs,), has_aux=True, use=of_leaves.use)
    gradient = torch.func.grad(of_outputs.scalar, has_aux=True)
    curved = torch.func.jvp(lambda *outs: gradient(outs)[0], outs, out_tangents)[1]
    return of_leaves.arguments(_means("gnvp", of_leaves, pull(curved)))[0]


@untraced
def jacobian(f: Callable[[Any], Any], inputs: Any, *, chunk_size: int | None = None) -> Any:
    """Return the Jacobian of this rank's outputs by its inputs, in reverse mode.

    Each rank has its own inputs, so nothing is averaged. The function gathers each unit once,
    however many rows the Jacobian has. Under ``torch.vmap`` you get a Jacobian for each sample, and
    a loss may contain one.

    Arguments:
        f: ``f(inputs)`` -> a tree of floating-point tensors. It gets its shards from around it, as
            in ``lambda x: sharded(shards, buffers, x)``.
        inputs: a tensor, or a tree of several.
        chunk_size: the number of rows that are computed at one time; by default all.

    Returns:
        A tree like the outputs, with a tree like ``inputs`` in place of each output. Its tensors
        have the shape ``[*shape of the output, *shape of the input]``. Integers have ``None``.

    Raises:
        TypeError: the outputs aren't tensors, or nothing in ``inputs`` is differentiable.
        ValueError: ``inputs`` has shards, whose Jacobian no rank could hold: call ``jvp`` or
            ``vjp``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: leaves["w"] * x.square(), plan.units[""], mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     return fs.jacobian(lambda x: f(shards[""], x), torch.ones(2) + mesh.rank).tolist()
        >>> fs.simulate(main, world_size=2)
        [[[2.0, 0.0], [0.0, 4.0]], [[4.0, 0.0], [0.0, 8.0]]]

    Source: ``jax.jacobian``; ``torch.func.jacrev``, which has no derivatives of some kernels.
    """
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, of="rows", none="for all")
    of_leaves = _Leaves(f, (inputs,))
    by_all = tuple(range(len(of_leaves.leaves)))
    rows = torch.func.jacrev(of_leaves, by_all, has_aux=True, chunk_size=chunk_size)(
        *of_leaves.leaves
    )[0]
    # Why afterwards: only a run shows which of the inputs a unit gathers.
    for leaf in of_leaves.leaves:
        if comm := of_leaves.use.comm(leaf):
            raise ValueError(
                f"jacobian is by this rank's inputs; found {comm.label} among them: call fs.jvp or "
                "fs.vjp for products with the Jacobian by shards"
            )
    return of_leaves.build_outputs([of_leaves.arguments(row)[0] for row in rows])


class _Leaves:
    """A function of trees as one of tensors: ``(*leaves) -> (outs, tensors of aux)``.

    The tensors are those that can be differentiated by; all others are constants.

    Arguments:
        f: the function of trees.
        primals: its arguments, a tuple.
        has_aux: whether it returns ``(outputs, aux)``.
        use: notes what the function does with its shards.

    Attributes:
        leaves: the tensors among the arguments.
        use: see the argument.
    """

    def __init__(
        self, f: Callable[..., Any], primals: Any, *, has_aux: bool = False, use: Any = None
    ) -> None:
        check_flag("has_aux", has_aux)
        check_callable("a derivative", f, "f(*primals) of shards")
        if not isinstance(primals, tuple):
            raise TypeError(
                f"primals must be a tuple of arguments; found {outline(primals)}: pass (shards,) "
                "for one tree"
            )
        self.f, self.primals, self.has_aux = f, primals, has_aux
        self.use: ShardUse = use or ShardUse()
        self.values = tree.leaves(primals)
        self.leaves, self._build = _parted(primals, _is_continuous)
        if not self.leaves:
            raise TypeError(
                "a derivative is by floating-point or complex tensors; found none in "
                f"{outline(primals)}: pass shards, or inputs"
            )

    def __call__(self, *leaves: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Tensors]:
        arguments = self._build(leaves)
        # Why any_order: ``f`` may call attention or a loss itself, outside of a sharded function.
        with self.use.noting(), any_order():
            result = self.f(*arguments)
        if self.has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"with has_aux=True the function must return (outputs, aux); found {outline(result)}"
            )
        outputs, aux = result, None
        if self.has_aux:
            outputs, aux = result
        # Note: transforms return tensors alone, so the form of the results is left here.
        outs, self.build_outputs = tree.flatten(outputs)
        if not outs or not all(isinstance(out, torch.Tensor) for out in outs):
            raise TypeError(
                "a function that is differentiated must return a tensor, or a tree of them; found "
                f"{outline(outputs)}: return other values as aux, with has_aux=True"
            )
        aux_tensors, self.build_aux = _parted(aux, lambda x: isinstance(x, torch.Tensor))
        return tuple(outs), aux_tensors

    def scalar(self, leaves: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Return the only output, and the tensors of aux."""
        (out,), aux_tensors = self(*leaves)
        return out, aux_tensors

    def arguments(self, leaves: Sequence[Any]) -> Any:
        """Return trees like the arguments, with ``None`` for what isn't a leaf."""
        return self._build(leaves, [None] * len(self.values))

    def aligned(self, trees: Any) -> list[torch.Tensor]:
        """Return tangents in the order of the leaves."""
        tangents = _aligned("tangents", trees, self.primals, "primals")
        pairs = zip(self.values, tangents, strict=True)
        return [_or_zeros(t, x, "tangent") for x, t in pairs if _is_continuous(x)]


def _use(caller: str, mesh: Mesh | None, has_aux: bool = False) -> ShardUse:
    """Return what notes over which ranks a function communicates, after checking options."""
    GradientOptions(mesh=mesh, has_aux=has_aux).compare(caller)
    return ShardUse(mesh)


def _aligned(name: str, trees: Any, like: Any, like_name: str) -> list[Any]:
    try:
        return tree.leaves_up_to(like, trees)
    except ValueError as error:
        raise ValueError(
            f"{name} must be trees like the {like_name}, in which None counts as zeros; found "
            f"{outline(trees)}: {error}"
        ) from error


def _or_zeros(value: Any, like: torch.Tensor, name: str) -> torch.Tensor:
    if value is None:
        return torch.zeros_like(like)
    if not isinstance(value, torch.Tensor) or value.shape != like.shape:
        raise ValueError(
            f"a {name} must be a tensor of the shape {tuple(like.shape)}; found {outline(value)}"
        )
    return value


def _means(caller: str, of_leaves: _Leaves, sums: Tensors) -> list[torch.Tensor | None]:
    """Return derivatives by shards of the mean over ranks, given sums over ranks."""
    use = of_leaves.use
    mesh = world_of(use, caller)
    # A value_and_grad around this one differentiates a loss that is computed from this mean.
    note_collective(mesh)
    means: list[torch.Tensor | None] = []
    for leaf, leaf_sum in zip(of_leaves.leaves, sums, strict=True):
        comm = use.comm(leaf)
        if comm is not None and not comm.plan.trainable:
            means.append(None)
            continue
        divisor: Any = mesh.world_size
        if comm is not None and comm.plan.local:
            divisor = local_divisor(comm.mesh, comm.plan.local, None, leaf.device)
        if divisor != 1:
            leaf_sum = leaf_sum / divisor
        means.append(leaf_sum)
    return means


def _parted(
    whole: Any, chosen: Callable[[Any], bool]
) -> tuple[list[Any], Callable[..., Any]]:
    """Return the chosen leaves of a tree, and a function from such leaves to the tree.

    The function takes the other leaves too; by default they are those of the tree.
    """
    values, unflatten = tree.flatten(whole)
    places = [i for i, value in enumerate(values) if chosen(value)]

    def build(parts: Sequence[Any], others: Sequence[Any] = values) -> Any:
        return unflatten(tree.replaced(others, places, parts))

    return [values[i] for i in places], build


def _is_continuous(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and is_continuous(x)
