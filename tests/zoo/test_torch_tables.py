"""Every module and optimizer of torch's own tables equals itself when it is sharded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.utils import _pytree

import funcshard as fs
from tests.zoo.law import loss_of, tensors_in

MODULES = {info.name: info for info in module_db}
OPTIMIZERS = {info.optim_cls.__name__: info for info in optim_db}
SAMPLES = 4  # of each module
# Their update of an element needs more than that element: whole matrices, a closure, sparse gradients.
REFUSED = {"Adafactor", "LBFGS", "Muon", "SparseAdam"}
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def samples_of(info: Any) -> list[tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Return modules with parameters and their arguments: of torch's samples, the first few."""
    torch.manual_seed(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True)
    modules = []
    for sample in samples:
        if sample.forward_input is None or len(modules) == SAMPLES:
            continue
        created = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs)
        module = created.double().train()
        parameters = [p for p in module.parameters() if not torch.nn.parameter.is_lazy(p)]
        if any(parameter.requires_grad for parameter in parameters):
            modules.append((module, sample.forward_input.args, sample.forward_input.kwargs))
    return modules


def fresh(arguments: Any) -> Any:
    return _pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), arguments
    )


def run_plain(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, ...]:
    module = copy.deepcopy(module)
    args, kwargs = fresh((args, kwargs))
    torch.manual_seed(1)
    output = module(*args, **kwargs)
    loss = loss_of(output)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    filled = [torch.zeros_like(p) if g is None else g for p, g in zip(named.values(), grads, strict=True)]
    outputs = [tensor.detach() for tensor in tensors_in(output)]
    return outputs, dict(zip(named, filled, strict=True)), dict(module.named_buffers())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_of_torch_equals_itself(name):
    for module, args, kwargs in samples_of(MODULES[name]):
        outputs, grads, new_buffers = run_plain(module, args, kwargs)
        apply, params, buffers = fs.make_functional(module, mutable=True)

        def main(mesh, apply=apply, params=params, buffers=buffers, args=args, kwargs=kwargs):
            plan = fs.make_plan(params, mesh)
            sharded = fs.fully_shard(apply, plan, mesh)
            shards = fs.shard(params, plan, mesh)

            def loss_fn(shards):
                rank_args, rank_kwargs = fresh((args, kwargs))
                output, new_buffers = sharded(shards, buffers, *rank_args, **rank_kwargs)
                return loss_of(output), ([t.detach() for t in tensors_in(output)], new_buffers)

            calls = []
            for _ in range(2):
                torch.manual_seed(1)
                (_, aux), grads = fs.value_and_grad(loss_fn, has_aux=True)(shards)
                calls.append((*aux, fs.gather(grads, plan, mesh)))
            return calls

        for calls in fs.simulate(main, 2):
            for actual_outputs, actual_buffers, actual_grads in calls:
                torch.testing.assert_close(actual_outputs, outputs, equal_nan=True, **TOLERANCE)
                torch.testing.assert_close(actual_buffers, new_buffers, equal_nan=True, **TOLERANCE)
                for leaf, grad in grads.items():
                    torch.testing.assert_close(actual_grads[leaf], grad, equal_nan=True, **TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_of_torch_equals_itself_on_shards(name):
    info = OPTIMIZERS[name]
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
