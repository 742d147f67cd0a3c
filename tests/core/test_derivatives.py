"""The operators on every mesh, against torch.func on the whole parameters and the whole batch."""

import functools
import math
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

import funcshard as fs
from tests.core.derivative_models import MODELS
from tests.core.units import forward_mode, random, same_bits
from tests.models import SUBJECTS, cast, part
from tests.ranks import on_ranks, run_ranks, run_simulated

pytestmark = forward_mode

HYBRID = {"replicate": 2, "shard": 2}
SAMPLES = 12


@functools.cache
def subject_of(name):
    """Return the whole parameters, and outputs and loss of a part of the batch, of ``number`` parts."""
    subject = (SUBJECTS | MODELS)[name]
    module = subject.build().double()
    if name == "mlp":
        module.head.bias.requires_grad_(False)
    apply, params, buffers = fs.make_functional(module)
    batch = cast(subject.make_batch(SAMPLES, 0), torch.float64)
    own = lambda i, number: part(batch, i, number)  # noqa: E731
    return SimpleNamespace(
        apply=apply, params=params, units=subject.units, buffers=buffers, inputs=lambda i, n: own(i, n)["inputs"],
        out=lambda p, i, n: logits_of(apply(p, buffers, **own(i, n)["inputs"])),
        loss=lambda y, i, n: cross_entropy(y.flatten(0, -2), own(i, n)["targets"].flatten()),
    )  # fmt: skip


def logits_of(output):
    return getattr(output, "logits", output)


def setup(name, mesh, how=None, dtype=torch.float64, **options):
    """Return plan, shards, this rank's function of shards, its loss of outputs, and its part of the batch."""
    subject, at = subject_of(name), (fs.axis_index(mesh), mesh.shape["replicate"] * mesh.shape["shard"])
    params, inputs = cast(subject.params, dtype), cast(subject.inputs(*at), dtype)
    plan = fs.make_plan(params, mesh, **{"units": subject.units, **options})
    run = fs.fully_shard(subject.apply, plan, mesh, **(how or {}))
    out = lambda s: logits_of(run(s, subject.buffers, **inputs))  # noqa: E731
    return plan, fs.shard(params, plan, mesh), out, lambda y: subject.loss(y, *at), at


def mlp(mesh, **options):
    """Return plan, shards, random shards, and outputs and loss of a small model on this rank's part of the batch."""
    plan, shards, out, loss_of, _ = setup("mlp", mesh, **options)
    return plan, shards, fs.randn_like(shards, plan, mesh), out, lambda s: loss_of(out(s))


def operators(ops, out, loss_of, p, v, product, mean):
    """Return own tensors, numbers and trees that operators give, composed in several ways."""
    loss = lambda p: loss_of(out(p))  # noqa: E731
    outputs, tangents = ops.jvp(out, (p,), (v,))
    pulled = ops.vjp(out, p)[1](tangents.cos() / tangents.numel())[0]
    linear_outputs, push = ops.linearize(out, p)
    gradient, multiply = ops.linearize(ops.grad(loss), p)
    along = lambda f: lambda p: product(f(p), v)  # noqa: E731
    third = ops.grad(along(ops.grad(along(ops.grad(loss)))))(p)
    own = {"outputs": outputs, "tangents": tangents, "linear": linear_outputs, "pushed": push(v)}
    numbers = {
        "slope": mean(ops.jvp(loss, (p,), (v,))[1]),
        "slope of the mean": ops.jvp(lambda p: mean(loss(p)), (p,), (v,))[1],
        "curvature": product(ops.hvp(loss, (p,), (v,)), v),
    }
    trees = {
        "gradient": ops.grad(loss)(p), "linear gradient": gradient, "product": ops.hvp(loss, (p,), (v,)),
        "linear product": multiply(v), "pulled": pulled, "Gauss-Newton": ops.gnvp(out, loss_of, (p,), (v,)),
        "third": third,
        "slope of Gauss-Newton": ops.jvp(lambda p: ops.gnvp(out, loss_of, (p,), (v,)), (p,), (v,))[1],
    }  # fmt: skip
    return own, numbers, trees


def plain_hvp(loss, primals, tangents):
    return torch.func.jvp(torch.func.grad(loss), primals, tangents)[1]


def plain_gnvp(out, loss_of, primals, tangents):
    outputs, slopes = torch.func.jvp(out, primals, tangents)
    curved = plain_hvp(loss_of, (outputs,), (slopes,))
    return torch.func.vjp(out, *primals)[1](curved)[0]


# torch.func.linearize does not nest, and jvp is what it computes.
PLAIN = SimpleNamespace(
    grad=torch.func.grad, jvp=torch.func.jvp, vjp=torch.func.vjp, hvp=plain_hvp, gnvp=plain_gnvp,
    linearize=lambda f, p: (f(p), lambda v: torch.func.jvp(f, (p,), (v,))[1]),
)  # fmt: skip


