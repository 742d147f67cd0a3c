"""Which of torch's operators have which derivatives, and right ones: the table of docs/derivatives.md, tried."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jvp, vmap

import funcshard as fs
from tests.core.units import forward_mode

pytestmark = [forward_mode, pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")]

PAGE = Path(__file__).parents[2] / "docs" / "derivatives.md"
X = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
IMAGE = X.view(2, 4, 2, 3)
IDS, ENDS = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 3])
TARGETS, LENGTHS = torch.tensor([[1, 2], [2, 3]]), (torch.full((2,), 4), torch.full((2,), 2))
WEIGHT_NORM = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)).parametrizations.weight[0]

REPLACED = ["scaled_dot_product_attention", "MultiheadAttention", "TransformerEncoderLayer, eval", "weight_norm"]
CURES = {
    **dict.fromkeys(REPLACED, "nothing, or `fs.any_order()` outside of transforms"),
    "LSTM": "`with torch.backends.mkldnn.flags(enabled=False):`, which takes away `vmap`",
    **dict.fromkeys(["RNN", "GRU"], "a loop over samples in place of `vmap`"),
    **dict.fromkeys(["embedding_bag, sum", "embedding_bag, max"], "`embedding`, then `sum` or `amax`"),
    "ctc_loss": "only first derivatives, in reverse mode",
    "grid_sample": "reverse over reverse in place of forward over reverse",
    **dict.fromkeys(["cdist", "pdist"], "`(x[:, :, None] - y[:, None]).norm(dim=-1)`"),
    "grouped_mm": 'a product for each group; `experts_implementation="eager"` in transformers',
}


def of(module: nn.Module) -> Callable[[torch.Tensor], Any]:
    """Return a function of the input alone."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    return lambda x: functional_call(module, params, (x,))


def recurrent(module: nn.Module) -> Callable[[torch.Tensor], Any]:
    f = of(module)
    return lambda x: f(x)[0]


# Of a tensor that is differentiated: an input, or a weight.
OPERATORS: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "scaled_dot_product_attention": (lambda x: F.scaled_dot_product_attention(x, x, x), X[:, None]),
    "MultiheadAttention": (lambda x: nn_attention(x, x, x, need_weights=False)[0], X),
    "TransformerEncoderLayer, eval": (of(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True).eval()), X),
    "weight_norm": (lambda w: WEIGHT_NORM(w[:, :1], w), X[0]),
    "RNN": (recurrent(nn.RNN(6, 3)), X),
    "LSTM": (recurrent(nn.LSTM(6, 3)), X),
    "GRU": (recurrent(nn.GRU(6, 3)), X),
    "embedding": (lambda w: F.embedding(IDS, w), X[0].T),
    "embedding_bag, sum": (lambda w: F.embedding_bag(IDS, w, ENDS, mode="sum"), X[0].T),
    "embedding_bag, max": (lambda w: F.embedding_bag(IDS, w, ENDS, mode="max"), X[0].T),
    "layer_norm": (lambda x: F.layer_norm(x, (6,)), X),
    "rms_norm": (lambda x: F.rms_norm(x, (6,)), X),
    "group_norm": (lambda x: F.group_norm(x, 2), X),
    "batch_norm, training": (lambda x: F.batch_norm(x, None, None, training=True), X),
    "batch_norm, eval": (lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4)), X),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.zeros(2, 6, dtype=torch.long)), X),
    "linear_cross_entropy": (lambda x: F.linear_cross_entropy(x[0], X[1], IDS[:4] % 4), X),
    "ctc_loss": (lambda x: F.ctc_loss(x.transpose(0, 1).log_softmax(-1), TARGETS, *LENGTHS), X),
    "conv2d": (lambda x: F.conv2d(x, torch.ones(2, 4, 2, 2)), IMAGE),
    "interpolate, bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE),
    "interpolate, bicubic": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), IMAGE),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), IMAGE),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE),
    "grid_sample": (lambda x: F.grid_sample(x, torch.zeros(2, 2, 2, 2), align_corners=False), IMAGE),
    "cdist": (lambda x: torch.cdist(x, x.flip(1)), X),
    "pdist": (lambda x: F.pdist(x[0]), X),
    "grouped_mm": (lambda x: F.grouped_mm(x.bfloat16().repeat(1, 2, 4), X.bfloat16().repeat(1, 6, 4)), X),
    "cumprod": (lambda x: x.cumprod(-1), X),
    "linalg.svd": (lambda x: torch.linalg.svd(x, full_matrices=False)[1], X),
    "fft.rfft": (lambda x: torch.fft.rfft(x).abs(), X),
}  # fmt: skip
torch.manual_seed(0)
nn_attention = nn.MultiheadAttention(6, 2, batch_first=True)


def says(derivative: Callable[[], Any]) -> str:
    try:
        derivative()
    except RuntimeError as error:
        is_lacking = re.search("not implemented|not support|match the broadcast shape", str(error))
        return "no" if is_lacking else str(error)
    return "yes"


def is_wrong(second: Callable[[], torch.Tensor], loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> bool:
    """Return whether a second derivative is another one than that of finite differences."""
    slope = lambda step: grad(loss)(x + step * grad(loss)(x).cos())  # noqa: E731
    steps = (slope(1e-3) - slope(-1e-3)) / 2e-3
    return bool((second() - steps).norm() > 0.05 * steps.norm() + 0.05)


def row(f: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[str]:
    """Return whether forward mode, a second derivative in reverse mode, and vmap of a gradient exist."""
    loss = lambda x: f(x).float().sin().sum()  # noqa: E731
    second = lambda: grad(lambda x: grad(loss)(x).sin().sum())(x)  # noqa: E731
    reverse = says(second)
    if reverse == "yes" and f(x).dtype == x.dtype and is_wrong(second, loss, x):  # bfloat16 is too coarse
        reverse = "wrong"
    return [
        says(lambda: jvp(loss, (x,), (x,))),
        reverse,
        says(lambda: vmap(grad(loss))(torch.stack([x, x]))),
    ]


def table() -> str:
    lines = []
    for name, (f, x) in OPERATORS.items():
        plain = row(f, x)
        with fs.any_order():
            replaced = row(f, x)
        cells = [a if a == b else "replaced" for a, b in zip(plain, replaced, strict=True)]
        if cells != ["yes"] * 3:
            lines.append("| " + " | ".join([f"`{name}`", *cells, CURES[name]]) + " |")
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="the table is of torch 2.13")
def test_the_table_is_what_torch_does() -> None:
    lines, page = table(), PAGE.read_text()
    assert lines in page, lines
    assert [name for name in OPERATORS if f"`{name.partition(',')[0]}" not in page] == []


@pytest.mark.slow
def test_what_is_replaced_has_every_derivative() -> None:
    for name in REPLACED:
        with fs.any_order():
            assert row(*OPERATORS[name]) == ["yes"] * 3, name
