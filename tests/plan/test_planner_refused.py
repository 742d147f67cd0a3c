"""Plans, schedules and policies that cannot be: one table of calls and errors, in whose words "…" is any text."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from funcshard.plan.wrap import Units

BLOCKS = [{"attn": {"w": torch.zeros(2, 2)}, "up": torch.zeros(4, 3), "norm": torch.zeros(3)} for _ in range(3)]
PARAMS = {"emb": torch.zeros(2), "blocks": BLOCKS, "head": torch.zeros(4, 5), "scale": torch.zeros(())}
HEAD = {"head": torch.zeros(4, 5)}
FOUR = {"shard": 2, "tensor": 2}


class Dispatches(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


class Functions(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def plan(units: Any = (), mesh: Any = 4, params: Any = PARAMS, **options: Any) -> fs.Plan:
    return fs.make_plan(params, mesh, units=units, **options)


def leaf(value: Any) -> fs.Plan:
    return plan(params={"a": {"w": value}})


def local(**axes: Any) -> fs.Plan:
    return plan(mesh=FOUR, local=axes)


AXES = ValueError("must be local along one or several axes of the mesh, ['replicate', 'shard', 'tensor']")
OWN_OPERATIONS = TypeError("leaf 'a.w' is a …, a tensor class whose operations … Convert it to a plain tensor")
RANKS = ValueError("must be a number of ranks that divides the 4 ranks of the shard axis; found 3 for unit 'head'")
STAYS = {"reshard_after_backward": False}

CASES: dict[str, tuple[Callable[[], object], Exception]] = {
    # units
    "a typo": (lambda: plan(["blocks.0.atn"]), ValueError("unit 'blocks.0.atn' …: did you mean 'blocks.0.attn'?")),
    "a glob of nothing": (lambda: plan(["x.*"]),
     ValueError("unit 'x.*' matches no part of the tree; … : repeated modules are 'blocks.*'")),
    "a glob of too few keys": (lambda: plan(["*.attn"]), ValueError("unit '*.attn' …: did you mean 'blocks.*.attn'?")),
    "a class": (lambda: plan(nn.Linear), TypeError("found <class …: pass units=fs.wrap.by_class(Linear)(module)")),
    # groups
    "an empty group": (lambda: plan([[]]), ValueError("units hold an empty group; name the paths")),
    "the root in a group": (lambda: plan([["", "head"]]),
     ValueError("names the root ''; name each path below the root once")),
    "a group in a group": (lambda: plan([[["emb"], "head"]]),
     TypeError("units must be a list of paths or globs; found ['emb']")),
    "a path and a group of a mapping": (lambda: plan({"head": {}, ("emb", "head"): {}}),
     ValueError("units name 'head' twice")),
    "an override of another group": (lambda: plan(Units([["emb", "head"]], {("head", "emb"): {"offload": True}})),
     ValueError("override options of ('head', 'emb'), which is not among them; found the units 'emb+head'")),
    # options of units
    "a dtype as precision of a unit": (lambda: plan({"emb": {"precision": torch.float16}}),
     TypeError("precision must be a funcshard.MixedPrecision, or None; found torch.float16: for")),
    "freed after forward and kept after backward": (lambda: plan({"emb": STAYS}),
     ValueError("must stay gathered after forward too; found that unit 'emb'")),
    "a copy that is freed": (lambda: plan({"emb": {"strategy": "no_shard", "reshard_after_forward": True}}),
     ValueError("unit 'emb': … the strategy 'no_shard' gathers none")),
    "ranks that are no divisor": (lambda: plan(["head"], params=HEAD, reshard_after_forward=3), RANKS),
    "ranks that copies are kept on": (lambda: plan(["head"], params=HEAD, reshard_after_forward=2, strategy="no_shard"),
     ValueError("reshard_after_forward=2 frees gathered")),
    "ranks, and kept after backward": (lambda: plan({"head": STAYS}, params=HEAD, reshard_after_forward=2),
     ValueError("is freed after forward: pass")),
    # leaves
    "a float": (lambda: leaf(1.0), TypeError("leaf 'a.w' must be a torch.Tensor; found float: move it out")),
    "a module": (lambda: leaf(nn.Linear(1, 1)), TypeError("found Linear: call apply, params, buffers =")),
    "__torch_dispatch__": (lambda: leaf(torch.ones(3).as_subclass(Dispatches)), OWN_OPERATIONS),
    "__torch_function__": (lambda: leaf(torch.ones(3).as_subclass(Functions)), OWN_OPERATIONS),
    # local leaves
    "a dim that is a text": (lambda: local(head={"tensor": "0"}), AXES),
    "no cuts": (lambda: local(head={}), AXES),
    "no such dim": (lambda: local(head={"tensor": 2}),
     ValueError("local leaf 'head' is to be a slice along dim 2 for axis 'tensor'; found the shape (4, 5)")),
    # keys
    "an empty key at the root": (lambda: plan(params={"": torch.ones(1)}),
     ValueError("a key of the container at the root of the tree is empty … name the key")),
    "a dot at the end": (lambda: plan(params={"a.": torch.ones(1)}),
     ValueError("the leaf at 'a.' has an empty key in its path … rename the key")),
    # precisions
    "an integer dtype": (lambda: fs.MixedPrecision(torch.int8),
     ValueError("param_dtype must be a floating-point torch.dtype … found torch.int8")),
    "a class as a text": (lambda: fs.MixedPrecision(ignored_classes="x.Y"), TypeError("found 'x.Y': write ('x.Y',)")),
    "a class of no modules": (lambda: fs.MixedPrecision(ignored_classes=(int,)),
     TypeError("must be subclasses of torch.nn.Module … found <class 'int'>")),
    # schedules and predictions
    "a text as order": (lambda: fs.make_schedule(plan(["emb"]), "ab"),
     TypeError("order must be a list of unit names; found the text 'ab': pass")),
    "no unit on demand": (lambda: fs.make_schedule(plan(["emb"]), on_demand=["x"]),
     ValueError("on_demand must name units of the plan; found 'x'; its units are ['emb']: list(plan.units)")),
    "a text that is recomputed": (lambda: fs.predict_events(plan(["emb"]), recomputed="ab"),
     TypeError("recomputed must be a list of unit names; found the text 'ab': pass ['ab']")),
    # policies
    "by no class": (lambda: fs.wrap.by_class(), TypeError("by_class takes … found none: write")),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_planned_is_told(name: str) -> None:
    call, error = CASES[name]
    with pytest.raises(type(error), match=".*".join(re.escape(part.strip()) for part in str(error).split("…"))):
        call()
