"""Compiled units compute the same as uncompiled ones, and no collective becomes part of a graph."""

import functools
import gc
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.models import SUBJECTS
from tests.module.test_fully_sharded import TOKENS, Model, loss_of, made
from tests.storages import Log

OF_TORCH = (  # torch's own warnings; Dynamo hides the first one unless it is an error
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.jit.script",
    "`gradient_checkpointing_enable` is deprecated",
)
OF_OURS = pytest.mark.filterwarnings("ignore:torch.compile compiles nothing of")  # see tests/_utils/test_compiled_outside.py
pytestmark = [
    *(pytest.mark.filterwarnings(f"ignore:{text}") for text in OF_TORCH),
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torch crashes when a second thread compiles"),
]


class Backend:
    """A backend that counts its graphs and their runs, and logs the weights that they run on."""

    def __init__(self, name="aot_eager"):
        self.name, self.graphs, self.runs, self.log, self.most = name, 0, 0, Log(), 0

    def __call__(self, graph, example):
        self.graphs += 1
        compiled = lookup_backend(self.name)(graph, example)

        def run(*inputs):
            self.runs += 1
            for each in inputs:
                if isinstance(each, torch.Tensor) and each.requires_grad and each.shape == (20, 8):  # a block's `up`
                    self.log(each)
            self.most = max(self.most, self.log.alive())
            return compiled(*inputs)

        return run

    @property
    def compiler(self):
        return functools.partial(torch.compile, backend=self)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def evaluated(mesh, functional, compiler, units, strategy="full_shard", steps=1, **options):
    apply, params, buffers = functional
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy)
    sharded = fs.fully_shard(apply, plan, mesh, compiler=compiler, **options)
    shards = fs.shard(params, plan, mesh)
    for _ in range(steps):
        with fs.record_events() as events:
            loss, grads = fs.value_and_grad(lambda s: loss_of(sharded(s, buffers, TOKENS)))(shards)
    return loss, fs.gather(grads, plan, mesh), list(events)


def same(found, expected):
    for (loss, grads, events), (expected_loss, expected_grads, expected_events) in zip(found, expected, strict=True):
        assert torch.equal(loss, expected_loss)
        assert all(torch.equal(grads[name], expected_grads[name]) for name in expected_grads)
        assert events == expected_events


CASES = {
    "one unit": ([], {}, 1),
    "blocks, in a root that is not compiled": (["blocks.*"], {}, 1),
    "of a unit in a unit the inner one": (["blocks.0", "blocks.0.up"], {}, 1),
    "units that stay gathered": (["blocks.*"], {"strategy": "shard_grad_op"}, 1),
    "units computed again": (["blocks.*"], {"remat": ["blocks.1"]}, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize(("units", "options", "graphs"), CASES.values(), ids=CASES)
def test_compiled_units_give_the_same_bits_and_collectives_and_are_compiled_once(units, options, graphs):
    functional, backend = fs.make_functional(made()), Backend()
    run = functools.partial(evaluated, functional=functional, units=units, **options)
    found = fs.simulate(lambda mesh: run(mesh, compiler=backend.compiler, steps=2), 2)
    assert backend.graphs == graphs
    assert backend.runs >= 2 * 2
    same(found, fs.simulate(lambda mesh: run(mesh, compiler=None, steps=2), 2))


@pytest.mark.slow
def test_between_forward_and_backward_a_compiled_unit_is_free():
    functional = fs.make_functional(made(Model, blocks=5))
    gc.disable()
    try:
        for strategy, most in {"full_shard": 1, "shard_grad_op": 5}.items():
            backend = Backend()
            fs.simulate(lambda mesh, s=strategy, b=backend: evaluated(mesh, functional, b.compiler, ["blocks.*"], s), 1 + 1)
            assert most <= backend.most <= 2 * most, strategy  # both simulated ranks write to one log
            assert backend.log.alive() == 0, strategy
            torch._dynamo.reset()
    finally:
        gc.enable()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_a_model_with_buffers_trains_compiled_by_inductor():
    subject = SUBJECTS["convnet"]
    apply, params, buffers = fs.make_functional(subject.build(0.0), mutable=True)
    batch = subject.make_batch(4, 0)

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh, units=["first"])
        sharded = fs.fully_shard(apply, plan, mesh, compiler=compiler)

        def loss_fn(shards, buffers, batch):
            out, buffers = sharded(shards, buffers, **batch["inputs"])
            return subject.loss(out, batch), buffers

        step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, mutable=True)
        state = step.init(fs.shard(params, plan, mesh), buffers)
        losses = []
        for _ in range(2):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        return torch.stack(losses), state.buffers

    (plain,) = fs.simulate(lambda mesh: main(mesh, None), 1)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    (compiled,) = fs.simulate(lambda mesh: main(mesh, torch.compile), 1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    torch.testing.assert_close(compiled, plain)


TRANSFORMS = {
    "grad": lambda f, s: torch.func.grad(f)(s),
    "jvp": lambda f, s: torch.func.jvp(f, (s,), (ones_like(s),))[1],
    "hvp": lambda f, s: torch.func.jvp(torch.func.grad(f), (s,), (ones_like(s),))[1],
}


def ones_like(shards):
    return torch.utils._pytree.tree_map(torch.ones_like, shards)


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("units", [["blocks.*"], []], ids=["blocks", "the root"])
def test_under_transforms_units_run_as_they_are_and_before_and_after_as_compiled(transform, units):
    apply, params, buffers = fs.make_functional(made())
    backend = Backend()

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh, units=units)
        sharded = fs.fully_shard(apply, plan, mesh, compiler=compiler)
        f, shards = lambda s: loss_of(sharded(s, buffers, TOKENS)), fs.shard(params, plan, mesh)
        results, runs = [], []
        for _ in range(2):
            results += [transform(f, shards), fs.value_and_grad(f)(shards)]
            runs.append(backend.runs)
        return results, runs

    compiler = functools.partial(torch.compile, backend=backend, fullgraph=True)
    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (compiler, None))
    torch.testing.assert_close([r for r, _ in found], [r for r, _ in expected], rtol=0, atol=0)
    assert backend.runs == 2 * 2 * (3 if units else 1)
    assert backend.graphs == 1


