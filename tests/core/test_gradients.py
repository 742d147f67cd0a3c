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
from tests.pairwise import crossed
from tests.ranks import run_ranks, run_simulated

PARAMS = {"a": torch.linspace(1, 2, 5), "b": {"c": torch.linspace(-1, 1, 7)}}


def units_of(mesh, params=PARAMS, **options):
    plan = fs.make_plan(params, mesh, units=["b"], **options)
    root = fs.unshard(lambda leaves, x: (leaves["a"] * x).sum(), plan.units[""], mesh)
    inner = fs.reshard(fs.unshard(lambda leaves, x: (leaves["c"] ** 2 * x).sum(), plan.units["b"], mesh))
    return plan, fs.shard(params, plan, mesh), root, inner


def test_aux_and_the_rest_of_the_arguments_pass_through():
    def main(mesh):
        _, shards, root, _ = units_of(mesh)
        evaluate = fs.value_and_grad(lambda s, x, *, y: (root(s[""], x), {"y": y}), has_aux=True)
        (loss, aux), grads = evaluate(shards, 2.0, y="kept")
        return loss.requires_grad, aux, list(grads)

    assert fs.simulate(main, 2) == [(False, {"y": "kept"}, ["", "b"])] * 2


def test_a_shard_that_the_loss_does_not_use_has_a_gradient_of_zeros():
    def main(mesh):
        _, shards, root, _ = units_of(mesh)
        return fs.value_and_grad(lambda s: root(s[""], 1.0))(shards)[1]["b"]["float32"]

    assert all(torch.equal(grad, torch.zeros(4)) and not grad.requires_grad for grad in fs.simulate(main, 2))


def test_weights_are_added_without_rounding():
    def main(mesh):
        _plan, shards, root, inner = units_of(mesh)
        own = [1, 2**24 + 1][mesh.rank]  # which float32 cannot hold
        (_, weight), _ = fs.value_and_grad(weighted_loss(root, inner), weighted=True)(shards, [1.0], own)
        return weight.item()

    assert fs.simulate(main, 2) == [2**24 + 2] * 2


def test_shards_may_be_transformed_before_they_are_gathered():
    def main(mesh):
        plan, shards, _, inner = units_of(mesh)
        halved = lambda unit: {key: local * 0.5 for key, local in unit.items()}  # noqa: E731
        _, grads = fs.value_and_grad(lambda s: inner(halved(s["b"]), 1.0))(shards)
        return fs.gather(grads, plan, mesh)["b"]["c"]

    for grad in fs.simulate(main, 2):
        torch.testing.assert_close(grad, 0.5 * PARAMS["b"]["c"])


INNER = {
    "as it is": lambda f: f,
    "checkpointed": lambda f: functools.partial(checkpoint, f, use_reentrant=False),
    "rematerialised": fs.remat,
}


@pytest.mark.parametrize("reduce", ["each", "once"])
@pytest.mark.parametrize("how", INNER)
def test_an_inner_gradient_inside_the_loss_is_not_mistaken_for_the_reducers_own(how, reduce):
    def main(mesh):
        plan, shards, _, inner = units_of(mesh)

        def f(s):  # computed again inside the reducer's own backward
            (by_c,) = torch.autograd.grad(inner(s["b"], 1.0), s["b"]["float32"], create_graph=True)
            return fs.psum((by_c / mesh.world_size).square().sum(), mesh)

        evaluate = fs.accumulate(lambda s, _: INNER[how](f)(s), 2, reduce=reduce)
        return fs.gather(evaluate(shards, torch.zeros(2))[1], plan, mesh)["b"]["c"]

    for grad in fs.simulate(main, 2):  # d/dc of |2c|^2
        torch.testing.assert_close(grad, 8 * PARAMS["b"]["c"])


def test_transforms_around_are_refused():
    with pytest.raises(RuntimeError, match=r"cannot run inside a torch.func transform; use torch.func.grad there"):
        torch.func.grad(lambda x: fs.value_and_grad(lambda s: s.sum())(x)[0])(torch.ones(3))


