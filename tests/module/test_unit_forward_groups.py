"""Units of several modules: gathered for the first of them, freed after the last, reduced once."""

import contextlib
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.ranks import run_ranks, run_simulated
from tests.storages import Log

WIDTH, WORDS = 6, 11
GRID = {"replicate": 2, "shard": 2}
NAME = "embed+norm+head"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))


class Model(nn.Module):
    """A language model whose forward runs as its ``way`` says, and logs a weight of its group."""

    def __init__(self, way="once", tied=False, log=None):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(WORDS, WIDTH), Norm(log), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.way, self.log = way, log
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        if self.log is not None:
            self.norm(torch.zeros(1, WIDTH, dtype=torch.float64))  # the first of its group, so that there is one to log
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.way != "embed without gradients"):
            x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.log is not None:
            self.log.between = self.log.alive()
        if self.way == "no head":
            return x
        if self.way == "twice":
            x = self.norm(x) + self.embed(tokens)
        if self.way == "again":
            return self.head(self.norm(x)) + self.head(self.norm(self.embed(tokens)))
        if self.way == "checkpoint":
            return checkpoint(lambda y: self.head(self.norm(y)), x, use_reentrant=False)
        if self.way == "first in checkpoint":
            return self.head(self.norm(x + checkpoint(self.embed, tokens, use_reentrant=False)))
        if self.way == "raises":
            raise KeyError("from forward")
        return self.head(x) if self.log is not None else self.head(self.norm(x))


class Norm(nn.LayerNorm):
    def __init__(self, log):
        super().__init__(WIDTH)
        self.log = log

    def forward(self, x):
        if self.log is not None:
            self.log(self.weight)
        return super().forward(x)


WAYS = ("once", "no head", "twice", "again", "checkpoint", "first in checkpoint", "embed without gradients")


def made(**options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Model(**options).double()


@functools.cache
def data():
    return torch.randint(0, WORDS, (8, 5), generator=torch.Generator().manual_seed(1))


def whole(**options):
    net = made(**options)
    loss = net(data()).square().mean()
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in net.named_parameters()}


def train(mesh, units, options, plan_options, **how):
    """Return loss, gradients by name, the events of the second call, and the sharded function."""
    apply, params, buffers = fs.make_functional(made(**options))
    plan = fs.make_plan(params, mesh, units=units, **plan_options)
    sharded = fs.fully_shard(apply, plan, mesh, **how)
    step = fs.value_and_grad(lambda shards, x: sharded(shards, buffers, x).square().mean(), mesh=mesh)
    shards, mine = fs.shard(params, plan, mesh), data()[mesh.rank :: mesh.world_size]
    for _ in range(2):
        with fs.record_events() as events:
            loss, grads = step(shards, mine)
    zeros = {u: {b: torch.zeros_like(shards[u][b]) if g is None else g for b, g in own.items()} for u, own in grads.items()}
    return fs.pmean(loss, mesh), fs.gather(zeros, plan, mesh), tuple(events), plan, sharded.schedule


def check(world, units, options, **plan_options):
    loss, grads = whole(**options)
    found = run_simulated(lambda mesh: train(mesh, units, options, plan_options), world)
    for mean, own, _, _, _ in found:
        torch.testing.assert_close(mean, loss)
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], torch.zeros_like(own[name]) if grad is None else grad)
    return found


@pytest.mark.parametrize("world", [2, 4, GRID])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_group_trains_as_unsharded_and_its_collectives_are_the_predicted_ones(world, strategy):
    for tied in (False, True):
        found = check(world, [["embed", "norm", "head"], "blocks.*"], {"tied": tied}, strategy=strategy)
        for _, _, events, plan, schedule in found:
            assert events == fs.predict_events(plan, schedule)
            kinds = [event.kind for event in events if event.unit == NAME and event.axis == "shard"]
            gathers = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0}[strategy]
            reduction = "all_reduce" if strategy == "no_shard" else "reduce_scatter"
            assert kinds == ["all_gather"] * gathers + [reduction]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_modules_of_a_group_are_called_in_any_way(way, strategy):
    found = check(2, ["blocks.*", ["embed", "norm", "head"]], {"way": way}, strategy=strategy)
    if way in ("once", "no head", "twice", "again"):
        assert all(events == fs.predict_events(plan, schedule) for *_, events, plan, schedule in found)


def test_a_group_gives_the_bits_of_separate_units_with_fewer_collectives():
    apart = check(2, ["embed", "norm", "head", "blocks.*"], {})
    joined = check(2, [["embed", "norm", "head"], "blocks.*"], {})
    for (loss, grads, events, *_), (loss_2, grads_2, events_2, *_) in zip(apart, joined, strict=True):
        assert torch.equal(loss, loss_2)
        assert all(torch.equal(grads[name], grads_2[name]) for name in grads)
        assert len(events_2) == len(events) - 5  # nothing needs the embedding alone in backward


