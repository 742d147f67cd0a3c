"""Modules that ``make_functional`` refuses: the error names the module or tensor, and a remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.testing._internal.two_tensor import TwoTensor

import funcshard as fs
from tests.ranks import run_ranks


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
        r"parameter '0\.weight' is a TwoTensor, .* \(torch\.testing\..*\); shards hold .*: convert it to a plain tensor",
    ),
    "a buffer of two tensors": (lambda: with_buffer(two()), TypeError, r"buffer '0\.seen' is a TwoTensor, .*: convert it"),
    "DataParallel": (
        lambda: nn.Sequential(nn.DataParallel(nn.Linear(3, 3))),
        TypeError,
        r"module '0' is parallelized by DataParallel, .*; use its \.module: fs\.fully_shard takes its place",
    ),
    "torch.jit": (
        lambda: nn.Sequential(torch.jit.script(nn.Linear(3, 3))),
        TypeError,
        r"module '0' was made by torch\.jit, .*: use the module from which it was made, and pass compiler=torch\.compile",
    ),
    "Embedding with max_norm": (
        lambda: nn.EmbeddingBag(5, 3, max_norm=2.0),
        ValueError,
        r"module '\(root\)' \(EmbeddingBag\) has max_norm=2\.0, .*parameter 'weight', .*: set the module's max_norm to None",
    ),
}


def words_of_parallel_modules(_mesh: fs.Mesh) -> list[str]:
    found = []
    for parallelize in (nn.parallel.DistributedDataParallel, fsdp2):
        with pytest.raises(TypeError) as raised:
            fs.make_functional(parallelize(nn.Sequential(nn.Linear(3, 3))))
        found.append(str(raised.value))
    return found


def test_a_module_that_torch_has_parallelized_already_is_refused_in_words() -> None:
    for ddp, fsdp in run_ranks(words_of_parallel_modules, 2):
        assert "module '(root)' is parallelized by DistributedDataParallel, " in ddp
        assert ddp.endswith("use its .module: fs.fully_shard takes its place")
        assert "module '(root)' is parallelized by FSDP, " in fsdp
        assert fsdp.endswith("use the module without it: fs.fully_shard takes its place")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_a_module_whose_function_would_be_wrong_is_refused_in_words(make, error, words) -> None:
    with pytest.raises(error, match=words):
        fs.make_functional(make())
