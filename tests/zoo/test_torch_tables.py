"""Every module and optimizer of torch's own tables equals itself when it is sharded."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import Any

import pytest
import torch
from torch.utils import _pytree

import funcshard as fs
from tests.zoo.law import Subject, check

# Why the tables are imported in the tests: that takes three seconds, which every run of pytest would pay.
PARTS = 10  # of the table of modules
OPTIMIZERS = [name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and hasattr(cls, "zero_grad")]
OPTIMIZERS.remove("Optimizer")
SAMPLES = 4  # of each module
# Their update of an element needs more than that element: whole matrices, a closure, sparse gradients.
REFUSED = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}


def fresh(tree: Any) -> Any:
    return _pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)


def subjects_of(info: Any) -> list[Subject]:
    """Return modules with parameters and their arguments: of torch's samples, the first few."""
    torch.manual_seed(0)
    subjects: list[Subject] = []
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    for sample in samples:
        given = sample.forward_input
        if given is None or len(subjects) == SAMPLES:
            continue
        module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        inputs = inspect.signature(module.forward).bind(*given.args, **given.kwargs).arguments
        if any(p.requires_grad for p in module.parameters() if not torch.nn.parameter.is_lazy(p)):
            build, make_inputs = functools.partial(copy.deepcopy, module), functools.partial(fresh, inputs)
            subjects.append(Subject(name=info.name, package="torch", build=build, inputs=make_inputs))
    return subjects


@pytest.mark.nightly(one_in=10)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_a_module_of_torch_equals_itself(part):
    from torch.testing._internal.common_modules import module_db

    for info in module_db[part::PARTS]:
        for subject in subjects_of(info):
            assert not check(subject, "full_shard by class"), info.name


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_equals_itself_on_shards(name):
    from torch.testing._internal.common_optimizers import optim_db

    (info,) = (info for info in optim_db if info.optim_cls.__name__ == name)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    batch, target = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    apply, params, buffers = fs.make_functional(module)
    compared = 0
    for optim_input in info.optim_inputs_func(device="cpu", dtype=torch.float64):
        options = dict(optim_input.kwargs)
        if name in REFUSED:
            with pytest.raises((TypeError, ValueError), match=name):
                fs.torch_optimizer(info.optim_cls, **options)
            continue
        transform = fs.torch_optimizer(info.optim_cls, **options)
        reference = copy.deepcopy(module)
        optimizer = info.optim_cls(reference.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(reference(batch), target).backward()
            optimizer.step()

        def main(mesh, transform=transform):
            plan = fs.make_plan(params, mesh, units=["0", "2"])
            sharded = fs.fully_shard(apply, plan, mesh)

            def loss_fn(shards, buffers, batch):
                return torch.nn.functional.mse_loss(sharded(shards, buffers, batch), target)

            step = fs.make_train_step(loss_fn, transform, plan, mesh)
            state = step.init(fs.shard(params, plan, mesh), buffers)
            for _ in range(3):
                state, _ = step(state, batch)
            return fs.gather(state.shards, plan, mesh)

        for result in fs.simulate(main, 2):
            for leaf, parameter in reference.named_parameters():
                torch.testing.assert_close(result[leaf], parameter.detach(), rtol=1e-9, atol=1e-9, msg=f"{options}, {leaf}")
        compared += 1
    assert bool(compared) != (name in REFUSED)
