"""``fully_shard``: a module runs unit by unit, and calls do not affect each other."""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.core.units import of_module
from tests.module.law import Runs, Watch, calls_on, check_equal, outputs_on, plain_call, same_bits, sharded_call
from tests.ranks import on_ranks, run_ranks, run_simulated
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
    (dict, [["blocks", "embed"]], r"unit 'blocks\+embed', its module 'blocks', is a ModuleList, which has no forward of"),
    (dict, [["blocks.0.up.weight", "blocks.1"]], r"unit '.*\+blocks\.1', its module 'blocks\.0\.up\.weight', is no module"),
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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_model_may_return_a_nested_tensor():
    """torch's error about its sizes came from a check of ours."""
    net = Runs(lambda net, x: torch.nested.as_nested_tensor([net.layer(x)]), layer=nn.Linear(3, 3))
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, 1, units=["layer"])
    sharded, shards = fs.fully_shard(apply, plan, fs.Mesh()), fs.shard(params, plan, fs.Mesh())
    loss_fn = lambda shards, x: sharded(shards, buffers, x).unbind()[0].sin().sum()  # noqa: E731
    loss, _ = fs.value_and_grad(loss_fn, mesh=fs.Mesh())(shards, torch.ones(2, 3))
    assert torch.equal(loss, net.layer(torch.ones(2, 3)).sin().sum())


def freezes(net, x):
    net.second.weight.requires_grad_(net.second.weight.requires_grad)  # as it is
    net.first.weight.requires_grad_(False)
    return net.second(net.first(x))


def views_pairs_as_complex(net, x):
    return net.first(x) * torch.view_as_complex(net.pairs).abs()


@pytest.mark.parametrize(
    ("run", "in_units", "advice"),
    [
        (freezes, True, "forward set requires_grad=False of parameter 'first.weight', .*: freeze it before"),
        (freezes, False, "forward set requires_grad of a computed tensor; .*: freeze it before"),
        (views_pairs_as_complex, False, "parameters start anywhere in the buffer .*: view its clone"),
    ],
)
def test_what_parameters_of_the_module_allow_and_leaves_of_a_unit_do_not_is_told(run, in_units, advice):
    parts = {"first": nn.Linear(3, 3), "second": nn.Linear(3, 3)}
    net = Runs(run, alpha=nn.Parameter(torch.ones(())), pairs=nn.Parameter(torch.ones(3, 2)), **parts)
    with pytest.raises((ValueError, RuntimeError), match=advice):
        check_equal(net, torch.ones(2, 3), list(parts) if in_units else ())


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


# --- a plan that trains what a module froze, and copies -------------------------------------------


def net_of(frozen: str) -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    net.requires_grad_(frozen == "none")
    if frozen == "first layer":
        net[2].requires_grad_()
    return net


# name -> (what is frozen, change of the params, how many frozen ones the plan trains unasked)
CASTS: dict[str, tuple[str, Any, int]] = {
    "unchanged": ("all", lambda p: p, 0),
    "cast, all frozen": ("all", lambda p: p.to(torch.float64), 4),
    "cast, some frozen": ("first layer", lambda p: p.to(torch.float64), 0),  # .to keeps requires_grad of the others
    "detached, some frozen": ("first layer", torch.Tensor.detach, 2),
    "detached, none frozen": ("none", torch.Tensor.detach, 0),
}


@pytest.mark.parametrize(("frozen", "change", "lost"), CASTS.values(), ids=CASTS)
def test_fully_shard_warns_if_the_plan_trains_everything_although_the_module_was_frozen(frozen, change, lost) -> None:
    apply, params, _ = fs.make_functional(net_of(frozen))
    plan = fs.make_plan({name: change(value) for name, value in params.items()}, fs.Mesh())
    words = (
        f"the plan trains every parameter, but {lost} of them, such as '0.bias', required no gradient.*cast the module "
        r"before make_functional, or call module.requires_grad_\(\)"
    )
    with pytest.warns(UserWarning, match=words) if lost else contextlib.nullcontext([]) as said:
        fs.fully_shard(apply, plan, fs.Mesh())  # warnings are errors here
    assert [warning.filename for warning in said] == [__file__] * bool(lost)


def test_a_plan_that_trains_some_of_what_was_frozen_is_a_choice() -> None:
    apply, params, _ = fs.make_functional(net_of("all"))
    params["2.weight"].requires_grad_()
    fs.fully_shard(apply, fs.make_plan(params, fs.Mesh()), fs.Mesh())  # warnings are errors here


