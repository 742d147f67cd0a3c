"""What a unit takes out of its module: precisions, sparse gradients, the fast path of transformer layers."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.core.units import forward_mode, of_module
from tests.module.law import Runs, calls_on, check_equal, gathers, outputs_on, plain_call, same_bits, sharded_call, squares
from tests.pairwise import crossed
from tests.promises.test_upstream_precision import WIDTH, Noted, build
from tests.ranks import on_ranks, run_ranks

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CASTING = {"the root casts": False, "units cast": True}
EVALUATION = {"low in eval": False, "full in eval": True}


def planned(params: Any, mesh: Any, precision: fs.MixedPrecision, **options: Any) -> tuple[fs.Plan, list[str]]:
    """Return the plan, and the warnings that ``make_plan`` gave."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = fs.make_plan(params, mesh, precision=precision, **options)
    return plan, [str(each.message) for each in said]


def noting(module: nn.Module, name: str, noted: Noted) -> nn.Module:
    """Return the module with a class that records the dtypes of its input and buffers."""
    cls = type(module)

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        noted.append((name, x.dtype, *(b.dtype for b in self.buffers() if b.is_floating_point())))
        return cls.forward(self, x)

    module.__class__ = type(cls.__name__, (cls,), {"forward": forward})
    return module


@pytest.mark.slow
@crossed(cast=CASTING, full=EVALUATION, strategy=["full_shard", "shard_grad_op", "no_shard"])
@on_ranks(2)
def test_evaluation_is_in_full_precision_where_it_should_be_and_training_before_and_after_is_not(mesh, cast, full, strategy):
    precision = fs.MixedPrecision(FP16, FP16, FP16, cast_forward_inputs=cast, full_precision_in_eval=full)
    net, noted, units = build(3, FP32)
    apply, params, buffers = fs.make_functional(net)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    plan = fs.make_plan(params, mesh, units=units, strategy=strategy, precision=precision)
    shards, x = fs.shard(params, plan, mesh), torch.randn(3, WIDTH)
    for mode in ("train", "eval", "train"):
        low = mode == "train" or not full
        sharded = fs.fully_shard(getattr(apply, mode)(), plan, mesh)
        with fs.record_events() as events:
            loss, grads = fs.value_and_grad(lambda s, run=sharded: run(s, buffers, x).sum())(shards)
        assert set(noted) == {(FP16, FP16, FP16, FP16) if low else (FP32, FP32, FP64, FP32)}
        assert loss.dtype == (FP16 if low else FP32)
        assert {event.dtype for event in events} == {"float16" if low else "float32"}
        ran = plan if low else plan.in_full_precision()
        assert tuple(events) == fs.predict_events(ran, sharded.schedule, not_saved=["0"])
        assert {grad.dtype for unit in grads.values() for grad in unit.values()} == {FP32}
        noted.clear()
        if not low:
            assert torch.equal(sharded(shards, buffers, x), apply.eval()(params, buffers, x))
            noted.clear()
    assert all(torch.equal(buffers[name], value) and buffers[name].dtype == FP64 for name, value in before.items())


@crossed(cast=CASTING, full=EVALUATION)
def test_a_root_that_owns_nothing_casts_its_inputs_in_evaluation_as_the_precision_says(cast, full):
    precision = fs.MixedPrecision(FP16, FP16, FP16, cast_forward_inputs=cast, full_precision_in_eval=full)
    noted = Noted()
    apply, params, buffers = fs.make_functional(nn.Sequential(noting(nn.Sequential(nn.Linear(5, 5)), "", noted)))
    (out,) = outputs_on(1, (apply.eval(), params, buffers), torch.randn(5, 5), ["0.0"], precision=precision)
    assert noted == [("", FP32 if full else FP16)]
    assert out.dtype == noted[0][1]


