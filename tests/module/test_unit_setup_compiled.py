"""Compiled units compute the same as uncompiled ones, and no collective becomes part of a graph."""

import functools
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.core.units import of_module
from tests.models import SUBJECTS
from tests.module.law import Call, Runs, Watch, calls_on, same_bits, sharded_call
from tests.module.test_fully_sharded import TOKENS, Model, loss_of, made, program
from tests.ranks import on_ranks
from tests.storages import Log

OF_TORCH = (  # torch's own warnings; Dynamo hides the first one unless it is an error
    "The .grad attribute of a Tensor that is not a leaf",
    "`gradient_checkpointing_enable` is deprecated",
)
OF_OURS = pytest.mark.filterwarnings(
    "ignore:torch.compile compiles nothing of"
)  # see tests/_utils/test_torch_private_warning.py
NEEDS_THREADS = pytest.mark.skipif(torch.__version__ < "2.13", reason="torch crashes when a second thread compiles")
pytestmark = [pytest.mark.slow, NEEDS_THREADS, *(pytest.mark.filterwarnings(f"ignore:{text}") for text in OF_TORCH)]


class Backend:
    """A backend that counts its graphs and their runs, and logs the weights that they run on."""

    def __init__(self, name="aot_eager"):
        self.name, self.graphs, self.runs, self.log = name, 0, 0, Watch()

    def __call__(self, graph, example):
        self.graphs += 1
        compiled = lookup_backend(self.name)(graph, example)

        def run(*inputs):
            self.runs += 1
            for each in inputs:
                if isinstance(each, torch.Tensor) and each.requires_grad and each.shape == (20, 8):  # a block's `up`
                    self.log(each)
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


def both(main, compiler, plain=None):
    """Check that simulated ranks get the same bits from ``main(mesh, compiler)`` as without."""
    same_bits(*(fs.simulate(lambda mesh, each=each: main(mesh, each), 2) for each in (compiler, plain)))


def compiled(functional, x, units=(), *, world=2, call=calls_on, how=None, equal=same_bits, **options):
    """Check that compiled units have the numbers and collectives of uncompiled ones; return the backend."""
    backend = Backend()
    found, expected = (
        call(world, functional, x, units, how={**(how or {}), "compiler": compiler}, **options)
        for compiler in (backend.compiler, None)
    )
    for mine, other in zip(found, expected, strict=True):
        if isinstance(mine, Call):
            assert mine.events == other.events
            mine, other = mine[:2], other[:2]
        equal(mine, other)
    return backend


CASES = {
    "blocks, in a root that is not compiled": (["blocks.*"], {}),
    "one unit": ([], {}),
    "of a unit in a unit the inner one": (["blocks.0", "blocks.0.up"], {}),
    "units that stay gathered": (["blocks.*"], {"strategy": "shard_grad_op"}),
    "units computed again": (["blocks.*"], {"how": {"remat": ["blocks.1"]}}),
}


@pytest.mark.nightly(one_in=6)
@pytest.mark.parametrize(("units", "options"), CASES.values(), ids=CASES)
def test_compiled_units_give_the_same_bits_and_collectives_and_are_compiled_once(units, options):
    backend = compiled(fs.make_functional(made()), TOKENS, units, program=program, **options)
    assert backend.graphs == 1
    assert backend.runs >= 2 * 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_garbage_collection")
@on_ranks(2)
def test_between_forward_and_backward_a_compiled_unit_is_free(mesh):
    backend, functional, of_calls = Backend(), fs.make_functional(made(Model, blocks=3)), Log()

    def noted(model, tokens):
        for shard in torch.utils._pytree.tree_leaves(model.args[0]):
            of_calls(shard)
        return program(model, tokens)

    sharded_call(mesh, functional, TOKENS, ["blocks.*"], program=noted, how={"compiler": backend.compiler})
    assert (backend.log.most, backend.log.alive(), of_calls.alive()) == (1, 0, 0)


