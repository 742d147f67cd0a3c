"""``fully_shard``: a module runs unit by unit, and calls do not affect each other."""

import gc
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.ranks import run_ranks, run_simulated
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


def unsharded(module):
    module.zero_grad()
    loss = loss_of(module(TOKENS))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}


def evaluate(mesh, functional, units, strategy="full_shard", loss_fn=None):
    apply, params, buffers = functional
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh)
    shards = fs.shard(params, plan, mesh)
    with fs.record_events() as events:
        loss, grads = fs.value_and_grad(loss_fn or (lambda s: loss_of(sharded(s, buffers, TOKENS))))(shards)
    return loss, fs.gather(grads, plan, mesh), (plan, sharded.schedule), events


def test_only_the_root_and_the_running_unit_are_gathered_at_any_moment():
    moments = []

    class Watch(Log):
        def __call__(self, tensor):
            super().__call__(tensor)
            moments.append(self.alive())

    log = Watch()
    functional = fs.make_functional(made(Model, log, blocks=6))
    gc.disable()
    try:
        for strategy, most in {"full_shard": 1, "shard_grad_op": 6}.items():
            log.clear()
            moments.clear()
            fs.simulate(lambda mesh, strategy=strategy: evaluate(mesh, functional, ["blocks.*"], strategy), 1 + 1)
            # Both simulated ranks write to one log, and each has its own gathered unit.
            assert max(moments) <= 2 * most, strategy
            assert max(moments) >= most, strategy
            assert log.alive() == 0, strategy
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_rank_holds_its_share_of_parameters_gradients_and_optimizer_state():
    apply, params, buffers = fs.make_functional(made())
    total = sum(p.numel() * p.element_size() for p in params.values())

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply, plan, mesh)
        step = fs.make_train_step(
            lambda s, b, x: loss_of(sharded(s, b, x)), fs.torch_optimizer(torch.optim.AdamW, lr=0.1), plan, mesh
        )
        state, _ = step(step.init(fs.shard(params, plan, mesh), buffers), TOKENS)
        _, grads = fs.value_and_grad(lambda s: loss_of(sharded(s, buffers, TOKENS)))(state.shards)

        def held(tree):
            tensors = [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and t.ndim]
            return sum(t.untyped_storage().nbytes() for t in tensors)

        padding = sum(b.padded_numel - b.numel for u in plan.unit_list for b in u.buffers) * 4
        return held(state.shards), held(grads), held(state.opt_state), padding

    for world in (2, 4):
        for shards, grads, opt_state, padding in fs.simulate(main, world):
            assert shards == grads == (total + padding) // world
            assert opt_state == 2 * shards


def test_forward_without_gradients_gathers_each_unit_once_and_leaves_nothing_behind():
    log = Log()
    module = made(Model, log)
    apply, params, buffers = fs.make_functional(module)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply.eval(), plan, mesh)
        with torch.no_grad(), fs.record_events() as events:
            out = sharded(fs.shard(params, plan, mesh), buffers, TOKENS)
        return out, [event.unit for event in events]

    results = fs.simulate(main, 2)
    assert log.alive() == 0
    for out, gathered in results:
        torch.testing.assert_close(out, module(TOKENS))
        assert gathered == ["", "blocks.0", "blocks.1", "blocks.2"]


# --- re-entrancy: the function keeps no state between calls --------------------------------------------------------------


def two_forwards_before_one_backward(sharded, shards, other, buffers):
    first, second = sharded(shards, buffers, TOKENS), sharded(shards, buffers, TOKENS.flip(0))
    return loss_of(first) + loss_of(second)


def a_forward_that_raises_in_between(sharded, shards, other, buffers):
    first = sharded(shards, buffers, TOKENS)
    with pytest.raises(IndexError):
        sharded(shards, buffers, TOKENS + WORDS)
    return loss_of(first) + loss_of(sharded(shards, buffers, TOKENS.flip(0)))


def a_forward_of_other_parameters_in_between(sharded, shards, other, buffers):
    first = sharded(shards, buffers, TOKENS)
    with torch.no_grad():
        sharded(other, buffers, TOKENS)
    return loss_of(first) + loss_of(sharded(shards, buffers, TOKENS.flip(0)))


