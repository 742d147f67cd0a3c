"""``make_functional``: a function that equals the module, is pure, and names wrong arguments."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard._utils import tree
from tests.module.law import Runs, check_equal, same_bits
from tests.ranks import run_ranks


def plus_one(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def scripted() -> nn.Module:
    """Return a module that keeps a function of ``torch.jit``, which cannot be copied."""
    module = Runs(lambda m, x: m.others["more"][0](m.lin(x)), lin=nn.Linear(3, 5))
    with warnings.catch_warnings(action="ignore"):
        module.others = {"more": [torch.jit.script(plus_one)]}
    return module


def shared_layer() -> nn.Module:
    first = nn.Linear(3, 3)
    return Runs(lambda m, x: m.deep(m.again(m.first(x))), first=first, again=first, deep=nn.Sequential(nn.Tanh(), first))


def rotary() -> nn.Module:
    module = Runs(lambda m, x: m.lin(x) * m.angles.cos(), lin=nn.Linear(3, 3, bias=False))
    module.register_buffer("angles", torch.randn(3), persistent=False)
    module.register_buffer("nothing", None)
    return module


def tied_head() -> nn.Module:
    emb, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = emb.weight
    return Runs(lambda m, x: m.head(m.emb(x).tanh()), emb=emb, head=head)


def outputs(m: Any, x: torch.Tensor, *, times: int = 1) -> dict[str, Any]:
    y = m.lin(x) * times
    return {"y": y, "deep": [y, None]}


x, tokens = torch.randn(4, 3), torch.randint(0, 7, (2, 5))
CASES: dict[str, tuple[Callable[[], nn.Module], tuple, dict]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)), (x,), {}),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 5)), nn.Tanh()), (x,), {}),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), (x,), {}),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.Linear(3, 5)), (x,), {}),
    "a function of torch.jit": (scripted, (x,), {}),
    "shared layer": (shared_layer, (x,), {}),
    "non-persistent buffer": (rotary, (x,), {}),
    "tied head": (tied_head, (tokens,), {}),
    "dict": (lambda: Runs(outputs, lin=nn.Linear(3, 3)), (x,), {"times": 3}),
    "no output": (lambda: Runs(lambda m, x: None, lin=nn.Linear(3, 3)), (x,), {}),
    "no parameters": (nn.Tanh, (x,), {}),
}
cases = pytest.mark.parametrize(("make", "args", "kwargs"), CASES.values(), ids=CASES)
statistics_stay = pytest.mark.filterwarnings("ignore:the forward of .* (changed buffers|set attributes) of the module")


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def snapshot(module: nn.Module, parameters: bool = True) -> dict[str, torch.Tensor]:
    named = (*(module.named_parameters() if parameters else ()), *module.named_buffers())
    return {name: value.detach().clone() for name, value in named}


def grads_of(out: Any, values: Any) -> Any:
    """Return the gradients of an output's sum of squares."""
    floating = [y.square().sum() for y in tree.leaves(out) if isinstance(y, torch.Tensor) and y.requires_grad]
    return torch.autograd.grad(sum(floating), [*values], allow_unused=True) if floating else None


@pytest.mark.slow
@cases
def test_each_call_has_the_outputs_gradients_and_buffers_of_the_module_and_changes_nothing(
    make: Any, args: tuple, kwargs: dict
) -> None:
    module = made(make)
    apply, params, buffers = fs.make_functional(module, mutable=True)
    assert params.keys() == dict(module.named_parameters()).keys()
    with torch.no_grad():
        for parameter in (*params.values(), *module.parameters()):  # which share no memory
            parameter.mul_(1.5)
    before = snapshot(module)
    torch.manual_seed(1)
    apply(params, buffers, *args, **kwargs)
    same_bits(snapshot(module), before)
    torch.manual_seed(1)
    theirs = module(*args, **kwargs)
    their_grads, their_buffers = grads_of(theirs, module.parameters()), snapshot(module, parameters=False)
    for value in (*module.parameters(), *module.buffers()):  # which reaches no call
        value.data.zero_()
    module.train(not module.training)
    for _ in range(2):
        torch.manual_seed(1)
        out, after = apply(params, buffers, *args, **kwargs)
        same_bits(out, theirs)
        same_bits(grads_of(out, params.values()), their_grads)
        same_bits(after, their_buffers)
        assert not any(value.requires_grad for value in after.values())
        same_bits({**params, **buffers}, before)


