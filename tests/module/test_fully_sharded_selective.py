"""Selective checkpoints: a policy keeps some results of a unit's operations, and the bits stay the same."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import funcshard as fs
from tests.module.test_fully_sharded_checkpointing import same_bits
from tests.ranks import one_thread, run_ranks, run_simulated
from tests.storages import Alive, Log

WIDTH, BLOCKS, ROWS = 6, 3, 6  # square activations: a result kept for another one would have its shape
WRAPPED = "_checkpoint_wrapped_module"
aten = torch.ops.aten


def always(policy):
    return lambda ctx, op, *args, **kwargs: policy


def every_second(ctx, op, *args, **kwargs):
    """Keep the results of operations in turn; one policy object serves one region."""
    every_second.count += 1
    return CheckpointPolicy.MUST_SAVE if every_second.count % 2 else CheckpointPolicy.PREFER_RECOMPUTE


every_second.count = 0


POLICIES = {
    "MUST_SAVE": always(CheckpointPolicy.MUST_SAVE),
    "PREFER_SAVE": always(CheckpointPolicy.PREFER_SAVE),
    "MUST_RECOMPUTE": always(CheckpointPolicy.MUST_RECOMPUTE),
    "PREFER_RECOMPUTE": always(CheckpointPolicy.PREFER_RECOMPUTE),
    "matrix products": [aten.addmm.default, aten.mm.default],
    "views": [aten.t.default, aten.view.default],
    "in turn": every_second,
    # operations that gathers and reductions run too
    "memory": [aten.new_empty.default, aten.clone.default, aten.empty.memory_format, aten.copy_.default],
}
FEW = ("matrix products", "views", "MUST_SAVE")  # keep some results, keep views of leaves, keep all


def contexts(policy):
    return functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])


def selective(f, policy):
    return functools.partial(checkpoint, f, use_reentrant=False, context_fn=contexts(policy))


class MLP(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.up, self.down, self.log = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), log

    def forward(self, x):
        self.log(self.up.weight)
        scale = x.new_full((), 1.5, dtype=torch.float64).to(x)  # operations with keyword arguments
        return torch.tanh(self.down(torch.tanh(self.up(x)))) * scale


class Block(nn.Module):
    def __init__(self, wrap, log):
        super().__init__()
        self.mlp, self.norm, self.wrap = wrap(MLP(log)), nn.LayerNorm(WIDTH), wrap

    def inner(self, x):
        return x + self.mlp(self.norm(x))

    def forward(self, x, again=None):
        return self.inner(x) if again is None else again(self.inner, x)


class Stack(nn.Module):
    """Blocks with checkpoints in some place; ``again`` is the policy of these."""

    def __init__(self, place, again, log):
        super().__init__()
        wrap = functools.partial(checkpoint_wrapper, context_fn=contexts(again)) if again else lambda module: module
        self.place, self.again, self.scale = place, again, nn.Parameter(torch.linspace(1, 2, WIDTH))
        inner = wrap if place in ("wrapper inside", "wrapper inside and around") else lambda module: module
        outer = wrap if place in ("wrapper", "wrapper around", "wrapper inside and around") else lambda module: module
        self.blocks = nn.ModuleList(outer(Block(inner, log)) for _ in range(BLOCKS))

    def forward(self, x):
        x = x * self.scale
        again = lambda f, x: (selective(f, self.again) if self.again else f)(x)  # noqa: E731
        if self.place == "inside":
            for block in self.blocks:
                x = block(x, again)
        elif self.place == "around":
            for block in self.blocks:
                x = again(block, x)
        elif self.place == "around and inside":
            for block in self.blocks:
                x = again(functools.partial(block, again=again), x)
        elif self.place == "around several":
            x = again(nn.Sequential(*self.blocks[:2]), x)
            x = again(lambda x: self.blocks[2](x) * self.scale, x)
        else:
            for block in self.blocks:
                x = block(x)
        return x.square().mean()


UNITS = [f"blocks.{i}" for i in range(BLOCKS)]
PLACES = {
    "inside": ["blocks.*"],
    "around": ["blocks.*"],
    "around and inside": ["blocks.*"],
    "around several": ["blocks.*"],
    "wrapper": ["blocks.*"],  # the wrapper is the unit
    "wrapper inside": ["blocks.*"],
    "wrapper around": [f"blocks.*.{WRAPPED}"],
    "wrapper inside and around": ["blocks.*", f"blocks.*.{WRAPPED}.mlp"],
}
# Options of predict_events where the suite predicts a checkpoint in that place.
PREDICTED = {
    "inside": {"recomputed": UNITS},
    "around": {"recomputed": UNITS},
    "wrapper": {"recomputed": UNITS},
    "wrapper around": {"recomputed": [f"{name}.{WRAPPED}" for name in UNITS]},
}


def plain_name(name):
    return name.replace(f".{WRAPPED}", "")


def inputs(rank):
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH) * (1 + rank)


def build(place, policy, log):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Stack(place, policy, log)


def step(mesh, place, policy, strategy="full_shard", remat=(), calls=2):
    """Return loss and gathered gradient of each call, and of the last one events and the leaves alive after forward."""
    every_second.count = 0
    log, alive, found = Log(), [], []
    apply, params, buffers = fs.make_functional(build(place, policy, log))
    plan = fs.make_plan(params, mesh, units=PLACES.get(place, ["blocks.*"]), strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh, remat=remat)

    def loss_fn(shards):
        loss = sharded(shards, buffers, inputs(mesh.rank))
        alive.append(log.alive())
        return loss

    for _ in range(calls):
        with fs.record_events() as events:
            loss, grads = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))
        found.append((loss, {plain_name(name): grad for name, grad in fs.gather(grads, plan, mesh).items()}))
    assert log.alive() == 0
    options = None if remat else PREDICTED.get(place)
    predicted = None if options is None else fs.predict_events(plan, sharded.schedule, **options)
    return found, tuple(events), predicted, alive[-1]


@functools.cache
def whole(world, place):
    """Return each rank's loss, and the mean gradient, of the model without shards and checkpoints."""
    module = build(place, None, Log())
    with one_thread():
        losses = [module(inputs(rank)) for rank in range(world)]
        grads = [torch.autograd.grad(loss, list(module.parameters())) for loss in losses]
    mean = {
        name: functools.reduce(torch.add, parts).div(world)
        for (name, _), *parts in zip(module.named_parameters(), *grads, strict=True)
    }
    return [loss.detach() for loss in losses], mean


