"""Sharded transformers have the derivatives of the whole ones."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import funcshard as fs
from funcshard._utils import tree
from tests.core.units import forward_mode
from tests.module.law import Runs
from tests.ranks import run_simulated
from tests.zoo.transformers_models import small_config

pytestmark = forward_mode

QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TOKENS = 8


def language(kind: str, head: str, **changes: Any) -> nn.Module:
    import transformers

    model = getattr(transformers, head)(small_config(kind, **changes))
    for path, norm in list(model.named_modules()):
        if type(norm).__name__ == "LlamaRMSNorm":  # which computes in float32
            model.set_submodule(path, nn.RMSNorm(32, eps=1e-6))
    return Runs(lambda self, ids: self.inner(input_ids=ids, use_cache=False).logits, inner=model)


def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
    return out


def encode(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.inner(x)
    return out


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Runs(encode, inner=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


LAYERS, BLOCKS, PARTS = ["inner.model.layers.*"], ["inner.transformer.h.*"], ["inner.layers.*"]
MODELS: dict[str, tuple[Any, list[str]]] = {
    **{
        f"GPT-2, {how}": (functools.partial(language, "gpt2", "GPT2LMHeadModel", attn_implementation=how, **QUIET), BLOCKS)
        for how in ("sdpa", "eager")
    },
    **{
        f"Llama, {how}": (functools.partial(language, "llama", "LlamaForCausalLM", attn_implementation=how), LAYERS)
        for how in ("sdpa", "eager")
    },
    "MultiheadAttention": (lambda: Runs(attend, inner=nn.MultiheadAttention(8, 2, batch_first=True)), ["inner"]),
    "TransformerEncoder": (encoder, PARTS),
}


def derivatives(f: Any, params: Any, tangents: Any) -> Any:
    loss = lambda p: f(p).square().mean()  # noqa: E731
    dot = lambda p: sum((a * b).sum() for a, b in zip(tree.leaves(grad(loss)(p)), tree.leaves(tangents), strict=True))  # noqa: E731
    forward_over_reverse = jvp(grad(loss), (params,), (tangents,))[1]
    return jvp(loss, (params,), (tangents,))[1], forward_over_reverse, grad(dot)(params)


def case(name: str) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, units = MODELS[name][0]().double(), MODELS[name][1]
    x = torch.randint(3, 60, (2, TOKENS)) if "," in name else torch.randn(2, TOKENS, 8, dtype=torch.float64)
    return model, units, x


@pytest.mark.nightly(one_in=12)
@pytest.mark.parametrize("options", [{}, {"remat": True}], ids=["kept", "remat"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODELS)
def test_derivatives_of_shards_are_those_of_the_model(name: str, training: bool, options: Any) -> None:
    model, units, x = case(name)
    apply, params, buffers = fs.make_functional(model)
    apply = apply.train(training)
    tangents = {path: torch.randn_like(p) for path, p in params.items()}
    with sdpa_kernel(SDPBackend.MATH):  # in training mode, where torch does not take its fast path
        expected = derivatives(lambda p: functional_call(model, {**p, **buffers}, (x,)), params, tangents)

    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(params, mesh, units=units)
        sharded = fs.fully_shard(apply, plan, mesh, **options)
        shards = fs.shard(params, plan, mesh), fs.shard(tangents, plan, mesh)
        slope, *products = derivatives(lambda s: sharded(s, buffers, x), *shards)
        # Each reduction adds up the same gradients of both ranks; reverse over reverse has two.
        return slope, *(fs.gather(product, plan, mesh) for product in products)

    slope, once, twice = run_simulated(main, 2)[0]
    tolerance = 1e-6 if name == "Llama, eager" else 1e-10  # whose softmax is in float32
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(slope, expected[0])
    for path in params:
        close(once[path] / 2, expected[1][path])
        close(twice[path] / 2, expected[2][path])


PENALTY = "run the forward inside `with fs.any_order\\(\\):`"


def penalised(sharded: Any, x: torch.Tensor) -> Any:
    def loss(shards: Any) -> torch.Tensor:
        z = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(sharded(shards, {}, z).square().sum(), z, create_graph=True)
        return slope.square().sum()

    return loss


def never(_: Any) -> Any:
    def run(*_: Any) -> None:
        raise AssertionError("a compiled function has no second derivative")

    return run


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"remat": True}, {"compiler": never}], ids=["kept", "remat", "compiled"])
def test_a_penalty_needs_any_order_and_says_so(options: Any) -> None:
    model, units, x = case("TransformerEncoder")
    apply, params, _ = fs.make_functional(model.train())

    def main(mesh: fs.Mesh) -> Any:
        plan = fs.make_plan(params, mesh, units=units)
        loss = penalised(fs.fully_shard(apply, plan, mesh, **options), x)
        shards = fs.shard(params, plan, mesh)
        if "compiler" not in options:
            with pytest.raises(RuntimeError, match=PENALTY):
                fs.value_and_grad(loss)(shards)
        with fs.any_order():
            return fs.gather(fs.value_and_grad(loss)(shards)[1], plan, mesh)

    found = run_simulated(main, 2)[0]
    leaves = {path: p.detach().requires_grad_() for path, p in params.items()}
    with sdpa_kernel(SDPBackend.MATH):
        penalised(lambda p, _, x: functional_call(model, p, (x,)), x)(leaves).backward()
    for path, leaf in leaves.items():
        torch.testing.assert_close(found[path], leaf.grad, rtol=1e-10, atol=1e-10)


def test_a_transform_inside_the_model_says_what_to_do() -> None:
    inner = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    moving = Runs(lambda self, x: jvp(lambda x: attend(self, x), (x,), (x,))[1], inner=inner)
    apply, params, _ = fs.make_functional(moving)
    with pytest.raises(RuntimeError, match=PENALTY):
        apply(params, {}, torch.ones(1, 3, 8))
    with fs.any_order():
        assert apply(params, {}, torch.ones(1, 3, 8)).shape == (1, 3, 8)


def test_a_chosen_kernel_is_obeyed() -> None:
    model, _, x = case("MultiheadAttention")
    apply, params, _ = fs.make_functional(model)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="leaves MATH and others enabled"):
        jvp(lambda p: apply(p, {}, x), (params,), (params,))


@pytest.mark.parametrize("fused", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=lambda kernel: kernel.name)
def test_a_list_of_kernels_with_math_is_no_choice(fused: SDPBackend) -> None:
    """As torchtitan's attention enters around each call."""
    model, _, x = case("MultiheadAttention")
    apply, params, _ = fs.make_functional(model)

    def slope(*kernels: SDPBackend) -> Any:
        with sdpa_kernel([*kernels]):
            return jvp(lambda p: apply(p, {}, x), (params,), (params,))[1]

    torch.testing.assert_close(slope(fused, SDPBackend.MATH), slope(SDPBackend.MATH))