@pytest.mark.slow
def test_a_call_of_a_compiled_function_keeps_nothing():
    apply, params, buffers = fs.make_functional(made())
    plan, mesh = fs.make_plan(params, 1, units=["blocks.*"]), fs.Mesh()
    gc.disable()
    try:
        for units in (["blocks.*"], []):
            plan, log, backend = fs.make_plan(params, 1, units=units), Log(), Backend()
            sharded = fs.fully_shard(apply, plan, mesh, compiler=backend.compiler)
            for _ in range(3):
                shards = fs.shard(params, plan, mesh)
                for shard in torch.utils._pytree.tree_leaves(shards):
                    log(shard)
                fs.value_and_grad(lambda s: loss_of(sharded(s, buffers, TOKENS)))(shards)  # noqa: B023
            assert backend.runs, units
            del shards, shard
            assert log.alive() == 0, units
    finally:
        gc.enable()


class Ways(nn.Module):
    """A module with a second method, buffers, another result in evaluation, and a refused input."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x):
        if x.shape[1] != 3:
            raise ValueError("three columns")
        return self.norm(self.inner(x)).tanh()

    def encode(self, x):
        return self.inner(x).sin()


WAYS = {
    "training": lambda apply: (apply, torch.enable_grad),
    "evaluation": lambda apply: (apply.eval(), torch.enable_grad),
    "another method": lambda apply: (apply.method("encode"), torch.enable_grad),
    "without gradients": lambda apply: (apply, torch.no_grad),
    "in inference mode": lambda apply: (apply, torch.inference_mode),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("units", [[], ["inner"]], ids=["the root", "a unit inside"])
def test_a_function_runs_compiled_in_every_way(way, units):
    whole, params, buffers = fs.make_functional(made(Ways), mutable=True)
    (apply, mode), x = way(whole), torch.randn(4, 3)

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh, units=units)
        sharded, shards, now = fs.fully_shard(apply, plan, mesh, compiler=compiler), fs.shard(params, plan, mesh), buffers
        outs = []
        with mode():
            for _ in range(2):
                out, now = sharded(shards, now, x)
                outs.append((out.detach().clone(), now))
        if apply.method_name == "forward":
            with pytest.raises(ValueError, match="three columns"):
                sharded(shards, now, x[:, :2])
        return outs

    backend = Backend()
    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (backend.compiler, None))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert backend.runs == 4


@pytest.mark.slow
def test_the_function_of_a_whole_model_is_one_graph():
    apply, params, buffers = fs.make_functional(made())
    backend = Backend()
    whole = torch.compile(apply, backend=backend, fullgraph=True)
    for _ in range(2):
        assert torch.equal(whole(params, buffers, TOKENS), made()(TOKENS))
    assert (backend.graphs, backend.runs) == (1, 2)


def test_a_module_in_full_precision_without_parameters_keeps_its_unit_from_being_compiled():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)

        def forward(self, x):
            return self.norm(self.inner(x))

    apply, params, buffers = fs.make_functional(nn.Sequential(Plain(), nn.Linear(3, 3)), mutable=True)
    plan = fs.make_plan(params, 1, units=["0", "1"], precision=fs.MixedPrecision(param_dtype=torch.bfloat16))
    backend, mesh = Backend(), fs.Mesh()
    shards, x = fs.shard(params, plan, mesh), torch.randn(4, 3)
    compiled = fs.fully_shard(apply, plan, mesh, compiler=backend.compiler)
    assert torch.equal(compiled(shards, buffers, x)[0], fs.fully_shard(apply, plan, mesh)(shards, buffers, x)[0])
    assert backend.graphs == 1


@pytest.mark.slow
def test_a_second_derivative_through_a_compiled_unit_is_torchs_error():
    apply, params, buffers = fs.make_functional(made())
    mesh = fs.init_mesh()
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded = fs.fully_shard(apply, plan, mesh, compiler=Backend().compiler)
    shards = torch.utils._pytree.tree_map(torch.Tensor.requires_grad_, fs.shard(params, plan, mesh))
    leaves = torch.utils._pytree.tree_leaves(shards)
    grads = torch.autograd.grad(loss_of(sharded(shards, buffers, TOKENS)), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)


def test_a_compiled_function_can_be_a_unit_by_hand():
    params, backend = {"w": torch.randn(20, 8), "b": torch.randn(20)}, Backend()
    x = torch.randn(3, 8)

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh)
        f = compiler(lambda leaves, x: nn.functional.linear(x, leaves["w"], leaves["b"]).tanh())
        f = fs.reshard(fs.unshard(f, plan.units[""], mesh))
        return fs.value_and_grad(lambda s: f(s[""], x).square().sum())(fs.shard(params, plan, mesh))

    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (backend.compiler, lambda f: f))
    assert backend.graphs == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


WHOLES = {  # and the number of graphs of the code around the functions of this library
    "the sharded function": (
        lambda compiler, sharded, loss_fn: fs.value_and_grad(lambda s, b: loss_of(compiler(sharded)(s, b, TOKENS))),
        0,
    ),
    "the loss function": (lambda compiler, sharded, loss_fn: fs.value_and_grad(compiler(loss_fn)), 1),
    "value_and_grad": (lambda compiler, sharded, loss_fn: compiler(fs.value_and_grad(loss_fn)), 0),
}


@OF_OURS
@pytest.mark.slow
@pytest.mark.parametrize(("whole", "graphs"), WHOLES.values(), ids=WHOLES)
@pytest.mark.parametrize("compiled", [False, True], ids=["units as they are", "units compiled"])
def test_collectives_run_between_the_graphs_of_a_compiled_program(whole, graphs, compiled):
    apply, params, buffers = fs.make_functional(made())

    def main(mesh, compiler, units):
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply, plan, mesh, compiler=units)
        f = whole(compiler, sharded, lambda s, b: loss_of(sharded(s, b, TOKENS)))
        with fs.record_events() as events:
            results = [f(fs.shard(params, plan, mesh), buffers) for _ in range(2)]
        return results, list(events)

    around, units = Backend(), Backend()
    found = fs.simulate(lambda mesh: main(mesh, around.compiler, units.compiler if compiled else None), 2)
    expected = fs.simulate(lambda mesh: main(mesh, lambda f: f, None), 2)
    torch.testing.assert_close([r for r, _ in found], [r for r, _ in expected], rtol=0, atol=0)
    assert [e for _, e in found] == [e for _, e in expected]
    assert (around.graphs, units.graphs) == (graphs, compiled)


@OF_OURS
@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["unshard", "reshard", "fully_shard", "psum", "pmean", "global_norm", "clip_by_global_norm", "shard", "gather"]
)
def test_each_of_these_breaks_the_graph(kind):
    params, x, around = {"w": torch.randn(3, 3)}, torch.randn(2, 3), Backend("eager")

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh)
        unit = fs.unshard(lambda leaves, x: x @ leaves["w"], plan.units[""], mesh)
        shards = fs.shard(params, plan, mesh)
        # BatchNorm has buffers, of which each call makes copies.
        apply, own, buffers = fs.make_functional(nn.BatchNorm1d(3).eval())
        whole = fs.make_plan(own, mesh)
        sharded, normal = fs.fully_shard(apply, whole, mesh), fs.shard(own, whole, mesh)
        f = {
            "unshard": lambda x: unit(shards[""], x * 2) + 1,
            "reshard": lambda x: fs.reshard(unit)(shards[""], x * 2) + 1,
            "fully_shard": lambda x: sharded(normal, buffers, x * 2) + 1,
            "psum": lambda x: fs.psum(x * 2, mesh) + 1,
            "pmean": lambda x: fs.pmean(x * 2, mesh) + 1,
            "global_norm": lambda x: x * 2 + fs.global_norm(shards, plan, mesh) + 1,
            "clip_by_global_norm": lambda x: x * 2 + fs.clip_by_global_norm(shards, plan, mesh, 1.0)[1] + 1,
            "shard": lambda x: fs.shard({"w": x.sum() * torch.ones(3, 3)}, plan, mesh)[""]["float32"] + 1,
            "gather": lambda x: fs.gather({"": {"float32": shards[""]["float32"] * 2}}, plan, mesh)["w"] + 1,
        }[kind]
        return [compiler(f)(x) for _ in range(2)]

    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (around.compiler, lambda f: f))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert around.graphs == 2  # the code before and the code after


@pytest.mark.slow
def test_gradients_of_samples_are_taken_between_graphs():
    params, x, around = {"w": torch.randn(3, 3)}, torch.randn(4, 3), Backend("eager")

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh)
        f = fs.unshard(lambda leaves, x: (x @ leaves["w"]).square().sum(), plan.units[""], mesh)
        evaluate = compiler(fs.per_sample_grad(lambda shards, x: f(shards[""], x), plan, mesh, max_norm=1.0))
        return evaluate(fs.shard(params, plan, mesh), x)

    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (around.compiler, lambda f: f))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert around.graphs == 0


@OF_OURS
@pytest.mark.slow
def test_a_step_can_be_part_of_a_compiled_program():
    apply, params, buffers = fs.make_functional(made())

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply, plan, mesh)
        loss_fn = lambda s, b, x: loss_of(sharded(s, b, x))  # noqa: E731
        step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, lr=0.1), plan, mesh)
        state = step.init(fs.shard(params, plan, mesh), buffers)
        for _ in range(2):
            state, metrics = compiler(step)(state, TOKENS)
        return metrics["loss"], state.shards

    around = Backend()
    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (around.compiler, lambda f: f))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert around.graphs == 0


class Mutating(nn.Module):
    """A module that sets its own attribute in forward, and calls a static method."""

    def __init__(self):
        super().__init__()
        self.net, self.state = nn.Linear(3, 3), 1

    def forward(self, x):
        self.state = self.state + 1
        return self._add(self.net(x) * self.state, x)

    @staticmethod
    def _add(x, y):
        return x + y


class Shared(nn.Module):
    """A module with one buffer under two names, which it uses twice and writes into."""

    def __init__(self):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(3)), nn.BatchNorm1d(3)
        self.register_buffer("mean", self.inner.running_mean)

    def forward(self, x):
        self.mean.add_(1)
        return self.inner(x * self.scale) + self.mean + self.mean


class Checkpointed(nn.Module):
    """A module of which backward computes a part again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x):
        inner = lambda x: torch.tanh(self.second(torch.tanh(self.first(x))))  # noqa: E731
        return x + checkpoint(inner, x, use_reentrant=False)