def a_backward_in_between(sharded, shards, other, buffers):
    first = sharded(shards, buffers, TOKENS)
    leaves = {name: {key: local.detach().requires_grad_() for key, local in unit.items()} for name, unit in other.items()}
    loss_of(sharded(leaves, buffers, TOKENS)).backward()
    return loss_of(first) + loss_of(sharded(shards, buffers, TOKENS.flip(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "calls",
    [
        two_forwards_before_one_backward,
        a_forward_that_raises_in_between,
        a_forward_of_other_parameters_in_between,
        a_backward_in_between,
    ],
)
def test_calls_do_not_disturb_each_other(calls):
    module = made()
    apply, params, buffers = fs.make_functional(module)
    expected = torch.autograd.grad(loss_of(module(TOKENS)) + loss_of(module(TOKENS.flip(0))), list(module.parameters()))

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply, plan, mesh)
        shards = fs.shard(params, plan, mesh)
        other = {name: {key: 2 * local for key, local in unit.items()} for name, unit in shards.items()}
        _, grads = fs.value_and_grad(lambda s: calls(sharded, s, other, buffers))(shards)
        return fs.gather(grads, plan, mesh)

    for grads in fs.simulate(main, 2):
        for (name, _), wanted in zip(module.named_parameters(), expected, strict=True):
            torch.testing.assert_close(grads[name], wanted)


@pytest.mark.slow
def test_a_raising_forward_leaves_nothing_gathered_once_its_exception_is_gone():
    log = Log()

    class Raises(Block):
        def forward(self, x):
            super().forward(x)
            raise ArithmeticError("half way")

    module = made(Model, log)
    module.blocks[1] = Raises(log)
    functional = fs.make_functional(module)

    def main(mesh):
        with pytest.raises(ArithmeticError, match="half way"):
            evaluate(mesh, functional, ["blocks.*"])
        gc.collect()
        return log.alive()

    assert fs.simulate(main, 1) == [0]
    assert fs.simulate(main, 2)[1] == 0


@pytest.mark.slow
def test_two_models_on_two_meshes_run_interleaved():
    small, large = made(), made(Model, None, 5, seed=1)
    functional = {"small": fs.make_functional(small), "large": fs.make_functional(large)}

    def main(mesh):
        hybrid = fs.Mesh({"shard": mesh.shard}, device=mesh.device)  # the inner axis alone: a smaller world
        built = {}
        for name, on in (("small", mesh), ("large", hybrid)):
            apply, params, buffers = functional[name]
            plan = fs.make_plan(params, on, units=["blocks.*"])
            shards = {
                unit: {key: local.requires_grad_() for key, local in of.items()}
                for unit, of in fs.shard(params, plan, on).items()
            }
            built[name] = (fs.fully_shard(apply, plan, on), shards, buffers, plan, on)
        outs = {name: sharded(shards, buffers, TOKENS) for name, (sharded, shards, buffers, _, _) in built.items()}
        sum(loss_of(out) for out in outs.values()).backward()
        return {
            name: fs.gather({u: {k: t.grad / on.world_size for k, t in of.items()} for u, of in shards.items()}, plan, on)
            for name, (_, shards, _, plan, on) in built.items()
        }

    for grads in fs.simulate(main, {"replicate": 2, "shard": 2}):
        torch.testing.assert_close(grads["small"], unsharded(small)[1])
        torch.testing.assert_close(grads["large"], unsharded(large)[1])


@pytest.mark.slow
def test_one_plan_serves_several_trees_and_an_average_needs_no_gathering():
    module, teacher = made(), made(seed=5)
    apply, params, buffers = fs.make_functional(module)
    _, teacher_params, _ = fs.make_functional(teacher)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply, plan, mesh)
        shards, taught = fs.shard(params, plan, mesh), fs.shard(teacher_params, plan, mesh)
        with fs.record_events() as events:
            average = {u: {k: taught[u][k].lerp(local, 0.25) for k, local in of.items()} for u, of in shards.items()}
        assert not events
        return sharded(average, buffers, TOKENS), sharded(taught, buffers, TOKENS)

    mixed = {n: teacher_params[n].lerp(p, 0.25) for n, p in params.items()}
    for by_average, by_teacher in fs.simulate(main, 3):
        torch.testing.assert_close(by_average, apply(mixed, buffers, TOKENS))
        torch.testing.assert_close(by_teacher, teacher(TOKENS))