@pytest.mark.nightly
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_a_model_with_buffers_trains_compiled_by_inductor():
    functional, x = fs.make_functional(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), mutable=True), torch.randn(4, 3)
    train = lambda model, x: model(x)[0].square().mean()  # noqa: E731
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    (found,), (expected,) = (
        calls_on(1, functional, x, ["0"], program=train, how={"compiler": compiler}) for compiler in (torch.compile, None)
    )
    torch.testing.assert_close(found[:2], expected[:2])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before


TRANSFORMS = {
    "grad": torch.func.grad,
    "jvp": lambda f: lambda s: torch.func.jvp(f, (s,), (torch.utils._pytree.tree_map(torch.ones_like, s),))[1],
    "hvp": lambda f: TRANSFORMS["jvp"](torch.func.grad(f)),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "units"), [("hvp", ["blocks.*"]), ("grad", []), ("jvp", [])])
def test_under_transforms_units_run_as_they_are_and_before_and_after_as_compiled(name, units):
    backend, transform, functional = Backend(), TRANSFORMS[name], fs.make_functional(made())

    def main(mesh, compiler):
        _, sharded, shards = of_module(mesh, functional, units, how={"compiler": compiler})
        f = lambda s: loss_of(sharded(s, {}, TOKENS))  # noqa: E731
        return [(transform(f)(shards), fs.value_and_grad(f)(shards)) for _ in range(2)]

    both(main, functools.partial(torch.compile, backend=backend, fullgraph=True))
    assert backend.runs == 2 * 2 * (3 if units else 1)
    assert backend.graphs == 1


class Slope(nn.Module):
    """A network whose loss is its slope, as in physics-informed networks and gradient penalties."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)

    def forward(self, x):
        return self.c(self.b(self.a(x).sin()))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("units", "remat"), [((), ()), (("b",), ()), ((("a", "c"), "b"), ()), (("b",), ("b",))],
    ids=["the root", "a block", "a group", "computed again"],
)  # fmt: skip
def test_a_second_derivative_is_right_or_the_error_of_torch(backend, units, remat):
    net, x = Slope(), torch.randn(5, 3)

    def slope(model):
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return grad.square().sum()

    def main(mesh):
        compiler = functools.partial(torch.compile, backend=backend)
        plan, sharded, shards = of_module(mesh, net, units, how={"compiler": compiler, "remat": remat})
        _, grads = fs.value_and_grad(lambda shards: slope(functools.partial(sharded, shards, {})))(shards)
        return fs.gather(grads, plan, mesh)

    if backend == "aot_eager":  # without our note, torch takes it for zero
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            fs.simulate(main, 2)
        return
    slope(net).backward()
    expected = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in net.named_parameters()}
    for grads in fs.simulate(main, 2):
        torch.testing.assert_close(grads, expected)


@OF_OURS
@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("kind", ["psum", "reshard", "global_norm", "fully_shard", "shard", "gather"])
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
            "reshard": lambda x: fs.reshard(unit)(shards[""], x * 2) + 1,
            "fully_shard": lambda x: sharded(normal, buffers, x * 2) + 1,
            "psum": lambda x: fs.psum(x * 2, mesh) + 1,
            "global_norm": lambda x: x * 2 + fs.global_norm(shards, plan, mesh) + 1,
            "shard": lambda x: fs.shard({"w": x.sum() * torch.ones(3, 3)}, plan, mesh)[""]["float32"] + 1,
            "gather": lambda x: fs.gather({"": {"float32": shards[""]["float32"] * 2}}, plan, mesh)["w"] + 1,
        }[kind]
        return [compiler(f)(x) for _ in range(2)]

    both(main, around.compiler, lambda f: f)
    assert around.graphs == 2  # the code before and the code after


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


@pytest.mark.nightly
@pytest.mark.parametrize("remat", [[], ["first"]], ids=["kept", "computed again"])
def test_a_compiled_unit_that_runs_another_one_breaks_its_graph_there(remat):
    first, second = nn.Linear(3, 3), Runs(lambda m, x: torch.tanh(m.others[0](m.own(x))), own=nn.Linear(3, 3))
    second.others = [first]  # outside torch's module tables
    net = Runs(lambda m, x: m.second(m.first(x)), first=first, second=second)
    assert compiled(fs.make_functional(net), torch.randn(4, 3), ["first", "second"], how={"remat": remat}).graphs


class Hidden(nn.Module):
    """A module with a child outside torch's module tables, and a counter of its calls."""

    def __init__(self):
        super().__init__()
        self.net, self.counter = nn.Linear(3, 3), 0
        self.__dict__["hidden"] = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        self.counter += 1
        return self.net(x) * self.counter + self.hidden(x)