@functools.cache
def expected(name):
    """Return what ``operators`` returns for one rank that has the whole batch; and the vector."""
    subject = subject_of(name)
    plan, shards, _, loss_of, _ = setup(name, fs.Mesh())
    drawn = fs.randn_like(shards, plan, fs.Mesh(), generator=torch.Generator().manual_seed(3))
    drawn = whole(drawn, plan, fs.Mesh())
    v = {path: drawn[path] for path in subject.params if path in drawn}
    frozen = {path: p for path, p in subject.params.items() if path not in v}
    product = lambda a, b: sum((a[path] * b[path]).sum() for path in v)  # noqa: E731
    out = lambda p: subject.out({**p, **frozen}, 0, 1)  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        params = {path: subject.params[path] for path in v}
        return operators(PLAIN, out, loss_of, params, v, product, lambda x: x)


def whole(vector, plan, mesh):
    """Return the whole tensors of a tree like shards, by path."""
    return {path: value for path, value in fs.gather(vector, plan, mesh).items() if value is not None}


def found(mesh, name, strategy):
    plan, shards, out, loss_of, at = setup(name, mesh, strategy=strategy)
    v = fs.randn_like(shards, plan, mesh, generator=torch.Generator().manual_seed(3))
    product = lambda a, b: fs.vdot(a, b, plan, mesh)  # noqa: E731
    own, numbers, trees = operators(fs, out, loss_of, shards, v, product, lambda x: fs.pmean(x, mesh))
    return own, numbers, {key: whole(vector, plan, mesh) for key, vector in trees.items()}, at


def check(results, name):
    own, numbers, trees = expected(name)
    for found_own, found_numbers, found_trees, (index, number) in results:
        parts = {key: value.chunk(number)[index] for key, value in own.items()}
        pairs = (found_own, parts), (found_numbers, numbers), (found_trees, trees)
        for actual, wanted in pairs:
            for key in wanted:
                torch.testing.assert_close(
                    actual[key], wanted[key], rtol=1e-10, atol=1e-10, msg=lambda m, key=key: f"{key}: {m}"
                )


@pytest.mark.nightly(one_in=36)
@pytest.mark.parametrize("strategy", ["shard_grad_op", "full_shard", "no_shard"])
@pytest.mark.parametrize("world", [{"shard": 2}, HYBRID, {"shard": 2, "tensor": 2}, {"shard": 4}, {}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "gpt", *MODELS])
def test_operators_are_those_of_the_whole_model_on_the_whole_batch(name, world, strategy):
    check(run_simulated(found, math.prod(world.values()), name, strategy, shape=world), name)


def found_on_gloo(mesh):
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
    return found(mesh, "mlp", "full_shard")


@pytest.mark.slow
def test_operators_on_gloo_processes():
    check(run_ranks(found_on_gloo, 2), "mlp")


SETTINGS = {
    "remat": {"how": {"remat": True}},
    "a group": {"units": [["layers.0", "layers.3"]]},
    "bfloat16": {"dtype": torch.float32, "precision": fs.MixedPrecision(torch.bfloat16, torch.float32)},
    "a local leaf": {"local": {"head.weight": "shard"}},
}


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(HYBRID)
def test_a_gradient_is_that_of_value_and_grad_and_a_product_its_derivative(mesh, strategy, options):
    plan, shards, v, _, loss = mlp(mesh, strategy=strategy, **options)
    grads = fs.grad(loss, mesh=mesh)(shards)
    same_bits(grads, fs.value_and_grad(loss)(shards)[1])
    assert grads[""][next(key for key in grads[""] if "frozen" in key)] is None
    if "precision" in options:
        return
    product = fs.hvp(loss, (shards,), (v,))
    torch.testing.assert_close(product, fs.linearize(fs.grad(loss), shards)[1](v))
    ends = [fs.value_and_grad(loss)(fs.axpy(step, v, shards))[1] for step in (1e-5, -1e-5)]
    differences = fs.axpy(5e4 - 1, ends[0], fs.axpy(-5e4, ends[1], ends[0]))
    torch.testing.assert_close(product, differences, rtol=1e-6, atol=1e-7)
    # value_and_grad of a penalty on the gradient, which gathers the shards inside transforms alone.
    if "local" not in options:
        penalty = lambda s: 0.5 * fs.norm(fs.grad(loss)(s), plan, mesh).square()  # noqa: E731
        torch.testing.assert_close(fs.value_and_grad(penalty)(shards)[1], fs.hvp(loss, (shards,), (grads,)))


