"""Methods of a unit's module besides ``forward`` gather the unit if ``fully_shard`` is told their names."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.ranks import run_ranks, run_simulated

WIDTH = 4


class Coder(nn.Module):
    """An autoencoder whose methods share a weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def encode(self, x, *, scale=1.0):
        return torch.tanh(self.inner(x)) * scale

    def decode(self, x):
        return self.outer(x) @ self.inner.weight

    def both(self, x):
        return self.decode(self.encode(x)) + self(x)

    def again(self, x):
        return checkpoint(self.decode, checkpoint(self.encode, x, use_reentrant=False), use_reentrant=False)

    def forward(self, x):
        return self.decode(self.encode(x))

    @staticmethod
    def size():
        return WIDTH

    @property
    def width(self):
        return WIDTH


class Model(nn.Module):
    """Calls methods of its coder in some way, between two layers."""

    def __init__(self, way):
        super().__init__()
        self.coder, self.head, self.way = Coder(), nn.Linear(WIDTH, 1), way

    def forward(self, x):
        return self.head(self.way(self.coder, x))

    def encoded(self, x):
        return self.coder.encode(x, scale=2.0)


WAYS = {  # name -> the calls, and how many times they gather the unit in forward
    "one method": (lambda coder, x: coder.encode(x), 1),
    "one after another": (lambda coder, x: coder.decode(coder.encode(x, scale=0.5)), 2),
    "a method and forward": (lambda coder, x: coder(x) + coder.encode(x), 2),
    "a method of methods and of forward": (lambda coder, x: coder.both(x), 1),
    "checkpoints inside": (lambda coder, x: coder.again(x), 1),
    "a checkpoint around": (lambda coder, x: checkpoint(coder.both, x, use_reentrant=False), 1),
}
METHODS = {"coder": ["encode", "decode", "both", "again"]}


def made(way):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        net = Model(WAYS[way][0])
    return net, *fs.make_functional(net)


def batch_of(rank):
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).roll(rank, 0)


def whole_grads(net, ranks):
    sum(net(batch_of(rank).requires_grad_()).square().mean() for rank in range(ranks)).div(ranks).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize(
    "options", [{}, {"strategy": "shard_grad_op"}, {"remat": ["coder"]}, {"strategy": "no_shard"}], ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_methods_give_the_unsharded_gradients_and_gather_as_predicted(way, options):
    net, apply, params, buffers = made(way)
    plan_options, remat = {k: v for k, v in options.items() if k != "remat"}, options.get("remat", [])

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["coder"], **plan_options)
        sharded = fs.fully_shard(apply, plan, mesh, methods=METHODS, remat=remat)
        shards, x = fs.shard(params, plan, mesh), batch_of(mesh.rank).requires_grad_()
        for _ in range(2):  # the first call learns the order
            with fs.record_events() as events:
                loss_fn = lambda s: sharded(s, buffers, x).square().mean()  # noqa: E731
                _, grads = fs.value_and_grad(loss_fn)(shards)
        recomputed = ["coder"] if remat or "checkpoint" in way else []
        if way != "checkpoints inside":  # where backward needs no leaf outside of checkpoints
            assert tuple(events) == fs.predict_events(plan, sharded.schedule, recomputed=recomputed)
        with torch.no_grad(), fs.record_events() as forward:
            sharded(shards, buffers, batch_of(mesh.rank))
        return fs.gather(grads, plan, mesh), Counter(event.unit for event in forward)

    expected = whole_grads(net, 2)
    for grads, gathers in fs.simulate(main, 2):
        torch.testing.assert_close(grads, expected)
        uses = {"shard_grad_op": 1, "no_shard": 0}.get(plan_options.get("strategy"), WAYS[way][1])
        assert gathers["coder"] == uses