@pytest.mark.parametrize(
    ("result", "options", "words"),
    {
        "a vector": (torch.ones(2), {}, r"must return a floating-point scalar.*shape \(2,\)"),
        "an integer": (torch.tensor(1), {}, "must return a floating-point scalar.*torch.int64"),
        "a number": (1.0, {}, "must return a floating-point scalar.*found 1.0"),
        "a pair without has_aux": ((torch.tensor(1.0), 2), {}, r"for \(loss, aux\) pass has_aux=True"),
        "no pair with has_aux": (torch.tensor(1.0), {"has_aux": True}, r"must return a pair \(loss, aux\); found Tensor"),
    }.values(),
    ids=["a vector", "an integer", "a number", "a pair without has_aux", "no pair with has_aux"],
)
def test_a_loss_that_is_no_scalar_is_refused(result, options, words):
    with pytest.raises(TypeError, match=words):
        fs.value_and_grad(lambda s: result, **options)({"": {"float32": torch.ones(2)}})


def test_the_callers_shards_are_left_alone():
    def main(mesh):
        _, shards, _, inner = units_of(mesh)
        before = shards["b"]["float32"].clone()
        with torch.no_grad():
            fs.value_and_grad(lambda s: inner(s["b"], 1.0))(shards)
        local = shards["b"]["float32"]
        return torch.equal(local, before), local.requires_grad, local.grad

    assert fs.simulate(main, 2) == [(True, False, None)] * 2


def weighted_loss(root, inner):
    """Return a loss that is the mean of a linear function of the rows of a batch."""

    def loss_fn(s, rows, weight):
        x = sum(rows) / len(rows)
        return root(s[""], x) + inner(s["b"], x), weight

    return loss_fn


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf, 7.0], ids=str)
def test_what_a_rank_of_weight_zero_computes_counts_nothing(nothing, strategy):
    def main(mesh):
        plan, shards, root, inner = units_of(mesh, strategy=strategy)

        def loss_fn(s, x, weight):
            direct = mesh.world_size * (s["b"]["float32"] * x).sum()
            return root(s[""], x) + inner(s["b"], x) + 0 * direct, weight, {"x": x}

        x, weight = (nothing, 0) if mesh.rank == 1 else (2.0 + mesh.rank, 1)
        (loss, total, aux), grads = fs.value_and_grad(loss_fn, has_aux=True, weighted=True)(shards, x, weight)
        assert total == 2
        assert aux["x"] is x
        return loss, fs.gather(grads, plan, mesh)

    for loss, grads in fs.simulate(main, 3):
        torch.testing.assert_close(loss, 3 * (PARAMS["a"].sum() + (PARAMS["b"]["c"] ** 2).sum()))
        torch.testing.assert_close(grads["a"], torch.full((5,), 3.0))
        torch.testing.assert_close(grads["b"]["c"], 6 * PARAMS["b"]["c"])


def test_a_world_without_data_has_loss_and_gradients_of_zero():
    def main(mesh):
        _, shards, root, inner = units_of(mesh)
        (loss, weight), grads = fs.value_and_grad(weighted_loss(root, inner), weighted=True)(shards, [math.nan], 0)
        return loss.item(), weight.item(), [grad.abs().sum().item() for grad in tree.leaves(grads)]

    assert fs.simulate(main, 2) == [(0.0, 0.0, [0.0, 0.0])] * 2


def test_what_ranks_share_through_psum_reaches_a_rank_of_weight_zero():
    def main(mesh):
        plan, shards, root, _ = units_of(mesh)
        loss_fn = lambda s: (fs.psum(root(s[""], mesh.rank + 1.0), mesh), 1 - mesh.rank)  # noqa: E731
        (_, weight), grads = fs.value_and_grad(loss_fn, weighted=True)(shards)
        assert weight == 1
        return fs.gather(grads, plan, mesh)["a"]

    for grad in fs.simulate(main, 2):  # rank 0's loss depends on rank 1's value too
        torch.testing.assert_close(grad, torch.full((5,), 3.0))