class Friend(nn.Module):
    """A module that also runs a module outside torch's module tables."""

    def __init__(self, other):
        super().__init__()
        self.own, self.others = nn.Linear(3, 3), [other]

    def forward(self, x):
        return torch.tanh(self.others[0](self.own(x)))


class Friends(nn.Module):
    """A model with two units, one of which runs the other."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = Friend(self.first)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [[], ["first"]], ids=["kept", "computed again"])
def test_a_compiled_unit_that_runs_another_one_breaks_its_graph_there(remat):
    apply, params, buffers = fs.make_functional(made(Friends))
    x = torch.randn(4, 3)

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh, units=["first", "second"])
        sharded = fs.fully_shard(apply, plan, mesh, compiler=compiler, remat=remat)
        with fs.record_events() as events:
            result = fs.value_and_grad(lambda s: sharded(s, buffers, x).square().sum())(fs.shard(params, plan, mesh))
        return result, list(events)

    backend = Backend()
    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (backend.compiler, None))
    assert backend.graphs
    torch.testing.assert_close([r for r, _ in found], [r for r, _ in expected])
    assert [e for _, e in found] == [e for _, e in expected]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ignored_classes of the precision hold BatchNorm2d")
def test_units_in_precisions_of_their_own_are_compiled_in_them():
    subject = SUBJECTS["convnet"]  # its BatchNorms become units, in full precision
    apply, params, buffers = fs.make_functional(subject.build(0.0), mutable=True)
    batch, precision = subject.make_batch(4, 0), fs.MixedPrecision(param_dtype=torch.bfloat16)

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh, units=[*subject.units, "first.0"], precision=precision)
        sharded = fs.fully_shard(apply, plan, mesh, compiler=compiler)
        loss_fn = lambda s: subject.loss(sharded(s, buffers, **batch["inputs"])[0], batch)  # noqa: E731
        return fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))

    backend = Backend()
    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (backend.compiler, None))
    assert backend.graphs == 3  # a convolution, and BatchNorms of two sizes
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Hidden(nn.Module):
    """A module with a child outside torch's module tables, and a counter of its calls."""

    def __init__(self):
        super().__init__()
        self.net, self.counter = nn.Linear(3, 3), 0
        self.__dict__["hidden"] = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        self.counter += 1
        return self.net(x) * self.counter + self.hidden(x)


