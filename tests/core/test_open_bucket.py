"""A small bucket that stays gathered: one autograd node for its units, with the bits of a node each."""

import gc
import weakref

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.autograd import forward_ad

import funcshard as fs

WIDTH = 3


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Four units, of which ``how`` says how they run."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.units = nn.ModuleList([Unit() for _ in range(4)])

    def forward(self, x):
        a, b, c, d = self.units
        if self.how == "checkpoint":
            x = torch.utils.checkpoint.checkpoint(lambda x: c(b(a(x))), x, use_reentrant=False)
        elif self.how == "no_grad":
            with torch.no_grad():
                x = a(x)
            x = c(b(x))
        elif self.how == "repeated":
            x = a(c(b(a(x))))
        elif self.how == "other order":
            x = b(a(c(x)))
        elif self.how == "left out":
            x = b(a(x))
        elif self.how == "without effect":
            c(x)
            x = b(a(x))
        else:
            x = c(b(a(x)))
        return d(x).square().mean()


HOWS = ["plain", "checkpoint", "no_grad", "repeated", "other order", "left out", "without effect"]


def setup(mesh, how="plain", **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(how)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(how != "frozen" or "bias" in name)
    apply, params, _ = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["units.*"], **options)
    return fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)


def batch(mesh):
    return torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) * (1 + mesh.rank)


BUCKET = {"strategy": "shard_grad_op", "bucket_bytes": 1 << 20}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [1, 2, {"replicate": 2, "shard": 2}], ids=str)
@pytest.mark.parametrize("how", [*HOWS, "frozen"])
def test_it_gives_the_bits_and_the_predicted_events(how, mesh) -> None:
    def main(mesh):
        results = []
        for options in (BUCKET, {**BUCKET, "bucket_bytes": 0}):
            sharded, shards = setup(mesh, how, **options)
            run = fs.value_and_grad(lambda s, x: sharded(s, {}, x))  # noqa: B023
            for _ in range(3):
                with fs.record_events() as events:
                    found = run(shards, batch(mesh))
                results.append((found[0], [grad for unit in found[1].values() for grad in unit.values()]))
            if how in ("plain", "repeated", "other order"):
                assert tuple(events) == fs.predict_events(sharded.plan, sharded.schedule)
        for each in results[1:]:
            torch.testing.assert_close(each, results[0], rtol=0, atol=0)

    fs.simulate(main, mesh)


def nodes_of(tensor):
    """Return the names of the autograd nodes below ``tensor``."""
    found, waiting = {}, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = node.name()
            waiting += [each for each, _ in node.next_functions]
    return [*found.values()]


def test_units_share_one_node_from_the_second_call_on() -> None:
    def main(mesh):
        sharded, shards = setup(mesh, **BUCKET)
        local = {name: {key: t.clone().requires_grad_() for key, t in unit.items()} for name, unit in shards.items()}
        return [sum("GatherLeaves" in name for name in nodes_of(sharded(local, {}, batch(mesh)))) for _ in range(2)]

    assert fs.simulate(main, 2)[0] == [4, 1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_second_derivatives_and_tangents_are_those_of_a_node_each() -> None:
    def main(mesh):
        results = []
        for size in (1 << 20, 0):
            sharded, shards = setup(mesh, **{**BUCKET, "bucket_bytes": size})
            x = batch(mesh)
            sharded(shards, {}, x)  # learns the order
            leaves = [t.clone().requires_grad_() for unit in shards.values() for t in unit.values()]
            tree = {name: {"float32": leaf} for name, leaf in zip(shards, leaves, strict=True)}
            grads = torch.autograd.grad(sharded(tree, {}, x), leaves, create_graph=True)
            again = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
            tangents = {name: {key: torch.ones_like(t) for key, t in unit.items()} for name, unit in shards.items()}
            pushed = torch.func.jvp(lambda s: sharded(s, {}, x), (shards,), (tangents,))  # noqa: B023
            results.append((grads, again, pushed))
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)

    fs.simulate(main, 2)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_dual_numbers_keep_their_tangents() -> None:
    def main(mesh):
        found = []
        for size in (1 << 20, 0):
            sharded, shards = setup(mesh, **{**BUCKET, "bucket_bytes": size})
            sharded(shards, {}, batch(mesh))  # learns the order
            # simulate has torch's level of dual numbers open
            dual = {
                name: {key: forward_ad.make_dual(t, torch.ones_like(t)) for key, t in unit.items()}
                for name, unit in shards.items()
            }
            found.append(forward_ad.unpack_dual(sharded(dual, {}, batch(mesh))).tangent)
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)

    fs.simulate(main, 2)


def test_its_storages_are_free_after_backward() -> None:
    seen = []

    class Spy(Unit):
        def forward(self, x):
            seen.append(weakref.ref(self.linear.weight.untyped_storage()))
            return super().forward(x)

    def main(mesh):
        apply, params, _ = fs.make_functional(nn.Sequential(*[Spy() for _ in range(3)]))
        plan = fs.make_plan(params, mesh, units=["*"], **BUCKET)
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        run = fs.value_and_grad(lambda s, x: sharded(s, {}, x).square().mean())
        run(shards, batch(mesh))
        with fs.record_events() as events:
            run(shards, batch(mesh))
        return [event.kind for event in events]

    assert fs.simulate(main, 2)[0] == ["all_gather", "reduce_scatter"]
    gc.collect()
    assert len(seen) == 12
    assert all(each() is None for each in seen)


def test_a_forward_that_writes_to_a_leaf_is_an_error() -> None:
    class Writes(Unit):
        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.mul_(1.0 if x.sum() < 1e9 else 2.0)
            return super().forward(x)

    def main(mesh):
        apply, params, _ = fs.make_functional(nn.Sequential(Unit(), Writes()))
        plan = fs.make_plan(params, mesh, units=["*"], **BUCKET)
        schedule = fs.make_schedule(plan)
        sharded, shards = fs.fully_shard(apply, plan, mesh, schedule=schedule), fs.shard(params, plan, mesh)
        with pytest.raises(RuntimeError, match=r"forward of unit '1' modified a leaf in place.*modify a copy"):
            fs.value_and_grad(lambda s, x: sharded(s, {}, x).sum())(shards, batch(mesh))

    fs.simulate(main, 2)


def test_an_output_that_is_a_leaf_is_a_copy() -> None:
    class Shows(Unit):
        def forward(self, x):
            return self.linear.weight

    def main(mesh):
        apply, params, _ = fs.make_functional(nn.Sequential(Unit(), Shows()))
        plan = fs.make_plan(params, mesh, units=["*"], **BUCKET)
        sharded = fs.fully_shard(apply, plan, mesh, schedule=fs.make_schedule(plan))
        shards = fs.shard(params, plan, mesh)
        _, grads = fs.value_and_grad(lambda s, x: sharded(s, {}, x).add_(1).sum())(shards, batch(mesh))
        found = fs.gather(grads, plan, mesh)
        return torch.equal(found["1.linear.weight"], torch.ones(WIDTH, WIDTH)) and not found["0.linear.weight"].any()

    assert all(fs.simulate(main, 2))