def test_threads_share_one_sharded_function():
    apply, params, buffers = fs.make_functional(made())
    mesh = fs.Mesh()
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    expected, results = apply(params, buffers, TOKENS), []

    def call():
        results.extend(torch.equal(sharded(shards, buffers, TOKENS), expected) for _ in range(20))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80


# --- what users' modules do ----------------------------------------------------------------------------------------------


class AuxLoss(Model):
    """Each block stores a value in an attribute, which the root reads after the block's forward."""

    class Noting(Block):
        def forward(self, x):
            out = super().forward(x)
            self.penalty = out.square().mean()
            return out

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Noting() for _ in range(2))

    def forward(self, tokens):
        out = super().forward(tokens)
        return out + sum(block.penalty for block in self.blocks)


class CalledTwice(Model):
    """A model that runs one block twice in a forward."""

    def forward(self, tokens):
        x = self.blocks[0](self.embed(tokens))
        return self.head(self.blocks[0](self.blocks[1](x)))


class OwnForward(Model):
    """A model with a block whose forward was set on the object, as a bound method."""

    def __init__(self):
        super().__init__()
        self.blocks[0].forward = types.MethodType(lambda block, x: 2 * Block.forward(block, x), self.blocks[0])


class Checkpointed(Model):
    """A model whose blocks are recomputed in backward."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Hooked(Model):
    """A model with a forward hook that changes the output of a block."""

    def __init__(self):
        super().__init__()
        self.blocks[1].register_forward_hook(lambda module, args, out: out * 1.5)


class Recurrent(Model):
    """A model of LSTMs, which keep a second list of their weights."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(x)


class LooksAtShapes(Model):
    """A root that reads shapes, dtypes and devices of parameters that are not gathered."""

    def forward(self, tokens):
        weight = self.blocks[0].up.weight
        like = {"dtype": weight.dtype, "device": weight.device}
        extra = torch.ones(weight.shape[1], **like)
        return super().forward(tokens) + extra.sum() * weight.is_floating_point() * next(self.parameters()).ndim


def test_an_rnn_frees_its_weights_as_soon_as_its_forward_returns():
    log, moments = Log(), []

    class Watched(Recurrent):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.register_forward_pre_hook(lambda *_: moments.append(log.alive()))
                block.register_forward_hook(lambda *_: moments.append(log.alive()))

    class Noting(nn.LSTM):
        def forward(self, x):
            log(self.weight_hh_l0)
            return super().forward(x)

    module = made(Watched)
    for block in module.blocks:
        block.__class__ = Noting
    functional = fs.make_functional(module)
    gc.disable()
    try:
        fs.simulate(lambda mesh: evaluate(mesh, functional, ["blocks.*"]), 2)
    finally:
        gc.enable()
    assert moments
    # The hooks run outside the unit, while this rank has no unit gathered; the other rank may be
    # inside one unit.
    assert max(moments) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls", [AuxLoss, CalledTwice, OwnForward, Checkpointed, Hooked, Recurrent, LooksAtShapes], ids=lambda cls: cls.__name__
)
def test_unusual_modules_work_sharded(cls):
    module = made(cls)
    functional = fs.make_functional(module)
    expected_loss, expected = unsharded(module)
    for loss, grads, _, _ in fs.simulate(lambda mesh: evaluate(mesh, functional, ["blocks.*"]), 2):
        torch.testing.assert_close(loss, expected_loss)
        for name, grad in grads.items():
            wanted = expected[name]
            torch.testing.assert_close(grad, torch.zeros_like(grad) if wanted is None else wanted)


class Skips(Model):
    """A model whose middle block runs only on request, and whose output is used only on request."""

    def forward(self, tokens, *, call=True, use=True):
        x = self.blocks[0](self.embed(tokens))
        if call:
            y = self.blocks[1](x)
            x = y if use else x
        return self.head(self.blocks[2](x))


