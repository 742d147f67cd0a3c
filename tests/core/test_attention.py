"""Attention in chunks: every derivative is that of torch's MATH backend, and memory is linear."""

from __future__ import annotations

import functools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import funcshard as fs
from funcshard.core import attention as attention_module
from funcshard.core.attention import attention
from tests.core.units import close, forward_mode, random
from tests.storages import Alive

pytestmark = forward_mode

HEADS, QUERIES, KEYS, SIZE = 4, 19, 21, 4


def inputs(seed: int, heads: int = HEADS) -> tuple[torch.Tensor, ...]:
    return random(seed, 2, HEADS, QUERIES, SIZE), *(random(seed + i, 2, heads, KEYS, SIZE) for i in (1, 2))


X, T, U = inputs(0), inputs(3), inputs(6)
SEEN = random(9, 2, 1, QUERIES, KEYS) > -0.5
BLIND = SEEN & (torch.arange(QUERIES) != 3)[:, None]  # the fourth query sees nothing
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": SEEN},
    "a query that sees nothing": {"attn_mask": BLIND},
    "keys": {"attn_mask": SEEN[:, :, :1]},
    "added": {"attn_mask": random(10, HEADS, QUERIES, KEYS)},
    "scale": {"scale": -0.3},
}


def loss(f: Any, x: Any) -> Any:
    return f(*x).sin().sum()


def dot(a: Any, b: Any) -> Any:
    return sum((x * y).sum() for x, y in zip(a, b, strict=True))


def stacked(x: Any) -> Any:
    return tuple(torch.stack([tensor, 2 * tensor, tensor.cos()]) for tensor in x)


def slope(f: Any, x: Any) -> Any:
    return jvp(lambda x: loss(f, x), (x,), (T,))[1]


def product(f: Any, x: Any, t: Any = T) -> Any:
    return jvp(grad(lambda x: loss(f, x)), (x,), (t,))[1]


def reverse_twice(f: Any, x: Any) -> Any:
    return grad(lambda x: dot(grad(lambda x: loss(f, x))(x), T))(x)


def create_graph(f: Any) -> Any:
    x = [tensor.clone().requires_grad_() for tensor in X]
    grads = torch.autograd.grad(loss(f, x), x, create_graph=True)
    second = torch.autograd.grad(dot(grads, T), x, create_graph=True)
    return second, torch.autograd.grad(dot(second, U), x)


def dual_level(f: Any) -> Any:
    with forward_ad.dual_level():
        x = [forward_ad.make_dual(tensor.requires_grad_(), t) for tensor, t in zip(inputs(0), T, strict=True)]
        out = loss(f, x)
        grads = torch.autograd.grad(out, x)
        return [forward_ad.unpack_dual(out)[:], *(forward_ad.unpack_dual(g)[:] for g in grads)]


def reverse_over_product(f: Any) -> Any:
    x = tuple(tensor.clone().requires_grad_() for tensor in X)
    grads, products = jvp(grad(lambda x: loss(f, x)), (x,), (T,))
    of_products = torch.autograd.grad(dot(products, U), x, retain_graph=True)
    return of_products, torch.autograd.grad(dot(grads, U) + products[0].sum(), x)


