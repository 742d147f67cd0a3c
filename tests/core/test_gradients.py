"""value_and_grad: which gradients are averaged, which are zero, and which are None."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import by_hand, each_by_hand, forward_mode, of_module, recorded
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_simulated

PARAMS = {"a": torch.linspace(1, 2, 5), "b": {"c": torch.linspace(-1, 1, 7)}}
STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]


def units_of(mesh, params=PARAMS, **options):
    functions = {"": lambda leaves, x: (leaves["a"] * x).sum(), "b": lambda leaves, x: (leaves["c"] ** 2 * x).sum()}
    plan, runs, shards = each_by_hand(mesh, params, functions, how=lambda f: f, **options)
    return plan, shards, runs[""], fs.reshard(runs["b"])


@on_ranks(2)
def test_a_shard_that_the_loss_does_not_use_has_a_gradient_of_zeros(mesh):
    _, shards, root, _ = units_of(mesh)
    with torch.no_grad():
        grad = fs.value_and_grad(lambda s: root(s[""], 1.0))(shards)[1]["b"]["float32"]
    assert torch.equal(grad, torch.zeros(4))
    assert not any(leaf.requires_grad or leaf.grad is not None for leaf in (grad, *tree.leaves(shards)))


INNER = {
    "as it is": lambda f: f,
    "checkpointed": lambda f: functools.partial(checkpoint, f, use_reentrant=False),
    "rematerialised": fs.remat,
}


@pytest.mark.parametrize("reduce", ["each", "once"])
@pytest.mark.parametrize("how", INNER)
@on_ranks(2)
def test_an_inner_gradient_inside_the_loss_is_not_mistaken_for_the_reducers_own(mesh, how, reduce):
    plan, shards, _, inner = units_of(mesh)

    def f(s):  # computed again inside the reducer's own backward
        (by_c,) = torch.autograd.grad(inner(s["b"], 1.0), s["b"]["float32"], create_graph=True)
        return fs.psum((by_c / mesh.world_size).square().sum(), mesh)

    evaluate = fs.accumulate(lambda s, _: INNER[how](f)(s), 2, reduce=reduce)
    grad = fs.gather(evaluate(shards, torch.zeros(2))[1], plan, mesh)["b"]["c"]  # d/dc of |2c|^2
    torch.testing.assert_close(grad, 8 * PARAMS["b"]["c"])


def test_transforms_around_are_refused():
    with pytest.raises(RuntimeError, match=r"cannot run inside a torch.func transform; use fs.grad there"):
        torch.func.grad(lambda x: fs.value_and_grad(lambda s: s.sum())(x)[0])(torch.ones(3))


ONE, NO_WEIGHT = torch.tensor(1.0), "a weight must be one number, finite and not negative: zero for no data; found"
AUX, WEIGHTED = {"has_aux": True}, {"weighted": True}
RESULTS = {  # what a loss function returns, options, and the error
    "a vector": (torch.ones(2), {}, TypeError, r"must return a floating-point scalar.*shape \(2,\)"),
    "an integer": (torch.tensor(1), {}, TypeError, "must return a floating-point scalar.*torch.int64"),
    "a pair without has_aux": ((ONE, 2), {}, TypeError, r"for \(loss, aux\) pass has_aux=True"),
    "no pair": (ONE, AUX, TypeError, r"with weighted=False, has_aux=True loss_fn must return \(loss, aux\); found a tens"),
    "no weight": (ONE, WEIGHTED, TypeError, r"must return \(loss, weight\); found a tensor"),
    "no aux": ((1, 2), AUX | WEIGHTED, TypeError, r"must return \(loss, weight, aux\); found a tuple of 2"),
    **{
        f"the weight {weight}": ((ONE, weight), WEIGHTED, ValueError, NO_WEIGHT)
        for weight in (-1, math.nan, "1.5 kg", torch.ones(2))
    },
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_no_loss_and_no_weight_is_refused(name):
    result, options, kind, words = RESULTS[name]
    with pytest.raises(kind, match=words):
        fs.value_and_grad(lambda s: result, **options)({"": {"float32": torch.ones(2)}})


@pytest.mark.parametrize(
    ("x", "weights", "total"),
    [(1.0, (1, 2**24 + 1), 2**24 + 2), (math.nan, (0, 0), 0)],  # a sum that float32 cannot hold, and a world without data
    ids=["large weights", "no data"],
)
@on_ranks(2)
def test_weights_are_added_without_rounding_and_may_all_be_zero(mesh, x, weights, total):
    _, shards, root, inner = units_of(mesh)
    loss_fn = lambda s, weight: (root(s[""], x) + inner(s["b"], x), weight)  # noqa: E731
    (loss, weight), grads = fs.value_and_grad(loss_fn, weighted=True)(shards, weights[mesh.rank])
    assert weight.item() == total
    assert total or [loss.item(), *(grad.abs().sum().item() for grad in tree.leaves(grads))] == [0.0] * 3


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("nothing", [math.nan, math.inf, 7.0], ids=str)
@on_ranks(3)
def test_what_a_rank_of_weight_zero_computes_counts_nothing(mesh, nothing, strategy):
    plan, shards, root, inner = units_of(mesh, strategy=strategy)

    def loss_fn(s, x, weight):
        direct = mesh.world_size * (s["b"]["float32"] * x).sum()
        return root(s[""], x) + inner(s["b"], x) + 0 * direct, weight, {"x": x}

    x, weight = (nothing, 0) if mesh.rank == 1 else (2.0 + mesh.rank, 1)
    (loss, total, aux), grads = fs.value_and_grad(loss_fn, has_aux=True, weighted=True)(shards, x, weight=weight)
    assert (total, loss.requires_grad, list(grads)) == (2, False, ["", "b"])
    assert aux["x"] is x
    found = loss, fs.gather(grads, plan, mesh)
    grads = {"a": torch.full((5,), 3.0), "b": {"c": 6 * PARAMS["b"]["c"]}}
    torch.testing.assert_close(found, (3 * (PARAMS["a"].sum() + (PARAMS["b"]["c"] ** 2).sum()), grads))


@on_ranks(2)
def test_what_ranks_share_through_psum_reaches_a_rank_of_weight_zero(mesh):
    plan, shards, root, _ = units_of(mesh)
    loss_fn = lambda s: (fs.psum(root(s[""], mesh.rank + 1.0), mesh), 1 - mesh.rank)  # noqa: E731
    (_, weight), grads = fs.value_and_grad(loss_fn, weighted=True)(shards)
    assert weight == 1
    grad = fs.gather(grads, plan, mesh)["a"]  # rank 0's loss depends on rank 1's value too
    torch.testing.assert_close(grad, torch.full((5,), 3.0))


@crossed(how=["in place", "returned"], strategy=STRATEGIES, world=[1, 3, {"replicate": 2, "shard": 2}])
@on_ranks()
def test_masking_before_the_reduction_is_masking_each_ranks_gradient(mesh, world, strategy, how):
    plan, shards, root, inner = units_of(mesh, strategy=strategy)

    def freeze_element_3(unit, grads):  # on rank 0 only: a mask after the reduction could not do that
        if "a" in grads and mesh.rank == 0:
            if how == "returned":
                return {"a": grads["a"] * (torch.arange(5) != 3)}
            grads["a"][3] = 0
        return None

    loss_fn = lambda s, x: root(s[""], x) + inner(s["b"], x)  # noqa: E731
    _, grads = fs.value_and_grad(loss_fn, on_grads=freeze_element_3)(shards, mesh.rank + 1.0)
    ranks = range(1, mesh.world_size + 1)
    of_a = torch.full((5,), sum(ranks) / len(ranks))
    of_a[3] -= 1 / len(ranks)
    wanted = {"a": of_a, "b": {"c": 2 * PARAMS["b"]["c"] * sum(ranks) / len(ranks)}}
    torch.testing.assert_close(fs.gather(grads, plan, mesh), wanted)


W3 = {"w": torch.ones(3)}
REPLACEMENTS = [
    ({"x": torch.ones(1)}, r"paths of unit '\(root\)' to gradients; found \['x'\], the paths are \['w'\]"),
    ([1], r"on_grads must return None, or a dictionary.*found list"),
    ({"w": torch.ones(2)}, r"leaves' shapes; for 'w' of unit '\(root\)' found \(2,\) instead of \(3,\)"),
]


@pytest.mark.parametrize(("returned", "words"), REPLACEMENTS)
def test_replacements_that_do_not_fit_are_refused(returned, words):
    _, f, shards = by_hand(fs.Mesh(), W3, lambda leaves: leaves["w"].sum())
    with pytest.raises(ValueError, match=words):
        fs.value_and_grad(lambda s: f(s[""]), on_grads=lambda unit, grads: returned)(shards)


def train_in_parts(mesh, strategies, shape, weighted):
    """Train one model whose parts are sharded over different meshes of the same ranks."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"body": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), "head": nn.Linear(3, 2)})
    batches = torch.randn(2, mesh.world_size, 4, 3)
    meshes, units = {"body": mesh, "head": mesh.reshaped(shape)}, {"body": ["0", "2"], "head": []}
    parts = {
        name: of_module(on, net[name], units[name], strategy=strategy)
        for (name, on), strategy in zip(meshes.items(), strategies, strict=True)
    }
    shards = {name: part[2] for name, part in parts.items()}

    def loss_fn(shards, x):
        for name, (_, sharded, _) in parts.items():
            x = sharded(shards[name], {}, x)
        return (x.square().mean(), mesh.rank + 1) if weighted else x.square().mean()

    optimizer, weights = torch.optim.SGD(net.parameters(), lr=0.1), [rank + 1 if weighted else 1 for rank in range(4)]
    for batch in batches:
        (_, grads), events = recorded(fs.value_and_grad(loss_fn, weighted=weighted), shards, batch[mesh.rank])
        shards = tree.map(lambda shard, grad: shard - 0.1 * grad, shards, grads)
        optimizer.zero_grad()
        for weight, x in zip(weights, batch, strict=True):
            (net["head"](net["body"](x)).square().mean() * weight / sum(weights)).backward()
        optimizer.step()
        for name, on in meshes.items():
            found = fs.gather(shards[name], parts[name][0], on)
            torch.testing.assert_close(found, {key: p.detach() for key, p in net[name].named_parameters()})
    return {(event.unit, event.axis, event.ranks) for event in events if event.unit is not None}