def test_copies_of_a_sharded_function_are_the_function_itself_and_a_pickle_says_what_can_be_pickled() -> None:
    apply, params, _ = fs.make_functional(net_of("none"))
    f = fs.fully_shard(apply, fs.make_plan(params, fs.Mesh()), fs.Mesh())
    assert copy.copy(f) is copy.deepcopy({"f": [f]})["f"][0] is f
    words = "it holds the connections of its mesh: .* with fs.save, or pickle the function of make_func"
    with pytest.raises(TypeError, match=words):
        pickle.dumps(f)


# --- parameters outside the plan: each rank has its own number of experts -------------------------

OWN = ["blocks.*.experts.**"]
UNITS = {"blocks": ["blocks.*"], "the root alone": [], "a unit inside": ["blocks.*", "blocks.0.dense"]}
EXPERTS = {0: 1, 1: 3, 2: 0, 3: 2}  # of each rank


def experts(number):
    def forward(m, x):
        y = m.scale * torch.tanh(m.dense(x))
        return x + sum((torch.tanh(expert(y)) for expert in m.experts), y)

    several = nn.ModuleList(nn.Linear(4, 4) for _ in range(number))
    return Runs(forward, dense=nn.Linear(4, 4), experts=several, scale=torch.full((4,), 0.5))