def counting(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Run a module with buffers that calls change: a mean of the inputs in float64, and a count."""
    module.noted.append((module.mean.dtype, module.count.dtype))
    module.mean.lerp_(x.mean(0).to(module.mean.dtype), 0.5)
    module.count += 1
    return module.lin(x)


@pytest.mark.parametrize("dtype", [FP16, BF16, None])
def test_new_buffers_come_back_in_the_dtypes_of_those_that_were_given(dtype):
    noted = Noted()
    tables = {"mean": torch.full((4,), 0.1, dtype=FP64), "count": torch.zeros((), dtype=torch.int64)}
    net = nn.Sequential(Runs(counting, lin=nn.Linear(4, 4), noted=noted, **tables))
    functional = fs.make_functional(net, mutable=True)
    buffers, precision = functional[2], fs.MixedPrecision(FP16, buffer_dtype=dtype)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    ((_, new),) = outputs_on(1, functional, torch.ones(2, 4), ["0"], precision=precision)
    assert noted == [(dtype or FP64, torch.int64)]
    assert {name: buffer.dtype for name, buffer in new.items()} == {"0.mean": FP64, "0.count": torch.int64}
    low = before["0.mean"].to(dtype or FP64)
    assert torch.equal(new["0.mean"], low.lerp(torch.ones(4).to(low), 0.5).double())
    assert new["0.count"] == 1
    same_bits(buffers, before)


class BatchNormNet(nn.Module):
    def __init__(self, affine: bool, noted: Noted) -> None:
        super().__init__()
        self.fc1 = noting(nn.Linear(2, 40, bias=False), "fc1", noted)
        self.bn = noting(nn.BatchNorm1d(4, affine=affine), "bn", noted)
        self.fc2 = noting(nn.Linear(40, 4, bias=False), "fc2", noted)
        self.ln = noting(nn.LayerNorm(4), "ln", noted)
        self.plain = noting(nn.LayerNorm(4, elementwise_affine=False), "plain", noted)
        self.fc3 = noting(nn.Linear(4, 4, bias=False), "fc3", noted)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.fc1(x).reshape(-1, 4, 10)).reshape(-1, 40)
        return F.softmax(self.fc3(self.plain(self.ln(self.fc2(x)))), dim=1)


IGNORING = fs.MixedPrecision(FP16, FP16, FP16, ignored_classes=(nn.modules.batchnorm._BatchNorm, nn.LayerNorm))


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "without parameters"])
@on_ranks(2)
def test_ignored_classes_become_units_in_full_precision(mesh, affine, dtype):
    precision = fs.MixedPrecision(dtype, dtype, dtype, ignored_classes=IGNORING.ignored_classes)
    noted, x = Noted(), torch.randn(3, 2)
    apply, params, buffers = fs.make_functional(BatchNormNet(affine, noted), mutable=True)
    plan, said = planned(params, mesh, precision)
    units = "BatchNorm1d, LayerNorm: 'bn', 'ln'" if affine else "LayerNorm: 'ln'"
    assert said == [f"ignored_classes of the precision hold {units} become units of their own, in full precision"]
    assert [(unit.name, unit.precision, unit.full_precision) for unit in plan.unit_list] == [
        ("", precision, False), *([("bn", None, True)] if affine else []), ("ln", None, True)
    ]  # fmt: skip
    sharded = fs.fully_shard(apply, plan, mesh)
    with fs.record_events() as events:
        (loss, new), grads = fs.value_and_grad(
            lambda s: ((out := sharded(s, buffers, x))[0].square().sum(), out[1]), has_aux=True
        )(fs.shard(params, plan, mesh))
    assert tuple(events) == fs.predict_events(plan, sharded.schedule)
    assert loss.dtype == dtype
    assert new["bn.running_mean"].dtype == FP32
    # BatchNorm computes the statistics of its input in float32.
    given, norm = F.linear(x.to(dtype), params["fc1.weight"].to(dtype)).reshape(-1, 4, 10).float(), nn.BatchNorm1d(4)
    norm(given)
    assert torch.equal(new["bn.running_mean"], norm.running_mean)
    assert {grad.dtype for unit in grads.values() for grad in unit.values()} == {FP32}
    assert {*noted} == {
        ("fc1", dtype),
        ("bn", FP32, FP32, FP32),
        ("fc2", dtype),
        ("ln", FP32),
        ("plain", FP32),
        ("fc3", dtype),
    }


def test_a_tree_around_the_params_keeps_what_they_remember():
    _, params, _ = fs.make_functional(BatchNormNet(True, Noted()))
    plan, said = planned({"model": params, "scale": torch.ones(2)}, 2, IGNORING)
    assert "'model.bn', 'model.ln' become units" in said[0]
    assert [name for name, unit in plan.units.items() if unit.full_precision] == ["model.bn", "model.ln"]


def test_copies_of_the_params_remember_nothing_and_the_error_says_so():
    net, mesh = BatchNormNet(True, Noted()), fs.Mesh()
    apply, params, buffers = fs.make_functional(net, mutable=True)
    clones = {name: value.clone() for name, value in params.items()}
    plan, said = planned(clones, 1, IGNORING)
    assert said == []
    words = r"module 'bn' is of ignored_classes, which are in full precision, but its parameter 'bn\.\w+' is in"
    with pytest.raises(ValueError, match=words + r" unit '\(root\)', of lower precision: pass the params of"):
        fs.fully_shard(apply, plan, mesh)
    # The remedy of the error message:
    units = fs.wrap.by_function(lambda module: {"precision": None} if module in (net.bn, net.ln) else False)(net)
    plan, _ = planned(clones, 1, IGNORING, units=units)
    out, _ = fs.fully_shard(apply, plan, mesh)(fs.shard(clones, plan, mesh), buffers, torch.ones(1, 2))
    assert out.dtype == FP16


def test_a_unit_that_ignores_other_classes_than_the_plan_decides_for_itself():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    lower = {"precision": fs.MixedPrecision(FP16, ignored_classes=())}
    units = fs.wrap.by_function(lambda module: lower if module is net[0] else module is net[1])(net)
    plan, said = planned(fs.make_functional(net)[1], 2, fs.MixedPrecision(FP16), units=units)
    assert list(plan.units) == ["0", "1", "1.1"]
    assert len(said) == 1
    assert "'1.1' become units" in said[0]


class Exact(nn.Sequential):
    pass


@pytest.mark.filterwarnings("ignore:ignored_classes of the precision hold Exact")
@pytest.mark.parametrize("own", [True, False], ids=["with leaves of its own", "all in units"])
def test_units_inside_a_module_of_an_ignored_class_are_in_full_precision_too(own):
    first = nn.LayerNorm(4) if own else nn.Identity()
    net = nn.Sequential(nn.Linear(4, 4), Exact(first, nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4)).double()
    precision, x = fs.MixedPrecision(FP16, ignored_classes=(Exact,)), torch.ones(2, 4, dtype=FP64)
    half = copy.deepcopy(net).half()
    expected = half[2](net[1](half[0](x.half()).double()).half())
    for out in outputs_on(2, fs.make_functional(net), x, fs.wrap.by_class(nn.Linear)(net), precision=precision):
        assert torch.equal(out, expected)


# --- embeddings that ask torch for sparse gradients, and get dense ones ---------------------------

word_ids = torch.tensor([[1, 2, 2], [4, 0, 1]])
EMBEDDINGS: dict[str, tuple[Callable[..., nn.Module], list[str]]] = {
    "a unit": (nn.Embedding, ["table"]),
    "in the root": (nn.Embedding, []),
    "a bag": (lambda *sizes, sparse: nn.EmbeddingBag(*sizes, mode="sum", sparse=sparse), ["table"]),
}


def embedding_model(make: Callable[..., nn.Module], *, sparse: bool) -> nn.Module:
    torch.manual_seed(0)
    table = make(5, 4, sparse=sparse)
    return Runs(lambda m, x: m.head(torch.tanh(m.table(x))), table=table, head=nn.Linear(4, 2)).double()


@pytest.mark.parametrize(("make", "units"), EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_a_sparse_embedding_has_the_gradients_of_a_dense_one(make: Any, units: Any) -> None:
    losses, grads = plain_call(embedding_model(make, sparse=False), word_ids, 2)
    for call in calls_on(2, fs.make_functional(embedding_model(make, sparse=True)), word_ids, units):
        torch.testing.assert_close([call.loss, call.grads], [losses[0], grads])


@forward_mode
def test_a_sparse_embedding_has_products_with_the_hessian() -> None:
    def product(mesh: fs.Mesh, sparse: bool) -> Any:
        plan, sharded, shards = of_module(mesh, embedding_model(nn.Embedding, sparse=sparse), ["table"])
        loss_fn = lambda shards: sharded(shards, {}, word_ids).square().mean()  # noqa: E731
        return fs.gather(fs.hvp(loss_fn, (shards,), (shards,)), plan, mesh)

    for found in fs.simulate(lambda mesh: (product(mesh, sparse=True), product(mesh, sparse=False)), 2):
        torch.testing.assert_close(*found)


def test_an_ignored_embedding_keeps_its_sparse_gradient() -> None:
    apply, params, _ = fs.make_functional(embedding_model(nn.Embedding, sparse=True))
    own = {"table.weight": params.pop("table.weight")}

    def main(mesh: fs.Mesh) -> bool:
        plan = fs.make_plan(params, mesh)
        sharded = fs.fully_shard(apply, plan, mesh, ignored_params=["table.weight"])
        weight = own["table.weight"].detach().requires_grad_()
        loss = sharded(fs.shard(params, plan, mesh), {"table.weight": weight}, word_ids).sum()
        return torch.autograd.grad(loss, weight)[0].is_sparse

    assert fs.simulate(main, 1) == [True]


# --- the fast path of a `TransformerEncoderLayer` with units inside -------------------------------

sequence = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(), 2)


def hooked() -> nn.Module:
    net = encoder_layer()
    net.register_forward_hook(lambda module, args, out: out * 2)
    return net


# name -> (module, units)
MODELS: dict[str, tuple[Any, list[str]]] = {
    "attention and a linear encoder_layer": (encoder_layer, ["self_attn", "linear1"]),
    "norms first": (lambda: encoder_layer(norm_first=True), ["norm1"]),
    "all of a encoder_layer but its norms": (encoder_layer, ["self_attn", "linear1", "linear2"]),
    "a encoder_layer with a hook": (hooked, ["self_attn"]),
    "layers": (encoder, ["layers.*"]),
    "attention of the second encoder_layer": (encoder, ["layers.1.self_attn"]),
    "layers and their attention": (encoder, ["layers.*", "layers.*.self_attn"]),
}


@pytest.mark.nightly(one_in=3)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@crossed(model=MODELS, padded={"": False, "padded": True}, how=["no_grad", "inference_mode", "frozen"])
def test_evaluation_gives_the_numbers_of_the_unsharded_model(model, padded, how) -> None:
    torch.manual_seed(0)
    make, units = model
    net = make().eval().requires_grad_(how != "frozen")
    kwargs = {"src_key_padding_mask": padding} if padded else {}
    context = torch.enable_grad if how == "frozen" else getattr(torch, how)
    with context():
        wanted = net(sequence, **kwargs)
    program = lambda model, x: model(x, **kwargs)  # noqa: E731
    with context():
        for found in outputs_on(1, fs.make_functional(net), sequence, units, program=program):
            torch.testing.assert_close(found, wanted)
    if padded and make is encoder:  # torch computes with nested tensors, and fills what is padded with zeros
        assert not wanted[1, 4:].any()


# --- methods of a module besides forward, which gather its unit -----------------------------------

CODER_WIDTH = 4


class Coder(nn.Module):
    """An autoencoder whose methods share a weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(CODER_WIDTH, CODER_WIDTH), nn.Linear(CODER_WIDTH, CODER_WIDTH)

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
        return CODER_WIDTH

    @property
    def width(self):
        return CODER_WIDTH


def made(way):
    """Return a module that calls methods of its coder in some way, between two layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        call = WAYS[way][0] if isinstance(way, str) else way
        return Runs(lambda m, x: m.head(call(m.coder, x)), coder=Coder(), head=nn.Linear(CODER_WIDTH, 1))


WAYS = {  # name -> the calls, and how many times they gather the unit in forward
    "one method": (lambda coder, x: coder.encode(x), 1),
    "one after another": (lambda coder, x: coder.decode(coder.encode(x, scale=0.5)), 2),
    "a method and forward": (lambda coder, x: coder(x) + coder.encode(x), 2),
    "a method of methods and of forward": (lambda coder, x: coder.both(x), 1),
    "checkpoints inside": (lambda coder, x: coder.again(x), 1),
    "a checkpoint around": (lambda coder, x: checkpoint(coder.both, x, use_reentrant=False), 1),
}
METHODS = {"coder": ["encode", "decode", "both", "again"]}
OPTIONS = {
    "full_shard": {},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "remat": {"how": {"remat": ["coder"]}},
    "no_shard": {"strategy": "no_shard"},
}


def batch(rank):
    return torch.linspace(-1, 1, 3 * CODER_WIDTH).view(3, CODER_WIDTH).roll(rank, 0).requires_grad_()


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_methods_give_the_unsharded_gradients_and_gather_as_predicted(way, name):
    options = {**OPTIONS[name]}
    how = {"methods": METHODS, **options.pop("how", {})}
    calls = check_equal(made(way), batch, ["coder"], how=how, **options)
    recomputed = ["coder"] if name == "remat" or "checkpoint" in way else []
    for call in calls:
        if way != "checkpoints inside":  # where backward needs no leaf outside of checkpoints
            assert call.events == call.predicted(recomputed=recomputed)


@pytest.mark.parametrize("way", WAYS)
def test_each_call_of_a_method_from_outside_gathers_the_unit_once(way):
    def gathered(model, x):
        with torch.no_grad(), fs.record_events() as events:
            model(x)
        return gathers(events, "coder")

    functional = fs.make_functional(made(way))
    assert outputs_on(2, functional, batch, ["coder"], program=gathered, how={"methods": METHODS}) == [WAYS[way][1]] * 2


def test_without_its_name_a_method_that_reads_a_leaf_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"'coder\.inner\.weight' was read .* name the method in fully_shard\(.*, methods="):
        check_equal(made("one method"), batch, ["coder"])


@pytest.mark.parametrize("precision", [None, fs.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)])
def test_a_method_of_the_whole_model_calls_methods_of_units_which_cast_as_forward_does(precision):
    net, encoded = made("one method"), lambda m, x: m.coder.encode(x, scale=2.0)
    apply, params, buffers = fs.make_functional(net)
    units = fs.wrap.Units(["coder"], {"coder": {"precision": precision}})
    functional, how = (apply.method(encoded), params, buffers), {"methods": {"coder": ["encode"]}}
    for rank, found in enumerate(outputs_on(2, functional, batch, units, how=how)):
        expected = encoded(net, batch(rank))
        torch.testing.assert_close(found, expected.bfloat16() if precision else expected, rtol=0.05, atol=0.05)


def test_methods_run_under_transforms_and_beside_compiled_forwards():
    net = made("a method and forward")
    evaluate = lambda loss_fn: lambda *args: (torch.zeros(()), torch.func.grad(loss_fn)(*args))  # noqa: E731
    how = {"methods": METHODS, "compiler": lambda f: f}
    expected = plain_call(net, batch, 2)[1]
    for call in calls_on(2, fs.make_functional(net), batch, ["coder"], how=how, evaluate=evaluate):
        # torch.func adds over ranks
        torch.testing.assert_close(call.grads, {name: 2 * grad for name, grad in expected.items()})


def test_methods_of_the_modules_of_a_group_gather_the_group_once():
    net = Runs(lambda m, x: m.second.decode(m.first.encode(x)), first=Coder(), second=Coder())
    how = {"methods": {"first": ["encode"], "second": ["decode"]}}
    for call in check_equal(net, batch, [["first", "second"]], how=how):
        assert gathers(call.events, "first+second") == 2  # once forward, once backward


REFUSED = [
    (["encode"], TypeError, r"must be a dictionary from units to lists of method names; found \['encode'\]"),
    ({"coder": 1}, TypeError, r"the methods of 'coder' must be a list of names; found 1"),
    ({"": ["encode"]}, ValueError, r"found ''; .* call fully_shard\(apply\.method\(name\), plan, mesh\)"),
    ({"head": ["forward"]}, ValueError, r"must name units of the plan .*; found 'head'; its units are \['coder'\]: make"),
    ({"coder": ["encodes"]}, ValueError, r"found 'encodes': leave it out"),
    ({"coder": ["forward"]}, ValueError, r"besides forward and those that Python calls; found 'forward'"),
    ({"coder": ["size"]}, ValueError, r"found 'size'"),
    ({"coder": ["width"]}, ValueError, r"found 'width'"),
]


@pytest.mark.parametrize(("methods", "error", "message"), REFUSED)
def test_what_is_no_method_of_a_unit_is_refused(methods, error, message):
    apply, params, _ = fs.make_functional(made("one method"))
    plan = fs.make_plan(params, 1, units=["coder"])
    with pytest.raises(error, match=message):
        fs.fully_shard(apply, plan, fs.Mesh(), methods=methods)


class Halves(Coder):
    forward = nn.Module.forward  # it has none of its own


def test_a_unit_without_a_forward_runs_by_its_methods_and_is_refused_without_them():
    net = made("one after another")
    net.coder = Halves()
    for call in check_equal(net, batch, ["coder"], how={"methods": {"coder": ["encode", "decode"]}}):
        assert call.events == call.predicted()
    for methods in (None, {"coder": []}):
        with pytest.raises(ValueError, match=r"is a Halves, which has no forward of its own; .* in fully_shard\(methods="):
            check_equal(net, batch, ["coder"], how={"methods": methods})


def beside_fsdp2(mesh):
    """Check that the gradients of a loss of two methods are those of FSDP2."""
    net = made("one after another")
    how, evaluate = {"methods": METHODS}, functools.partial(fs.accumulate, micro_batches=1, reduce="once")
    ours = sharded_call(mesh, fs.make_functional(net), batch, ["coder"], how=how, evaluate=evaluate, calls=1).grads
    for part in (net.coder, net):
        fsdp2(part)
    for name in ("encode", "decode"):
        register_fsdp_forward_method(net.coder, name)
    squares(net, batch(mesh.rank)).backward()
    same_bits(ours, {name: p.grad.full_tensor() for name, p in net.named_parameters()})


@pytest.mark.slow
def test_methods_have_the_gradients_of_register_fsdp_forward_method_to_the_bit():
    run_ranks(beside_fsdp2, 2)