@on_ranks(2)
def test_trees_may_lack_leaves_and_have_their_keys_in_any_order(mesh):
    _, shards, v, out, loss = mlp(mesh)
    turned = {unit: dict(reversed(v[unit].items())) for unit in reversed(v)}
    whole_product = fs.hvp(loss, (shards,), (v,))
    assert list(whole_product) == list(shards)
    torch.testing.assert_close(fs.hvp(loss, (shards,), (turned,)), whole_product)
    parts = [{unit: v[unit] if unit == kept else dict.fromkeys(v[unit]) for unit in v} for kept in v]
    torch.testing.assert_close(
        functools.reduce(functools.partial(fs.axpy, 1.0), [fs.hvp(loss, (shards,), (part,)) for part in parts]),
        whole_product,
    )
    aux_of = lambda s: (out(s), {"n": 1, "loss": loss(s)})  # noqa: E731
    for aux in (fs.jvp(aux_of, (shards,), (v,), has_aux=True)[2], fs.vjp(aux_of, shards, has_aux=True)[2]):
        torch.testing.assert_close(aux, {"n": 1, "loss": loss(shards)})
    grads, aux = fs.grad(lambda s: (loss(s), {"n": None, "out": out(s)}), has_aux=True)(shards)
    torch.testing.assert_close((grads, aux["out"]), (fs.grad(loss)(shards), out(shards)))


ERRORS = {
    "no units": (lambda s: fs.grad(lambda s: s["w"].sum())(s), "takes the mean over a mesh, but loss_fn ran no unit"),
    "a constant": (lambda s: fs.grad(lambda _: torch.zeros(()))(s), "found one without a gradient"),
    "no tuple": (lambda s: fs.jvp(torch.sum, s, s), r"pass \(shards,\) for one tree"),
    "another tree": (
        lambda s: fs.jvp(lambda s: s["w"].sum(), (s,), ({"b": s["w"]},)),
        "tangents must be trees like the primals",
    ),
    "another shape": (lambda s: fs.jvp(lambda s: s["w"].sum(), (s,), ({"w": torch.ones(3)},)), "a tangent must be a tensor"),
    "no aux": (lambda s: fs.vjp(lambda s: s["w"], s, has_aux=True), "must return"),
    "no loss": (lambda s: fs.hvp(lambda s: s["w"], (s,), (s,)), "loss_fn must return a floating-point scalar"),
}


@pytest.mark.parametrize(("call", "words"), ERRORS.values(), ids=ERRORS)
@on_ranks(2)
def test_a_wrong_call_says_what_to_do(mesh, call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call({"w": torch.ones(2)})


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["mse_loss", "huber_loss", "soft_margin_loss"])
def test_a_loss_whose_kernel_lacks_a_forward_derivative_has_products_with_its_hessian(name, reduction):
    x, v, targets = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)).double()
    loss = getattr(torch.nn.functional, name)

    def loss_fn(x):
        return loss(3 * x, targets, reduction=reduction).sum()

    expected = torch.func.grad(lambda x: (torch.func.grad(loss_fn)(x) * v).sum())(x)
    torch.testing.assert_close(fs.hvp(loss_fn, (x,), (v,), mesh=fs.Mesh()), expected)


def penalty_of(jacobian, run, inputs):
    """Return a loss that contains a Jacobian by inputs, and the Jacobian."""
    rows = jacobian(lambda x: logits_of(run(x)).tanh(), inputs)
    return sum(row.square().mean() for row in rows.values()), rows


def jacobians(mesh, name):
    subject, at = subject_of(name), (mesh.rank, mesh.world_size)
    plan = fs.make_plan(subject.params, mesh, units=subject.units)
    shards, sharded = fs.shard(subject.params, plan, mesh), fs.fully_shard(subject.apply, plan, mesh)
    loss = lambda s, **size: penalty_of(  # noqa: E731
        functools.partial(fs.jacobian, **size), lambda x: sharded(s, subject.buffers, **x), subject.inputs(*at)
    )
    grads, rows = fs.grad(loss, has_aux=True)(shards)
    with fs.record_events() as events:
        torch.testing.assert_close(loss(shards, chunk_size=2)[1], rows)
    assert len(events) == sum(len(unit.buffers) for unit in plan.unit_list)
    return whole(grads, plan, mesh), rows