@pytest.mark.slow
@crossed(
    shape=[{"replicate": 2, "shard": 2}, {"replicate": 4, "shard": 1}],
    strategies=[("full_shard", "full_shard"), ("shard_grad_op", "no_shard")],
    weighted={"plain mean": False, "weighted mean": True},
)
def test_parts_of_a_model_on_meshes_of_their_own_train_as_unsharded(shape, strategies, weighted):
    for found in run_simulated(train_in_parts, 4, strategies, shape, weighted):
        head = {("", axis, ranks) for axis, ranks in shape.items() if ranks > 1}
        assert found == {("0", "shard", 4), ("2", "shard", 4), *head}


@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
@on_ranks(2)
def test_a_loss_of_one_element_is_returned_as_a_scalar(mesh, weighted):
    plan, f, shards = by_hand(mesh, {"w": torch.ones(4)}, lambda leaves, x: (leaves["w"] * x).sum().view(1))
    loss_fn = lambda s, x: (f(s[""], x.mean()), 3) if weighted else f(s[""], x.mean())  # noqa: E731
    for evaluate in (fs.value_and_grad(loss_fn, weighted=weighted), fs.accumulate(loss_fn, 2, weighted=weighted)):
        value, grads = evaluate(shards, torch.arange(4.0))
        loss = value[0] if weighted else value
        assert (loss.shape, loss.item(), fs.gather(grads, plan, mesh)["w"].tolist()) == ((), 6.0, [1.5] * 4)


