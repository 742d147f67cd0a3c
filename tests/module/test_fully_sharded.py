"""``fully_shard``: a module runs unit by unit, and calls do not affect each other."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import funcshard as fs
from tests.core.units import of_module
from tests.module.law import Runs, Watch, calls_on, check_equal, outputs_on, plain_call, sharded_call
from tests.ranks import on_ranks
from tests.storages import Log

WIDTH, WORDS = 8, 11
TOKENS = torch.arange(24).reshape(4, 6).remainder(WORDS)


class Block(nn.Module):
    """A residual block that logs the storage of its weights, so that tests see when it is freed."""

    def __init__(self, log=None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH)
        self.log = log

    def forward(self, x):
        if self.log is not None:
            self.log(self.up.weight)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """An embedding, blocks, and a head that is tied to the embedding."""

    def __init__(self, log=None, blocks=3):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(log) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(cls=Model, *args, seed=0, **kwargs):
    torch.manual_seed(seed)
    return cls(*args, **kwargs)


def loss_of(logits):
    return F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten())


def program(model, tokens):
    return loss_of(model(tokens))


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize(("strategy", "most"), [("full_shard", 1), ("shard_grad_op", 6)])
@on_ranks(2)
def test_only_the_root_and_the_running_unit_are_gathered_at_any_moment(mesh, strategy, most):
    log = Watch()
    functional = fs.make_functional(made(Model, log, blocks=6))
    sharded_call(mesh, functional, TOKENS, ["blocks.*"], program=program, strategy=strategy)
    assert (log.most, log.alive()) == (most, 0)


@pytest.mark.slow
def test_calls_do_not_disturb_each_other():
    def mixed(model, tokens):
        """Call a model twice, and in between in all ways that do not count."""
        first, (shards, buffers) = program(model, tokens), model.args
        with pytest.raises(IndexError):
            model(tokens + WORDS)
        other = torch.utils._pytree.tree_map(lambda shard: (2 * shard.detach()).requires_grad_(), shards)
        with torch.no_grad():
            model.func(other, buffers, tokens)
        program(functools.partial(model.func, other, buffers), tokens).backward()
        return first + program(model, tokens.flip(0))

    net = made()
    functional = fs.make_functional(net)
    losses, grads = plain_call(net, TOKENS, program=lambda model, x: program(model, x) + program(model, x.flip(0)))
    for call in calls_on(2, functional, TOKENS, ["blocks.*"], program=mixed):
        torch.testing.assert_close(call[:2], (losses[0], grads))


def test_threads_share_one_sharded_function():
    functional = fs.make_functional(made())
    expected = functional[0](*functional[1:], TOKENS)

    def program(model, tokens):
        with ThreadPoolExecutor(4) as pool:
            return [*pool.map(lambda _: model(tokens), range(80))]

    ((*outs,),) = outputs_on(1, functional, TOKENS, ["blocks.*"], program=program)
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.usefixtures("without_garbage_collection")
@on_ranks(2)
def test_an_rnn_frees_its_weights_as_soon_as_its_forward_returns(mesh):
    class Noting(nn.LSTM):  # an LSTM keeps a second list of its weights
        def forward(self, x):
            log(self.weight_hh_l0)
            return super().forward(x)[0]

    log, moments, module = Log(), [], made()
    module.blocks = nn.ModuleList(Noting(WIDTH, WIDTH, batch_first=True) for _ in range(2))
    for block in module.blocks:
        # The hooks run outside the unit.
        block.register_forward_pre_hook(lambda *_: moments.append(log.alive()))
        block.register_forward_hook(lambda *_: moments.append(log.alive()))
    sharded_call(mesh, fs.make_functional(module), TOKENS, ["blocks.*"], program=program)
    assert moments == [0] * 8


@pytest.mark.parametrize("remat", [False, True])
def test_a_unit_may_set_weights_of_an_rnn_in_each_of_its_calls(remat):
    def dropping(runs, x):  # as WeightDrop does, whose parameter is not the RNN's
        runs.rnn.weight_hh_l0 = runs.raw * 0.5
        return runs.rnn(x)[0]

    def twice(net, tokens):
        net.model.blocks[0](net.model.embed(tokens))
        return net.model(tokens)

    model = made()
    model.blocks = nn.ModuleList()
    for kind in (nn.LSTM, nn.GRU):
        rnn = kind(WIDTH, WIDTH, batch_first=True)
        raw = nn.Parameter(rnn.weight_hh_l0.detach().clone())
        del rnn._parameters["weight_hh_l0"]
        model.blocks.append(Runs(dropping, rnn=rnn, raw=raw))
    check_equal(Runs(twice, model=model), TOKENS, ["model.blocks.*"], program=program, how={"remat": remat})


def test_a_root_reads_attributes_that_units_set_and_shapes_of_parameters_that_are_not_gathered():
    def noting(runs, x):
        runs.penalty = x.square().mean()
        return runs.block(x)

    def reading(net, tokens):
        weight = net.model.blocks[0].block.up.weight
        extra = torch.ones(weight.shape[1], dtype=weight.dtype, device=weight.device).sum()
        return net.model(tokens) + extra * weight.is_floating_point() + sum(block.penalty for block in net.model.blocks)

    model = made()
    model.blocks = nn.ModuleList(Runs(noting, block=block) for block in model.blocks)
    check_equal(Runs(reading, model=model), TOKENS, ["model.blocks.*"], program=program)


class Skips(Model):
    """A model whose middle block runs only on request, and whose output is used only on request."""

    call = use = True

    def forward(self, tokens, *, use=True):
        x = self.blocks[0](self.embed(tokens))
        if self.call:
            y = self.blocks[1](x)
            x = y if use and self.use else x
        return self.head(self.blocks[2](x))


@pytest.mark.slow
@pytest.mark.parametrize(("call", "use"), [(False, False), (True, False)], ids=["not called", "output unused"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_unit_that_the_loss_does_not_depend_on_is_not_reduced_on_any_rank_and_has_zeros(strategy, call, use):
    net = made(Skips)
    net.call, net.use = call, use
    for result in check_equal(net, TOKENS, ["blocks.*"], program=program, strategy=strategy):
        kinds = [event.kind for event in result.events if event.unit == "blocks.1"]
        assert kinds == ["all_gather"] * (call and strategy == "full_shard")


def test_ranks_that_disagree_whether_the_output_of_a_unit_is_used_get_an_error():
    disagree = lambda model, rank: loss_of(model(TOKENS, use=rank == 0))  # noqa: E731
    with pytest.raises((ValueError, RuntimeError), match=r"different collectives|none can continue"):
        calls_on(2, fs.make_functional(made(Skips)), lambda rank: rank, ["blocks.*"], program=disagree)


def without_marks(params):
    return {name: p.clone() for name, p in params.items()}  # clones lose the attribute that marks a tie


def doubled(params):
    return {name: torch.zeros(*p.shape[:-1], 2 * p.shape[-1]) for name, p in params.items()}


REFUSED = [  # the parameters of the plan, its units, and the error
    (doubled, [], r"parameter 'embed\.weight' has shape \(11, 16\) in the plan and \(11, 8\) in the module"),
    (lambda params: fs.make_functional(made(Model, None, 2))[1], [], r"missing: \['blocks\.2\.down\.bias', .*: nothing"),
    (dict, ["blocks"], r"unit 'blocks' is a ModuleList, which has no forward of its own"),
    (dict, ["blocks.0.up.weight"], r"unit 'blocks\.0\.up\.weight' is no module of this model"),
    (
        without_marks,
        ["embed"],
        r"'embed\.weight' is tied to 'head\.weight', which .* outside unit 'embed' .* make_functional returned",
    ),
]


@pytest.mark.parametrize(("planned", "units", "words"), REFUSED)
def test_a_plan_that_does_not_fit_the_module_is_refused(planned, units, words):
    apply, params, _ = fs.make_functional(made())
    with pytest.raises(ValueError, match=words):
        fs.fully_shard(apply, fs.make_plan(planned(params), fs.Mesh(), units=units), fs.Mesh())


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_one_tensor_that_is_the_gradient_of_two_units_is_reduced_for_each(strategy):
    first, second = (Runs(lambda unit: unit.leaf, leaf=nn.Parameter(torch.arange(4.0))) for _ in range(2))
    net = Runs(lambda m, x: (m.first() + m.second()) * x, first=first, second=second)
    check_equal(net, lambda rank: torch.tensor(rank + 1.0), ["*"], {"replicate": 2, "shard": 2}, strategy=strategy)


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_module_may_use_a_transform_inside_its_forward(strategy):
    def force(net, x):  # the negative gradient of an energy
        return -torch.func.grad(lambda x: net.last(torch.tanh(net.first(x))).square().sum())(x)

    net = Runs(force, first=nn.Linear(4, 4), last=nn.Linear(4, 4))
    check_equal(net, torch.linspace(-1, 1, 4), ["*"], strategy=strategy)


def test_a_parameter_that_forward_freezes_outside_its_unit_is_told():
    def freezes(net, x):
        net.second.weight.requires_grad_()  # as it is
        net.first.weight.requires_grad_(False)
        return net.second(net.first(x))

    net = Runs(freezes, first=nn.Linear(3, 3), second=nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match=r"forward set requires_grad=False of parameter 'first.weight', .*: freeze it before"
    ):
        check_equal(net, torch.ones(2, 3), ["*"])


@on_ranks(2)
def test_backward_begins_at_the_output_that_was_computed_last(mesh):
    def two_outputs(net, x):
        early = net.first(x)
        late = net.last(early) * 2
        if late.requires_grad:  # backward is then between the late output and its unit
            late.register_hook(lambda _: started.append([event.unit for event in events]))
        return early * 1, late.tanh()

    started, net = [], Runs(two_outputs, first=nn.Linear(4, 4), last=nn.Linear(4, 4))
    _, sharded, shards = of_module(mesh, net, ["first", "last"])
    for _ in range(2):  # the first call learns the order
        with fs.record_events() as events:
            fs.value_and_grad(lambda s: sharded(s, {}, torch.ones(2, 4))[1].sum())(shards)
    assert started[-1] == ["first", "last", "last"]
