"""vdot, norm, axpy, randn_like and broadcast_to_shards on every mesh, against the whole tensors."""

import math

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from funcshard.core import leaf_blocks
from tests.core.units import (
    by_hand,
    close,
    each_by_hand,
    forward_mode,
    of_module,
    random,
    recorded,
    requiring_grad,
    same_bits,
)
from tests.module.law import Runs
from tests.pairwise import crossed
from tests.ranks import on_ranks
from tests.slices import WHOLE, ranks, setup, whole

pytestmark = forward_mode

MESHES = {
    "4": {"shard": 4},
    "2 x 2": {"replicate": 2, "shard": 2},
    "3, tensor 2": {"shard": 3, "tensor": 2},
    "replicate 2, shard 2, tensor 2": {"replicate": 2, "shard": 2, "tensor": 2},
    "expert 2, tensor 2": {"expert": 2, "tensor": 2},
}
STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(leaf_blocks, "BLOCK", 7)  # so that leaves have several blocks and shards cut them


def product(a, b):
    return sum((x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def vectors(mesh, strategy):
    """Return two random vectors, their product, and a loss made of vectors with its derivatives, all whole."""
    plan, shards, _ = setup(mesh, strategy)
    generator = torch.Generator().manual_seed(5)
    a, b = (fs.randn_like(shards, plan, mesh, generator=generator) for _ in range(2))

    def loss_fn(a):
        along = fs.vdot(a, b, plan, mesh)
        moved = fs.axpy(fs.broadcast_to_shards(along, plan, mesh), b, a)  # a number that acts on shards
        return along * fs.norm(moved, plan, mesh)

    loss, grads = fs.value_and_grad(loss_fn)(a)
    _, product = torch.func.jvp(torch.func.grad(loss_fn), (a,), (b,))
    product = fs.axpy(1 / mesh.world_size - 1, product, product)
    slope = torch.func.jvp(loss_fn, (a,), (b,))[1]
    numbers = torch.stack([fs.vdot(a, b, plan, mesh), loss, slope])
    return numbers, [whole(x, plan, mesh) for x in (a, b, fs.axpy(0.5, a, b), grads, product)]


@pytest.mark.nightly(one_in=7)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_a_vector_of_shards_is_the_whole_vector_on_every_mesh(shape, strategy):
    ((_, (a, b, *_)),) = ranks(vectors, WHOLE, "full_shard")

    def loss_fn(a):
        along = product(a, b)
        moved = {name: along * b[name] + a[name] for name in a}
        return along * product(moved, moved).sqrt()

    _, hessian_product = torch.func.jvp(torch.func.grad(loss_fn), (a,), (b,))
    loss, slope = torch.func.jvp(loss_fn, (a,), (b,))
    sums = {name: 0.5 * a[name] + b[name] for name in a}
    for numbers, (*drawn, found_sums, grads, found_product) in ranks(vectors, shape, strategy):
        same_bits(drawn, [a, b])
        close(numbers, torch.stack([product(a, b), loss, slope]))
        close((found_sums, grads, found_product), (sums, torch.func.grad(loss_fn)(a), hessian_product))


def test_random_vectors_are_standard_normal_and_independent():
    params = {"w": torch.zeros(300, 7), "b": torch.zeros(700)}
    plan = fs.make_plan(params, 1)
    shards = fs.shard(params, plan, fs.Mesh())
    draw = lambda: fs.randn_like(shards, plan, fs.Mesh())[""]["float32"].double()  # noqa: E731
    torch.manual_seed(0)
    x, y = draw(), draw()
    assert x.mean().abs() < 0.08
    assert abs(x.std() - 1) < 0.05
    for other in (y, x.roll(7)):  # the next block
        assert abs(x @ other) / len(x) < 0.08
    torch.manual_seed(0)
    same_bits(draw(), x)


def tied():
    """Return a module with a tied weight, a frozen one, and one of integers."""
    first, second, frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 5).requires_grad_(False)
    second.weight, count = first.weight, nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)
    run = lambda net, x: net.frozen(net.second(net.first(x)))  # noqa: E731
    return Runs(run, first=first, second=second, frozen=frozen, count=count).double()