def test_a_state_dict_has_all_names_of_a_tied_parameter() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    apply, params, buffers = fs.make_functional(module)
    plan = fs.make_plan(params, 1)
    state_dict = fs.to_state_dict(fs.shard(params, plan, fs.Mesh()), plan, fs.Mesh())
    assert "1.weight" in state_dict
    for given in (state_dict, module.state_dict(), {name: value.clone() for name, value in state_dict.items()}):
        assert torch.equal(apply(given, buffers, x), module(x))
    with pytest.raises(ValueError, match=r"unexpected: \['2.weight'\]"):
        apply({**state_dict, "2.weight": torch.zeros(3, 3)}, buffers, x)


def test_a_module_on_the_meta_device_gives_a_function_of_real_tensors() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    apply, params, buffers = fs.make_functional(module, mutable=True)
    assert all(value.is_meta for value in (*params.values(), *buffers.values()))
    assert apply(params, buffers, x.to("meta"))[0].shape == (4, 4)
    real = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    assert torch.equal(apply(dict(real.named_parameters()), dict(real.named_buffers()), x)[0], real(x))


@statistics_stay
def test_train_and_eval_are_functions_of_their_own() -> None:
    module = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
    module[0].eval()
    apply, params, buffers = fs.make_functional(module)
    in_eval = apply.eval()(params, buffers, x)
    assert torch.equal(apply.eval().train().eval()(params, buffers, x), in_eval)
    assert torch.equal(in_eval, F.batch_norm(x, buffers["1.running_mean"], buffers["1.running_var"]))
    torch.manual_seed(0)
    own = apply(params, buffers, x)
    assert torch.equal(own, F.batch_norm(x, None, None, training=True))
    torch.manual_seed(0)
    assert not torch.equal(apply.train()(params, buffers, x), own)
    assert module.training
    assert not module[0].training


def test_other_methods_run_on_the_same_parameters() -> None:
    class Encodes(nn.Linear):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self(x).relu()

    module = Encodes(3, 3)
    apply, params, buffers = fs.make_functional(module)
    assert torch.equal(apply.method("encode")(params, buffers, x), module.encode(x))
    assert torch.equal(apply.method("encode").method("forward")(params, buffers, x), module(x))
    with pytest.raises(AttributeError, match="Encodes has no method 'in_features'"):
        apply.method("in_features")


def test_arguments_may_be_called_params_and_buffers() -> None:
    def forward(module: nn.Module, params: int, buffers: int) -> int:
        return params - buffers

    apply, params, buffers = fs.make_functional(Runs(forward))
    assert apply(params, buffers, params=5, buffers=3) == 2


def test_persistent_buffers_are_those_of_the_state_dict_under_each_of_their_names() -> None:
    class Twice(nn.Module):
        def __init__(self, first_is_persistent: bool) -> None:
            super().__init__()
            shared = torch.ones(2)
            self.register_buffer("one", shared, persistent=first_is_persistent)
            self.register_buffer("two", shared, persistent=not first_is_persistent)

    module = nn.Sequential(nn.BatchNorm1d(3), rotary(), Twice(True), Twice(False))
    apply, _, buffers = fs.make_functional(module)
    assert "1.angles" in buffers
    names = set(module.state_dict()) - {name for name, _ in module.named_parameters()}
    assert set(apply.persistent(buffers)) == names