def model_of(rank):
    """Return the model of one rank: all ranks share everything but the experts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net = nn.ModuleDict({"blocks": nn.Sequential(experts(0), experts(0)), "head": nn.Linear(4, 1)})
        torch.manual_seed(10 + rank)
        for block in net["blocks"]:
            block.experts.extend(nn.Linear(4, 4) for _ in range(EXPERTS[rank]))
    return Runs(lambda m, x: m.head(m.blocks(x)), **net).double()


def parts_of(rank):
    """Return the function of a rank, the parameters that all ranks share, its own ones, and the buffers."""
    apply, params, buffers = fs.make_functional(model_of(rank))
    own = {name: value for name, value in params.items() if ".experts." in name}
    return apply, {name: value for name, value in params.items() if name not in own}, own, buffers


def rows_of(rank):
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def step_with_own(mesh, units, strategy="full_shard"):
    """Return the gradients of the plan's leaves by name, and those of this rank's own experts."""
    apply, shared, own, buffers = parts_of(mesh.rank)
    plan = fs.make_plan(shared, mesh, units=units, strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh, ignored_params=OWN)

    def loss_fn(trained, x):
        shards, own = trained
        return sharded(shards, {**buffers, **own}, x).square().mean()

    for _ in range(2):
        with fs.record_events() as events:
            trained = fs.shard(shared, plan, mesh), own
            _, (grads, own_grads) = fs.value_and_grad(loss_fn, mesh=mesh)(trained, rows_of(mesh.rank))
    assert tuple(events) == fs.predict_events(plan, sharded.schedule)
    return fs.gather(grads, plan, mesh), own_grads


def check_own(results):
    """Check the gradients of the mean over ranks of the losses."""
    world = len(results)
    alone = [plain_call(model_of(rank), rows_of(rank))[1] for rank in range(world)]
    for mine, (grads, own_grads) in zip(alone, results, strict=True):
        torch.testing.assert_close(grads, {name: sum(each[name] for each in alone) / world for name in grads})
        torch.testing.assert_close(own_grads, {name: mine[name] / world for name in own_grads})
        assert {*grads, *own_grads} == mine.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("units", "strategy"), [("blocks", "no_shard"), ("the root alone", "shard_grad_op"), ("a unit inside", "full_shard")]
)
def test_ranks_train_experts_of_another_number_outside_the_plan(units, strategy):
    check_own(run_simulated(lambda mesh: step_with_own(mesh, UNITS[units], strategy), 4))


@pytest.mark.slow
def test_processes_train_experts_of_another_number_outside_the_plan():
    check_own(run_ranks(step_with_own, 2, UNITS["blocks"]))


@on_ranks(4)
def test_a_checkpoint_keeps_the_ignored_parameters_of_each_rank(mesh, tmp_path):
    _, shared, own, _ = parts_of(mesh.rank)
    plan = fs.make_plan(shared, mesh, units=["blocks.*"])
    state = {"shards": fs.shard(shared, plan, mesh), "own": fs.PerRank(own)}
    fs.save(tmp_path, state, plan, mesh)
    back = fs.restore(tmp_path, plan, mesh)["own"].value
    same_bits(back, own)


WRONG = [
    (["blocks.*.expert.**"], (), ValueError, r"missing: \['blocks.0.experts.*, or name parameters that it should lack"),
    ([1], (), TypeError, r"expected string or bytes-like object, got 'int'"),
    (OWN, {}, ValueError, r"hold a tensor of shape \(4, 4\) for 'blocks.0.experts.0.weight', .* found nothing: pass"),
    (OWN, torch.zeros(2), ValueError, r"shape \(4, 4\) for .*found a tensor of shape \(2,\): pass \{\*\*buffers"),
]


@pytest.mark.parametrize(("ignored", "given", "error", "words"), WRONG)
def test_mistakes_with_ignored_parameters_are_errors(ignored, given, error, words):
    apply, shared, own, buffers = parts_of(1)
    plan, mesh = fs.make_plan(shared, 1, units=["blocks.*"]), fs.Mesh()
    with pytest.raises(error, match=words):
        fs.fully_shard(apply, plan, mesh, ignored_params=ignored)(
            fs.shard(shared, plan, mesh), {**buffers, **(dict.fromkeys(own, given) if len(given) else {})}, rows_of(0)
        )


# --- shards that change between forward and backward ----------------------------------------------


def two(again):
    """Return two layers, large enough that ranks of one machine share their gathered memory."""
    around = (lambda f, x: checkpoint(f, x, use_reentrant=False)) if again else lambda f, x: f(x)
    forward = lambda m, x: around(m.b, around(m.a, x).tanh()).square().sum()  # noqa: E731
    return Runs(forward, a=nn.Linear(160, 160), b=nn.Linear(160, 160))


def write(shard):
    with torch.no_grad():
        shard.mul_(2)


def assign_data(shard):
    shard.data = shard.data * 2


def write_through_data(shard):
    shard.data.mul_(2)


CHANGES = {"write": write, "assign .data": assign_data, "write through .data": write_through_data}
OLD, OTHER = "the gradient at the old values", "another gradient"
RESHARDED = "a shard of unit 'b' was modified in place between forward and backward, which would gather other values"
TORCHS = "is a view and its base or another view"
AGAIN, REMAT = (
    "a shard of unit 'b' was modified in place, or got other data",
    "in the arguments of a function under fs.remat",
)
# How backward gets the leaves: what becomes of each change. A write through .data leaves no trace, as in torch.
PROMISED = {
    ("full_shard", "nothing again"): (RESHARDED, OLD, OTHER),
    ("full_shard", "checkpoint"): (RESHARDED, OLD, OTHER),
    ("full_shard", "remat"): (RESHARDED, REMAT, OTHER),
    ("shard_grad_op", "nothing again"): (OLD, OLD, OLD),
    ("shard_grad_op", "checkpoint"): (AGAIN, AGAIN, OTHER),
    ("shard_grad_op", "remat"): (REMAT, REMAT, OTHER),
    ("no_shard", "nothing again"): (TORCHS, OLD, OTHER),
    ("no_shard", "checkpoint"): (AGAIN, AGAIN, OTHER),
    ("no_shard", "remat"): (REMAT, REMAT, OTHER),
}


def outcome(mesh, strategy, how, change):
    torch.manual_seed(0)
    apply, params, buffers = fs.make_functional(two(how == "checkpoint"))
    plan = fs.make_plan(params, mesh, units=["a", "b"], strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh, remat=["a", "b"] if how == "remat" else ())
    shards = fs.shard(params, plan, mesh)
    leaves = [shards[unit]["float32"].requires_grad_() for unit in plan.units]
    x = torch.linspace(-1, 1, 320).view(2, 160)
    wanted = torch.autograd.grad(sharded(shards, buffers, x), leaves)
    loss = sharded(shards, buffers, x)
    for leaf in leaves:
        CHANGES[change](leaf)
    try:
        found = torch.autograd.grad(loss, leaves)
    except RuntimeError as error:
        return str(error)
    return OLD if all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)) else OTHER


# Processes share gathered memory.
CASES = [*((run_simulated, *case) for case in PROMISED), (run_ranks, "shard_grad_op", "nothing again")]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "strategy", "how"), CASES)
def test_what_becomes_of_a_change_between_forward_and_backward(run, strategy, how):
    for change, promised in zip(CHANGES, PROMISED[strategy, how], strict=True):
        for found in run(outcome, 2, strategy, how, change):
            assert promised in found, change
