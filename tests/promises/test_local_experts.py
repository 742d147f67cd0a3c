"""A mixture of experts on a mesh of two axes, with leaves that are local along one axis, both, or none."""

import math

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module
from tests.pairwise import crossed

LOCAL = {"*.row": "replicate", "*.column": "shard", "*.own": ("shard", "replicate")}
KINDS = {"": (), "row": ("replicate",), "column": ("shard",), "own": ("replicate", "shard")}
STRATEGIES = ["full_shard", "shard_grad_op", "no_shard"]
STEPS = 2
GRID = {"replicate": 2, "shard": 2}
WIDE = {"replicate": 2, "shard": 3}
UNITS = {
    "flat": ["1", "2", "3"],
    "an expert is a unit": ["1.row", "2.row", "2.column", "2.own", "3"],
    "the root alone": [],
}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.row, self.column, self.own = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        y = self.own(torch.tanh(self.column(torch.tanh(self.row(x)))))
        return x + torch.sigmoid(self.gate(x)) * y


def model_of(shape, rank):
    """Return the model of one rank: ranks that share a leaf have equal values, and other ranks different ones."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), Experts(), Experts(), nn.Linear(3, 1))
    for name, p in net.named_parameters():
        p.data += 0.1 * index_of(shape, rank, kind_of(name))
    return net


def kind_of(path):
    part = path.split(".")[1]
    return part if part in KINDS else ""


def index_of(shape, rank, kind):
    """Return the index of the value that a rank holds, among the values of a leaf of this kind."""
    outer, inner = divmod(rank, shape["shard"])
    return {"": 0, "row": outer, "column": inner, "own": rank}[kind]


def batch_of(rank, step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def train(mesh, strategy, weighted, reduce, units):
    """Train some steps; return losses and this rank's whole parameters. Each step's events are checked."""
    net = model_of(mesh.shape, mesh.rank)
    plan, sharded, shards = of_module(mesh, net, UNITS[units], strategy=strategy, local=LOCAL)

    def loss_fn(shards, buffers, batch):
        loss = sharded(shards, buffers, batch).square().mean()
        return (loss, mesh.rank + 1.0) if weighted else loss

    micro = fs.Accumulation(2, reduce) if reduce else fs.Accumulation()
    step = fs.make_train_step(
        loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=0.05), plan, mesh,
        weighted=weighted, accumulate=micro.micro_batches, reduce=micro.reduce,
    )  # fmt: skip
    state, losses = step.init(shards, {}), []
    for i in range(STEPS):
        with fs.record_events() as events:
            state, metrics = step(state, batch_of(mesh.rank, i))
        if units == "flat":
            kept = tuple(event for event in events if event.unit is not None)  # the reduction of the loss belongs to no unit
            assert kept == fs.predict_events(plan, sharded.schedule, accumulate=micro)
        losses.append(metrics["loss"].item())
    return losses, fs.to_state_dict(state.shards, plan, mesh)


def reference(shape, weighted):
    """Train the same on one rank that holds all values, without sharding."""
    ranks = range(math.prod(shape.values()))
    nets = [model_of(shape, rank) for rank in ranks]
    values = {}
    for rank, net in enumerate(nets):
        for path, p in net.named_parameters():
            values.setdefault((path, index_of(shape, rank, kind_of(path))), p)
    of_rank = [
        {path: values[path, index_of(shape, rank, kind_of(path))] for path, _ in nets[0].named_parameters()}
        for rank in ranks
    ]
    weights = [rank + 1.0 if weighted else 1.0 for rank in ranks]
    optimizer, losses = torch.optim.AdamW(values.values(), lr=0.05), []
    for i in range(STEPS):
        each = [torch.func.functional_call(nets[0], of_rank[r], batch_of(r, i)).square().mean() for r in ranks]
        total = sum(w * loss for w, loss in zip(weights, each, strict=True))
        losses.append(total.item() / sum(weights))
        for (path, index), p in values.items():
            sharing = sum(w for r, w in enumerate(weights) if index_of(shape, r, kind_of(path)) == index)
            (grad,) = torch.autograd.grad(total, p, retain_graph=True)
            p.grad = grad / sharing
        optimizer.step()
    return losses, [{path: p.detach() for path, p in params.items()} for params in of_rank]


WORLDS = {
    **{units: (GRID, units) for units in UNITS},
    **{str(shape): (shape, "flat") for shape in (WIDE, {"replicate": 1, "shard": 2}, {"replicate": 2, "shard": 1})},
}


@pytest.mark.nightly(one_in=6)
@crossed(world=WORLDS, strategy=STRATEGIES, weighted=(False, True), reduce=("", "each", "once"))
def test_training_equals_the_unsharded_model_of_all_ranks(world, strategy, weighted, reduce):
    (shape, units), (losses, params) = world, reference(world[0], weighted)
    trained = fs.simulate(lambda mesh: train(mesh, strategy, weighted, reduce, units), shape)
    for own, found in zip(params, trained, strict=True):
        torch.testing.assert_close(found, (losses, own))


@pytest.mark.parametrize("src", range(4))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_come_from_the_rank_that_stands_where_src_does(strategy, src):
    outer, inner = divmod(src, 2)

    def main(mesh):
        row, column = divmod(mesh.rank, 2)
        sources = {"": row == outer and column == inner, "row": column == inner, "column": row == outer, "own": True}
        params = {
            f"0.{kind or 'gate'}": torch.full((5,), float(mesh.rank), device="cpu" if here else "meta")
            for kind, here in sources.items()
        }
        plan = fs.make_plan(params, mesh, local=LOCAL, strategy=strategy)
        full = fs.gather(fs.shard(params, plan, mesh, src=src), plan, mesh)
        return {path.split(".")[1]: leaf.unique().tolist() for path, leaf in full.items()}

    for rank, found in enumerate(fs.simulate(main, GRID)):
        row, column = divmod(rank, 2)
        wanted = {"gate": src, "row": 2 * row + inner, "column": 2 * outer + column, "own": rank}
        assert found == {kind: [float(value)] for kind, value in wanted.items()}


def test_an_init_function_may_depend_on_the_index_along_the_axis():
    def main(mesh):
        params = dict(model_of(mesh.shape, mesh.rank).named_parameters())
        plan = fs.make_plan(params, mesh, units=UNITS["flat"], local=LOCAL)
        shards = fs.init_shards(lambda unit: {leaf.path: params[leaf.path].detach() for leaf in unit.leaves}, plan, mesh)
        again = fs.from_state_dict(fs.to_state_dict(shards, plan, mesh), plan, mesh)
        torch.testing.assert_close(again, shards, rtol=0, atol=0)
        return fs.to_state_dict(shards, plan, mesh)

    for rank, found in enumerate(fs.simulate(main, GRID)):
        torch.testing.assert_close(found, dict(model_of(GRID, rank).state_dict()), rtol=0, atol=0)
