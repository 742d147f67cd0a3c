"""Run the zoo's models through every verb: ``python -m tests.zoo --verbs``.

A model that equals itself when it trains may still fail in a profile, a recorded graph, a product
with the Hessian, a recomputation or a checkpoint, or leave something behind that breaks the next
verb. So all verbs of a model run in one process, twice.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import funcshard as fs
from tests.zoo.law import Subject, cast_inputs, loss_of, tensors_in, units_of

__all__ = ["verbs_of"]


def verbs_of(subject: Subject) -> dict[str, Callable[[], Any]]:
    """Return the verbs of a model in evaluation mode, on one rank; each raises if it fails."""
    torch.manual_seed(0)
    module = subject.build().to(subject.dtype).eval()
    inputs = cast_inputs(subject.inputs(), subject.dtype)
    positional = tuple(inputs[key] for key in sorted(key for key in inputs if key.isdigit()))
    keywords = {key: value for key, value in inputs.items() if not key.isdigit()}
    apply, params, buffers = fs.make_functional(module)
    mesh = fs.Mesh()
    plan = fs.make_plan(params, mesh, units=units_of(subject, module, params, "class", inputs))
    shards = fs.shard(params, plan, mesh)

    if "use_cache" in inspect.signature(module.forward).parameters:
        keywords["use_cache"] = False  # Why: under torch.func, a recomputed layer can't fill its cache
    batch = positional, keywords

    def loss_fn(shards: Any, buffers: Any = buffers, batch: Any = batch, **options: Any) -> torch.Tensor:
        args, kwargs = batch
        return loss_of(fs.fully_shard(apply, plan, mesh, **options)(shards, buffers, *args, **kwargs))

    def profile() -> None:
        fs.estimate(fs.profile(apply, params, buffers, *positional, loss=loss_of, **keywords), plan)

    def trace() -> None:
        step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh, donate=False)
        state = step.init(shards, buffers)
        losses = [take(state, batch)[1]["loss"] for take in (step, fs.trace(step, state, batch))]
        assert torch.equal(*losses), losses

    def hvp() -> None:
        fs.hvp(loss_fn, (shards,), (shards,), mesh=mesh)

    def remat() -> None:
        grads = [
            fs.value_and_grad(lambda s, options=options: loss_fn(s, **options), mesh=mesh)(shards)[1]
            for options in ({}, {"remat": True})
        ]
        assert all(map(torch.equal, *map(tensors_in, grads)))

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            fs.save(f"{folder}/step", shards, plan, mesh)
            assert all(map(torch.equal, tensors_in(fs.restore(f"{folder}/step", plan, mesh)), tensors_in(shards)))

    return {verb.__name__: verb for verb in (profile, trace, hvp, remat, save)}