def meddling(change: Any) -> nn.Module:
    """Return a module whose forward does ``change`` to its weight."""
    return Runs(lambda m, x: (change(m.lin.weight), m.lin(x))[1], lin=nn.Linear(3, 3))


CHANGES: dict[str, Any] = {
    "requires_grad_": lambda weight: weight.requires_grad_(False),
    "requires_grad": lambda weight: setattr(weight, "requires_grad", False),
    "a grad": lambda weight: setattr(weight, "grad", torch.ones(3, 3)),
    "no grad": lambda weight: setattr(weight, "grad", None),
    "a new attribute": lambda weight: setattr(weight, "cache", torch.ones(3)),
    "another value of an attribute": lambda weight: setattr(weight, "axis", torch.ones(3)),
    "an attribute less": lambda weight: delattr(weight, "axis"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("raises", [False, True])
def test_a_forward_changes_no_parameter_of_the_caller(change: Any, raises: bool) -> None:
    apply, params, buffers = fs.make_functional(meddling(change))
    weight = params["lin.weight"]
    weight.grad, weight.axis = torch.full((3, 3), 5.0), (axis := torch.zeros(3))
    grad, names = weight.grad, {*vars(weight)}
    for _ in range(2):
        if raises:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                apply(params, buffers, torch.ones(4, 4))
        else:
            expected = F.linear(x, weight, params["lin.bias"])
            assert torch.equal(apply(params, buffers, x), expected)
        assert weight.requires_grad
        assert weight.grad is grad
        assert weight.axis is axis
        assert {*vars(weight)} == names


def test_a_parameter_that_forward_freezes_gets_no_gradient_from_that_call() -> None:
    apply, params, buffers = fs.make_functional(meddling(CHANGES["requires_grad_"]))
    for _ in range(2):
        apply(params, buffers, x).sum().backward()
        assert params["lin.weight"].grad is None
    assert params["lin.bias"].grad is not None


WRITES: dict[str, Any] = {
    "in place": torch.no_grad()(lambda weight: weight.clamp_(0, 1)),
    "through data": lambda weight: weight.data.clamp_(0, 1),
    "other data": lambda weight: setattr(weight, "data", weight.data + 1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_forward_that_writes_to_a_parameter_is_told(write: Any) -> None:
    apply, params, buffers = fs.make_functional(meddling(write))
    with pytest.raises(RuntimeError, match=r"forward wrote to its parameter 'lin.weight', .*: compute with a copy"):
        apply(params, buffers, x)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_are_an_error_until_they_are_removed(register: str) -> None:
    """They were lost, and gradients had other values."""
    module = nn.Linear(3, 3)
    handle = getattr(module.bias, register)(lambda _: None)
    with pytest.raises(ValueError, match=r"parameter 'bias' has hooks, .*: remove them"):
        fs.make_functional(module)
    handle.remove()
    fs.make_functional(module)


def test_parameters_of_inference_mode_have_no_versions_to_compare() -> None:
    apply, params, buffers = fs.make_functional(nn.Linear(3, 3))
    with torch.inference_mode():
        mixed = {**params, "weight": params["weight"] * 2}
    assert torch.equal(apply(mixed, buffers, x), F.linear(x, params["weight"] * 2, params["bias"]))


def refuse_parallel_modules(_mesh: fs.Mesh) -> None:
    for parallelize, words in (
        (
            nn.parallel.DistributedDataParallel,
            "by DistributedDataParallel, .* use its .module: fs.fully_shard takes its place",
        ),
        (fsdp2, "by FSDP, .* use the module without it: fs.fully_shard takes its place"),
    ):
        with pytest.raises(TypeError, match=rf"module '\(root\)' is parallelized {words}$"):
            fs.make_functional(parallelize(nn.Sequential(nn.Linear(3, 3))))


def test_a_module_that_torch_has_parallelized_already_is_refused() -> None:
    run_ranks(refuse_parallel_modules, 2)


class WithoutContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def with_backward_hook() -> nn.Module:
    net = nn.Linear(3, 3)
    net.register_full_backward_hook(lambda module, before, after: None)
    return net


def checkpointed(use_reentrant: bool) -> nn.Module:
    return Runs(lambda m, x: checkpoint(m.lin, x, use_reentrant=use_reentrant), lin=nn.Linear(3, 3))


def with_function() -> nn.Module:
    return Runs(lambda m, x: WithoutContext.apply(m.lin(x)), lin=nn.Linear(3, 3))


# What runs in no transform of torch -> (the module, what to do).
OUTSIDE_OF_TRANSFORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a checkpoint": (lambda: checkpointed(use_reentrant=False), "use fs.remat"),
    "a reentrant checkpoint": (lambda: checkpointed(use_reentrant=True), "reentrant .*use fs.remat"),
    "a Function without setup_context": (with_function, "give it one"),
    "a full backward hook": (with_backward_hook, "remove full backward hooks"),
}


@pytest.mark.parametrize(("make", "advice"), OUTSIDE_OF_TRANSFORMS.values(), ids=OUTSIDE_OF_TRANSFORMS)
def test_what_runs_in_no_transform_gets_an_error_that_says_what_to_do(make: Any, advice: str) -> None:
    apply, params, buffers = fs.make_functional(make())
    with pytest.raises(RuntimeError, match=advice):
        torch.func.grad(lambda params: apply(params, buffers, torch.ones(2, 3)).sum())(params)


# --- modules that torch.fx and torch.export made --------------------------------------------------

of_torch = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x)).tanh() * self.scale


def traced(module: nn.Module) -> nn.Module:
    return fx.symbolic_trace(module)


def exported(module: nn.Module) -> nn.Module:
    return torch.export.export(module, (x,)).module()


def two_blocks() -> nn.Module:
    return nn.Sequential(Block(), nn.Linear(3, 3))


# name -> (module, units)
GRAPHS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "fx, whole": (lambda: traced(two_blocks()), []),
    "fx, with a unit inside": (lambda: traced(two_blocks()), ["0.lin", "1"]),
    "fx, as a unit": (lambda: nn.Sequential(traced(Block()), nn.Linear(3, 3)), ["0", "1"]),
    "fx, inside another": (lambda: nn.Sequential(nn.Sequential(traced(Block())), nn.Linear(3, 3)), ["0", "0.0"]),
    "export, whole": (lambda: exported(two_blocks()), []),
    "export, as a unit": (lambda: nn.Sequential(exported(Block()), nn.Linear(3, 3)), ["0", "1"]),
}