class Solution(torch.autograd.Function):
    """``f(x)``, whose gradient another backward computes: as of a neural ODE or of a fixed point."""

    @staticmethod
    def forward(ctx, f, x, *shards):
        ctx.f = f
        ctx.save_for_backward(x, *shards)
        with torch.no_grad():
            return f(x)

    @staticmethod
    def backward(ctx, grad):
        x, *shards = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.f(x), [x, *shards], grad, allow_unused=True)


def double(unit, *args):
    for grad in args[0].values() if isinstance(args[0], dict) else args[1:]:
        grad.mul_(2)


@pytest.mark.slow
@crossed(
    bucket_bytes={"units": 0, "a bucket": 1 << 20},
    hook=[None, "on_grads", "on_reduce_scattered"],
    strategy=STRATEGIES,
)
@on_ranks(2)
def test_a_hook_that_a_backward_inside_backward_would_miss_is_an_error(mesh, strategy, hook, bucket_bytes):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)).double()
    apply, params, _ = fs.make_functional(net)
    x = torch.randn(2, 4, 2, dtype=torch.float64)
    plan, sharded, shards = of_module(mesh, (apply, params, {}), ["0", "1"], strategy=strategy, bucket_bytes=bucket_bytes)

    def loss(shards):
        f = lambda x: sharded(shards, {}, sharded(shards, {}, x))  # noqa: E731
        return Solution.apply(f, x[mesh.rank], *(own["float64"] for own in shards.values())).square().mean()

    fs.value_and_grad(loss)(shards)  # units of a bucket share an autograd node from the second call on
    if hook is None:
        expected = torch.func.grad(lambda p: apply(p, {}, apply(p, {}, x)).square().mean())(params)
        torch.testing.assert_close(dict(fs.gather(fs.value_and_grad(loss)(shards)[1], plan, mesh)), expected)
    else:
        with pytest.raises(ValueError, match=f"{hook} sees the gradients .* found a backward inside it .* leave {hook} out"):
            fs.value_and_grad(loss, **{hook: double})(shards)


