"""Mistakes with losses, gradients and their norms."""

import optree
import torch

import funcshard as fs
from tests.misuse import BUFFERS, DATA, DESYNC, EVERYWHERE, GRID, NET, PARAMS, Table, right, set_up, untold, whole_grads

CASES = Table()
MISTAKES = "docs/mistakes.md"
OPERATORS = "docs/operators.md"
SUM = "Return the mean over samples, not the sum."
PARTS = "Nobody checks whether the ranks' parts of the batch overlap, are missing or differ in size."
AGAIN = "Don't divide, clip or scale gradients a second time."


def grads_of(s, loss_fn, x=None, **options):
    return s.whole(fs.value_and_grad(loss_fn, **options)(s.shards, s.x if x is None else x)[1])


def squares(s, shards, x):
    return s.sharded(shards, BUFFERS, x).square()


def sum_of_own(s, shards, x):
    """Return the sum over this rank's rows, divided by the rows of all ranks."""
    return squares(s, shards, x).sum() / len(DATA)


# --- reductions and divisors ----------------------------------------------------------------------

CASES += [
    ("value_and_grad", "the loss is divided by the rows of all ranks, and the gradients by the ranks",
     untold(MISTAKES, AGAIN, whole_grads), lambda s: grads_of(s, lambda shards, x: sum_of_own(s, shards, x))),
    ("value_and_grad", "on_reduce_scattered communicates on one rank", DESYNC,
     lambda s: grads_of(s, s.loss, on_reduce_scattered=lambda *_: None if s.mesh.rank else fs.psum(DATA, s.mesh) and None)),
    ("accumulate", "reduce names some units only", right(whole_grads),
     lambda s: s.whole(fs.accumulate(s.loss, 2, reduce={"0": "once"})(s.shards, s.x)[1])),
]  # fmt: skip

# --- value_and_grad -------------------------------------------------------------------------------

CASES += [
    ("value_and_grad", "a weight as a tensor of an integer", right(whole_grads),
     lambda s: grads_of(s, lambda shards, x: (s.loss(shards, x), torch.tensor(len(x))), weighted=True)),
]  # fmt: skip


