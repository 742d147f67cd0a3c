"""``simulate(check_vma=True)`` raises where a value varies and must not, and lets right programs pass."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.testing.test_mesh_comparison import MESHES, RIGHT, Program, lookup, mixed, scaled

ALL_AXES = {"replicate": 1, "shard": 1, "tensor": 1, "expert": 1}


def mesh_of(meshes: str) -> dict[str, int]:
    last: Any = MESHES[meshes][-1]
    return ALL_AXES | ({"shard": last} if isinstance(last, int) else last)


def in_place(shards: Any, grads: Any, mesh: fs.Mesh, step: int) -> Any:
    return {"": {key: shard.add_(mesh.position["tensor"]) for key, shard in shards[""].items()}}


def noisy(by: str) -> Program:
    """Return a program that updates copies with numbers of the rank along an axis."""
    grow = lambda s, g, m, step: fs.axpy(-0.1, scaled(g, 1 + m.position[by]), s)  # noqa: E731
    return Program(update=grow, steps=2)


WRONG: dict[str, tuple[str, Program, str, str]] = {
    "no psum": ("tensor", mixed(lambda y, m: y), "a psum along 'tensor' is missing", "return Program(model=lambda"),
    "no psum after a lookup": ("tensor", Program(model=lookup), "a psum along 'tensor' is missing", 'p["up"][torch.where'),
    "a psum along another axis": ("tensor", mixed(lambda y, m: fs.psum(y, m)), "along 'tensor' is missing", "Program(model"),
    "copies along a model axis": ("tensor", noisy("tensor"), "of unit '(root)' along 'tensor'", "grow"),
    "in place": ("tensor", Program(update=in_place, steps=2), "along 'tensor', and the copies differ", "shard.add_("),
    "copies along replicate": ("data", noisy("replicate"), "along 'replicate', and the copies differ since", "grow"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_value_that_varies_raises_with_the_line(name: str) -> None:
    meshes, program, message, line = WRONG[name]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        fs.simulate(program, mesh_of(meshes), check_vma=True)
    assert line in str(error.value)


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_passes_with_the_same_numbers(name: str) -> None:
    meshes, program = RIGHT[name]
    if isinstance(program, Program):
        program = dataclasses.replace(program, steps=3)
    checked, plain = (fs.simulate(program, mesh_of(meshes), check_vma=check) for check in (True, False))
    assert repr(checked) == repr(plain)


def test_a_backward_by_shards_warns_and_one_by_inputs_does_not() -> None:
    def main(mesh: fs.Mesh) -> None:
        params = {"w": torch.ones(2, 2)}
        plan = fs.make_plan(params, mesh)
        shards = {key: shard.requires_grad_() for key, shard in fs.shard(params, plan, mesh)[""].items()}
        x = torch.ones(2, requires_grad=True)
        loss = fs.unshard(lambda leaves, x: (leaves["w"] @ x).sum(), plan.units[""], mesh)(shards, x)
        torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.warns(UserWarning, match=r"test_varying.py.*divide by 2"):
            torch.autograd.grad(loss, list(shards.values()))

    fs.simulate(main, 2, check_vma=True)
