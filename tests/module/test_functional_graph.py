"""Modules that ``torch.fx`` and ``torch.export`` made train as the modules from which they were made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import funcshard as fs
from tests.module.law import check_equal

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x)).tanh() * self.scale


def traced(module: nn.Module) -> nn.Module:
    return fx.symbolic_trace(module)


def exported(module: nn.Module) -> nn.Module:
    return torch.export.export(module, (x,)).module()


def two_blocks() -> nn.Module:
    return nn.Sequential(Block(), nn.Linear(3, 3))


# name -> (module, units)
GRAPHS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "fx, whole": (lambda: traced(two_blocks()), []),
    "fx, with a unit inside": (lambda: traced(two_blocks()), ["0.lin", "1"]),
    "fx, as a unit": (lambda: nn.Sequential(traced(Block()), nn.Linear(3, 3)), ["0", "1"]),
    "fx, inside another": (lambda: nn.Sequential(nn.Sequential(traced(Block())), nn.Linear(3, 3)), ["0", "0.0"]),
    "export, whole": (lambda: exported(two_blocks()), []),
    "export, as a unit": (lambda: nn.Sequential(exported(Block()), nn.Linear(3, 3)), ["0", "1"]),
}


def off_zero(model: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) + 1).square().mean()
    return loss


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize(("make", "units"), GRAPHS.values(), ids=GRAPHS)
def test_gradients_are_those_of_the_module(make, units) -> None:
    check_equal(make(), x, units, bits=True, program=off_zero, how={"remat": bool(units)})


@pytest.mark.parametrize("make", [traced, exported])
def test_calls_and_later_edits_of_the_graph_do_not_meet(make) -> None:
    module = make(two_blocks())
    apply, params, buffers = fs.make_functional(module)
    before = apply(params, buffers, x)
    assert torch.equal(before, module(x))
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    assert torch.equal(apply(zeros, buffers, x), torch.zeros(4, 3))
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    with module.graph.inserting_before(output):
        (result,) = output.all_input_nodes
        output.replace_input_with(result, module.graph.call_function(torch.neg, (result,)))
    module.recompile()
    assert torch.equal(apply(params, buffers, x), before)


def test_no_call_copies_the_graph() -> None:
    for module in (traced(two_blocks()), exported(two_blocks())):
        apply, _, _ = fs.make_functional(module)
        assert {key for _, key in apply.skeleton.copied_attributes} <= {"train", "eval"}


def test_containers_of_a_graph_are_no_units() -> None:
    apply, params, _ = fs.make_functional(exported(two_blocks()))
    words = (
        "unit '0' is a Module, which has no forward of its own; .* choose the modules that are called, such as its children"
    )
    with pytest.raises(ValueError, match=words):
        fs.fully_shard(apply, fs.make_plan(params, fs.Mesh(), units=["0"]), fs.Mesh())


def test_the_mode_of_an_exported_module_is_that_of_its_export() -> None:
    apply, _, _ = fs.make_functional(nn.Sequential(exported(nn.Dropout(0.5))))
    with pytest.raises(TypeError, match=r"made by torch\.export, .*: export the module in the other mode too"):
        apply.eval()
    fs.make_functional(traced(two_blocks()))[0].eval()


def test_modules_of_unflatten_are_refused_as_they_cannot_be_copied() -> None:
    module = torch.export.unflatten(torch.export.export(two_blocks(), (x,)))
    with pytest.raises(TypeError, match=r"'\(root\)' was made by torch\.export\.unflatten, .*: use the \.module\(\) of"):
        fs.make_functional(module)