@pytest.mark.slow
@pytest.mark.parametrize(("call", "use"), [(False, False), (True, False)], ids=["not called", "output unused"])
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_a_unit_that_the_loss_does_not_depend_on_is_not_reduced_on_any_rank_and_has_zeros(strategy, call, use):
    module = made(Skips)
    apply, params, buffers = fs.make_functional(module)
    loss_of(module(TOKENS, call=call, use=use)).backward()

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"], strategy=strategy)
        sharded = fs.fully_shard(apply, plan, mesh)
        shards = fs.shard(params, plan, mesh)
        evaluate = fs.value_and_grad(lambda s, **options: loss_of(sharded(s, buffers, TOKENS, **options)))
        with fs.record_events() as events:
            grads = evaluate(shards, call=call, use=use)[1]
        again = evaluate(shards, call=call, use=use)[1]  # now that the order is known
        assert all(torch.equal(again[u][k], grads[u][k]) for u in grads for k in grads[u])
        return fs.gather(grads, plan, mesh), [event.kind for event in events if event.unit == "blocks.1"]

    for grads, kinds in fs.simulate(main, 2):
        assert kinds == ["all_gather"] * (call and strategy == "full_shard")
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(
                grads[name], torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )


@pytest.mark.parametrize("options", [{"call": False}, {"use": False}], ids=["not called", "output unused"])
def test_ranks_that_disagree_whether_a_unit_is_used_get_an_error(options):
    functional = fs.make_functional(made(Skips))

    def main(mesh):
        apply, params, buffers = functional
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply, plan, mesh)
        mine = options if mesh.rank else {}
        fs.value_and_grad(lambda s: loss_of(sharded(s, buffers, TOKENS, **mine)))(fs.shard(params, plan, mesh))

    with pytest.raises(
        (ValueError, RuntimeError), match=r"the order of units must be the same|different collectives|none can go on"
    ):
        fs.simulate(main, 2)


def test_methods_other_than_forward_run_their_units_gathered():
    class Encoder(Model):
        def encode(self, tokens, scale=1.0):
            return self.blocks[0](self.embed(tokens)) * scale

    module = made(Encoder)
    apply, params, buffers = fs.make_functional(module)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        return fs.fully_shard(apply.method("encode"), plan, mesh)(fs.shard(params, plan, mesh), buffers, TOKENS, scale=2.0)

    for out in fs.simulate(main, 2):
        torch.testing.assert_close(out, module.encode(TOKENS, scale=2.0))


def test_new_buffers_come_back_and_the_given_ones_stay():
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    apply, params, buffers = fs.make_functional(module, mutable=True)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["*"])
        return fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), buffers, x)

    results = fs.simulate(main, 2)
    assert all(torch.equal(buffers[name], value) for name, value in before.items())
    expected = module(x)
    for out, new in results:
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(new, dict(module.named_buffers()))


def test_frozen_and_trainable_leaves_of_one_unit_have_buffers_of_their_own():
    module = made()
    for block in module.blocks:
        block.up.requires_grad_(False)
    functional = fs.make_functional(module)
    _, expected = unsharded(module)

    def main(mesh):
        apply, params, buffers = functional
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply, plan, mesh)
        with fs.record_events() as events:
            _, grads = fs.value_and_grad(lambda s: loss_of(sharded(s, buffers, TOKENS)))(fs.shard(params, plan, mesh))
        assert tuple(events) == fs.predict_events(plan, sharded.schedule)
        assert [unit["float32.frozen"] for name, unit in grads.items() if name] == [None] * 3
        whole = {name: {key: g for key, g in unit.items() if g is not None} for name, unit in grads.items()}
        return whole, str(plan)

    for grads, printed in fs.simulate(main, 1):
        assert grads["blocks.0"]["float32"].numel() == sum(
            g.numel() for n, g in expected.items() if n.startswith("blocks.0") and g is not None
        )
        assert "float32.frozen" in printed
    fs.simulate(main, 2)


# --- errors ----------------------------------------------------------------------------------------------------------------


class ReadsOutside(Model):
    """A root that computes with a weight of a block."""

    def forward(self, tokens):
        return super().forward(tokens) + self.blocks[1].up.weight.sum()


