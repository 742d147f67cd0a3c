"""The structures that ``cast_tree`` and ``tensors_in`` look into and return."""

from __future__ import annotations

import collections
import dataclasses
import importlib

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from funcshard._utils.tree import cast_tree, tensors_in
from tests.strange_objects import STRANGE, LyingList, RaisingList, RaisingTuple

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

Point = collections.namedtuple("Point", ["x", "label"])


@dataclasses.dataclass
class Batch:
    image: torch.Tensor
    ids: torch.Tensor
    name: str = "batch"
    norm: torch.Tensor | None = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: torch.Tensor


class Named(dict):
    """A dictionary with an attribute, as many libraries have them."""

    source = "somewhere"


def model_output(x):
    """Return an output of Hugging Face, a dataclass whose fields are items too."""
    outputs = importlib.import_module("transformers.modeling_outputs")
    return outputs.BaseModelOutputWithPast(last_hidden_state=x, hidden_states=(x, I), past_key_values=None)


F, I = torch.ones(2), torch.ones(2, dtype=torch.int64)  # noqa: E741
B, C = torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)
HOLDERS = {
    "a tensor": (lambda x: x, lambda y: y),
    "a tuple": (lambda x: (x, I), lambda y: y[0]),
    "a list in a dictionary": (lambda x: {"a": [I, [x]]}, lambda y: y["a"][1][0]),
    "a named tuple": (lambda x: Point(x, I), lambda y: y.x),
    "a dataclass": (lambda x: Batch(x, I), lambda y: y.image),
    "a frozen dataclass in a tuple": (lambda x: (Frozen(x),), lambda y: y[0].image),
    "a subclass of dict": (lambda x: Named(a=x), lambda y: y["a"]),
    "an ordered dictionary": (lambda x: collections.OrderedDict(z=I, a=x), lambda y: y["a"]),
    "a field of a model output": (model_output, lambda y: y.last_hidden_state),
    "an item of a model output": (model_output, lambda y: y["last_hidden_state"]),
    "a tuple in a model output": (model_output, lambda y: y[1][0]),
    "a packed sequence": (lambda x: pack_sequence([x, x[:1]]), lambda y: y.data),
}
SLOW = {name: pytest.mark.slow for name in HOLDERS if "model output" in name}  # transformers is imported
HELD = [pytest.param(*pair, id=name, marks=SLOW.get(name, ())) for name, pair in HOLDERS.items()]


@pytest.mark.parametrize(("hold", "take"), HELD)
def test_floating_point_is_found_and_cast_wherever_it_stands_and_else_the_same_object_comes_back(hold, take):
    given = hold(F)
    out = cast_tree(given, FP16)
    assert type(out) is type(given)
    assert take(out).dtype == FP16
    assert take(given).dtype == FP32  # the input has not changed
    assert any(tensor is take(given) for tensor in tensors_in(given))
    for other in map(hold, (I, B, C, F.half())):
        assert cast_tree(other, FP16) is other


def test_what_is_beside_a_cast_tensor_stays_itself():
    extra, name = [I], object()
    out = cast_tree({"x": F, "extra": extra, "name": name, "none": None, "number": 1.5}, BF16)
    assert out["extra"] is extra
    assert out["name"] is name
    assert (out["none"], out["number"], list(out)) == (None, 1.5, ["x", "extra", "name", "none", "number"])
    batch = cast_tree(Batch(F, I, "b"), BF16)
    assert (batch.ids is I, batch.name) == (True, "b")
    packed = pack_sequence([F, F[:1]])
    assert isinstance(cast_tree(packed, BF16), PackedSequence)
    assert torch.equal(cast_tree(packed, BF16).batch_sizes, packed.batch_sizes)


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_objects_that_raise_when_looked_at_are_opaque(make):
    strange = make()
    assert cast_tree(strange, FP16) is strange
    assert list(tensors_in(strange)) == []
    held = {"strange": strange, "tensor": F}
    out = cast_tree(held, FP16)
    assert out["strange"] is strange
    assert out["tensor"].dtype == FP16
    assert list(map(id, tensors_in(held))) == [id(F)]


@pytest.mark.parametrize("cls", [RaisingTuple, RaisingList, LyingList])
def test_containers_that_do_not_iterate_are_looked_into(cls):
    out = cast_tree(cls([F, I]), FP16)
    assert type(out) is cls
    assert [each.dtype for each in tensors_in(out)] == [FP16, torch.int64]
