"""Modules that ``make_functional`` refuses: the error names the module or tensor, and a remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import funcshard as fs


def with_parameter(value: torch.Tensor) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].weight = nn.Parameter(value)
    return net


def with_buffer(value: torch.Tensor) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].register_buffer("seen", value)
    return net


def two() -> torch.Tensor:
    return TwoTensor(torch.ones(3, 3), torch.zeros(3, 3))


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "a parameter of two tensors": (
        lambda: with_parameter(two()),
        TypeError,
        (
            r"parameter '0\.weight' is a TwoTensor, .* \(torch\.testing\._internal\.two_tensor\.TwoTensor\); shards hold "
            r".*: convert it to a plain tensor first"
        ),
    ),
    "a buffer of two tensors": (lambda: with_buffer(two()), TypeError, r"buffer '0\.seen' is a TwoTensor, .*: convert it"),
    "torch.jit.script": (
        lambda: nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3))),
        TypeError,
        r"module '1' was made by torch\.jit, .*: use the module from which it was made, and pass compiler=torch\.compile",
    ),
    "torch.jit.trace": (
        lambda: torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3)),
        TypeError,
        r"module '\(root\)' was made by torch\.jit",
    ),
    "Embedding with max_norm": (
        lambda: nn.Sequential(nn.Embedding(5, 3, max_norm=0.1)),
        ValueError,
        (
            r"module '0' \(Embedding\) has max_norm=0\.1, so its forward writes to its parameter '0\.weight', .*: set the "
            r"module's max_norm to None, and rescale the weight between steps"
        ),
    ),
    "EmbeddingBag with max_norm": (
        lambda: nn.EmbeddingBag(5, 3, max_norm=2.0),
        ValueError,
        r"module '\(root\)' \(EmbeddingBag\) has max_norm=2\.0, so its forward writes to its parameter 'weight'",
    ),
    "a lazy module": (lambda: nn.LazyLinear(3), ValueError, "'weight' of a lazy module has no shape yet"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_a_module_whose_function_would_be_wrong_is_refused_in_words(make, error, words) -> None:
    with pytest.raises(error, match=words):
        fs.make_functional(make())