def off_zero(model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) + 1).square().mean()
    return loss


@of_torch
@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize(("make", "units"), GRAPHS.values(), ids=GRAPHS)
def test_gradients_are_those_of_the_module(make, units) -> None:
    check_equal(make(), x, units, bits=True, program=off_zero, how={"remat": bool(units)})


@of_torch
@pytest.mark.parametrize("make", [traced, exported])
def test_calls_and_later_edits_of_the_graph_do_not_meet(make) -> None:
    module = make(two_blocks())
    apply, params, buffers = fs.make_functional(module)
    before = apply(params, buffers, x)
    assert torch.equal(before, module(x))
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    assert torch.equal(apply(zeros, buffers, x), torch.zeros(4, 3))
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    with module.graph.inserting_before(output):
        (result,) = output.all_input_nodes
        output.replace_input_with(result, module.graph.call_function(torch.neg, (result,)))
    module.recompile()
    assert torch.equal(apply(params, buffers, x), before)


@of_torch
def test_no_call_copies_the_graph() -> None:
    for module in (traced(two_blocks()), exported(two_blocks())):
        apply, _, _ = fs.make_functional(module)
        assert {key for _, key in apply.skeleton.copied_attributes} <= {"train", "eval"}


@of_torch
def test_containers_of_a_graph_are_no_units() -> None:
    apply, params, _ = fs.make_functional(exported(two_blocks()))
    words = (
        "unit '0' is a Module, which has no forward of its own; .* choose the modules that are called, such as its children"
    )
    with pytest.raises(ValueError, match=words):
        fs.fully_shard(apply, fs.make_plan(params, fs.Mesh(), units=["0"]), fs.Mesh())


