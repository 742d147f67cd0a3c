"""A trace for a GPU keeps what attention and dropout keep there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard.estimate.trace.kernels import AcceleratorKernels

BATCH, HEADS, LENGTH, SIZE = 2, 4, 128, 8
SCORES = BATCH * HEADS * LENGTH * LENGTH  # elements of the matrix of scores
KEYS = {"all": HEADS, "grouped": HEADS // 2}


class Attention(nn.Module):
    def __init__(self, *, keys: str = "all", bias: str = "", remat: bool = False, **options: Any) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, HEADS * SIZE), nn.Linear(16, KEYS[keys] * SIZE)
        self.options, self.bias, self.remat = options, bias, remat
        self.table = nn.Parameter(torch.zeros(1, HEADS, LENGTH, LENGTH)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = (layer(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for layer in (self.q, self.k))
        mask = None if self.table is None else self.table.mT if self.bias == "transposed" else self.table
        call = lambda q, k: F.scaled_dot_product_attention(q, k, k, mask, **self.options)  # noqa: E731
        return checkpoint(call, q, k, use_reentrant=False) if self.remat else call(q, k)


def saved(module: nn.Module, dtype: torch.dtype, *, accelerator: bool = True) -> int:
    """Return the bytes that autograd keeps."""
    apply, params, buffers = fs.make_functional(module.to(dtype))
    x = torch.zeros(BATCH, LENGTH, 16, dtype=dtype)
    return fs.profile(apply, params, buffers, x, loss=lambda out: out.sum()).on(accelerator=accelerator).saved


FUSED = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.1},
    "a bias that is learned": {"bias": "contiguous"},
    "bias and dropout": {"bias": "contiguous", "dropout_p": 0.1},
    "computed again": {"dropout_p": 0.1, "remat": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", FUSED.values(), ids=FUSED)
def test_fused_attention_keeps_no_scores(options: dict[str, Any], dtype: torch.dtype) -> None:
    assert saved(Attention(**options), dtype) < SCORES


# On an H100, a Llama with grouped keys in float32 takes 27.3 GiB, of which 4.0 are scores.
UNFUSED = {
    "grouped keys in float32": (torch.float32, {"keys": "grouped", "enable_gqa": True}),
    "a bias whose rows are not in a row": (torch.bfloat16, {"bias": "transposed"}),
}


@pytest.mark.parametrize(("dtype", "options"), UNFUSED.values(), ids=UNFUSED)
def test_other_attention_keeps_scores_in_float32(dtype: torch.dtype, options: dict[str, Any]) -> None:
    assert saved(Attention(**options), dtype) > 4 * SCORES


def test_grouped_keys_are_fused_in_half_precision() -> None:
    assert saved(Attention(keys="grouped", enable_gqa=True), torch.bfloat16) < SCORES


def test_dropout_keeps_a_bool_for_each_element() -> None:
    module = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1))
    elements = BATCH * LENGTH * 32
    assert saved(module, torch.float32, accelerator=False) - saved(module, torch.float32) == 3 * elements


@pytest.mark.nightly
def test_the_attention_of_a_transformer_layer_is_fused() -> None:
    layer = nn.TransformerEncoderLayer(16, HEADS, 16, dropout=0.1, batch_first=True)
    rest = nn.TransformerEncoderLayer(16, HEADS, 16, dropout=0.0, batch_first=True)
    assert saved(layer, torch.float32) - saved(rest, torch.float32) < SCORES
    assert saved(layer, torch.float32, accelerator=False) - saved(rest, torch.float32) > SCORES


VALUES: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"is_causal": True},
    "a bool mask": lambda: {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    "a row without a key": lambda: {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril(-1)},
    "a float mask": lambda: {"attn_mask": torch.linspace(0, 1, 25).reshape(5, 5)},
    "a scale": lambda: {"scale": 0.5},
}


@pytest.mark.parametrize("options", VALUES.values(), ids=VALUES)
def test_unfused_attention_has_the_values_of_torchs(options: Callable[..., dict[str, Any]]) -> None:
    q, k, v = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    with AcceleratorKernels():
        out = F.scaled_dot_product_attention(q, k, v, **options())
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, **options()))