MODULES = {Mutating: "full_shard", Shared: "shard_grad_op", Checkpointed: "full_shard", Hidden: "shard_grad_op"}


@pytest.mark.nightly(one_in=2)
@pytest.mark.filterwarnings("ignore:the forward of Sequential set attributes")
@pytest.mark.parametrize(("cls", "strategy"), MODULES.items())
def test_a_module_that_does_more_than_compute_is_compiled_once(cls, strategy):
    functional = fs.make_functional(nn.Sequential(made(cls), nn.Tanh(), made(cls)), mutable=True)
    backend, x = Backend(), torch.randn(4, 3)

    def main(mesh, compiler):
        how, now = {"compiler": compiler}, functional[2]
        _, sharded, shards = of_module(mesh, functional, ["0", "2"], strategy=strategy, how=how)

        def loss_fn(shards, now):
            out, new = sharded(shards, now, x)
            return out.square().sum(), new

        results = []
        for _ in range(3):
            (loss, now), grads = fs.value_and_grad(loss_fn, has_aux=True)(shards, now)
            results.append((loss, now, grads))
        return results

    both(main, backend.compiler)
    assert backend.graphs == 2  # the input of the first unit needs no gradient


@pytest.mark.nightly
def test_bert_trains_compiled_and_with_gradient_checkpointing():
    subject = SUBJECTS["bert"]
    net, batch = subject.build(0.0), subject.make_batch(2, 0)
    net.gradient_checkpointing_enable({"use_reentrant": False})
    bert = lambda model, batch: subject.loss(model(**batch["inputs"]), batch)  # noqa: E731
    equal = torch.testing.assert_close
    assert compiled(fs.make_functional(net), batch, subject.units, program=bert, equal=equal).graphs >= 1


def test_modules_that_are_compiled_already_are_refused_or_run_uncompiled():
    module, doubled = made(), made()
    module.blocks[1].compile()
    with pytest.warns(UserWarning, match=r"'blocks\.1' was compiled in place.*pass compiler=torch.compile to fully_shard"):
        apply, params, buffers = fs.make_functional(module)
    for parameter in doubled.parameters():
        parameter.data *= 2
    assert torch.equal(apply({name: 2 * p for name, p in params.items()}, buffers, TOKENS), doubled(TOKENS))
    module.blocks[2] = torch.compile(module.blocks[2])
    with pytest.raises(TypeError, match=r"'blocks\.2' was wrapped by torch.compile.*its _orig_mod.*compiler="):
        fs.make_functional(module)


def test_where_torch_would_crash_a_compiler_is_refused(monkeypatch):
    apply, params, _ = fs.make_functional(made())
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    main = lambda mesh: fs.fully_shard(apply, fs.make_plan(params, mesh), mesh, compiler=torch.compile)  # noqa: E731
    with pytest.raises(RuntimeError, match=r"torch before 2\.13 crashes.*simulated ranks do; found 2\.11\.0: leave"):
        fs.simulate(main, 1)
    main(fs.Mesh())  # on the main thread


def test_a_compiled_function_of_a_module_is_refused():
    apply, params, _ = fs.make_functional(made())
    with pytest.raises(TypeError, match=r"found a compiled function: pass apply itself, and compiler=torch.compile"):
        fs.fully_shard(torch.compile(apply), fs.make_plan(params, 1), fs.Mesh())