@of_torch
def test_the_mode_of_an_exported_module_is_that_of_its_export() -> None:
    apply, _, _ = fs.make_functional(nn.Sequential(exported(nn.Dropout(0.5))))
    with pytest.raises(TypeError, match=r"made by torch\.export, .*: export the module in the other mode too"):
        apply.eval()
    fs.make_functional(traced(two_blocks()))[0].eval()


class CopiesItself(nn.Linear):
    def __deepcopy__(self, memo):
        return nn.Linear(self.in_features, self.out_features)


def test_a_module_that_copies_itself_with_other_tensors_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"'0' \(Linear\) copies itself with other tensors or modules"):
        fs.make_functional(nn.Sequential(CopiesItself(3, 3)))


@of_torch
def test_modules_of_unflatten_are_refused_as_they_cannot_be_copied() -> None:
    module = torch.export.unflatten(torch.export.export(two_blocks(), (x,)))
    with pytest.raises(TypeError, match=r"'\(root\)' was made by torch\.export\.unflatten, .*: use the \.module\(\) of"):
        fs.make_functional(module)


# --- parametrize.cached, whose table belongs to the whole program ---------------------------------

x64 = torch.randn(2, 3, dtype=torch.float64)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


class View(nn.Module):
    def forward(self, w):
        return w.view(w.shape)


def parametrized(parametrization=Symmetric, *, cached):
    """Return a network that calls its parametrized layer twice."""

    def run(net, x):
        assert parametrize.type_before_parametrizations(net.a) is nn.Linear  # the class that torch made stays
        with parametrize.cached() if cached else contextlib.nullcontext():
            return net.a(net.b(net.a(x)))

    torch.manual_seed(0)
    a, b = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
    return Runs(run, a=parametrize.register_parametrization(a, "weight", parametrization()), b=b)


def test_calls_of_two_trees_inside_cached_do_not_share_tensors():
    net = parametrized(cached=False)
    apply, params, buffers = fs.make_functional(net)
    other = {name: value * 2 for name, value in params.items()}
    alone = [apply(each, buffers, x64) for each in (params, other)]
    with parametrize.cached():
        together = [apply(each, buffers, x64) for each in (params, other)]
        assert torch.equal(net(x64), together[0])
    assert all(map(torch.equal, together, alone))


def test_a_call_inside_cached_computes_a_tensor_once():
    seen = []

    class Counts(Symmetric):
        def forward(self, w):
            seen.append(w)
            return super().forward(w)

    for cached, times in ((True, 1), (False, 2)):
        apply, params, buffers = fs.make_functional(parametrized(Counts, cached=cached))
        seen.clear()
        apply(params, buffers, x64)
        assert len(seen) == times


def cached_calls(loss_fn):
    evaluate = fs.value_and_grad(loss_fn)

    def call(*args):
        with parametrize.cached():
            return evaluate(*args)

    return call


UNITS = [([], []), (["a", "b"], []), (["a", "b"], ["a"]), (["a.parametrizations.weight"], [])]


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("parametrization", [Symmetric, View])
@pytest.mark.parametrize(("units", "remat"), UNITS)
@pytest.mark.parametrize("evaluate", [fs.value_and_grad, cached_calls])
def test_sharded_gradients_inside_cached_are_the_modules(parametrization, units, remat, evaluate):
    net = parametrized(parametrization, cached=evaluate is not cached_calls)
    check_equal(net, x64, units, how={"remat": remat}, evaluate=evaluate)
