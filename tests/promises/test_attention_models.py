"""Attention in a model: a penalty in reverse mode needs ``any_order``, and a chosen kernel is obeyed.

core/test_derivatives.py compares the derivatives of whole models.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import funcshard as fs
from tests.core.derivative_models import MODELS
from tests.core.units import forward_mode, of_module
from tests.module.law import Runs
from tests.ranks import run_simulated

pytestmark = forward_mode


def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
    return out


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
    model, x = MODELS["TransformerEncoder"].build().double(), torch.randn(2, 8, 8, dtype=torch.float64)

    def main(mesh: fs.Mesh) -> Any:
        plan, sharded, shards = of_module(mesh, model, ["layers.*"], how=options)
        loss = penalised(sharded, x)
        if "compiler" not in options:
            with pytest.raises(RuntimeError, match=PENALTY):
                fs.value_and_grad(loss)(shards)
        with fs.any_order():
            return fs.gather(fs.value_and_grad(loss)(shards)[1], plan, mesh)

    found = run_simulated(main, 2)[0]
    leaves = {path: p.detach().requires_grad_() for path, p in model.named_parameters()}
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
    model = Runs(attend, inner=nn.MultiheadAttention(8, 2, batch_first=True))
    apply, params, _ = fs.make_functional(model)
    x = torch.randn(2, 8, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="leaves MATH and others enabled"):
        jvp(lambda p: apply(p, {}, x), (params,), (params,))


@pytest.mark.parametrize("fused", [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=lambda kernel: kernel.name)
def test_a_list_of_kernels_with_math_is_no_choice(fused: SDPBackend) -> None:
    """As torchtitan's attention enters around each call."""
    model = Runs(attend, inner=nn.MultiheadAttention(8, 2, batch_first=True))
    apply, params, _ = fs.make_functional(model)
    x = torch.randn(2, 8, 8)

    def slope(*kernels: SDPBackend) -> Any:
        with sdpa_kernel([*kernels]):
            return jvp(lambda p: apply(p, {}, x), (params,), (params,))[1]

    torch.testing.assert_close(slope(fused, SDPBackend.MATH), slope(SDPBackend.MATH))
