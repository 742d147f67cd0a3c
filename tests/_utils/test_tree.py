"""Pytrees as data: structures survive JSON, classes are found by name, tensors are found and cast."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import funcshard as fs
from funcshard._utils import tree
from funcshard._utils.tree import cast_tree, loaded_class, tensors_in
from tests.strange_objects import STRANGE, LyingList, RaisingList, RaisingTuple


class Pair(NamedTuple):
    left: Any
    right: Any


class Leaf:
    """An object that optree treats as a leaf, compared by identity."""


TREES = {
    "leaf": Leaf(),
    "empty dict": {},
    "nothing": None,
    "dict": {"b": Leaf(), "a": Leaf()},
    "integer keys": {10: Leaf(), 2: Leaf()},
    "mixed keys": {"a": Leaf(), 1: Leaf()},
    "tuple keys": {("a", 1): Leaf(), ("a", 0): Leaf()},
    "ordered dict": OrderedDict([("b", Leaf()), ("a", Leaf())]),
    "list": [Leaf(), Leaf()],
    "tuple": (Leaf(),),
    "namedtuple": Pair(Leaf(), {"x": Leaf()}),
    "empty places": {"a": None, "b": [None, Leaf()], "c": ()},
    "deque": deque([Leaf(), Leaf()], maxlen=3),
    "nested": {"a": [{"b": (Leaf(), Pair(None, Leaf()))}], "c": OrderedDict(z=Leaf(), y=[Leaf()])},
    "dotted": {"a.b": Leaf(), "a.c": Leaf(), "d": Leaf()},
}


@pytest.mark.parametrize("given_tree", TREES.values(), ids=TREES)
def test_build_is_the_inverse_of_describe_also_through_json(given_tree: Any) -> None:
    structure, leaves, paths = tree.describe(given_tree)
    again = tree.freeze(json.loads(json.dumps(structure)))
    assert again == structure
    assert hash(again) == hash(structure)
    for rebuilt in (tree.build(structure, leaves), tree.build(again, leaves)):
        assert rebuilt == given_tree
        assert type(rebuilt) is type(given_tree)
    assert len(paths) == len(set(paths)) == len(leaves)


def test_two_insertion_orders_of_one_dict_are_one_structure_and_differ_in_insertion_order() -> None:
    one, two = {"b": [1, None], "a": {"d": 2, "c": 3}}, {"a": {"c": 3, "d": 2}, "b": [1, None]}
    assert tree.describe(one)[0] == tree.describe(two)[0]
    assert tree.insertion_order(one) == [("b.0", 1), ("a.d", 2), ("a.c", 3)]
    assert tree.insertion_order(two) == [("a.c", 3), ("a.d", 2), ("b.0", 1)]


@pytest.mark.parametrize(
    "given_tree",
    [{"a": {"b": Leaf()}, "a.b": Leaf()}, {1: Leaf(), "1": Leaf()}, {"a": [Leaf()], "a.0": Leaf()}],
    ids=["dotted key", "integer and string", "index"],
)
def test_two_leaves_of_one_path_are_refused(given_tree: Any) -> None:
    with pytest.raises(ValueError, match=r"two leaves of the tree have the path '.*'; .* rename one of the keys"):
        tree.describe(given_tree)


def test_a_defaultdict_is_refused_with_its_place() -> None:
    with pytest.raises(TypeError, match=r"the defaultdict at 'a\.0' cannot be part of a plan.* convert it to a"):
        tree.describe({"a": [defaultdict(list, x=Leaf())]})
    with pytest.raises(TypeError, match=r"the defaultdict at the root of the tree cannot be part of a plan"):
        tree.describe(defaultdict(list, x=Leaf()))


def test_is_under_compares_whole_components() -> None:
    inside = ["blocks.1.w", "blocks.1"]
    assert [path for path in [*inside, "blocks.10.w", "blocks", ""] if tree.is_under(path, "blocks.1")] == inside
    assert tree.is_under("anything", "")
    assert tree.is_under("", "")


# --- classes by their names -----------------------------------------------------------------------


class _Outer:
    class Inner:
        """A class inside of another one."""

    value = print


NO_CLASSES: list[Any] = [
    None, 3, [], "", ":", "os", "os:", "os:system", "os:path.join", "os:path.genericpath.os", "funcshard:plan.Plan",
    f"{__name__}:_Outer.value", f"{__name__}:_Outer.value.__self__", f"{__name__}:_Outer.missing", "not_loaded:Thing",
    f"{__name__}:_Outer.__class__", f"{__name__}:fs.Plan",
]  # fmt: skip
CLASSES = {"collections:OrderedDict": OrderedDict, f"{__name__}:_Outer.Inner": _Outer.Inner, "funcshard:Plan": fs.Plan}


@pytest.mark.parametrize(("name", "loaded"), [*((name, None) for name in NO_CLASSES), *CLASSES.items()])
def test_a_class_of_a_loaded_module_is_found_by_its_name_and_nothing_else(name: Any, loaded: Any) -> None:
    assert loaded_class(name) is loaded


def test_nothing_is_computed_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            pytest.fail(f"{name} would be imported")

    class Proxy:
        @property
        def __class__(self) -> Any:
            pytest.fail("the class would be computed")

    lazy = Lazy("lazy")
    object.__getattribute__(lazy, "__dict__").update(proxy=Proxy(), Thing=_Outer)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    assert loaded_class("lazy:proxy") is None
    assert loaded_class("lazy:other") is None
    assert loaded_class("lazy:Thing") is _Outer


# --- tensors in any structure ---------------------------------------------------------------------


FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@dataclasses.dataclass
class Batch:
    image: torch.Tensor
    ids: torch.Tensor
    name: str = "batch"
    mask: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.mask = 1.0 * self.image


@dataclasses.dataclass(frozen=True, eq=False)
class Frozen(Mapping):
    """A mapping that cannot be changed, and a dataclass."""

    image: torch.Tensor

    def __getitem__(self, key: str) -> torch.Tensor:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(["image"])

    def __len__(self) -> int:
        return 1


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
    "a named tuple": (lambda x: Pair(x, I), lambda y: y.left),
    "a dataclass": (lambda x: Batch(x, I), lambda y: y.image),
    "a frozen dataclass in a tuple": (lambda x: (Frozen(x),), lambda y: y[0].image),
    "a subclass of dict": (lambda x: Named(a=x), lambda y: y["a"]),
    "an ordered dictionary": (lambda x: OrderedDict(z=I, a=x), lambda y: y["a"]),
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
    assert tensors_in(strange) == []
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
