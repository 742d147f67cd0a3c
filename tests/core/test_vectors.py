"""vdot, norm, axpy and randn_like on every mesh, against the whole tensors."""

import math

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from funcshard.core import leaf_blocks
from tests.core.units import forward_mode, of_module, recorded, same_bits
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


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


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


class Tied(nn.Module):
    """A tied weight, a frozen one, and one of integers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 5)
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.count = nn.Parameter(torch.ones(3, dtype=torch.int64), requires_grad=False)

    def forward(self, x):
        return self.frozen(self.second(self.first(x)))


@on_ranks(3)
def test_ties_count_once_and_frozen_leaves_nothing(mesh):
    torch.manual_seed(0)
    net = Tied().double()
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
