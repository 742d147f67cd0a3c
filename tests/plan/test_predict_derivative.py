"""The collectives of operators are those that ``predict_events`` tells, with and without checkpoints."""

import math
from collections import Counter

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import forward_mode, recorded
from tests.models import SUBJECTS
from tests.ranks import run_simulated

pytestmark = forward_mode


class Mixed(nn.Module):
    """A linear layer whose leaves of two dtypes, some of them frozen, make three buffers."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(5).double())
        self.scale = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        return (x @ self.weight.T * self.scale + self.bias).tanh().float()


def model_of(name):
    """Return a module, the globs of its units, its inputs, and its logits of what it returns."""
    torch.manual_seed(0)
    if name == "mixed":
        return nn.Sequential(Mixed(), nn.Linear(5, 3), Mixed()), ("0", "1", "2"), {"input": torch.randn(4, 3)}, lambda y: y
    subject = SUBJECTS[name]
    inputs = subject.make_batch(4, 0)["inputs"]
    return subject.build(), subject.units, inputs, lambda y: getattr(y, "logits", y)


def pulled(outputs, pullback):
    return pullback(torch.ones_like(outputs))


OPERATORS = {
    "grad": lambda out, loss, s: fs.grad(lambda s: loss(out(s)))(s),
    "jvp": lambda out, loss, s: fs.jvp(out, (s,), (s,)),
    "vjp": lambda out, loss, s: pulled(*fs.vjp(out, s)),
    "hvp": lambda out, loss, s: fs.hvp(lambda s: loss(out(s)), (s,), (s,)),
    "gnvp": lambda out, loss, s: fs.gnvp(out, loss, (s,), (s,)),
    "linearize": lambda out, loss, s: fs.linearize(out, s)[1](s),
}
HALF = fs.MixedPrecision(torch.bfloat16, torch.float32)
NARROW = fs.Cast(lambda x: x.to(torch.float16), lambda rows: rows.flatten().float())
TWO, HYBRID, TENSOR = {"shard": 2}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}
NESTED = {"units": ["blocks.*", "blocks.*.mlp"]}
REMAT = {"remat": True}
# Model, mesh, options of the plan and of fully_shard. The first ones run by day.
CASES = {
    "gpt recomputed": ("gpt", TWO, {}, REMAT),
    "mixed": ("mixed", HYBRID, {}, {}),
    "gpt": ("gpt", TWO, {}, {}),
    "mixed recomputed": ("mixed", HYBRID, {}, REMAT),
    "gpt hybrid": ("gpt", HYBRID, {}, REMAT),
    "gpt copied": ("gpt", TWO, {"strategy": "no_shard"}, REMAT),
    "gpt kept": ("gpt", HYBRID, {"strategy": "shard_grad_op"}, {}),
    "gpt beside a tensor axis": ("gpt", TENSOR, {}, REMAT),
    "gpt in bfloat16": ("gpt", TWO, {"precision": HALF}, REMAT),
    "gpt in groups": ("gpt", TWO, {"units": [["blocks.0", "blocks.1"]]}, {}),
    "gpt of units in units": ("gpt", TWO, NESTED, {}),
    "gpt of units in recomputed ones": ("gpt", TWO, NESTED, {"remat": ["blocks.0", "blocks.1"]}),
    "gpt, one recomputed": ("gpt", TWO, {}, {"remat": ["blocks.1"]}),
    "gpt, cast": ("gpt", TWO, {}, {"cast": lambda unit, buffer: NARROW}),
    "llama": ("llama", TWO, {"units": ["model.layers.*"]}, {}),
    "llama recomputed": ("llama", HYBRID, {}, REMAT),
}
BY_DAY = 2
PARAMS = [
    pytest.param(*case, id=name, marks=() if index < BY_DAY else (pytest.mark.slow, pytest.mark.nightly(one_in=7)))
    for index, (name, case) in enumerate(CASES.items())
]


def events_of(mesh, name, options, how):
    module, units, inputs, logits_of = model_of(name)
    apply, params, buffers = fs.make_functional(module)
    plan = fs.make_plan(params, mesh, **{"units": units, **options})
    shards, run = fs.shard(params, plan, mesh), fs.fully_shard(apply, plan, mesh, **how)
    out = lambda s: logits_of(run(s, buffers, **inputs))  # noqa: E731
    out(shards)  # the order of units is known from here on
    remat = how.get("remat", ())
    told = {"recomputed": [name for name in plan.units if name] if remat is True else remat, "cast": how.get("cast")}
    events = {key: recorded(call, out, lambda y: y.float().exp().mean(), shards)[1] for key, call in OPERATORS.items()}
    return events, {key: fs.predict_events(plan, run.schedule, transform=key, **told) for key in OPERATORS}


@pytest.mark.parametrize(("name", "shape", "options", "how"), PARAMS)
def test_an_operator_issues_the_predicted_collectives(name, shape, options, how):
    for events, predicted in run_simulated(events_of, math.prod(shape.values()), name, options, how, shape=shape):
        assert events == predicted


DOCUMENTED = {"jvp": (2, 0), "hvp": (2, 2), "gnvp": (2, 1), "grad": (1, 1), "vjp": (1, 1), "linearize": (2, 1)}


@pytest.mark.parametrize("transform", DOCUMENTED)
def test_an_operator_gathers_and_reduces_each_unit_as_often_as_documented(transform):
    plan = fs.make_plan({"a": torch.ones(3), "b": torch.ones(3)}, 2, units=["a"])
    counts = Counter((event.unit, event.kind) for event in fs.predict_events(plan, transform=transform))
    for unit in ("", "a"):
        assert (counts[unit, "all_gather"], counts[unit, "reduce_scatter"]) == DOCUMENTED[transform], unit
