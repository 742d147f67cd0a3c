"""Norms and the like under ``any_order``: derivatives of every order and mode are those of written-out operations."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap

import funcshard as fs
from tests.core.units import forward_mode

pytestmark = forward_mode

X, V, C = torch.randn(3, 4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W, B = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
STATISTICS = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)

WEIGHT_NORM = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2)).parametrizations.weight[0]


def written_out(dims, x):
    standard = (x - x.mean(dims, True)) / (x.var(dims, correction=0, keepdim=True) + 1e-5).sqrt()
    return standard * W[:, None] + B[:, None]


# Torch's function, and what it computes.
NORMS = {
    "layer_norm": (
        lambda x: F.layer_norm(x, (6, 5), W[:, None].expand(6, 5), B[:, None].expand(6, 5)),
        functools.partial(written_out, (1, 2)),
    ),
    "batch_norm": (
        lambda x: F.batch_norm(x, None, None, W, B, training=True),
        functools.partial(written_out, (0, 2)),
    ),
    "instance_norm": (lambda x: F.instance_norm(x, weight=W, bias=B), functools.partial(written_out, 2)),
    "batch_norm, eval": (
        lambda x: F.batch_norm(x, *STATISTICS, W, B),
        lambda x: x / (1 + 1e-5) ** 0.5 * W[:, None] + B[:, None],
    ),
    "hardsigmoid": (F.hardsigmoid, lambda x: (x + 3).clamp(0, 6) / 6),
    "weight_norm": (
        lambda x: WEIGHT_NORM(W[:4, None, None], x),
        lambda x: W[:4, None, None] * x / x.square().sum((1, 2), True).sqrt(),
    ),
    "glu": (lambda x: F.glu(x, 1), lambda x: x[:, :3] * x[:, 3:].sigmoid()),
}


def tangent(f):
    return lambda x: jvp(f, (x,), (V,))[1]


def slope(f):
    return lambda x: (grad(f)(x) * V).sum()


def by_dual_level(f):
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        dot = forward_ad.unpack_dual(f(forward_ad.make_dual(x, V))).tangent
    return torch.autograd.grad(dot, x)[0]


def by_autograd(f, order):
    x = X.clone().requires_grad_()
    value = f(x)
    for _ in range(order):
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        value = (gradient * V).sum()
    return gradient.detach()


DERIVATIVES = {
    "rf": lambda f: grad(tangent(f))(X),
    "fr": lambda f: tangent(grad(f))(X),
    "rr": lambda f: grad(slope(f))(X),
    "ff": lambda f: tangent(tangent(f))(X),
    "rff": lambda f: grad(tangent(tangent(f)))(X),
    "rfr": lambda f: grad(tangent(slope(f)))(X),
    "rrr": lambda f: grad(slope(slope(f)))(X),
    "ffr": lambda f: tangent(tangent(grad(f)))(X),
    "frf": lambda f: tangent(grad(tangent(f)))(X),
    "rf of samples": lambda f: vmap(grad(lambda x: jvp(f, (x,), (V,))[1]))(torch.stack([X, V])),
    "a loss of a tangent": lambda f: by_autograd(tangent(f), 1),
    "penalty": lambda f: by_autograd(f, 2),
    "penalty of a penalty": lambda f: by_autograd(f, 3),
    "dual level": by_dual_level,
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize(("norm", "composition"), NORMS.values(), ids=NORMS)
def test_a_norm_has_every_derivative_in_every_order(norm, composition, derivative):
    def loss(f, x):
        out = f(x)
        return (out * C[:, : out.shape[1]]).sin().sum()

    with fs.any_order():
        found = derivative(functools.partial(loss, norm))
    torch.testing.assert_close(found, derivative(functools.partial(loss, composition)), rtol=1e-9, atol=1e-9)


def test_what_torch_has_right_it_computes():
    loss = lambda x: (F.layer_norm(x, (5,)) * C).sin().sum()  # noqa: E731
    for derivative in ("fr", "rr"):
        with fs.any_order():
            found = DERIVATIVES[derivative](loss)
        assert torch.equal(found, DERIVATIVES[derivative](loss))


@pytest.mark.parametrize(
    "norm",
    [lambda x: F.layer_norm(x, (5,), W[:5].float()), lambda x: F.batch_norm(x, None, None, W.float(), training=True)],
    ids=["layer_norm", "batch_norm"],
)
def test_a_norm_of_a_narrow_dtype_computes_in_a_wide_one_as_torch_does(norm):
    x = (300 * X.float()).half().requires_grad_()  # whose variance exceeds float16
    with fs.any_order():
        found = norm(x)
    torch.testing.assert_close(found, norm(x))  # of one dtype too


def test_running_statistics_are_updated_once():
    mean, var = (s.clone() for s in STATISTICS)
    with fs.any_order():
        grad(tangent(lambda x: F.batch_norm(x, mean, var, training=True).square().sum()))(X)
    torch.testing.assert_close(mean, 0.1 * X.mean((0, 2)))
    torch.testing.assert_close(var, 0.9 + 0.1 * X.var((0, 2)))