def test_a_parameter_read_outside_its_units_forward_is_named():
    functional = fs.make_functional(made(ReadsOutside))
    words = r"parameter 'blocks\.1\.up\.weight' was read \(by .*\) outside the forward of unit 'blocks\.1', which owns it"
    with pytest.raises(ValueError, match=words):
        fs.simulate(lambda mesh: evaluate(mesh, functional, ["blocks.*"]), 2)


def without_marks(params):
    return {name: p.clone() for name, p in params.items()}  # clones lose the attribute that marks a tie


# name -> (what is sharded, by which parameters and units, the error)
REFUSED = {
    "a plan of another size": (
        lambda apply: apply,
        lambda params: {name: torch.zeros(*p.shape[:-1], 2 * p.shape[-1]) for name, p in params.items()},
        [],
        ValueError(r"parameter 'embed\.weight' has shape \(11, 16\) in the plan and \(11, 8\) in the module"),
    ),
    "a plan of fewer blocks": (
        lambda apply: apply,
        lambda params: fs.make_functional(made(Model, None, 2))[1],
        [],
        ValueError(r"it lacks \['blocks\.2\.down\.bias', .*\] of this one's parameters and has nothing besides"),
    ),
    "a unit that is never called": (
        lambda apply: apply,
        dict,
        ["blocks"],
        ValueError(r"unit 'blocks' is a ModuleList, which has no forward of its own"),
    ),
    "a unit that is a parameter": (
        lambda apply: apply,
        dict,
        ["blocks.0.up.weight"],
        ValueError(r"unit 'blocks\.0\.up\.weight' is no module of this model"),
    ),
    "a tie across units that the plan does not know": (
        lambda apply: apply,
        without_marks,
        ["embed"],
        ValueError(r"'embed\.weight' is tied to 'head\.weight', which lies outside unit 'embed' .* ties=apply\.ties"),
    ),
    "a plain function": (
        lambda apply: loss_of,
        dict,
        [],
        TypeError(r"the apply that make_functional returned; .* unshard and reshard around its un"),
    ),
}


@pytest.mark.parametrize(("function", "planned", "units", "error"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(function, planned, units, error):
    apply, params, _ = fs.make_functional(made())
    with pytest.raises(type(error), match=str(error)):
        fs.fully_shard(function(apply), fs.make_plan(planned(params), fs.Mesh(), units=units), fs.Mesh())


def test_a_tie_that_is_told_to_the_plan_is_taken():
    apply, params, _ = fs.make_functional(made())
    plan = fs.make_plan(without_marks(params), fs.Mesh(), units=["embed", "blocks.0"], ties=apply.ties)
    assert plan == fs.make_plan(params, fs.Mesh(), units=["embed", "blocks.0"])
    assert list(plan.units) == ["", "blocks.0"]


class HalfFrozen(nn.Module):
    """A model whose first unit runs in inference mode, like an encoder that is not trained."""

    def __init__(self, width):
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        with torch.inference_mode():
            x = self.units[0](x)
        return self.units[2](torch.tanh(self.units[1](x.clone())))


def partly_in_inference_mode(mesh, width, strategy, options):
    torch.manual_seed(0)
    net, x = HalfFrozen(width).double(), torch.linspace(-1, 1, 2 * width, dtype=torch.float64).view(2, width)
    net(x).square().mean().backward()
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["units.*"], strategy=strategy, **options)
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    for _ in range(2):  # the second time, the all-gather of the next unit starts in inference mode
        _, grads = fs.value_and_grad(lambda shards: sharded(shards, buffers, x).square().mean())(shards)
        for name, grad in fs.gather(grads, plan, mesh).items():
            wanted = net.get_parameter(name).grad
            torch.testing.assert_close(grad, torch.zeros_like(grad) if wanted is None else wanted)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 1 << 20}], ids=["alone", "bucketed"])
@pytest.mark.parametrize(
    ("run", "width", "strategy"),
    [
        (run_simulated, 4, "full_shard"), (run_simulated, 4, "shard_grad_op"),
        (run_ranks, 4, "shard_grad_op"), (run_ranks, 100, "full_shard"),
    ],
    ids=["simulated", "simulated, kept", "small", "large"],
)  # fmt: skip
def test_units_in_inference_mode_do_not_change_the_gradients_of_other_units(run, width, strategy, options):
    run(partly_in_inference_mode, 2, width, strategy, options)