@pytest.mark.parametrize("prefetch", ["pre", "post", None])
def test_a_group_is_gathered_ahead_as_the_schedule_says(prefetch):
    units = [["blocks.0.norm", "blocks.2.up", "head"], "blocks.*", "embed"]

    def main(mesh):
        plan = fs.make_plan(fs.make_functional(made())[1], mesh, units=units)
        order = ["embed", "blocks.0", "blocks.0.norm+blocks.2.up+head", "blocks.1", "blocks.2"]
        schedule = fs.make_schedule(plan, order, backward_prefetch=prefetch, limit=2)
        *_, events, plan, learned = train(mesh, units, {}, {}, schedule=schedule)
        assert events == fs.predict_events(plan, learned)

    run_simulated(main, 2)


@pytest.mark.parametrize("remat", [[], ["norm"], [NAME]], ids=str)
@pytest.mark.parametrize("way", ["once", "raises", "no head"])
def test_a_group_is_held_between_its_modules_and_free_after_the_last_of_them(way, remat):
    def main(mesh):
        log = Log()
        apply, params, buffers = fs.make_functional(made(way=way, log=log))
        plan = fs.make_plan(params, mesh, units=[["embed", "norm", "head"], "blocks.*"])
        sharded, shards = fs.fully_shard(apply, plan, mesh, remat=remat), fs.shard(params, plan, mesh)
        out = None
        with contextlib.suppress(KeyError):
            out = sharded(shards, buffers, data())
        after = log.alive()
        del out
        return log.between, after

    assert run_simulated(main, 2) == [(1, 0)] * 2


def transformed(mesh, units):
    apply, params, buffers = fs.make_functional(made())
    plan = fs.make_plan(params, mesh, units=units)
    sharded = fs.fully_shard(apply, plan, mesh)
    shards = fs.shard(params, plan, mesh)
    grads = torch.func.grad(lambda s: sharded(s, buffers, data()).square().mean())(shards)
    with torch.no_grad():
        quiet = sharded(shards, buffers, data())
    with torch.inference_mode():
        silent = sharded(shards, buffers, data())
    return fs.gather(grads, plan, mesh), quiet, silent.clone()


def test_a_group_runs_under_transforms_and_without_gradients():
    apart = run_simulated(transformed, 2, ["embed", "norm", "head", "blocks.*"])
    joined = run_simulated(transformed, 2, [["embed", "norm", "head"], "blocks.*"])
    for (grads, *outputs), (grads_2, *outputs_2) in zip(apart, joined, strict=True):
        assert all(torch.equal(grads[name], grads_2[name]) for name in grads)
        assert all(torch.equal(one, other) for one, other in zip(outputs, outputs_2, strict=True))


def test_a_call_inside_a_transform_gathers_a_group_once():
    def main(mesh):
        apply, params, buffers = fs.make_functional(made())
        plan = fs.make_plan(params, mesh, units=[["embed", "norm", "head"], "blocks.*"])
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        with fs.record_events() as events:
            torch.func.grad(lambda s: sharded(s, buffers, data()).square().mean())(shards)
        return [event.kind for event in events if event.unit == NAME]

    assert run_simulated(main, 2) == [["all_gather", "reduce_scatter"]] * 2


@pytest.mark.parametrize(
    ("remat", "recomputed"),
    [(["norm"], [NAME]), (["embed", "head"], [NAME]), (True, [NAME, "blocks.0", "blocks.1", "blocks.2"])],
    ids=["one", "two", "all"],
)
@pytest.mark.parametrize("way", ["once", "twice", "again", "checkpoint"])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_modules_of_a_group_are_computed_again_from_leaves_that_are_gathered_once(strategy, way, remat, recomputed):
    units = ["blocks.*", ["embed", "norm", "head"]]
    plain = check(2, units, {"way": way}, strategy=strategy)
    again = run_simulated(lambda mesh: train(mesh, units, {"way": way}, {"strategy": strategy}, remat=remat), 2)
    for (loss, grads, events, *_), (loss_2, grads_2, events_2, plan, schedule) in zip(plain, again, strict=True):
        assert torch.equal(loss, loss_2)
        assert all(torch.equal(grads[name], grads_2[name]) for name in grads)
        if way == "checkpoint":  # the modules inside it gather the group for themselves
            continue
        assert [event for event in events_2 if event.unit == NAME] == [event for event in events if event.unit == NAME]
        assert events_2 == fs.predict_events(plan, schedule, recomputed=recomputed)


def test_under_a_transform_modules_of_a_group_are_computed_again_each_by_itself():
    def main(mesh, remat):
        apply, params, buffers = fs.make_functional(made())
        plan = fs.make_plan(params, mesh, units=[["embed", "norm", "head"], "blocks.*"])
        sharded, shards = fs.fully_shard(apply, plan, mesh, remat=remat), fs.shard(params, plan, mesh)
        grads = torch.func.grad(lambda s: sharded(s, buffers, data()).square().mean())(shards)
        return fs.gather(grads, plan, mesh)

    torch.testing.assert_close(run_simulated(main, 2, True), run_simulated(main, 2, ()))