def penalty_on_a_model_axis(mesh: fs.Mesh, **options: object) -> list[float]:
    """Return the gradient of a squared norm, on a mesh with a model axis."""
    grid = mesh.reshaped({"shard": mesh.world_size // 2, "tensor": 2})
    params = {"w": torch.arange(4.0)}
    plan = fs.make_plan(params, grid)
    loss_fn = lambda shards: fs.psum(shards[""]["float32"].square().sum(), grid, **options)  # type: ignore[arg-type]  # noqa: E731
    _, grads = fs.value_and_grad(loss_fn, mesh=grid)(fs.shard(params, plan, grid))
    return fs.gather(grads, plan, grid)["w"].tolist()


CASES += [
    ("psum", "a penalty on shards, summed along the data axes alone",
     untold(MISTAKES, "Without `axis`, `psum` runs along the data axes.", [0.0, 2.0, 4.0, 6.0]), penalty_on_a_model_axis),
    ("psum", "a penalty on shards, summed along all axes", right([0.0, 2.0, 4.0, 6.0]),
     lambda mesh: penalty_on_a_model_axis(mesh, axis=("replicate", "shard", "tensor"))),
    ("value_and_grad", "a weighted loss that is a sum", untold(MISTAKES, SUM, whole_grads),
     lambda s: grads_of(s, lambda shards, x: (squares(s, shards, x).sum(), len(x)), weighted=True)),
    ("value_and_grad", "a loss that is a sum", untold(MISTAKES, SUM, whole_grads),
     lambda s: grads_of(s, lambda shards, x: squares(s, shards, x).sum())),
    ("value_and_grad", "weights on one rank only", DESYNC,
     lambda s: (fs.value_and_grad((lambda shards, x: (s.loss(shards, x), 1.0)) if s.mesh.rank else s.loss,
        weighted=s.mesh.rank > 0)(s.shards, s.x) and s.whole(s.shards))),
    ("value_and_grad", "the first rows on every rank", untold(MISTAKES, PARTS, whole_grads),
     lambda s: grads_of(s, s.loss, DATA.chunk(s.mesh.world_size)[0])),
    ("value_and_grad Mesh", "rows of the batch by the rank along one axis", untold(MISTAKES, PARTS, whole_grads),
     lambda s: grads_of(s, s.loss, DATA.chunk(s.mesh.world_size)[s.mesh.shard.rank]), (GRID,)),
    ("value_and_grad", "parts of unequal size without weights", untold(MISTAKES, PARTS, whole_grads),
     lambda s: grads_of(s, s.loss, [DATA[:5], *DATA[5:].tensor_split(s.mesh.world_size - 1)][s.mesh.rank])),
    ("value_and_grad", "parts of unequal size with weights", right(whole_grads),
     lambda s: grads_of(s, lambda shards, x: (s.loss(shards, x), len(x)), weighted=True,
        x=[DATA[:5], *DATA[5:].tensor_split(s.mesh.world_size - 1)][s.mesh.rank])),
    ("value_and_grad", "one unit captured from outside",
     untold(MISTAKES, "A shard that the loss captures or detaches is a constant", whole_grads),
     lambda s: grads_of(s, lambda shards, x: s.loss({**shards, "0": s.shards["0"]}, x))),
    ("value_and_grad", "the gradient divided by the ranks", untold(MISTAKES, AGAIN, whole_grads),
     lambda s: s.whole(optree.tree_map(lambda grad: grad / s.mesh.world_size, s.grads()))),
    ("value_and_grad", "on_grads communicates on one rank", DESYNC,
     lambda s: grads_of(s, s.loss, on_grads=lambda unit, grads:
        {} if s.mesh.rank else dict.fromkeys((), fs.psum(DATA, s.mesh)))),
]  # fmt: skip


@CASES("value_and_grad shard", "shards cut in inference mode", RuntimeError("inference tensor"))
def _(mesh):
    with torch.inference_mode():
        s = set_up(mesh)
    return s.whole(s.grads())


def after_backward(s):
    shards = optree.tree_map(lambda shard: shard.clone().requires_grad_(), s.shards)
    s.loss(shards, s.x).backward()
    return s.whole(optree.tree_map(lambda shard: shard.grad, shards))


CASES += [
    ("value_and_grad unshard", "backward on shards that require gradients",
     untold("docs/gradients.md", "so only `fs.simulate(..., check_vma=True)` [warns of it]", whole_grads),
     after_backward),
]  # fmt: skip


# --- accumulate -----------------------------------------------------------------------------------


def accumulated(s, loss_fn, *args, micro_batches=2, **options):
    return s.whole(fs.accumulate(loss_fn, micro_batches, **options)(s.shards, *args)[1])


CASES += [
    ("accumulate", "a loss that is a sum", untold(MISTAKES, SUM, whole_grads),
     lambda s: accumulated(s, lambda shards, x: squares(s, shards, x).sum() / len(s.x), s.x)),
]  # fmt: skip

# --- per_sample_grad ------------------------------------------------------------------------------


def of_sample(s, shards, x):
    return s.sharded(shards, BUFFERS, x).square().sum()


def per_sample(s, loss_fn=of_sample, x=None, mesh=None, **options):
    evaluate = fs.per_sample_grad(lambda shards, x: loss_fn(s, shards, x), s.plan, mesh or s.mesh, **options)
    return s.whole(evaluate(s.shards, s.x if x is None else x)[1])


CASES += [
    ("per_sample_grad", "a loss of the whole batch", right(whole_grads),
     lambda s: per_sample(s, lambda s, shards, x: s.loss(shards, x))),
    ("per_sample_grad", "no batch", TypeError("the batch as its last positional argument"),
     lambda s: fs.per_sample_grad(s.loss, s.plan, s.mesh)(s.shards, batch=s.x)),
    ("per_sample_grad", "noise without a bound", ValueError("one sample's part is unbounded; pass max_norm"),
     lambda s: per_sample(s, noise_multiplier=1.0)),
    ("per_sample_grad", "noise without a generator", ValueError("noise needs a generator"),
     lambda s: per_sample(s, max_norm=1.0, noise_multiplier=1.0)),
    ("per_sample_grad", "a generator of each rank's own", ValueError("the state of the generator of randn_like"),
     lambda s: per_sample(s, max_norm=1.0, noise_multiplier=1.0, generator=torch.Generator().manual_seed(s.mesh.rank)),
     EVERYWHERE),
    ("per_sample_grad", "a batch with a number in it", ValueError("pass what all samples share before the batch"),
     lambda s: per_sample(s, x={"x": s.x, "scale": 1.0})),
    ("per_sample_grad", "the batch size of one rank",
     untold(MISTAKES, "`per_sample_grad(batch_size=)` is the expected size of the world's batch", whole_grads),
     lambda s: per_sample(s, batch_size=len(s.x))),
]  # fmt: skip

# --- norms and clipping ---------------------------------------------------------------------------


def whole_norm():
    return torch.nn.utils.get_total_norm(whole_grads().values())


CASES += [
    ("global_norm", "full buffers in the places of shards", ValueError("or not at all"),
     lambda s: fs.global_norm({name: {"float32": torch.ones(20)} for name in s.shards}, s.plan, s.mesh)),
    ("global_norm", "on one rank only", DESYNC,
     lambda s: (grads := s.grads()) and s.mesh.rank == 0 and fs.global_norm(grads, s.plan, s.mesh)),
    ("global_norm", "torch's norm of this rank's gradients",
     untold(MISTAKES, "Torch's norms see this rank's shards only.", whole_norm),
     lambda s: torch.nn.utils.get_total_norm(optree.tree_leaves(s.grads()))),
    ("clip_by_global_norm", "the result is not used",
     untold(MISTAKES, "`clip_by_global_norm` returns new gradients, and can't know whether you still use the old ones.",
        torch.tensor(0.1)),
     lambda s: ([grads := s.grads(), fs.clip_by_global_norm(grads, s.plan, s.mesh, 0.1)] and
        fs.global_norm(grads, s.plan, s.mesh))),
]  # fmt: skip


# --- operators ------------------------------------------------------------------------------------


def slope(s, f):
    """Return the derivative of ``f`` at the shards, along the shards."""
    return fs.jvp(f, (s.shards,), (s.shards,))[1]


def whole_slope():
    return sum((grad * PARAMS[path]).sum() for path, grad in whole_grads().items()).detach()


def whole_product():
    params = {path: p.detach() for path, p in PARAMS.items()}
    loss = lambda p: torch.func.functional_call(NET, p, DATA).square().mean()  # noqa: E731
    return torch.func.jvp(torch.func.grad(loss), (params,), (params,))[1]


CASES += [
    ("jvp", "the slope of this rank's loss for that of the mean",
     untold(OPERATORS, "If you want an output of the whole batch, put `fs.pmean` into the function.", whole_slope),
     lambda s: slope(s, lambda shards: s.loss(shards, s.x))),
    ("jvp pmean", "the slope of the mean loss", right(whole_slope),
     lambda s: slope(s, lambda shards: fs.pmean(s.loss(shards, s.x), s.mesh))),
    ("hvp", "on one rank only", DESYNC,
     lambda s: s.mesh.rank or fs.hvp(lambda shards: s.loss(shards, s.x), (s.shards,), (s.shards,))),
    ("vjp grad", "the pullback of a gradient",
     untold(OPERATORS, "`fs.vjp` is for functions whose outputs are this rank's.", whole_product),
     lambda s: s.whole(fs.vjp(fs.grad(lambda shards: s.loss(shards, s.x)), s.shards)[1](s.shards)[0])),
    ("linearize grad", "the Hessian as a linear function", right(whole_product),
     lambda s: s.whole(fs.linearize(fs.grad(lambda shards: s.loss(shards, s.x)), s.shards)[1](s.shards))),
    ("vdot", "whole parameters", ValueError("these are whole parameters"),
     lambda s: fs.vdot(PARAMS, PARAMS, s.plan, s.mesh)),
    ("axpy", "trees of two plans", ValueError("two trees with the same keys"),
     lambda s: fs.axpy(1.0, s.shards, fs.shard(PARAMS, fs.make_plan(PARAMS, s.mesh), s.mesh))),
    ("randn_like", "a generator of each rank's own", ValueError("the state of the generator of randn_like"),
     lambda s: fs.randn_like(s.shards, s.plan, s.mesh, generator=torch.Generator().manual_seed(s.mesh.rank)), EVERYWHERE),
    ("agree", "a loop whose length is this rank's", DESYNC,
     lambda s: [s.loss(s.shards, s.x) for _ in range(3 + s.mesh.rank)]),
]  # fmt: skip


# --- broadcast_to_shards --------------------------------------------------------------------------

CASES += [
    ("broadcast_to_shards", "the plan of another mesh", ValueError("mesh"),
     lambda s: fs.broadcast_to_shards(torch.tensor(0.1), fs.make_plan(PARAMS, 8), s.mesh)),
]  # fmt: skip

# --- linear algebra -------------------------------------------------------------------------------

CASES += [
    ("linalg.cg", "a plan without a mesh", ValueError("shards need both a plan and a mesh"),
     lambda s: fs.linalg.cg(lambda v: v, s.shards, s.plan)),
    ("linalg.eigsh", "a first vector of zeros", ValueError("v0 must be a vector…found the norm 0.0"),
     lambda s: fs.linalg.eigsh(lambda v: v, fs.axpy(-1.0, s.shards, s.shards), s.plan, s.mesh)),
    ("linalg.eigsh", "an operator that gives NaN", ValueError("a product with A has values that are not finite"),
     lambda s: fs.linalg.eigsh(lambda v: fs.axpy(float("nan"), v, v), s.shards, s.plan, s.mesh)),
]  # fmt: skip
