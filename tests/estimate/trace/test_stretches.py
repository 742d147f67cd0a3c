"""Programs from stretches against programs from all events, for units of every depth."""

import pytest
from torch import nn

import funcshard as fs
from funcshard.estimate.trace.program import make_program
from funcshard.estimate.trace.stretches import Stretch, compact
from funcshard.estimate.trace.tape import Tape
from funcshard.estimate.trace.tracing import ModelCall, trace_model
from tests.estimate.chains import expanded
from tests.estimate.trace.test_tracing import MODELS


def traced(make, *, remat=(), folds=(True,)):
    """Return a tape for each choice of folding, and the paths of all modules that can be units."""
    args, model = make()
    apply, params, buffers = fs.make_functional(model)
    plan = fs.make_plan(params, 1)
    modules = [
        path for path, module in model.named_modules()
        if path and next(module.parameters(), None) is not None and not isinstance(module, nn.ModuleList)
    ]  # fmt: skip
    call = ModelCall(apply, buffers, args, {}, None, None, set())
    return *(trace_model(call, plan, params, remat=remat, fold=fold) for fold in folds), modules


def choices(modules):
    """Yield units: none, blocks, all modules, every third one, and a group among other units."""
    leaves = [path for path in modules if not any(other.startswith(f"{path}.") for other in modules)]
    group = tuple(leaves[::3])
    for units in ([], [path for path in modules if path.count(".") < 2], modules, modules[::3]):
        yield {"": ("",), **{path: (path,) for path in units}}
    yield {"": ("",), **{path: (path,) for path in modules if path not in group}, "+".join(group): group}


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("layers of two kinds", ()),
        ("experts with rows of their own", ("layers.0",)),
        ("every second layer checkpointed", ()),
        ("experts checkpointed", ()),
        ("tied layers", ("layers.1",)),
        ("one layer three times", ()),
    ],
)
def test_a_program_from_stretches_is_the_one_from_all_events(name, remat):
    tape, whole, modules = traced(MODELS[name], remat=remat, folds=(True, False))
    for paths in choices(modules):
        program = make_program(tape, paths)
        assert program == make_program(Tape(tuple(expanded(tape)), ()), paths), list(paths)
        assert program == make_program(whole, paths), list(paths)


def test_the_events_of_equal_calls_are_added_up_once(monkeypatch):
    tape, modules = traced(MODELS["experts with rows of their own"])
    calls = []
    of_calls = Tape.expanded
    monkeypatch.setattr(Tape, "expanded", lambda self, life: calls.append(1) or of_calls(self, life))
    found = list(compact(tape, [path for path in modules if path.count(".") == 1]))
    assert len(calls) == 2  # the first layer, whose input needs no gradient, and the other two
    assert any(isinstance(event, Stretch) for event in found)
    assert len(found) < sum(1 for _ in expanded(tape)) / 5