def test_local_leaves_have_their_own_ranks_gradient_whatever_the_weights():
    def main(mesh):
        _, shards, root, inner = units_of(mesh, local=["b.c"])
        evaluate = fs.value_and_grad(weighted_loss(root, inner), weighted=True)
        return tree.leaves(evaluate(shards, [2.0 if mesh.rank else math.nan], 3 * mesh.rank)[1]["b"])[0]

    zero, *others = fs.simulate(main, 3)
    assert torch.equal(zero, torch.zeros(7))
    for grad in others:
        torch.testing.assert_close(grad, 4 * PARAMS["b"]["c"])


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, "1.5 kg", torch.ones(2), None], ids=str)
def test_what_is_no_weight_is_refused(weight):
    with pytest.raises(ValueError, match="a weight must be one number, finite and not negative: zero for no data; found"):
        fs.value_and_grad(lambda s: (s[""].sum(), weight), weighted=True)({"": torch.ones(2)})


@pytest.mark.parametrize(
    ("result", "has_aux", "words"),
    [
        (torch.tensor(1.0), False, r"with weighted=True loss_fn must return a pair \(loss, weight\); found Tensor"),
        (
            (1, 2),
            True,
            r"has_aux=True and weighted=True loss_fn must return a triple \(loss, weight, aux\); found a tuple of 2",
        ),
    ],
    ids=["no weight", "no aux"],
)
def test_a_loss_without_its_weight_is_refused(result, has_aux, words):
    with pytest.raises(TypeError, match=words):
        fs.value_and_grad(lambda s: result, has_aux, weighted=True)({"": {"float32": torch.ones(2)}})


def leaf_losses(mesh, strategy="full_shard"):
    params = {"table": torch.linspace(-1, 1, 12).view(6, 2), "b": {"c": torch.linspace(1, 2, 2), "d": torch.ones(3)}}
    plan = fs.make_plan(params, mesh, units=["b"], strategy=strategy)
    table = fs.unshard(lambda leaves, rows: leaves["table"][rows].sum(0), plan.units[""], mesh)
    inner = fs.reshard(fs.unshard(lambda p, x: (p["c"] * x).sum() ** 2 + p["d"].sum(), plan.units["b"], mesh))

    def whole(leaves, rows):
        return (leaves["b"]["c"] * leaves["table"][rows].sum(0)).sum() ** 2 + leaves["b"]["d"].sum()

    def reference(rows):
        leaves = tree.map(lambda leaf: leaf.clone().requires_grad_(), params)
        whole(leaves, rows).backward()
        return {"table": leaves["table"].grad, "b.c": leaves["b"]["c"].grad, "b.d": leaves["b"]["d"].grad}

    rows = [torch.tensor([0, 3, 3]), torch.tensor([1, 3]), torch.tensor([5]), torch.tensor([2, 0])]
    return plan, fs.shard(params, plan, mesh), lambda s, x: inner(s["b"], table(s[""], x)), reference, rows


@pytest.mark.slow
@crossed(
    how=["in place", "returned"],
    strategy=["full_shard", "shard_grad_op", "no_shard"],
    world=[1, 3, {"replicate": 2, "shard": 2}],
)
def test_masking_before_the_reduction_is_masking_each_ranks_gradient(world, strategy, how):
    def main(mesh):
        plan, shards, loss_fn, reference, rows = leaf_losses(mesh, strategy)

        def freeze_row_3(unit, grads):  # on rank 0 only: a mask after the reduction could not do that
            if "table" not in grads or mesh.rank > 0:
                return None
            if how == "in place":
                grads["table"][3] = 0
                return None
            return {"table": grads["table"] * (torch.arange(6) != 3).unsqueeze(1)}

        _, grads = fs.value_and_grad(loss_fn, on_grads=freeze_row_3)(shards, rows[mesh.rank])
        ranks = [reference(rows[rank]) for rank in range(mesh.world_size)]
        ranks[0]["table"][3] = 0
        gathered = dict(zip(*tree.describe(fs.gather(grads, plan, mesh))[:0:-1], strict=True))
        for path, grad in gathered.items():
            torch.testing.assert_close(grad, sum(own[path] for own in ranks) / mesh.world_size)

    fs.simulate(main, world)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"x": torch.ones(1)}, r"from paths of unit '\(root\)' to gradients; found \['x'\], the paths are \['w'\]"),
        ([1], r"on_grads must return None, or a dictionary.*found list"),
        (
            {"w": torch.ones(2)},
            r"gradients of their leaves' shapes; for 'w' of unit '\(root\)' found \(2,\) instead of \(3,\)",
        ),
    ],
    ids=["another path", "a list", "another shape"],
)
def test_replacements_that_do_not_fit_are_refused(returned, words):
    mesh = fs.Mesh()
    plan = fs.make_plan({"w": torch.ones(3)}, mesh)
    f = fs.unshard(lambda leaves: leaves["w"].sum(), plan.units[""], mesh)
    with pytest.raises(ValueError, match=words):
        fs.value_and_grad(lambda s: f(s[""]), on_grads=lambda unit, grads: returned)(
            fs.shard({"w": torch.ones(3)}, plan, mesh)
        )


