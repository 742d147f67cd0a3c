"""broadcast_to_shards: the gradient of a value that multiplies shards, against plain torch on the whole parameters."""

import pytest
import torch

import funcshard as fs
from tests.core.units import by_hand, each_by_hand, forward_mode, requiring_grad
from tests.pairwise import crossed
from tests.ranks import on_ranks

pytestmark = forward_mode

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")
WORLDS = (1, 4, {"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 1}, {"shard": 2, "expert": 2})


def random(seed, *shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# Five and seven elements: with padding at the end of the last shard.
PARAMS = {"up": {"w": random(0, 3, 2), "b": random(1, 3)}, "down": {"w": random(2, 1, 3)}}
SUPPORT, QUERY = random(3, 4, 5, 2), random(4, 4, 5, 2)
NUMBER = torch.tensor(0.3, dtype=torch.float64)


def whole_loss(params, x):
    hidden = torch.tanh(x @ params["up"]["w"].T + params["up"]["b"])
    return (hidden @ params["down"]["w"].T - x.prod(-1, keepdim=True)).square().mean()


def each(f, *trees):
    return {name: {key: f(*(tree[name][key] for tree in trees)) for key in trees[0][name]} for name in trees[0]}


def inner_gradient(f, params):
    leaves = [leaf for own in params.values() for leaf in own.values()]
    found = iter(torch.autograd.grad(f(params), leaves, create_graph=True))
    return each(lambda _: next(found), params)


# What multiplies the inner gradient: a learned tensor or tree -> one factor for each leaf.
LEARNED = {
    "a rate": (NUMBER, lambda rate: each(lambda _: rate, PARAMS)),
    "a scale for each leaf": (
        torch.tensor([0.3, 0.2, 0.1], dtype=torch.float64),
        lambda scales: {"up": {"w": scales[0], "b": scales[1]}, "down": {"w": scales[2]}},
    ),
    "a scale for each row": (random(5, 3), lambda rows: {"up": {"w": rows[:, None], "b": rows}, "down": {"w": rows[:1]}}),
}


def expected_objective(ranks, factors_of):
    """Return the mean loss after one step of gradient descent, as a function of the parameters and of what is learned."""

    def objective(params, learned):
        grads = inner_gradient(lambda p: sum(whole_loss(p, x) for x in SUPPORT[:ranks]) / ranks, params)
        moved = each(lambda p, factor, grad: p - factor * grad, params, factors_of(learned), grads)
        return sum(whole_loss(moved, x) for x in QUERY[:ranks]) / ranks

    return objective


def units_of(mesh, strategy):
    functions = {"up": lambda p, x: torch.tanh(x @ p["w"].T + p["b"]), "down": lambda p, hidden: hidden @ p["w"].T}
    plan, runs, shards = each_by_hand(mesh, PARAMS, functions, strategy=strategy)

    def loss(shards, x):
        return (runs["down"](shards["down"], runs["up"](shards["up"], x)) - x.prod(-1, keepdim=True)).square().mean()

    return plan, loss, shards


def adapted_loss(mesh, strategy, factors_of):
    """Return the plan, the loss after a step, of the shards and of what is learned, and the shards."""
    plan, loss, shards = units_of(mesh, strategy)

    def adapted(shards, learned):
        factors = factors_of(learned)
        one = len({id(factor) for own in factors.values() for factor in own.values()}) == 1
        scales = fs.broadcast_to_shards(factors["up"]["w"] if one else factors, plan, mesh)
        grads = inner_gradient(lambda s: loss(s, SUPPORT[mesh.rank]) / mesh.world_size, shards)
        moved = each(lambda p, scale, grad: p - scale * grad, shards, scales, grads)
        return loss(moved, QUERY[mesh.rank])

    return plan, adapted, shards


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.nightly(one_in=2)
@crossed(strategy=STRATEGIES, world=WORLDS, learned=list(LEARNED), other=STRATEGIES)
@on_ranks()
def test_a_learned_value_that_multiplies_shards_gets_its_gradient_once(mesh, strategy, world, learned, other):
    value, factors_of = LEARNED[learned]
    params, value = requiring_grad(each(torch.clone, PARAMS)), value.clone().requires_grad_()
    objective = expected_objective(mesh.world_size, factors_of)(params, value)
    leaves = [value, *(leaf for own in params.values() for leaf in own.values())]
    of_value, *of_params = torch.autograd.grad(objective, leaves)
    value = value.detach()
    plan, adapted, shards = adapted_loss(mesh, strategy, factors_of)

    # A tensor beside the shards, whose gradients are added up.
    tree = {"shards": shards, "learned": value}
    _, grads = fs.value_and_grad(lambda tree: adapted(tree["shards"], tree["learned"]))(tree)
    close(fs.psum(grads["learned"], mesh, axis=tuple(mesh.shape)), of_value)
    whole = fs.gather(grads["shards"], plan, mesh)
    close([leaf for own in whole.values() for leaf in own.values()], of_params)

    # A leaf of another plan.
    beside, unit, of_leaf = by_hand(mesh, {"learned": value}, lambda leaves: leaves["learned"].clone(), strategy=other)
    _, grads = fs.value_and_grad(lambda tree: adapted(tree[0], unit(tree[1][""])))((shards, of_leaf))
    close(fs.gather(grads[1], beside, mesh)["learned"], of_value)

    # Plain autograd, which adds over ranks.
    own = value.clone().requires_grad_()
    (part,) = torch.autograd.grad(adapted(requiring_grad(shards), own), own)
    close(fs.psum(part, mesh, axis=tuple(mesh.shape)) / mesh.world_size, of_value)


def meta_loss_of_rate(mesh, strategy):
    """Return the loss of a learned rate, whose inner step is of torch.func."""
    plan, loss, shards = units_of(mesh, strategy)

    def of_rate(rate):
        rates = fs.broadcast_to_shards(rate, plan, mesh)
        grads = torch.func.grad(loss)(shards, SUPPORT[mesh.rank])
        moved = each(lambda p, r, grad: p - r * grad / mesh.world_size, shards, rates, grads)
        return loss(moved, QUERY[mesh.rank])

    return of_rate


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world"), [("full_shard", 2), ("no_shard", 2)], ids=str)
@on_ranks()
def test_derivatives_of_every_order_by_a_learned_rate_are_right(mesh, strategy, world):
    objective = expected_objective(mesh.world_size, LEARNED["a rate"][1])
    leaves = requiring_grad(each(torch.clone, PARAMS))
    rate, orders = NUMBER.clone().requires_grad_(), []
    value = objective(leaves, rate)
    for _ in range(3):
        (value,) = torch.autograd.grad(value, rate, create_graph=True)
        orders.append(value.detach())
    of_rate = meta_loss_of_rate(mesh, strategy)
    whole = lambda x: fs.psum(x, mesh, axis=tuple(mesh.shape)) / mesh.world_size  # noqa: E731
    rate = NUMBER.clone().requires_grad_()
    value, found = of_rate(rate), []
    for _ in range(3):
        (value,) = torch.autograd.grad(value, rate, create_graph=True)
        value = whole(value)
        found.append(value.detach())
    close(found, orders)
    grad = torch.func.grad(of_rate)
    close(whole(torch.func.jvp(grad, (NUMBER,), (torch.ones_like(NUMBER),))[1]), orders[1])
    close(whole(torch.vmap(grad)(torch.stack([NUMBER, NUMBER / 2])))[0], orders[0])


@pytest.mark.parametrize("world", [4, {"replicate": 2, "shard": 1}], ids=str)
@on_ranks()
def test_ranks_may_use_their_parts_of_a_gradient_differently(mesh, world):
    objective = expected_objective(mesh.world_size, LEARNED["a rate"][1])
    params, rate = requiring_grad(each(torch.clone, PARAMS)), NUMBER.clone().requires_grad_()
    (first,) = torch.autograd.grad(objective(params, rate), rate, create_graph=True)
    (second,) = torch.autograd.grad(first, rate)
    weight = float(mesh.rank + 1)
    (part,) = torch.autograd.grad(meta_loss_of_rate(mesh, "no_shard")(rate), rate, create_graph=True)
    weighted = fs.pmean(weight * part, mesh)
    (found,) = torch.autograd.grad(weighted, rate)
    mean_weight = (1 + mesh.world_size) / 2
    close(weighted.detach(), mean_weight * first.detach())
    close(fs.pmean(found, mesh), mean_weight * second)


OTHER_FORMS = [
    (0.1, TypeError, "takes a tensor, or a tree of them; found float: make it one"),
    ({"up": {"w": 1.0, "b": NUMBER}, "down": {"w": NUMBER}}, TypeError, "found float at 'up.w'"),
    ({"up": {"w": NUMBER}}, ValueError, r"missing: \['down.w', 'up.b'\], unexpected: nothing"),
    ({"up": {"w": NUMBER, "b": random(0, 4)}, "down": {"w": NUMBER}}, ValueError, r"expand to the shape \(3,\); found"),
]


@pytest.mark.parametrize(("value", "kind", "words"), OTHER_FORMS)
@on_ranks(2)
def test_a_value_of_another_form_is_an_error(mesh, value, kind, words):
    with pytest.raises(kind, match=words):
        fs.broadcast_to_shards(value, fs.make_plan(PARAMS, mesh, units=["up", "down"]), mesh)


@on_ranks(2)
def test_offloaded_and_frozen_shards_get_the_value_too(mesh):
    params = {"w": torch.ones(3, requires_grad=True), "b": torch.ones(2)}
    plan = fs.make_plan(params, mesh, strategy="no_shard", offload=True)
    scales = fs.broadcast_to_shards({"w": torch.tensor(2.0), "b": torch.tensor(3.0)}, plan, mesh)
    assert {key: scale.tolist() for key, scale in scales[""].items()} == {
        "float32": [2.0, 2.0, 2.0],
        "float32.frozen": [3.0, 3.0],
    }