MODULES = [Mutating, Shared, Checkpointed, Hidden]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the forward of Sequential set attributes")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
@pytest.mark.parametrize("cls", MODULES)
def test_a_module_that_does_more_than_compute_is_compiled_once(cls, strategy):
    apply, params, buffers = fs.make_functional(nn.Sequential(made(cls), nn.Tanh(), made(cls)), mutable=True)
    backend, x = Backend(), torch.randn(4, 3)

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh, units=["0", "2"], strategy=strategy)
        sharded, shards, now = fs.fully_shard(apply, plan, mesh, compiler=compiler), fs.shard(params, plan, mesh), buffers
        results = []
        for _ in range(5):

            def loss_fn(shards, now=now):
                out, new = sharded(shards, now, x)
                return out.square().sum(), new

            (loss, now), grads = fs.value_and_grad(loss_fn, has_aux=True)(shards)
            results.append((loss, now, grads))
        return results

    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (backend.compiler, None))
    assert backend.graphs == 2  # the input of the first unit needs no gradient
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_bert_trains_compiled_and_with_gradient_checkpointing():
    module = SUBJECTS["bert"].build(0.0)
    module.gradient_checkpointing_enable({"use_reentrant": False})
    subject, (apply, params, buffers) = SUBJECTS["bert"], fs.make_functional(module)
    batch, backend = subject.make_batch(2, 0), Backend()

    def main(mesh, compiler):
        plan = fs.make_plan(params, mesh, units=subject.units)
        sharded = fs.fully_shard(apply, plan, mesh, compiler=compiler)
        loss_fn = lambda s: subject.loss(sharded(s, buffers, **batch["inputs"]), batch)  # noqa: E731
        return fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))

    found, expected = (fs.simulate(lambda mesh, c=c: main(mesh, c), 2) for c in (backend.compiler, None))
    assert backend.graphs >= 1
    torch.testing.assert_close(found, expected)