DERIVATIVES = {
    "value": lambda f: f(*X),
    "grad": lambda f: grad(lambda x: loss(f, x))(X),
    "jvp": lambda f: jvp(f, X, T),
    "jvp of grad": lambda f: product(f, X),
    "by value alone": lambda f: jvp(grad(lambda x: loss(f, x)), (X,), ((0 * T[0], 0 * T[1], T[2]),))[1],
    "grad of jvp": lambda f: grad(functools.partial(slope, f))(X),
    "grad of grad": lambda f: reverse_twice(f, X),
    "jvp of jvp": lambda f: jvp(lambda x: slope(f, x), (X,), (U,)),
    "jvp of grad of grad": lambda f: jvp(lambda x: reverse_twice(f, x), (X,), (U,)),
    "grad of jvp of grad": lambda f: grad(lambda x: dot(product(f, x), U))(X),
    "vmap of value": lambda f: vmap(f)(*stacked(X)),
    "vmap of one input": lambda f: vmap(lambda q: f(q, *X[1:]), in_dims=1, out_dims=1)(torch.stack([X[0], T[0]], 1)),
    "vmap of grad": lambda f: vmap(grad(lambda x: loss(f, x)))(stacked(X)),
    "vmap of jvp": lambda f: vmap(lambda x: slope(f, x))(stacked(X)),
    "vmap of jvp of grad": lambda f: vmap(lambda x: product(f, x))(stacked(X)),
    "vmap over tangents": lambda f: vmap(lambda t: product(f, X, t))(stacked(T)),
    "create_graph": create_graph,
    "a dual level": dual_level,
    "reverse over a product": reverse_over_product,
    "grad of vmap": lambda f: grad(lambda x: vmap(lambda q: loss(f, (q, *x[1:])))(stacked(x)[0]).sin().sum())(X),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut these short sequences too, into chunks of eight queries."""
    monkeypatch.setattr("funcshard.core.attention.LEAST_QUERIES", 8)
    monkeypatch.setattr("funcshard.core.attention.CHUNK_SCORES", 1)


def oracle(*x: torch.Tensor, attn_mask: Any = None, **options: Any) -> torch.Tensor:
    if attn_mask is BLIND:  # torch's reverse over forward is NaN
        return sdpa(*x, SEEN).masked_fill(~BLIND.any(-1, keepdim=True), 0.0)
    return sdpa(*x, attn_mask=attn_mask, **options)


def same(derivative: Any, **options: Any) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        expected = derivative(functools.partial(oracle, **options))
    close(derivative(functools.partial(attention, **options)), expected)
    with mock.patch("funcshard.core.attention._chosen_kernel", return_value=SDPBackend.MATH.value):
        close(derivative(functools.partial(attention, **options)), expected)


@pytest.mark.nightly(one_in=7)
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_derivative_is_that_of_plain_operations(case: Any, derivative: Any) -> None:
    same(derivative, **case)


@pytest.mark.parametrize("case", ["plain", "causal", "boolean", "keys", "added"])
def test_values_and_first_gradients_are_those_of_torchs_kernel(case: str) -> None:
    ours, torchs = (functools.partial(f, **CASES[case]) for f in (attention, sdpa))
    slopes, expected = (grad(functools.partial(loss, f)) for f in (ours, torchs))
    no_chunks = mock.patch("funcshard.core.attention.ChunkMap._run_chunks", side_effect=AssertionError)
    with mock.patch("funcshard.core.attention.SLOW_GRADIENTS", ()), no_chunks:
        close((ours(*X), slopes(X), vmap(slopes)(stacked(X))[0][0]), (torchs(*X), expected(X), expected(X)[0]))


def test_a_mask_has_derivatives() -> None:
    mask = CASES["added"]["attn_mask"]

    def both_orders(f: Any) -> Any:
        of_mask = lambda mask: jvp(lambda x: loss(functools.partial(f, attn_mask=mask), x), (X,), (T,))[1]  # noqa: E731
        return jvp(grad(of_mask), (mask,), (mask.cos(),))

    same(both_orders)
    close(attention(*X, BLIND), sdpa(*X, BLIND))


@pytest.mark.parametrize("queries", [0, 5, 40])
def test_lengths_and_shared_keys(queries: int) -> None:
    _, key, value = inputs(20, heads=2)
    same(
        lambda f: grad(lambda q: loss(f, (q, key, value)))(random(23, 2, HEADS, queries, SIZE)),
        is_causal=True,
        enable_gqa=True,
    )
    same(lambda f: f(X[0][0, 0], X[1][0, 0], X[2][0, 0]))  # without batch and heads


def test_values_and_tangents_take_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = mock.Mock(side_effect=attention_module.ChunkMap._run_chunks)
    monkeypatch.setattr(attention_module.ChunkMap, "_run_chunks", lambda *args: passes(*args))
    product(attention, X)
    assert passes.call_count == 2  # forward and backward


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_within_its_rounding(dtype: torch.dtype) -> None:
    x, t = (tuple(tensor.to(dtype) for tensor in tensors) for tensors in (X, T))
    wide_x, wide_t = (tuple(tensor.double() for tensor in tensors) for tensors in (x, t))
    bound = 8 if dtype == torch.float32 else 0.7  # 1.3 if scores had the low precision
    for a, b in zip(product(attention, x, t), product(attention, wide_x, wide_t), strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() < bound * torch.finfo(dtype).eps * b.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*(t.float() for t in X)).dtype == torch.bfloat16


def test_dropout_draws_once() -> None:
    f = functools.partial(attention, dropout_p=0.4, is_causal=True)

    def drawn(derivative: Any) -> Any:
        torch.manual_seed(0)
        return derivative(f), torch.rand(())

    def at(step: float) -> Any:
        return drawn(lambda f: grad(lambda x: loss(f, x))(tuple(x + step * t for x, t in zip(X, T, strict=True))))

    (found, after), (plus, after_grad), (minus, _) = drawn(lambda f: product(f, X)), at(1e-5), at(-1e-5)
    assert after == after_grad
    assert all(torch.allclose(a, (p - m) / 2e-5, atol=1e-6) for a, p, m in zip(found, plus, minus, strict=True))
    share = (attention(*(torch.ones(1, 1, 200, 4),) * 2, torch.eye(200)[None, None], dropout_p=0.4) == 0).double().mean()
    assert math.isclose(share, 0.4, abs_tol=0.02)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_under_vmap(randomness: str) -> None:
    f = functools.partial(attention, dropout_p=0.4)
    x = tuple(tensor.expand(3, *tensor.shape) for tensor in X)
    values, _ = vmap(lambda q, k, v: jvp(lambda x: loss(f, x), ((q, k, v),), (T,)), randomness=randomness)(*x)
    assert (values[0] == values[1]) == (randomness == "same")
    along = vmap(lambda t: jvp(lambda x: loss(f, x), (X,), (t,))[1], randomness=randomness)(stacked(T))
    assert torch.allclose(along[1], 2 * along[0])
    with pytest.raises(RuntimeError, match="pass randomness='different'"):
        vmap(f)(*x)


def test_memory_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = tuple(torch.randn(1, 1, 2048, 2) for _ in range(3))
    with Alive(lambda nbytes: True) as alive:
        product(functools.partial(attention, is_causal=True), x, x)
        product(functools.partial(attention, attn_mask=torch.ones(2048, dtype=torch.bool)), x, x)
        rows = torch.zeros(2, 1, 1, 2048)
        slopes = grad(lambda q, k: loss(functools.partial(attention, attn_mask=rows), (q, k, k)))
        vmap(slopes)(torch.ones(2, 2, 1, 2048, 2), torch.ones(2, 2, 1, 2048, 2))
    assert max(alive.most_of) <= 4 * 2**20


def test_torch_tells_of_a_mask_beside_causality() -> None:
    with fs.any_order(), pytest.raises(RuntimeError, match="attn_mask"):
        sdpa(*X[:2], X[2][..., :3], SEEN, is_causal=True)  # torch's kernel takes both