@forward_mode
@pytest.mark.parametrize("hook", ["on_grads", "on_reduce_scattered"])
def test_a_hook_that_a_transform_of_shards_would_miss_is_an_error(hook):
    _, f, shards = by_hand(fs.Mesh(), W3, lambda leaves: leaves["w"].square().sum())
    slope = lambda shards: torch.func.jvp(f, (shards,), (shards,))[1]  # noqa: E731
    assert fs.value_and_grad(slope)(shards[""])[1]["float32"].tolist() == [4.0, 4.0, 4.0]
    constant = lambda shards: f(shards) + slope({"float32": shards["float32"].detach()})  # noqa: E731
    fs.value_and_grad(constant, **{hook: double})(shards[""])  # its own gradient alone
    with pytest.raises(ValueError, match=f"{hook} needs .* a torch.func transform or remat under one: leave this out"):
        fs.value_and_grad(slope, **{hook: double})(shards[""])


@on_ranks(2)
def test_an_output_that_is_kept_with_its_graph_keeps_no_gradient_of_its_step(mesh):
    _, f, shards = by_hand(mesh, {"w": torch.ones(8)}, lambda leaves, x: leaves["w"] * x)
    kept = []

    def loss_fn(shards, x):
        kept.append(f(shards[""], x))
        return kept[-1].sum()

    grads = fs.value_and_grad(loss_fn)(shards, 2.0)[1]
    held = [StorageWeakRef(leaf.untyped_storage()) for unit in grads.values() for leaf in unit.values()]
    del grads
    assert kept[0].grad_fn is not None
    assert [ref.expired() for ref in held] == [True]


# --- the objective: the mean over the ranks of which mesh, of losses with a gradient --------------


# Name of a loss -> the loss of (this rank's w, mesh), and the same as a function of all ranks' w.
# The objective is the mean of the losses, so autograd over all ranks' leaves at once is the
# reference.
TERMS = {
    "psum": (lambda w, mesh: fs.psum(w**3, mesh).sum(), lambda every, r: sum(w**3 for w in every).sum()),
    "pmean": (lambda w, mesh: fs.pmean(w**3, mesh).sum(), lambda every, r: sum(w**3 for w in every).sum() / len(every)),
    "psum weighed by the rank": (
        lambda w, mesh: (mesh.rank + 1) * fs.psum(w**2, mesh).sum(),
        lambda every, r: (r + 1) * sum(w**2 for w in every).sum(),
    ),
    "psum and an own term": (
        lambda w, mesh: fs.psum(w**2, mesh).sum() + (mesh.rank + 1) * w.sin().sum(),
        lambda every, r: sum(w**2 for w in every).sum() + (r + 1) * every[r].sin().sum(),
    ),
}


@pytest.mark.slow
@crossed(given=["mesh given", "mesh found"], world=[1, 2, 3, {"replicate": 2, "shard": 2}], term=list(TERMS))
@on_ranks()
def test_a_loss_of_collectives_alone_has_the_gradient_of_the_mean_over_ranks(mesh, term, world, given):
    sharded, reference = TERMS[term]
    every = [torch.linspace(-1, 2, 4).double().add(rank).requires_grad_() for rank in range(mesh.world_size)]
    evaluate = fs.value_and_grad(lambda w: sharded(w, mesh), mesh=mesh if given == "mesh given" else None)
    losses = [reference(every, rank) for rank in range(mesh.world_size)]
    expected = torch.autograd.grad(sum(losses) / mesh.world_size, every)[mesh.rank]
    torch.testing.assert_close(evaluate(every[mesh.rank].detach()), (losses[mesh.rank].detach(), expected))


