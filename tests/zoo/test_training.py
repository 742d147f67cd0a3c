"""Models of other people's packages train as they do without sharding."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.ranks import run_ranks
from tests.zoo.law import Subject, call, cast_inputs, loss_of
from tests.zoo.subjects import SUBJECTS

STEPS = 20
# Not Adam: it divides by the size of a gradient, and makes steps of the rounding of a zero one.
SGD = {"lr": 0.01, "momentum": 0.9}

TRAINED = {
    name: next(subject for subject in SUBJECTS if subject.name.startswith(name))
    for name in (
        "LlamaForCausalLM",
        "ViTForImageClassification",
        "WhisperForConditionalGeneration",
        "MixtralForCausalLM",
        "UNet2DConditionModel",
        "SchNet",
        "gate points network",
    )
}


class Run(NamedTuple):
    losses: list[float]  # the mean over ranks
    params: dict[str, torch.Tensor]


def setup(subject: Subject, ranks: int) -> tuple[nn.Module, list[Any]]:
    """Return the module and the batch of each rank, the same in every process."""
    warnings.simplefilter("ignore")  # of the packages; ranks in processes turn warnings into errors
    torch.manual_seed(0)
    module = subject.build().train()
    if subject.dtype != torch.float32:
        module = module.to(subject.dtype)
    return module, [cast_inputs(subject.inputs(), subject.dtype) for _ in range(ranks)]


def loss_with_seed(function: Callable[..., Any], batch: Any, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return loss_of(call(function, copy.deepcopy(batch)))


def train_as_module(name: str, ranks: int) -> Run:
    """Train the module on the mean of the ranks' losses."""
    module, batches = setup(TRAINED[name], ranks)
    optimizer, means = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], **SGD), []
    for step in range(STEPS):
        optimizer.zero_grad()
        mean = torch.stack([loss_with_seed(module, x, 100 * step + rank) for rank, x in enumerate(batches)]).mean()
        mean.backward()
        optimizer.step()
        means.append(mean.item())
    return Run(means, {key: value.detach() for key, value in module.named_parameters()})


def train_on_shards(mesh: fs.Mesh, name: str) -> Run:
    subject = TRAINED[name]
    module, batches = setup(subject, mesh.world_size)
    apply, params, buffers = fs.make_functional(module)
    names = set(subject.blocks)
    units = fs.wrap.by_function(lambda inner: type(inner).__name__ in names)(module)
    plan = fs.make_plan(params, mesh, units=units)
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> torch.Tensor:
        inputs, seed = batch
        return loss_with_seed(lambda *args, **kwargs: sharded(shards, buffers, *args, **kwargs), inputs, seed)

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, **SGD), plan, mesh)
    state = step.init(fs.shard(params, plan, mesh), buffers)
    losses = []
    for number in range(STEPS):
        state, metrics = step(state, (batches[mesh.rank], 100 * number + mesh.rank))
        losses.append(metrics["loss"].item())
    return Run(losses, fs.gather(state.shards, plan, mesh))


INSTALLED = [name for name, subject in TRAINED.items() if importlib.util.find_spec(subject.package)]
RANKS = 2
# Twenty steps of models that compute in float32 inside, with gradients added in another order.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def assert_equal_runs(actual: Run, expected: Run) -> None:
    torch.testing.assert_close(actual.losses, expected.losses, **TOLERANCE)
    torch.testing.assert_close(actual.params, {name: expected.params[name] for name in actual.params}, **TOLERANCE)


@pytest.mark.nightly(one_in=4)
@pytest.mark.filterwarnings("ignore")  # of the packages, in their own forwards
@pytest.mark.parametrize("name", INSTALLED)
def test_twenty_steps_are_those_of_the_plain_module(name):
    expected = train_as_module(name, RANKS)
    assert expected.losses[-1] < expected.losses[0]
    for run in fs.simulate(lambda mesh: train_on_shards(mesh, name), RANKS):
        assert_equal_runs(run, expected)
    for run in run_ranks(train_on_shards, RANKS, name):
        assert_equal_runs(run, expected)