@pytest.mark.parametrize("name", ["ViT", "UNet"])
def test_a_jacobian_is_by_the_ranks_inputs_and_a_loss_may_contain_it(name):
    subject = subject_of(name)
    plain = lambda f, x: torch.func.jacrev(f)(x)  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        pairs = [
            torch.func.grad(
                lambda p, i=i: penalty_of(plain, lambda x: subject.apply(p, subject.buffers, **x), subject.inputs(i, 2)),
                has_aux=True,
            )(subject.params)
            for i in range(2)
        ]
    mean = {path: sum(grads[path] for grads, _ in pairs) / 2 for path in subject.params}
    for index, (grads, rows) in enumerate(run_simulated(jacobians, 2, name)):
        torch.testing.assert_close(rows, pairs[index][1], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(grads, mean, rtol=1e-10, atol=1e-10)


@on_ranks(2)
def test_a_jacobian_has_the_form_of_outputs_and_inputs_and_is_by_no_shard(mesh):
    x = {"a": torch.ones(2), "number": torch.tensor(3)}
    rows = fs.jacobian(lambda x: {"out": x["a"].square() * x["number"]}, x)
    assert rows["out"]["a"].tolist() == [[6.0, 0.0], [0.0, 6.0]]
    assert rows["out"]["number"] is None
    _, shards, _, out, _ = mlp(mesh)
    with pytest.raises(ValueError, match=r"found buffer '.*' of unit '.*' among them: call fs.jvp"):
        fs.jacobian(out, shards)


HALF = fs.MixedPrecision(torch.bfloat16, torch.float32)


def rounded(values, dtype):
    """Return float64 numbers in ``dtype``, rounded to bfloat16 before."""
    return cast(cast(values, torch.bfloat16), dtype)


def low_operators(ops, out, loss_of, p, v):
    """Return the trees of operators, and this part's tangents."""
    loss = lambda p: loss_of(out(p))  # noqa: E731
    trees = {
        "gradient": ops.grad(loss)(p), "product": ops.hvp(loss, (p,), (v,)),
        "Gauss-Newton": ops.gnvp(out, loss_of, (p,), (v,)),
    }  # fmt: skip
    return trees, ops.jvp(out, (p,), (v,))[1]


def plain_in(name, dtype):
    """Return the operators and the tangents of the plain module in ``dtype``, on the whole batch."""
    subject = subject_of(name)
    params, v = rounded(subject.params, dtype), rounded(vector_of(name), dtype)
    buffers, inputs = rounded(subject.buffers, dtype), rounded(subject.inputs(0, 1), dtype)
    wide = lambda y: y if dtype == torch.float64 else y.float()  # noqa: E731
    run = lambda p, x: wide(logits_of(subject.apply(p, buffers, **x)))  # noqa: E731
    loss = lambda y: subject.loss(y, 0, 1)  # noqa: E731
    return low_operators(PLAIN, lambda p: run(p, inputs), loss, params, v)


@functools.cache
def vector_of(name):
    subject = subject_of(name)
    return {path: random(index, *p.shape) for index, (path, p) in enumerate(subject.params.items())}


def found_in_bfloat16(mesh, name):
    subject, at = subject_of(name), (mesh.rank, mesh.world_size)
    params = rounded(subject.params, torch.float32)
    plan = fs.make_plan(params, mesh, units=subject.units, precision=HALF)
    shards = fs.shard(params, plan, mesh)
    v = fs.shard(rounded(vector_of(name), torch.float32), plan, mesh)
    sharded, buffers = fs.fully_shard(subject.apply, plan, mesh), rounded(subject.buffers, torch.float32)
    inputs = rounded(subject.inputs(*at), torch.float32)
    run = lambda s, x: logits_of(sharded(s, buffers, **x)).float()  # noqa: E731
    trees, tangents = low_operators(fs, lambda s: run(s, inputs), lambda y: subject.loss(y, *at), shards, v)

    return {key: whole(tree, plan, mesh) for key, tree in trees.items()}, tangents


def distance(found, expected):
    """Return the norm of the difference of two trees, relative to that of the second."""
    pairs = [(found, expected)]
    if isinstance(found, dict):
        pairs = [(found[path], expected[path]) for path in expected]
    difference = sum((a.double() - b).square().sum() for a, b in pairs)
    return (difference / sum(b.square().sum() for _, b in pairs)).sqrt().item()


@pytest.mark.parametrize(
    "name", [name if name == "ViT" else pytest.param(name, marks=pytest.mark.nightly) for name in MODELS]
)
def test_in_bfloat16_operators_are_as_far_from_float64_as_the_plain_modules(name):
    with sdpa_kernel(SDPBackend.MATH):
        exact, plain = plain_in(name, torch.float64), plain_in(name, torch.bfloat16)
    results = run_simulated(found_in_bfloat16, 2, name)
    triples = {"tangents": (torch.cat([tangents for _, tangents in results]), plain[1], exact[1])}
    triples |= {key: (results[0][0][key], plain[0][key], exact[0][key]) for key in exact[0]}
    for key, (ours, theirs, right) in triples.items():
        assert distance(ours, right) <= 2 * distance(theirs, right) < 0.5, key