def check(place, results):
    losses, mean = whole(len(results), place)
    for rank, (found, events, predicted, _) in enumerate(results):
        for loss, grads in found:
            same_bits((loss, grads), (losses[rank], mean))
        assert predicted is None or events == predicted


# The places and policies of the fast run; the slow run takes them all.
QUICK = [("inside", "matrix products"), ("around", "matrix products"), ("around", "views"), ("wrapper", "MUST_SAVE")]


@pytest.mark.parametrize(("place", "policy"), QUICK)
def test_a_policy_changes_no_bit_and_no_collective(place, policy):
    check(place, run_simulated(step, 2, place, policy))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("place", PLACES)
def test_every_policy_in_every_place_changes_no_bit_and_no_collective(place, strategy):
    # A policy sees the operations of forward, gathers among them; full_shard has the most of them.
    for policy in POLICIES if strategy == "full_shard" else FEW:
        try:
            check(place, run_simulated(step, 2, place, policy, strategy))
        except BaseException as error:
            error.add_note(f"with the policy {policy!r}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("place", ["inside", "around"])
def test_the_same_on_a_mesh_of_copies(place, strategy):
    shape = {"replicate": 2, "shard": 2}
    without = run_simulated(step, 4, place, None, strategy, shape=shape)  # whose four ranks are added two by two
    for policy in FEW:
        results = run_simulated(step, 4, place, policy, strategy, shape=shape)
        for (found, *_), (wanted, *_) in zip(results, without, strict=True):
            same_bits(found, wanted)
            torch.testing.assert_close(found[0][1], whole(4, place)[1])


@pytest.mark.slow
@pytest.mark.parametrize("place", ["inside", "around", "wrapper inside and around"])
def test_the_same_on_real_ranks(place):
    for policy in FEW:
        check(place, run_ranks(step, 2, place, policy))


@pytest.mark.parametrize("place", ["inside", "around"])
def test_a_selective_checkpoint_under_remat_changes_no_bit(place):
    check(place, run_simulated(step, 2, place, "matrix products", "full_shard", UNITS))


def by_hand(mesh, policy, wrap):
    """Return the gradient of units composed by hand, with ``wrap(unit's function, policy)``."""
    params = {f"u{i}": {"w": torch.linspace(-1, 1, WIDTH**2).view(WIDTH, WIDTH) + i} for i in range(3)}
    plan = fs.make_plan(params, mesh, units=["u*"])
    layer = lambda leaves, x: torch.tanh(x @ leaves["w"].t())  # noqa: E731

    def loss_fn(shards):
        x = inputs(mesh.rank)
        for unit in plan.units:
            x = wrap(fs.reshard(fs.unshard(layer, plan.units[unit], mesh)), policy)(shards[unit], x)
        return x.square().mean()

    return fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))