def test_without_its_name_a_method_that_reads_a_leaf_is_an_error_that_says_so():
    _, apply, params, buffers = made("one method")

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["coder"])
        with pytest.raises(ValueError, match=r"'coder\.inner\.weight' was read .* name that in fully_shard\(.*, methods="):
            fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), buffers, batch_of(0))

    run_simulated(main, 2)


def test_a_method_of_the_whole_model_calls_methods_of_units():
    net, apply, params, buffers = made("one method")

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["coder"])
        encoded = fs.fully_shard(apply.method("encoded"), plan, mesh, methods={"coder": ["encode"]})
        return encoded(fs.shard(params, plan, mesh), buffers, batch_of(0)).detach()

    for found in run_simulated(main, 2):
        torch.testing.assert_close(found, net.encoded(batch_of(0)).detach())


def test_methods_cast_their_inputs_as_forward_does():
    _, apply, params, buffers = made("one method")
    precision = fs.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=fs.wrap.Units(["coder"], {"coder": {"precision": precision}}))
        encoded = fs.fully_shard(apply.method("encoded"), plan, mesh, methods={"coder": ["encode"]})
        return encoded(fs.shard(params, plan, mesh), buffers, batch_of(0)).dtype

    assert run_simulated(main, 2) == [torch.bfloat16] * 2


def test_methods_run_under_transforms_and_beside_compiled_forwards():
    net, apply, params, buffers = made("a method and forward")

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["coder"])
        sharded = fs.fully_shard(apply, plan, mesh, methods=METHODS, compiler=lambda f: f)
        shards = fs.shard(params, plan, mesh)
        loss_fn = lambda s: sharded(s, buffers, batch_of(mesh.rank)).square().mean()  # noqa: E731
        return fs.gather(torch.func.grad(loss_fn)(shards), plan, mesh)

    expected = {name: 2 * grad for name, grad in whole_grads(net, 2).items()}  # torch.func adds over ranks
    for grads in fs.simulate(main, 2):
        torch.testing.assert_close(grads, expected)


def test_methods_of_the_modules_of_a_group_gather_the_group_once():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Coder(), Coder()

        def forward(self, x):
            return self.second.decode(self.first.encode(x))

    net = Pair()
    apply, params, buffers = fs.make_functional(net)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=[["first", "second"]])
        sharded = fs.fully_shard(apply, plan, mesh, methods={"first": ["encode"], "second": ["decode"]})
        with torch.no_grad(), fs.record_events() as events:
            return sharded(fs.shard(params, plan, mesh), buffers, batch_of(0)), len(events)

    for found, gathers in run_simulated(main, 2):
        torch.testing.assert_close(found, net(batch_of(0)).detach())
        assert gathers == 1


def test_a_call_changes_no_class_and_no_module():
    net, apply, params, buffers = made("one method")
    before = Coder.encode

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["coder"])
        sharded = fs.fully_shard(apply, plan, mesh, methods=METHODS)
        sharded(fs.shard(params, plan, mesh), buffers, batch_of(0))

    run_simulated(main, 2)
    assert Coder.encode is before
    assert type(net.coder) is Coder
    torch.testing.assert_close(apply(params, buffers, batch_of(0)), net(batch_of(0)))


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        (["encode"], TypeError, r"must be a dictionary from units to lists of method names; found \['encode'\]"),
        (
            {"coder": "encode"},
            TypeError,
            r"the methods of 'coder' must be a list of names; found 'encode': write \['encode'\]",
        ),
        ({"coder": 1}, TypeError, r"the methods of 'coder' must be a list of names; found 1"),
        ({"": ["encoded"]}, ValueError, r"found ''; .* call fully_shard\(apply\.method\(name\), plan, mesh\)"),
        (
            {"head": ["forward"]},
            ValueError,
            r"must name units of the plan .*; found 'head'; its units are \['coder'\]: make",
        ),
        ({"coder": ["encodes"]}, ValueError, r"found 'encodes'; leave it out, or name one of .*'decode', 'encode'"),
        ({"coder": ["forward"]}, ValueError, r"besides forward and those that Python calls; found 'forward'"),
        ({"coder": ["__call__"]}, ValueError, r"found '__call__'; leave it out"),
        ({"coder": ["size"]}, ValueError, r"found 'size'"),
        ({"coder": ["width"]}, ValueError, r"found 'width'"),
        ({"coder": [1]}, ValueError, r"found 1"),
    ],
)
def test_what_is_no_method_of_a_unit_is_refused(methods, error, message):
    _, apply, params, _ = made("one method")
    plan = fs.make_plan(params, 1, units=["coder"])
    with pytest.raises(error, match=message):
        fs.fully_shard(apply, plan, fs.Mesh(), methods=methods)


