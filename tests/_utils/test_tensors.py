"""The bytes of tensors."""

import pytest
import torch

from funcshard._utils.tensors import byte_view

NUMBERS = torch.arange(6, dtype=torch.int16)
COMPLEX = torch.tensor([1 - 2j])
# name -> (tensor, one with the same elements, whether the bytes are a view)
BYTES = {
    "rows": (NUMBERS.view(2, 3), NUMBERS, True),
    "columns": (NUMBERS.view(2, 3).t(), torch.tensor([0, 3, 1, 4, 2, 5], dtype=torch.int16), False),
    "a part": (NUMBERS[2:4], NUMBERS[2:4].clone(), True),
    "one of a column": (NUMBERS.view(1, 6)[:, 4], NUMBERS[4], True),
    "one of many": (NUMBERS.view(2, 3)[1:, ::3], NUMBERS[3], True),
    "no element": (NUMBERS[::2][:0], NUMBERS[:0], True),
    "a scalar": (NUMBERS[5], NUMBERS[5:], True),
    "conjugates": (COMPLEX.conj(), torch.tensor([1 + 2j]), False),
    "negatives": (torch._neg_view(COMPLEX), torch.tensor([-1 + 2j]), False),
}


@pytest.mark.parametrize(("tensor", "same", "view"), BYTES.values(), ids=BYTES)
def test_bytes_are_those_of_the_elements_and_a_view_if_they_can_be(tensor, same, view):
    found = byte_view(tensor)
    assert found.dtype == torch.uint8
    assert bytes(found.tolist()) == same.clone().view(-1).numpy().tobytes()
    assert (found.data_ptr() == tensor.data_ptr()) is view