def train_in_parts(mesh, strategies, shape, weighted):
    """Train one model whose parts are sharded over different meshes of the same ranks."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"body": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), "head": nn.Linear(3, 2)})
    batches = torch.randn(2, mesh.world_size, 4, 3)
    meshes = {"body": mesh, "head": mesh.reshaped(shape)}
    parts, shards, plans = {}, {}, {}
    for (name, on), strategy in zip(meshes.items(), strategies, strict=True):
        apply, params, buffers = fs.make_functional(net[name])
        plans[name] = fs.make_plan(params, on, units=["0", "2"] if name == "body" else [], strategy=strategy)
        sharded = fs.fully_shard(apply, plans[name], on)
        parts[name] = functools.partial(lambda sharded, buffers, s, x: sharded(s, buffers, x), sharded, buffers)
        shards[name] = fs.shard(params, plans[name], on)

    def loss_fn(shards, x):
        loss = parts["head"](shards["head"], parts["body"](shards["body"], x)).square().mean()
        return (loss, mesh.rank + 1) if weighted else loss

    optimizer, weights = torch.optim.SGD(net.parameters(), lr=0.1), [rank + 1 if weighted else 1 for rank in range(4)]
    for batch in batches:
        with fs.record_events() as events:
            _, grads = fs.value_and_grad(loss_fn, weighted=weighted)(shards, batch[mesh.rank])
        shards = tree.map(lambda shard, grad: shard - 0.1 * grad, shards, grads)
        optimizer.zero_grad()
        for weight, x in zip(weights, batch, strict=True):
            (net["head"](net["body"](x)).square().mean() * weight / sum(weights)).backward()
        optimizer.step()
        for name, on in meshes.items():
            found = fs.gather(shards[name], plans[name], on)
            torch.testing.assert_close(found, {key: p.detach() for key, p in net[name].named_parameters()})
    return {(event.unit, event.axis, event.ranks) for event in events if event.unit is not None}


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True], ids=["plain mean", "weighted mean"])
@pytest.mark.parametrize("strategies", [("full_shard", "full_shard"), ("shard_grad_op", "no_shard")], ids=str)
@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (run_simulated, {"replicate": 2, "shard": 2}),
        (run_simulated, {"replicate": 4, "shard": 1}),
        (run_ranks, {"replicate": 2, "shard": 2}),
    ],
)
def test_parts_of_a_model_on_meshes_of_their_own_train_as_unsharded(run, shape, strategies, weighted):
    for found in run(train_in_parts, 4, strategies, shape, weighted):
        head = {("", axis, ranks) for axis, ranks in shape.items() if ranks > 1}
        assert found == {("0", "shard", 4), ("2", "shard", 4), *head}


@pytest.mark.parametrize("weighted", [False, True], ids=["mean", "weighted"])
def test_a_loss_of_one_element_is_returned_as_a_scalar(weighted):
    def main(mesh):
        params = {"w": torch.ones(4)}
        plan = fs.make_plan(params, mesh)
        f = fs.unshard(lambda leaves, x: (leaves["w"] * x).sum().view(1), plan.units[""], mesh)
        shards = fs.shard(params, plan, mesh)
        loss_fn = lambda s, x: (f(s[""], x.mean()), 3) if weighted else f(s[""], x.mean())  # noqa: E731
        found = []
        for grad in (fs.value_and_grad(loss_fn, weighted=weighted), fs.accumulate(loss_fn, 2, weighted=weighted)):
            value, grads = grad(shards, torch.arange(4.0))
            loss = value[0] if weighted else value
            found.append((loss.shape, loss.item(), fs.gather(grads, plan, mesh)["w"].tolist()))
        return found

    assert fs.simulate(main, 2)[1] == [((), 6.0, [1.5] * 4)] * 2


# --- a backward inside backward ---------------------------------------------------------------------


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
            return None, *torch.autograd.grad(ctx.f(x), [x, *shards], grad)


def double(unit, *args):
    for grad in args[0].values() if isinstance(args[0], dict) else args[1:]:
        grad.mul_(2)


@pytest.mark.slow
@crossed(
    bucket_bytes={"units": 0, "a bucket": 1 << 20},
    hook=[None, "on_grads", "on_reduce_scattered"],
    strategy=["full_shard", "shard_grad_op", "no_shard"],
)
def test_a_hook_that_a_backward_inside_backward_would_miss_is_an_error(strategy, hook, bucket_bytes):
    torch.manual_seed(0)
    apply, params, _ = fs.make_functional(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2)).double())
    x = torch.randn(2, 4, 2, dtype=torch.float64)
    expected = torch.func.grad(
        lambda p: torch.stack([apply(p, {}, apply(p, {}, part)).square().mean() for part in x]).mean()
    )

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["0", "1"], strategy=strategy, bucket_bytes=bucket_bytes)
        sharded = fs.fully_shard(apply, plan, mesh)

        def loss(shards):
            f = lambda x: sharded(shards, {}, sharded(shards, {}, x))  # noqa: E731
            return Solution.apply(f, x[mesh.rank], *(own["float64"] for own in shards.values())).square().mean()

        shards = fs.shard(params, plan, mesh)
        fs.value_and_grad(loss)(shards)  # units of a bucket share an autograd node from the second call on
        _, grads = fs.value_and_grad(loss, **({hook: double} if hook else {}))(shards)
        return fs.gather(grads, plan, mesh)

    if hook is None:
        for grads in fs.simulate(main, 2):
            torch.testing.assert_close(dict(grads), expected(params))
    else:
        with pytest.raises(ValueError, match=f"{hook} sees the gradients .* found a backward inside it .* leave {hook} out"):
            fs.simulate(main, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func.jvp's
@pytest.mark.parametrize("hook", ["on_grads", "on_reduce_scattered"])
def test_a_hook_that_a_transform_of_shards_would_miss_is_an_error(hook):
    def main(mesh):
        plan = fs.make_plan({"w": torch.ones(3)}, mesh)
        f = fs.unshard(lambda leaves: leaves["w"].square().sum(), plan.units[""], mesh)
        shards = fs.shard({"w": torch.ones(3)}, plan, mesh)[""]
        slope = lambda shards: torch.func.jvp(f, (shards,), (shards,))[1]  # noqa: E731
        plain = fs.value_and_grad(slope)(shards)[1]
        constant = lambda shards: f(shards) + slope({"float32": shards["float32"].detach()})  # noqa: E731
        fs.value_and_grad(constant, **{hook: double})(shards)  # its own gradient alone
        with pytest.raises(ValueError, match=f"{hook} needs .* a torch.func transform inside loss_fn .*: leave this out"):
            fs.value_and_grad(slope, **{hook: double})(shards)
        return plain["float32"].tolist()

    assert fs.simulate(main, 1) == [[4.0, 4.0, 4.0]]


def test_an_output_that_is_kept_with_its_graph_keeps_no_gradient_of_its_step():
    def main(mesh):
        params = {"w": torch.ones(8)}
        plan = fs.make_plan(params, mesh)
        f, kept = fs.unshard(lambda leaves, x: leaves["w"] * x, plan.units[""], mesh), []

        def loss_fn(shards, x):
            kept.append(f(shards[""], x))
            return kept[-1].sum()

        grads = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh), 2.0)[1]
        held = [StorageWeakRef(leaf.untyped_storage()) for unit in grads.values() for leaf in unit.values()]
        del grads
        assert kept[0].grad_fn is not None
        return [ref.expired() for ref in held]

    assert fs.simulate(main, 2) == [[True]] * 2
