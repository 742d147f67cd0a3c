"""Fake tensors with remembered forms are those that torch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from funcshard._utils import torch_fakes
from funcshard._utils.torch_fakes import fake_tensors
from funcshard._utils.torch_private import storage_id
from funcshard._utils.tree import tensors_in

CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a product": lambda x: x @ x.t(),
    "a view": lambda x: x[1:, ::2].transpose(0, 1),
    "a view of other size": lambda x: x.view(torch.int16),
    "in place": lambda x: x.add_(1),
    "another layout": lambda x: x.contiguous().to(torch.bfloat16).as_strided((2, 2), (1, 2), 1),
    "several results": lambda x: x.max(dim=0),
    "several views": lambda x: x.split(2),
    "whole numbers": lambda x: x.long() + torch.arange(3, device=x.device),
    "a transposition in place": lambda x: x.clone().t_(),
    "no data": lambda x: torch.zeros_like(x).new_empty(5),
}


def forms(x: torch.Tensor, out: Any) -> list[Any]:
    """Return form, device, memory and class of all results."""
    return [
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.storage_offset(), tensor.untyped_storage().nbytes(),
         tensor.device, storage_id(tensor) == storage_id(x), tensor is x, type(tensor))
        for tensor in tensors_in(out)
    ]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_remembered_form_is_that_of_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_fakes, "_known", {})
    seen = []
    for _ in range(2):
        with fake_tensors():
            x = torch.empty(4, 3, dtype=torch.float32, device="cpu")
            seen.append(forms(x, CASES[case](x)))
    assert seen[1] == seen[0]
    assert torch_fakes._known


def test_a_number_that_a_model_reads_is_computed_each_time() -> None:
    for size in (3, 4):
        with fake_tensors():
            numbers = torch.arange(size, device="cpu")
            assert int(numbers.sum()) == size * (size - 1) // 2
            numbers[1:] += 1  # which torch's mode computes by itself
            assert numbers.tolist() == [0, *range(2, size + 1)]
