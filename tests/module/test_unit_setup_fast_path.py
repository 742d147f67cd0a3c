"""A ``TransformerEncoderLayer`` with units inside evaluates as the unsharded layer does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.module.law import outputs_on
from tests.pairwise import crossed

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")

sequence = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])


def layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(layer(), 2)


def hooked() -> nn.Module:
    net = layer()
    net.register_forward_hook(lambda module, args, out: out * 2)
    return net


# name -> (module, units)
MODELS: dict[str, tuple[Any, list[str]]] = {
    "attention and a linear layer": (layer, ["self_attn", "linear1"]),
    "norms first": (lambda: layer(norm_first=True), ["norm1"]),
    "all of a layer but its norms": (layer, ["self_attn", "linear1", "linear2"]),
    "a layer with a hook": (hooked, ["self_attn"]),
    "layers": (encoder, ["layers.*"]),
    "attention of the second layer": (encoder, ["layers.1.self_attn"]),
    "layers and their attention": (encoder, ["layers.*", "layers.*.self_attn"]),
}


@pytest.mark.nightly(one_in=3)
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