HOW = {
    "remat of a unit around a module of it": {"remat": ["blocks.0"]},
    "compiled": {"compiler": lambda forward: lambda *args, **kwargs: forward(*args, **kwargs)},
}


@pytest.mark.parametrize("how", HOW)
def test_a_group_runs_with_each_option_of_fully_shard(how):
    units = ["blocks.*", ["embed", "blocks.0.norm", "head"]]
    loss, grads = whole()
    for mean, own, *_ in run_simulated(lambda mesh: train(mesh, units, {}, {}, **HOW[how]), 2):
        torch.testing.assert_close(mean, loss)
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], grad)


def test_a_group_computes_in_its_precision_and_ignored_classes_leave_it():
    precision = fs.MixedPrecision(param_dtype=torch.float32, ignored_classes=(nn.LayerNorm,))

    def main(mesh):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return train(mesh, [["embed", "norm", "head"], "blocks.*"], {}, {"precision": precision})

    loss, grads = whole()
    for mean, own, events, plan, schedule in run_simulated(main, 2):
        assert plan.units["norm"].full_precision
        assert plan.units[NAME].members == ("embed", "head")
        assert events == fs.predict_events(plan, schedule)
        assert {event.dtype for event in events if event.unit == NAME} == {"float32"}
        torch.testing.assert_close(mean.double(), loss, rtol=1e-5, atol=1e-5)
        for name, grad in grads.items():
            torch.testing.assert_close(own[name], grad, rtol=1e-4, atol=1e-5)


def test_state_of_a_group_has_the_modules_names_and_loads_into_a_plan_without_groups(tmp_path):
    net = made()
    apply, params, buffers = fs.make_functional(net)

    grouped = fs.make_plan(params, 2, units=[["embed", "norm", "head"], "blocks.*"])
    plain = fs.make_plan(params, 2, units=["blocks.*"])

    def train_on(mesh, state):
        sharded = fs.fully_shard(apply, grouped, mesh)

        def loss_fn(shards, buffers, x):
            return sharded(shards, buffers, x).square().mean()

        optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-2)
        step = fs.make_train_step(loss_fn, optimizer, grouped, mesh, donate=False)
        return step(step.init(fs.shard(params, grouped, mesh), buffers) if state is None else state[mesh.rank], data())[0]

    def names(mesh, state):
        return fs.to_state_dict(state[mesh.rank].shards, grouped, mesh)

    first = run_simulated(train_on, 2, None)
    back = fs.replan(fs.replan(first, grouped, plain), plain, grouped)
    one, other = (run_simulated(names, 2, run_simulated(train_on, 2, state))[0] for state in (first, back))
    assert one.keys() == net.state_dict().keys()
    assert all(torch.equal(one[name], other[name]) and not torch.equal(one[name], net.state_dict()[name]) for name in one)

    def files(mesh):
        fs.save(tmp_path, first[mesh.rank], grouped, mesh)
        loaded = fs.restore(tmp_path, plain, mesh)
        same = fs.gather(loaded.shards, plain, mesh), fs.gather(first[mesh.rank].shards, grouped, mesh)
        assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])

    run_simulated(files, 2)


WRONG = {
    "a list in it": (
        [["blocks", "head"]],
        {},
        r"unit 'blocks\+head', its module 'blocks', is a ModuleList, which has no forward of its own",
    ),
    "a parameter in it": (
        [["embed.weight", "head"]],
        {},
        r"unit 'embed.weight\+head', its module 'embed.weight', is no mod",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_groups_are_errors_of_fully_shard(case):
    units, how, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        run_simulated(lambda mesh: train(mesh, units, {}, {}, **how), 2)


def beside_fsdp2(mesh):
    """Return loss and gradients of this library and of FSDP2 on the same processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    loss, grads, *_ = train(mesh, [["embed", "norm", "head"], "blocks.*"], {"tied": True}, {})
    net = made(tied=True)
    ranks = init_device_mesh("cpu", (mesh.world_size,))
    for block in net.blocks:
        fully_shard(block, mesh=ranks)
    fully_shard([net.embed, net.norm, net.head], mesh=ranks)
    fully_shard(net, mesh=ranks)
    own = net(data()[mesh.rank :: mesh.world_size]).square().mean()
    own.backward()
    theirs = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    return loss, fs.pmean(own.detach(), mesh), grads, theirs


@pytest.mark.slow
def test_on_processes_a_group_trains_as_that_of_fsdp2():
    for loss, their_loss, grads, theirs in run_ranks(beside_fsdp2, 2):
        torch.testing.assert_close(loss, their_loss)
        assert grads.keys() == theirs.keys()
        for name in grads:
            torch.testing.assert_close(grads[name], theirs[name])