def test_a_unit_without_a_forward_runs_by_its_methods_and_is_refused_without_them():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def encode(self, x):
            return self.inner(x)

        def decode(self, x):
            return self.outer(x)

    net = Model(lambda coder, x: coder.decode(coder.encode(x)))
    net.coder = Halves()
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, 2, units=["coder"])

    def main(mesh, methods):
        sharded = fs.fully_shard(apply, plan, mesh, methods=methods)
        loss_fn = lambda s: sharded(s, buffers, batch_of(mesh.rank)).square().mean()  # noqa: E731
        with fs.record_events() as events:
            _, grads = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))
        assert tuple(events) == fs.predict_events(plan, sharded.schedule)
        return fs.gather(grads, plan, mesh)

    for grads in fs.simulate(lambda mesh: main(mesh, {"coder": ["encode", "decode"]}), 2):
        torch.testing.assert_close(grads, whole_grads(net, 2))
        net.zero_grad()
    for methods in (None, {"coder": []}):
        with pytest.raises(ValueError, match=r"is a Halves, which has no forward of its own; .* in fully_shard\(methods="):
            fs.simulate(lambda mesh, methods=methods: main(mesh, methods), 2)


def test_generate_of_a_hugging_face_model_gathers_its_layers_for_each_token():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=63, pad_token_id=0)).eval()
        prompt = torch.randint(1, 60, (2, 5))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    apply, params, buffers = fs.make_functional(net)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["transformer.h.*"])
        generate = fs.fully_shard(apply.method("generate"), plan, mesh)
        with fs.record_events() as events:
            tokens = generate(fs.shard(params, plan, mesh), buffers, prompt, **options)
        return tokens, Counter(event.unit for event in events)

    for tokens, gathers in fs.simulate(main, 2):
        assert torch.equal(tokens, net.generate(prompt, **options))
        assert gathers == {"": 1, "transformer.h.0": 4, "transformer.h.1": 4}


def beside_fsdp2(mesh):
    """Return the gradients of a loss of two methods, of FSDP2 and of this library."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    net, apply, params, buffers = made("one after another")
    plan = fs.make_plan(params, mesh, units=["coder"])
    sharded = fs.fully_shard(apply, plan, mesh, methods={"coder": ["encode", "decode"]})
    loss_fn = lambda s: sharded(s, buffers, batch_of(mesh.rank)).square().mean()  # noqa: E731
    _, grads = fs.accumulate(lambda s, _: loss_fn(s), 1, reduce="once")(fs.shard(params, plan, mesh), torch.zeros(1))
    fully_shard(net.coder)
    fully_shard(net)
    for name in ("encode", "decode"):
        register_fsdp_forward_method(net.coder, name)
    net(batch_of(mesh.rank)).square().mean().backward()
    return fs.gather(grads, plan, mesh), {name: p.grad.full_tensor() for name, p in net.named_parameters()}


@pytest.mark.slow
def test_methods_have_the_gradients_of_register_fsdp_forward_method_to_the_bit():
    for ours, theirs in run_ranks(beside_fsdp2, 2):
        torch.testing.assert_close(ours, {name: theirs[name] for name in ours}, rtol=0, atol=0)
