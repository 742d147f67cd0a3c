"""Twenty training steps of a model of the zoo: as a module, as a function, and as one of shards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import funcshard as fs
from tests.zoo.law import Subject, call, cast_inputs, loss_of
from tests.zoo.subjects import SUBJECTS

__all__ = ["TRAINED", "Run", "train_as_function", "train_as_module", "train_on_shards"]

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


def train(params: Sequence[torch.Tensor], losses_of: Callable[[int], list[torch.Tensor]]) -> list[float]:
    """Train ``params`` in place on the mean of the ranks' losses; return it for each step."""
    optimizer = torch.optim.SGD(params, **SGD)
    means = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = losses_of(step)
        mean = torch.stack(losses).mean()
        mean.backward()
        optimizer.step()
        means.append(mean.item())
    return means


def train_as_module(name: str, ranks: int) -> Run:
    module, batches = setup(TRAINED[name], ranks)
    losses_of = lambda step: [  # noqa: E731
        loss_with_seed(module, batch, 100 * step + rank) for rank, batch in enumerate(batches)
    ]
    losses = train([p for p in module.parameters() if p.requires_grad], losses_of)
    return Run(losses, {key: value.detach() for key, value in module.named_parameters()})


def train_as_function(name: str, ranks: int) -> Run:
    module, batches = setup(TRAINED[name], ranks)
    apply, params, buffers = fs.make_functional(module)
    function = lambda *args, **kwargs: apply(params, buffers, *args, **kwargs)  # noqa: E731
    losses_of = lambda step: [  # noqa: E731
        loss_with_seed(function, batch, 100 * step + rank) for rank, batch in enumerate(batches)
    ]
    losses = train([p for p in params.values() if p.requires_grad], losses_of)
    return Run(losses, {key: value.detach() for key, value in params.items()})


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