@pytest.mark.parametrize("policy", ["matrix products", "views", "MUST_SAVE"])
def test_units_composed_by_hand_take_a_policy_too(policy):
    wanted = run_simulated(by_hand, 2, policy, lambda f, _: f)
    same_bits(run_simulated(by_hand, 2, policy, selective), wanted)
    same_bits(run_simulated(by_hand, 2, policy, lambda f, p: fs.remat(selective(f, p))), wanted)
    same_bits(run_simulated(by_hand, 2, policy, lambda f, p: selective(fs.remat(f), p)), wanted)


# --- other collectives in the region --------------------------------------------------------------


def summed(mesh, policy):
    """Return the gradient of a loss whose checkpoint holds an all-reduce, and the kinds of collectives."""
    params = {"w": torch.linspace(-1, 1, 4)}
    plan = fs.make_plan(params, mesh)

    def region(w, x):
        y = torch.sin(w * x)
        return torch.cos((y - fs.pmean(y.clone(), mesh)).clone()).exp()

    unit = fs.reshard(
        fs.unshard(
            lambda leaves, x: (selective(region, policy) if policy else region)(leaves["w"], x).sum(), plan.units[""], mesh
        )
    )
    loss_fn = lambda shards: unit(shards[""], torch.ones(3, 4) + mesh.rank)  # noqa: E731
    with fs.record_events() as events:
        found = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))
    return found, [event.kind for event in events]


@pytest.mark.parametrize("policy", ["memory", "MUST_SAVE", "PREFER_RECOMPUTE"])
def test_an_all_reduce_in_the_region_runs_again_whatever_the_policy_keeps(policy):
    for (found, kinds), (wanted, before) in zip(
        run_simulated(summed, 2, policy), run_simulated(summed, 2, None), strict=True
    ):
        same_bits(found, wanted)
        assert kinds.count("all_reduce") == before.count("all_reduce") + 1


# --- memory ---------------------------------------------------------------------------------------


def kept(place, policy, strategy="full_shard"):
    """Return how many activations one rank keeps between forward and backward."""

    def main(mesh):
        apply, params, buffers = fs.make_functional(build(place, policy, Log()))
        plan = fs.make_plan(params, mesh, units=["blocks.*"], strategy=strategy)
        sharded, left = fs.fully_shard(apply, plan, mesh), []
        rows = 50  # so that no parameter has the size of an activation

        def loss_fn(shards):
            x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH)
            with Alive(lambda nbytes: nbytes == rows * WIDTH * 4) as alive:
                loss = sharded(shards, buffers, x)
            left.append(alive.now().total())
            return loss

        fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))
        return left[0]

    return run_simulated(main, 2)[0]


@pytest.mark.parametrize("place", ["inside", "around"])
def test_a_policy_keeps_more_than_full_recomputation_and_less_than_no_checkpoint(place):
    nothing, full = kept("nothing", None), kept(place, "PREFER_RECOMPUTE")
    products, everything = kept(place, "matrix products"), kept(place, "MUST_SAVE")
    assert products == full + 2 * BLOCKS  # the results of two matrix products of each block
    assert full < products < nothing < everything


def leaves_alive(place, policy, strategy="full_shard", run=run_simulated):
    return [alive for *_, alive in run(step, 2, place, policy, strategy)]


@pytest.mark.parametrize("policy", ["matrix products", "views", "MUST_SAVE"])
def test_no_policy_around_a_unit_keeps_its_gathered_leaves(policy):
    assert leaves_alive("around", policy) == [0, 0]


def test_a_policy_inside_a_unit_keeps_the_gathered_leaves_only_if_it_keeps_views():
    assert leaves_alive("inside", "matrix products") == [0, 0]
    assert leaves_alive("inside", "views") == [BLOCKS, BLOCKS]


# --- torch's own limits ---------------------------------------------------------------------------


def test_a_policy_that_keeps_what_an_operation_then_writes_to_is_refused_by_torch_as_without_shards():
    class Drops(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return selective(lambda x: nn.functional.dropout(self.layer(x).sin(), 0.5), "MUST_SAVE")(x).sum()

    apply, params, buffers = fs.make_functional(Drops())
    plan = fs.make_plan(params, 1)
    said = "Tensor cached during selective activation checkpoint has been mutated"
    loss = Drops()(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=said):
        loss.backward()
    gradient, shards = fs.value_and_grad(fs.fully_shard(apply, plan, fs.Mesh())), fs.shard(params, plan, fs.Mesh())
    with pytest.raises(RuntimeError, match=said):
        gradient(shards, buffers, torch.ones(2, 3))