class Sum(nn.Module):
    """A model of two one-leaf units, for whose gradients autograd returns the same tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Leaf(), Leaf()

    def forward(self, x):
        return (self.a() + self.b()) * x


class Leaf(nn.Module):
    def __init__(self):
        super().__init__()
        self.leaf = nn.Parameter(torch.arange(4.0))

    def forward(self):
        return self.leaf


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("world", [1, 2, {"replicate": 2, "shard": 2}], ids=str)
def test_one_tensor_that_is_the_gradient_of_two_units_is_reduced_for_each(world, strategy):
    apply, params, buffers = fs.make_functional(Sum())

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["a", "b"], strategy=strategy)
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        _, grads = fs.value_and_grad(lambda shards: sharded(shards, buffers, mesh.rank + 1.0).sum())(shards)
        mean = (mesh.world_size + 1) / 2
        assert {name: grad.tolist() for name, grad in fs.gather(grads, plan, mesh).items()} == {
            "a.leaf": [mean] * 4, "b.leaf": [mean] * 4
        }  # fmt: skip

    fs.simulate(main, world)


class Force(nn.Module):
    """A module that differentiates its own units by its input: the negative gradient of an energy."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return -torch.func.grad(lambda x: self.outer(torch.tanh(self.inner(x))).square().sum())(x)


def by_a_transform_inside(mesh, width, strategy):
    torch.manual_seed(0)
    force, x = Force(width).double(), torch.linspace(-1, 1, width, dtype=torch.float64)
    loss = force(x).square().mean()
    loss.backward()
    apply, params, buffers = fs.make_functional(force)
    plan = fs.make_plan(params, mesh, units=["inner", "outer"], strategy=strategy)
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    for _ in range(2):  # the second time, the order of units is known
        found, grads = fs.value_and_grad(lambda shards: sharded(shards, buffers, x).square().mean())(shards)
        torch.testing.assert_close(found, loss.detach())
        for name, grad in fs.gather(grads, plan, mesh).items():
            wanted = force.get_parameter(name).grad
            torch.testing.assert_close(grad, torch.zeros_like(grad) if wanted is None else wanted)
    with torch.no_grad():
        torch.testing.assert_close(sharded(shards, buffers, x).square().mean(), loss.detach())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize(("run", "width"), [(run_simulated, 4), (run_ranks, 100)], ids=["simulated", "real"])
def test_a_module_may_use_a_transform_inside_its_forward(run, width, strategy):
    run(by_a_transform_inside, 2, width, strategy)


def test_shards_of_another_plan_are_refused_before_any_collective():
    apply, params, buffers = fs.make_functional(made())

    def main(mesh):
        plan, other = fs.make_plan(params, mesh, units=["blocks.*"]), fs.make_plan(params, mesh)
        sharded = fs.fully_shard(apply, plan, mesh)
        shards = fs.shard(params, other, mesh)
        with (
            fs.record_events() as events,
            pytest.raises(ValueError, match=r"must hold the units of the plan, .* found \[''\]"),
        ):
            sharded(shards, buffers, TOKENS)
        return list(events)

    assert fs.simulate(main, 2) == [[], []]


def test_ranks_whose_plans_differ_get_an_error():
    apply, params, _ = fs.make_functional(made())

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"] if mesh.rank else [])
        fs.fully_shard(apply, plan, mesh)

    with pytest.raises(ValueError, match=r"the plan must be the same on every rank; rank 0 has"):
        fs.simulate(main, 2)


def test_a_parameter_that_forward_freezes_outside_its_unit_is_told():
    class Freezes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            self.b.weight.requires_grad_()  # as it is
            self.a.weight.requires_grad_(False)
            return self.b(self.a(x))

    apply, params, buffers = fs.make_functional(Freezes())

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["a", "b"])
        return fs.fully_shard(apply, plan, mesh)(fs.shard(params, plan, mesh), buffers, torch.ones(2, 3))

    with pytest.raises(ValueError, match=r"forward set requires_grad=False of parameter 'a.weight', .*: freeze it before"):
        run_simulated(main, 2)