@on_ranks(3)
def test_ties_count_once_and_frozen_leaves_nothing(mesh):
    torch.manual_seed(0)
    net = tied()
    plan, _, shards = of_module(mesh, net, ["first", "second"])
    v = fs.randn_like(shards, plan, mesh)
    params = fs.gather(v, plan, mesh)
    trained = {name for name, value in params.items() if value is not None}
    assert {name.split(".")[0] for name in trained} == {"first", "second"}
    close(fs.vdot(v, v, plan, mesh), product([params[name] for name in trained], [params[name] for name in trained]))
    numbers = {u: {k: x if x.is_floating_point() else None for k, x in own.items()} for u, own in shards.items()}
    close(fs.norm(numbers, plan, mesh).square(), sum(p.square().sum() for p in net.parameters() if p.is_floating_point()))
    moved = fs.axpy(-1.0, v, shards)
    frozen = lambda shards: {k: x for own in shards.values() for k, x in own.items() if "frozen" in k}  # noqa: E731
    same_bits(frozen(moved), frozen(shards))
    nothing = {u: dict.fromkeys(own) for u, own in shards.items()}
    same_bits(fs.axpy(1.0, numbers, nothing), numbers)


def test_axpy_takes_any_tree():
    x, y = torch.arange(3.0), torch.ones(3)
    close(fs.axpy(2.0, x, y), 2 * x + y)
    # A number of another dtype decides on no dtype, also of leaves without dims.
    pair = fs.axpy(torch.tensor(2.0).double(), (x, [x[1]]), (y, [y[0]]))
    close(pair, (2 * x + y, [torch.tensor(3.0)]))
    close(fs.axpy((2.0, {"a": y}), (x, {"a": x}), (None, {"a": y})), (2 * x, {"a": x + y}))
    turned = fs.axpy(1.0, {"b": x, "a": y}, {"b": y, "a": None})
    assert list(turned) == ["b", "a"]


LOCAL = {"row": "replicate", "column": "shard", "own": ("shard", "replicate")}


@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks({"replicate": 2, "shard": 3})
def test_each_value_of_a_local_leaf_counts_once(mesh, strategy):
    params = {name: torch.full((5,), 1.0 + mesh.rank, dtype=torch.float64) for name in LOCAL}
    params["row"] = torch.full((5,), 1.0 + mesh.position["replicate"], dtype=torch.float64)
    params["column"] = torch.full((5,), 1.0 + mesh.position["shard"], dtype=torch.float64)
    plan = fs.make_plan(params, mesh, local=LOCAL, strategy=strategy)
    shards = fs.shard(params, plan, mesh)
    assert fs.vdot(shards, shards, plan, mesh) == 5 * ((1 + 4) + (1 + 4 + 9) + (1 + 4 + 9 + 16 + 25 + 36))
    close(fs.norm(shards, plan, mesh), fs.global_norm(shards, plan, mesh))
    own = fs.gather(fs.randn_like(shards, plan, mesh), plan, mesh)["own"]
    drawn = fs.all_gather(own, mesh, axis=("replicate", "shard"))
    assert len(drawn.flatten().unique()) == drawn.numel()


@on_ranks(2)
def test_a_product_costs_one_all_reduce_and_maps_over_stacked_models(mesh):
    params = {"w": torch.arange(3.0), "c": torch.tensor([1 + 2j, 3 - 1j])}
    plan = fs.make_plan(params, mesh)
    shards = fs.shard(params, plan, mesh)
    found, events = recorded(fs.vdot, shards, shards, plan, mesh)
    assert found == 5 + 15
    assert found.is_complex()
    assert [(event.kind, event.bytes) for event in events] == [("all_reduce", 8)]
    assert fs.norm(shards, plan, mesh) == pytest.approx(math.sqrt(20))
    stack = tree.map(lambda x: torch.stack([x, 2 * x]), shards)
    assert torch.vmap(lambda s: fs.vdot(s, s, plan, mesh))(stack).real.tolist() == [20.0, 80.0]
    half = {"": {k: x.bfloat16() if k == "float32" else None for k, x in shards[""].items()}}
    assert fs.vdot(half, half, plan, mesh).dtype == torch.float32