def test_modules_that_are_compiled_already_are_refused_or_run_uncompiled():
    module = made()
    module.blocks[1] = torch.compile(module.blocks[1])
    with pytest.raises(TypeError, match=r"'blocks\.1' was wrapped by torch.compile.*its _orig_mod.*compiler="):
        fs.make_functional(module)
    module = made()
    module.blocks[1].compile()
    with pytest.warns(UserWarning, match=r"'blocks\.1' was compiled in place.*pass compiler=torch.compile to fully_shard"):
        apply, params, buffers = fs.make_functional(module)
    doubled = made()
    for parameter in doubled.parameters():
        parameter.data *= 2
    assert torch.equal(apply({name: 2 * p for name, p in params.items()}, buffers, TOKENS), doubled(TOKENS))
    module.blocks[2] = torch.compile(module.blocks[2])
    with pytest.raises(TypeError, match=r"'blocks\.2' was wrapped by torch.compile"):
        fs.make_functional(module)


def test_where_torch_would_crash_a_compiler_is_refused(monkeypatch):
    apply, params, _ = fs.make_functional(made())
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    main = lambda mesh: fs.fully_shard(apply, fs.make_plan(params, mesh), mesh, compiler=torch.compile)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"torch before 2\.13 crashes.*simulated ranks do; found 2\.11\.0: leave"):
        fs.simulate(main, 1)
    main(fs.Mesh())  # on the main thread


def test_what_cannot_compile_is_refused():
    apply, params, _ = fs.make_functional(made())
    plan, mesh = fs.make_plan(params, 1), fs.init_mesh()
    with pytest.raises(TypeError, match=r"compiler must be a function such as torch.compile; found True"):
        fs.fully_shard(apply, plan, mesh, compiler=True)
    with pytest.raises(TypeError, match=r"found function, compiled: pass apply itself, and compiler=torch.compile"):
        fs.fully_shard(torch.compile(apply), plan, mesh)