@pytest.mark.parametrize("micro_batches", [1, 2])
@on_ranks(2)
def test_unsharded_params_on_several_ranks_need_a_mesh(mesh, micro_batches):
    def grads(given=None, rank=mesh.rank):
        evaluate = fs.accumulate(lambda w, x: (w * x).sum(), micro_batches, mesh=given)
        return evaluate(torch.ones(2), torch.full((2, 1), rank + 1.0))[1].tolist()

    words = r"which of the 2 ranks: shard copies of one model.*for this rank alone mesh=fs.Mesh\(\)"
    with pytest.raises(ValueError, match=words):
        grads()
    own = 2 * (mesh.rank + 1.0) / micro_batches  # the mean over micro-batches of sums over their rows
    assert grads(fs.Mesh()) == [own] * 2
    assert grads(mesh) == [own / 2] * 2  # each rank's leaf is a variable of its own, on which only its own loss depends


@on_ranks({"replicate": 2, "shard": 2})
def test_a_psum_over_a_part_of_the_ranks_needs_the_mesh_of_the_mean(mesh):
    row = fs.Mesh({"shard": mesh.shard}, device=mesh.device)
    plan, shards, root, _ = units_of(mesh)
    loss_fn = lambda s: fs.psum(root(s[""], 1.0), row)  # noqa: E731
    with pytest.raises(ValueError, match=r"found meshes of \[2, 4\] ranks.*pass mesh= if only psum or pmean runs over"):
        fs.value_and_grad(loss_fn)(shards)
    with pytest.raises(ValueError, match=r"found units of other meshes than mesh=, of \[1, 4\] ranks"):
        fs.value_and_grad(lambda s: root(s[""], 1.0), mesh=fs.Mesh())(shards)
    # Two ranks of a row each hold the sum of both of their losses.
    grads = fs.gather(fs.value_and_grad(loss_fn, mesh=mesh)(shards)[1], plan, mesh)
    torch.testing.assert_close(grads["a"], torch.full((5,), 2.0))


@on_ranks(2)
def test_a_gradient_inside_a_loss_tells_the_world_of_the_loss_around_it(mesh):
    _, shards, root, _ = units_of(mesh)

    def outer(w):
        _, grads = fs.value_and_grad(lambda s: root(s[""], 1.0))(shards)
        return (w * grads[""]["float32"]).sum()

    found = fs.value_and_grad(outer)(torch.ones(3))[1].tolist()
    assert found == ([0.5, 0.5, 0.0] if mesh.rank else [0.5, 0.5, 0.5])


CONSTANTS = {
    "detached shards": lambda s, shards, root: root(tree.map(torch.Tensor.detach, s[""]), 1.0),
    "the shards of the scope around it": lambda s, shards, root: root(shards[""], 1.0),
    "another tensor's gradient only": lambda s, shards, root: root(shards[""], 1.0) * torch.ones((), requires_grad=True),
    "a number as a tensor": lambda s, shards, root: torch.tensor(root(s[""], 1.0).item()),
}


@pytest.mark.parametrize(("micro_batches", "reduce"), [(1, "each"), (2, "each"), (2, "once")])
@pytest.mark.parametrize("constant", CONSTANTS)
@on_ranks(2)
def test_a_loss_that_no_gradient_leaves_is_an_error_unless_it_adds_zeros(mesh, constant, micro_batches, reduce):
    _, shards, root, _ = units_of(mesh)
    loss_fn = lambda s, *_: CONSTANTS[constant](s, shards, root)  # noqa: E731
    how = {"mesh": mesh, "reduce": reduce}
    with pytest.raises(ValueError, match="depends on a trainable shard of its argument; found one without a gradient"):
        fs.accumulate(loss_fn, micro_batches, **how)(shards, torch.ones(2))
    reaching = lambda s, *rest: loss_fn(s, *rest) + 0.0 * s[""]["float32"].sum()  # noqa: E731
    loss, grads = fs.accumulate(reaching, micro_batches, **how)(shards, torch.ones(2))
    torch.testing.assert_close(loss, PARAMS["a"].sum())
    assert not any(leaf.any() for leaf in tree.leaves(grads))