# --- broadcast_to_shards --------------------------------------------------------------------------

WORLDS = (1, 4, {"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 1}, {"shard": 2, "expert": 2})


# Five and seven elements: with padding at the end of the last shard.
PARAMS = {"up": {"w": random(0, 3, 2), "b": random(1, 3)}, "down": {"w": random(2, 1, 3)}}
SUPPORT, QUERY = random(3, 4, 5, 2), random(4, 4, 5, 2)
NUMBER = torch.tensor(0.3, dtype=torch.float64)


def whole_loss(params, x):
    hidden = torch.tanh(x @ params["up"]["w"].T + params["up"]["b"])
    return (hidden @ params["down"]["w"].T - x.prod(-1, keepdim=True)).square().mean()


def inner_gradient(f, params):
    found = iter(torch.autograd.grad(f(params), tree.leaves(params), create_graph=True))
    return tree.map(lambda _: next(found), params)


# What multiplies the inner gradient: a learned tensor or tree -> one factor for each leaf.
LEARNED = {
    "a rate": (NUMBER, lambda rate: tree.map(lambda _: rate, PARAMS)),
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
        moved = tree.map(lambda p, factor, grad: p - factor * grad, params, factors_of(learned), grads)
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
        moved = tree.map(lambda p, scale, grad: p - scale * grad, shards, scales, grads)
        return loss(moved, QUERY[mesh.rank])

    return plan, adapted, shards


@pytest.mark.nightly(one_in=2)
@crossed(strategy=STRATEGIES, world=WORLDS, learned=list(LEARNED), other=STRATEGIES)
@on_ranks()
def test_a_learned_value_that_multiplies_shards_gets_its_gradient_once(mesh, strategy, world, learned, other):
    value, factors_of = LEARNED[learned]
    params, value = requiring_grad(tree.map(torch.clone, PARAMS)), value.clone().requires_grad_()
    objective = expected_objective(mesh.world_size, factors_of)(params, value)
    of_value, *of_params = torch.autograd.grad(objective, [value, *tree.leaves(params)])
    value = value.detach()
    plan, adapted, shards = adapted_loss(mesh, strategy, factors_of)

    # A tensor beside the shards, whose gradients are added up.
    both = {"shards": shards, "learned": value}
    _, grads = fs.value_and_grad(lambda both: adapted(both["shards"], both["learned"]))(both)
    close(fs.psum(grads["learned"], mesh, axis=tuple(mesh.shape)), of_value)
    close(tree.leaves(fs.gather(grads["shards"], plan, mesh)), of_params)

    # A leaf of another plan.
    beside, unit, of_leaf = by_hand(mesh, {"learned": value}, lambda leaves: leaves["learned"].clone(), strategy=other)
    _, grads = fs.value_and_grad(lambda both: adapted(both[0], unit(both[1][""])))((shards, of_leaf))
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
        moved = tree.map(lambda p, r, grad: p - r * grad / mesh.world_size, shards, rates, grads)
        return loss(moved, QUERY[mesh.rank])

    return of_rate


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "world"), [("full_shard", 2), ("no_shard", 2)], ids=str)
@on_ranks()
def test_derivatives_of_every_order_by_a_learned_rate_are_right(mesh, strategy, world):
    objective = expected_objective(mesh.world_size, LEARNED["a rate"][1])
    leaves = requiring_grad(tree.map(torch.clone, PARAMS))
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
    params, rate = requiring_grad(tree.map(torch.clone, PARAMS)), NUMBER.clone().requires_grad_()
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
